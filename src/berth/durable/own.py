"""Files that must surely be berth's own: opened without following, waiting or believing, and refused by name.

Whoever can write a file that berth acts on can make berth act. So a file counts as ours only if nobody but root and
the caller can have written it: a regular file of one name, owned by one of the two, that others may not write.
"""

import errno
import os
import stat
from typing import Final

from berth.errors import FailedError, ForbiddenError

#: Nothing that lies under the name is followed or waited for.
_CAREFULLY: Final = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
#: Bits of the mode that let others than the owner write. With an ACL the first is its mask, the most it can allow.
_OTHERS_WRITE: Final = stat.S_IWGRP | stat.S_IWOTH
_CHUNK: Final = 1 << 20


def open_own(name: str, flags: int, *, dir_fd: int, path: str) -> int:
    """Open the existing file `name` of the directory `dir_fd`, and refuse it where it may not be berth's own.

    Args:
        name: Name of an entry of `dir_fd`.
        flags: Access and O_APPEND, see open(2).
        dir_fd: Open directory.
        path: What messages and errors call the file.

    Raises:
        ForbiddenError: `linked-file`: a symbolic link, or more than one name. `special-file`: not a regular file.
            `foreign-file`: owned by neither root nor the caller. `writable-file`: others may write it.
        OSError: As open(2) says, with `path`.
    """
    try:
        fd = os.open(name, flags | _CAREFULLY, dir_fd=dir_fd)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise _refused("linked-file", path, "it is a symbolic link") from error
        if error.errno in (errno.ENXIO, errno.EISDIR):
            raise _refused("special-file", path, "it is not a regular file") from error
        raise OSError(error.errno, os.strerror(error.errno or 0), path) from error
    try:
        _check(os.fstat(fd), path)
    except ForbiddenError:
        os.close(fd)
        raise
    return fd


def read_own(fd: int, *, limit: int, path: str) -> bytes:
    """Return the whole content of the open file `fd`, from its beginning.

    Args:
        fd: A regular file.
        limit: Most bytes that are accepted; no more than one above it are read.
        path: What messages and errors call the file.

    Raises:
        FailedError: `oversized-file`.
        OSError: It cannot be read, with `path`.
    """
    data = bytearray()
    try:
        while chunk := os.pread(fd, min(_CHUNK, limit + 1 - len(data)), len(data)):
            data += chunk
    except OSError as error:
        raise OSError(error.errno, os.strerror(error.errno or 0), path) from error
    if len(data) > limit:
        raise oversized(path, limit)
    return bytes(data)


def oversized(path: str, limit: int) -> FailedError:
    """Return the error for the file `path`, which is, or would be, larger than `limit` bytes."""
    return FailedError(
        "oversized-file",
        f"{path!r} has more than {limit} bytes, which berth neither reads nor writes; nothing was changed",
        "Look at what makes it so large.",
    )


def _check(status: os.stat_result, path: str) -> None:
    caller = os.geteuid()
    if not stat.S_ISREG(status.st_mode):
        raise _refused("special-file", path, "it is not a regular file")
    if status.st_nlink > 1:
        raise _refused("linked-file", path, f"it has {status.st_nlink} names, so it can be changed under another one")
    if status.st_uid not in (0, caller):
        raise _refused("foreign-file", path, f"uid {status.st_uid} owns it, neither root nor you (uid {caller})")
    if status.st_mode & _OTHERS_WRITE:
        raise _refused("writable-file", path, f"others may write it (mode {stat.S_IMODE(status.st_mode):04o})")


def _refused(name: str, path: str, why: str) -> ForbiddenError:
    return ForbiddenError(
        name,
        f"{path!r} is not surely berth's own: {why}. It was not used, and is kept as it is",
        "Find out who made it so and what it holds, then put a file of berth's there again, or move this one away.",
    )
