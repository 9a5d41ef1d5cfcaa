"""Every check of doctor, and how they are carried out: at the same time, each in a child with a deadline."""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from typing import Final

from berth.doctor import cores, isolation, mpi, npu, storage
from berth.doctor.abilities import DOES_NOT, Ability, excuse_user_namespaces
from berth.doctor.deadline import NoAnswerError, Trial, start
from berth.epoch.capability import Accepted
from berth.sandbox.bubblewrap import User

#: How long a check may take.
TIMEOUT_S: Final = 10.0
#: MPI has up to two runs and an import to do, each with a limit of its own.
_MPI_TIMEOUT_S: Final = 3 * mpi.RUN_TIMEOUT_S + 2.0

Check = tuple[str, Callable[[], Ability], float]


def look(*, state_root: str, accepted: Accepted, sandbox_user: User | None) -> list[Ability]:
    """Try everything berth can use on this host; nothing is left behind, and no check can hang or crash the others.

    Args:
        state_root: Absolute path of the state root; it need not exist.
        accepted: What the settings accept of its file system.
        sandbox_user: (uid, gid, supplementary gids) of `sandbox.user` in the settings, or None.
    """
    found = _carry_out(
        [
            ("user namespaces", partial(isolation.user_namespaces, sandbox_user), TIMEOUT_S),
            ("bubblewrap", partial(isolation.bubblewrap, sandbox_user), TIMEOUT_S),
            ("seccomp", isolation.seccomp, TIMEOUT_S),
            ("sandbox user", partial(isolation.sandbox_user, sandbox_user), TIMEOUT_S),
            ("state root", partial(storage.state_root, state_root, accepted), TIMEOUT_S),
            ("cpuset", cores.cpuset, TIMEOUT_S),
            ("claims", cores.claims, TIMEOUT_S),
            ("NPU driver", npu.npu_driver, TIMEOUT_S),
            ("MPI", mpi.mpi, _MPI_TIMEOUT_S),
        ]
    )
    found[0] = excuse_user_namespaces(found[0], found[1])
    return found


def look_at_file_system(path: str, accepted: Accepted) -> Ability:
    """Try whether work-state can lie in the directory `path`.

    Raises:
        MalformedError: It is not a directory.
    """
    storage.check_directory(path)
    return _carry_out([("file system", partial(storage.file_system, path, accepted), TIMEOUT_S)])[0]


def _carry_out(checks: Sequence[Check]) -> list[Ability]:
    trials = [(name, _start(check, limit_s)) for name, check, limit_s in checks]
    return [_outcome(name, trial) for name, trial in trials]


def _start(check: Callable[[], Ability], limit_s: float) -> Trial | NoAnswerError:
    try:
        return start(lambda: json.dumps(asdict(check())), timeout_s=limit_s)
    except NoAnswerError as error:
        return error


def _outcome(name: str, trial: Trial | NoAnswerError) -> Ability:
    try:
        if isinstance(trial, NoAnswerError):
            raise trial
        return Ability(**json.loads(trial.answer()))
    except NoAnswerError as error:
        mend = "Try again on a quieter host; if it stays, please report this line."
        return Ability(name=name, level=DOES_NOT, why=f"the check {error}", mend=mend)
