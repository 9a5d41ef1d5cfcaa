"""Retire an epoch by hand: one whose processes are gone and that nobody will go on with."""

import os
from typing import Final

from berth.epoch.epoch import EpochRoot
from berth.epoch.names import active_name, is_epoch_id
from berth.errors import FailedError, ForbiddenError, MalformedError
from berth.launch.store import holds_request

_SEE_LIST: Final = "`berth epoch list` shows what is there."


def retire_left(root: EpochRoot, epoch: str) -> str:
    """Retire the epoch `epoch` of `root` and return its new name.

    Raises:
        MalformedError: `epoch` is not an epoch id, or there is no active epoch of this id.
        ForbiddenError: A process holds it, or it is a run's, which the next run records and retires.
        FailedError: It could not be retired; both names are as they were.
        UncertainError: It is retired, and that may not outlast a power cut.
    """
    if not is_epoch_id(epoch):
        raise MalformedError(
            "bad-epoch",
            f"{epoch!r} is not an epoch id",
            "Give its 64 lower-case hexadecimal digits, as `berth epoch list` shows them.",
        )
    try:
        os.stat(active_name(epoch), dir_fd=root.fd, follow_symlinks=False)
    except FileNotFoundError:
        retired = any(name == epoch for name, _ in root.retired())
        what = "it is retired already" if retired else f"{root.path!r} holds no epoch of this id"
        raise MalformedError("no-such-epoch", f"the epoch {epoch} is not active: {what}", _SEE_LIST) from None
    try:
        taken = root.adopt(epoch)
        if taken is None:
            raise ForbiddenError(
                "epoch-held", f"the epoch {epoch} is in use by another process", "Wait for that run to end."
            )
        with taken:
            if holds_request(taken):
                raise ForbiddenError(
                    "epoch-of-a-run",
                    f"the epoch {epoch} is that of a killed `berth run`, which has no record yet",
                    "Start any `berth run` with this state root: it records and retires the epoch.",
                )
            return taken.retire()
    except OSError as error:
        raise FailedError(
            "not-retired",
            f"the epoch {epoch} of {root.path!r} could not be retired: {error.strerror}",
            "Nothing was changed; repair what the reason names and try again.",
        ) from error
