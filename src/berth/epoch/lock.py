"""The lock of a state root: held, for moments, by whoever makes, adopts or probes names in it."""

import contextlib
import os
from collections.abc import Iterator
from typing import Final

from berth.errors import FailedError
from berth.linux.locks import open_lock_file, wait_lock

LOCK_NAME: Final = ".berth.lock"
_TIMEOUT_S: Final = 30.0


@contextlib.contextmanager
def hold_root_lock(root_fd: int, root: str) -> Iterator[None]:
    """Hold the lock of the root open as `root_fd`, whose path is `root`, making its file where it is missing.

    Raises:
        FailedError: The lock file is unusable, or somebody holds it for too long.
    """
    try:
        fd = open_lock_file(LOCK_NAME, dir_fd=root_fd)
    except OSError as error:
        raise FailedError(
            "root-lock",
            f"the lock file {LOCK_NAME} of the state root {root!r} cannot be opened: {error.strerror}",
            "It must be a regular file that you may write; berth makes it itself where it is missing.",
        ) from error
    try:
        if not wait_lock(fd, _TIMEOUT_S):
            raise FailedError(
                "root-lock",
                f"another process has held {LOCK_NAME} of {root!r} for {_TIMEOUT_S:.0f} s",
                f"See who it is with `fuser -v {os.path.join(root, LOCK_NAME)}`.",
            )
        yield
    finally:
        os.close(fd)
