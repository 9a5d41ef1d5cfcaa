"""Examine a directory before it becomes a state root: every trial there is, and nothing left behind.

A root that berth uses already is probed as every run does it, under its lock. Everywhere else the probe gets a
directory of its own, `.berth-doctor-<random>`: it needs no lock that way, and leaves no lock file in a directory that
is not berth's.
"""

import contextlib
import os
import tempfile
from collections.abc import Iterator
from typing import Final

from berth.epoch.capability import NOTHING_ACCEPTED, Accepted, Capability, probe
from berth.epoch.lock import LOCK_NAME, hold_root_lock
from berth.errors import FailedError, MalformedError

PREFIX: Final = ".berth-doctor-"
_DIRECTORY: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def examine(path: str, *, accepted: Accepted = NOTHING_ACCEPTED, publication_root: str | None = None) -> Capability:
    """Carry out every trial in the directory `path`; a refusal is part of what is returned.

    Args:
        path: The directory; a link to one is refused.
        accepted: What the operator accepts of its file system.
        publication_root: Directory that results are to be renamed into, or None.

    Raises:
        MalformedError: One of them is not a directory.
        FailedError: Nothing can be made in `path`.
    """
    with contextlib.ExitStack() as opened:
        fd = _open(path)
        opened.callback(os.close, fd)
        publication = None
        if publication_root is not None:
            publication = (_open(publication_root), os.path.abspath(publication_root))
            opened.callback(os.close, publication[0])
        absolute = os.path.abspath(path)
        if _holds_lock_file(fd):
            opened.enter_context(hold_root_lock(fd, absolute))
        else:
            fd = opened.enter_context(_private_directory(absolute))
        return probe(fd, absolute, accepted=accepted, thorough=True, publication=publication)


def _open(path: str) -> int:
    try:
        return os.open(path, _DIRECTORY)
    except PermissionError as error:
        raise FailedError(
            "probe-failed", f"{path!r} cannot be opened: {error.strerror}", "Choose a directory of your own."
        ) from error
    except (OSError, ValueError) as error:
        what = "is a symbolic link" if os.path.islink(path) else "is not a directory"
        if not os.path.lexists(path):
            what = "does not exist"
        raise MalformedError("bad-directory", f"{path!r} {what}", "Give an existing directory.") from error


def _holds_lock_file(fd: int) -> bool:
    try:
        os.stat(LOCK_NAME, dir_fd=fd, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return True


@contextlib.contextmanager
def _private_directory(parent: str) -> Iterator[int]:
    try:
        path = tempfile.mkdtemp(prefix=PREFIX, dir=parent)
    except OSError as error:
        raise FailedError(
            "probe-failed",
            f"nothing can be made in {parent!r}: {error.strerror}",
            "Choose a directory that you may write, on a disk that is mounted for writing and not full.",
        ) from error
    try:
        fd = os.open(path, _DIRECTORY)
        try:
            yield fd
        finally:
            os.close(fd)
    finally:
        os.rmdir(path)
