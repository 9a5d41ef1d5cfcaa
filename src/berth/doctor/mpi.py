"""Does MPI work here? Two ranks are really started, by whichever mpirun is there."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from typing import Final

from berth.doctor.abilities import DOES_NOT, LESS, WORKS, Ability
from berth.doctor.deadline import NoAnswerError, attempt

RUN_TIMEOUT_S: Final = 10.0
_NAME: Final = "MPI"
_RANK_WORD: Final = "rank"
#: Open MPI refuses more ranks than cores without it; other launchers may not know it.
_OPEN_MPI: Final = ("--oversubscribe",)
_INSTALL: Final = "`apt-get install openmpi-bin libopenmpi-dev` or `dnf install openmpi openmpi-devel`"
#: Loading the library is what fails where it is missing; initialising it would start a run of one rank.
_IMPORT: Final = "import mpi4py; mpi4py.rc(initialize=False); from mpi4py import MPI; print(mpi4py.__version__)"


def mpi() -> Ability:
    """Start two ranks, and import mpi4py as this interpreter would."""
    launcher = _find_launcher()
    if launcher is None:
        why = "no mpirun and no mpiexec is in PATH or beside this Python"
        mend = f"Install it: {_INSTALL}, then `{_pip()} install mpi4py`."
        return Ability(name=_NAME, level=DOES_NOT, why=why, mend=mend)
    failure = _run_two_ranks(launcher)
    if failure is not None:
        mend = f"Run the same by hand: `{' '.join([launcher, *_OPEN_MPI, *_as_root(), '-n 2 echo rank'])}`."
        return Ability(name=_NAME, level=DOES_NOT, why=f"{launcher} did not run two ranks: {failure}", mend=mend)
    ran = f"{launcher} ran two ranks"
    version, why_not = _import_mpi4py()
    if version is not None:
        return Ability(name=_NAME, level=WORKS, why=f"{ran}, and mpi4py {version} can be imported")
    why = f"{ran}, and mpi4py cannot be imported: {why_not}"
    return Ability(name=_NAME, level=LESS, why=why, mend=f"`{_pip()} install mpi4py` (it needs {_INSTALL}).")


def _as_root() -> tuple[str, ...]:
    return ("--allow-run-as-root",) if os.geteuid() == 0 else ()


def _pip() -> str:
    return f"{sys.executable} -m pip"


def _find_launcher() -> str | None:
    beside = os.path.dirname(sys.executable)
    for name in ("mpirun", "mpiexec"):
        path = shutil.which(name) or shutil.which(name, path=beside)
        if path is not None:
            return path
    return None


def _run_two_ranks(launcher: str) -> str | None:
    """Return why two ranks could not be run, or None; first as Open MPI wants it, then with plain options."""
    failure = None
    for options in ((*_OPEN_MPI, *_as_root()), ()):
        try:
            status, out, err = _run([launcher, *options, "-n", "2", "echo", _RANK_WORD])
        except NoAnswerError as error:
            return f"it {error}"
        if status == 0 and out.split() == [_RANK_WORD] * 2:
            return None
        said = _last_line(err) or _last_line(out) or "it printed nothing"
        failure = failure or f"exit code {status}, {said}"
    return failure


def _import_mpi4py() -> tuple[str | None, str]:
    """Return the version of mpi4py and why there is none."""
    try:
        status, out, err = _run([sys.executable, "-P", "-c", _IMPORT])
    except NoAnswerError as error:
        return None, f"the import {error}"
    return (out.strip(), "") if status == 0 else (None, _last_line(err) or f"exit code {status}")


def _run(argv: Sequence[str]) -> tuple[int, str, str]:
    """Return exit code, output and error output of `argv`; whatever it started is gone when its time is over.

    Raises:
        NoAnswerError: It could not be started, or its time is over.
    """

    def run() -> str:
        done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="backslashreplace")
        return json.dumps((done.returncode, done.stdout, done.stderr))

    status, out, err = json.loads(attempt(run, timeout_s=RUN_TIMEOUT_S))
    return status, out, err


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip(" -\t")]
    return lines[-1] if lines else ""
