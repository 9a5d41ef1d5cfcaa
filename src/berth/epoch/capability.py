"""Does this directory really refuse to replace a name? Tried on the real file system, never derived from a version.

The probe renames inside a private directory below the root, in this order: a rename with RENAME_NOREPLACE must
succeed, and then one onto an existing name must be refused with EEXIST, which is verified by content. The success half
comes first because a file system that refuses the flag altogether still answers EEXIST for an existing target (the
kernel looks before it asks the file system), and would look like one that supports it.
"""

import contextlib
import errno
import os
import secrets
import time
from collections.abc import Iterator
from typing import Final

from berth.durable.files import list_names
from berth.epoch import names
from berth.errors import AbilityError, BerthError, FailedError
from berth.linux import syscalls
from berth.linux.locks import try_lock

_DIRECTORY: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FIRST: Final = b"first"
_SECOND: Final = b"second"


def probe_noreplace(root_fd: int, root: str) -> None:
    """Prove that renames inside the directory `root` never replace a name.

    Leftovers of probes that were killed are removed on the way. The caller holds the root's lock, so that no other
    start takes a probe that is just being made for a leftover.

    Args:
        root_fd: The directory, open.
        root: Its path, for messages.

    Raises:
        AbilityError: The file system does not refuse to replace, or does not know the flag.
        FailedError: The probe itself could not be carried out or cleaned up.
    """
    try:
        _remove_leftovers(root_fd)
        with _private_directory(root_fd) as probe_fd:
            _probe_files(probe_fd)
            _probe_directories(probe_fd)
    except BerthError:
        raise
    except OSError as error:
        if error.errno in (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM, errno.ENOTTY):
            raise _unsupported(root, f"the kernel answered: {error.strerror}") from error
        raise FailedError(
            "probe-failed",
            f"the file system of {root!r} could not be probed: {error}",
            "Check that the directory is writable and its disk is not full, or choose another with --state-root.",
        ) from error
    except _ReplacedError as error:
        raise _unsupported(root, str(error)) from error


class _ReplacedError(Exception):
    """A rename did not do what it reported, or was not refused where it had to be."""


def _unsupported(root: str, why: str) -> AbilityError:
    return AbilityError(
        "no-noreplace",
        f"the file system of {root!r} does not protect existing names (renameat2 with RENAME_NOREPLACE): {why}. "
        "berth never retires work-state where it could overwrite other work-state",
        "Choose a directory on a local file system such as ext4, xfs or btrfs, with --state-root or BERTH_STATE_ROOT.",
    )


@contextlib.contextmanager
def _private_directory(root_fd: int) -> Iterator[int]:
    """A new directory below the root, locked while in use and removed afterwards."""
    name = f"{names.PROBE_PREFIX}{os.getpid()}-{time.monotonic_ns()}-{secrets.token_hex(16)}"
    os.mkdir(name, 0o700, dir_fd=root_fd)
    fd = os.open(name, _DIRECTORY, dir_fd=root_fd)
    try:
        try_lock(fd)
        yield fd
    finally:
        try:
            _remove(root_fd, name, fd)
        finally:
            os.close(fd)


def _probe_files(probe_fd: int) -> None:
    _create_file(probe_fd, "a", _FIRST)
    _must_move(probe_fd, "a", "b")
    _create_file(probe_fd, "a", _SECOND)
    _must_refuse(probe_fd, "a", "b")
    if (_read_file(probe_fd, "a"), _read_file(probe_fd, "b")) != (_SECOND, _FIRST):
        raise _ReplacedError("a refused rename of a file changed it all the same")


def _probe_directories(probe_fd: int) -> None:
    os.mkdir("c", 0o700, dir_fd=probe_fd)
    first = os.stat("c", dir_fd=probe_fd, follow_symlinks=False).st_ino
    _must_move(probe_fd, "c", "d")
    os.mkdir("c", 0o700, dir_fd=probe_fd)
    second = os.stat("c", dir_fd=probe_fd, follow_symlinks=False).st_ino
    _must_refuse(probe_fd, "c", "d")
    seen = [os.stat(name, dir_fd=probe_fd, follow_symlinks=False).st_ino for name in ("c", "d")]
    if seen != [second, first]:
        raise _ReplacedError("a refused rename of a directory changed it all the same")


def _must_move(probe_fd: int, source: str, destination: str) -> None:
    _rename(probe_fd, source, destination)
    present = list_names(probe_fd)
    if source in present or destination not in present:
        raise _ReplacedError("a rename reported success and moved nothing")


def _must_refuse(probe_fd: int, source: str, destination: str) -> None:
    try:
        _rename(probe_fd, source, destination)
    except FileExistsError:
        return
    raise _ReplacedError("a rename onto an existing name succeeded")


def _rename(probe_fd: int, source: str, destination: str) -> None:
    syscalls.renameat2(source, destination, syscalls.RENAME_NOREPLACE, src_dir_fd=probe_fd, dst_dir_fd=probe_fd)


def _create_file(probe_fd: int, name: str, data: bytes) -> None:
    fd = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=probe_fd)
    try:
        os.write(fd, data)
    finally:
        os.close(fd)


def _read_file(probe_fd: int, name: str) -> bytes:
    fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=probe_fd)
    try:
        return os.read(fd, 64)
    finally:
        os.close(fd)


def _remove_leftovers(root_fd: int) -> None:
    """Remove the directories of killed probes: exactly a probe's name, and its lock is free."""
    for name in filter(names.is_probe, list_names(root_fd)):
        with contextlib.suppress(FileNotFoundError):  # another start removes it at the same time
            fd = os.open(name, _DIRECTORY, dir_fd=root_fd)
            try:
                if try_lock(fd):
                    _remove(root_fd, name, fd)
            finally:
                os.close(fd)


def _remove(root_fd: int, name: str, fd: int) -> None:
    for entry in ("a", "b"):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(entry, dir_fd=fd)
    for entry in ("c", "d"):
        with contextlib.suppress(FileNotFoundError):
            os.rmdir(entry, dir_fd=fd)
    os.rmdir(name, dir_fd=root_fd)
