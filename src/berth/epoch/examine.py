"""Examine a directory before it becomes a state root: every trial there is, and nothing left behind.

A root that berth uses already is probed as every run does it, under its lock. Everywhere else the probe gets a
directory of its own, `.berth-doctor-<random>`: it needs no lock that way, and leaves no lock file in a directory that
is not berth's.
"""

import contextlib
import os
import re
import tempfile
import time
from collections.abc import Iterator
from typing import Final

from berth.epoch.capability import NOTHING_ACCEPTED, Accepted, Capability
from berth.epoch.directory import check_owner, open_root_directory
from berth.epoch.lock import LOCK_NAME, hold_root_lock
from berth.epoch.probe import FRESH_S, probe, remove_leftovers
from berth.errors import FailedError, MalformedError
from berth.linux.locks import try_lock

PREFIX: Final = ".berth-doctor-"
#: Such a directory: what tempfile appends is eight of these.
_NAME: Final = re.compile(rf"{re.escape(PREFIX)}[a-z0-9_]{{8}}")
_DIRECTORY: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def examine(
    path: str,
    *,
    accepted: Accepted = NOTHING_ACCEPTED,
    publication_root: str | None = None,
    as_root: bool = True,
) -> Capability:
    """Carry out every trial in the directory `path`; a refusal is part of what is returned.

    Args:
        path: The directory; a link to one is refused.
        accepted: What the operator accepts of its file system.
        publication_root: Directory that results are to be renamed into, or None.
        as_root: Whether it is to become a state root itself, rather than hold one: its owner and mode count then.

    Raises:
        MalformedError: One of them is not a directory.
    """
    absolute = os.path.abspath(path)
    try:
        with contextlib.ExitStack() as opened:
            fd = open_root_directory(path)
            opened.callback(os.close, fd)
            publication = None
            if publication_root is not None:
                publication = (open_root_directory(publication_root), os.path.abspath(publication_root))
                opened.callback(os.close, publication[0])
            status = os.fstat(fd)
            if _holds_lock_file(fd):
                opened.enter_context(hold_root_lock(fd, absolute))
            else:
                fd = opened.enter_context(_private_directory(fd, absolute))
            found = probe(fd, absolute, accepted=accepted, thorough=True, publication=publication)
    except FailedError as error:  # nothing could be tried there
        return Capability(absolute, None, accepted, time.time(), publication_root=publication_root, refusal=error)
    if as_root and found.refusal is None:
        try:
            check_owner(absolute, status)
        except MalformedError as error:
            found.refusal = error
    return found


def _holds_lock_file(fd: int) -> bool:
    try:
        os.stat(LOCK_NAME, dir_fd=fd, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return True


@contextlib.contextmanager
def _private_directory(parent_fd: int, parent: str) -> Iterator[int]:
    try:
        remove_leftovers(parent_fd, is_ours=lambda name: _NAME.fullmatch(name) is not None, least_age_s=FRESH_S)
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
            try_lock(fd)
            yield fd
        finally:
            os.close(fd)
    finally:
        with contextlib.suppress(OSError):  # what keeps it stands in the record; the next one removes it
            os.rmdir(path)
