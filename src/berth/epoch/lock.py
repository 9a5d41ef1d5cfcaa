"""The lock files of a state root: never unlinked, never followed, and held for as long as a block lasts.

`.berth.lock` is held for moments, by whoever makes, adopts or probes names in the root; the lock file of a reclaim step
for as long as the step takes.
"""

import contextlib
import errno
import os
from collections.abc import Iterator
from typing import Final

from berth.epoch.directory import NAME_ANOTHER
from berth.errors import FailedError
from berth.linux.locks import lock_holders, open_lock_file, wait_lock

LOCK_NAME: Final = ".berth.lock"
_TIMEOUT_S: Final = 30.0


@contextlib.contextmanager
def hold_root_lock(root_fd: int, root: str) -> Iterator[None]:
    """Hold the lock of the root open as `root_fd`, whose path is `root`, making its file where it is missing.

    Raises:
        FailedError: `root-lock`: the lock file is unusable, or somebody holds it for too long.
    """
    with hold_lock(root_fd, root, LOCK_NAME, wait_s=_TIMEOUT_S, error="root-lock") as locked:
        if locked is not None:
            raise FailedError(
                "root-lock",
                f"{LOCK_NAME} of {root!r} has been held for {_TIMEOUT_S:.0f} s by another process{_pids(locked)}",
                "Let it finish, or see what it waits for.",
            )
        yield


@contextlib.contextmanager
def hold_lock(root_fd: int, root: str, name: str, *, wait_s: float, error: str) -> Iterator[tuple[int, ...] | None]:
    """Hold the lock file `name` of the root; yield None, or the pids that hold it after `wait_s` seconds.

    Raises:
        FailedError: `error`: the lock file cannot be opened or locked.
    """
    with contextlib.ExitStack() as opened:
        try:
            fd = open_lock_file(name, dir_fd=root_fd)
            opened.callback(os.close, fd)
            holders = None if wait_lock(fd, wait_s) else lock_holders(fd)
        except OSError as reason:
            raise _unusable(root_fd, root, name, reason, error) from reason
        yield holders


def _unusable(root_fd: int, root: str, name: str, reason: OSError, error: str) -> FailedError:
    if os.fstat(root_fd).st_nlink == 0:
        return FailedError(error, f"the state root {root!r} was removed", NAME_ANOTHER)
    message = f"the lock file {name} of the state root {root!r} cannot be used: {reason.strerror}"
    if reason.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
        return FailedError(error, message, f"A state root must be writable. {NAME_ANOTHER}")
    if reason.errno in (errno.ENOSPC, errno.EDQUOT):
        return FailedError(error, message, "Free space on that file system first.")
    if reason.errno in (errno.ELOOP, errno.EISDIR, errno.EINVAL, errno.ENXIO):
        return FailedError(error, message, "It must be a regular file; berth makes it itself where it is missing.")
    return FailedError(error, message, "It must be on a file system that knows flock(2), such as ext4, xfs or btrfs.")


def _pids(pids: tuple[int, ...]) -> str:
    return f" (pid {', '.join(map(str, pids))})" if pids else ""
