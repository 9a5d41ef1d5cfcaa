"""Open what lies below a directory, without leaving its file system on the way."""

import errno
import os
from typing import Final

from berth.linux import syscalls
from berth.linux.mounts import mount_id_of

_DIRECTORY: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_STAY_BELOW: Final = syscalls.RESOLVE_NO_XDEV | syscalls.RESOLVE_NO_SYMLINKS | syscalls.RESOLVE_BENEATH


def open_below(name: str, *, dir_fd: int) -> int:
    """Open the sub-directory `name` of `dir_fd`, which must be a directory on the same mount; return its descriptor.

    Raises:
        ValueError: `name` is not the name of an entry.
        OSError: ENOTDIR or ELOOP where it is something else, EXDEV where something is mounted there.
    """
    syscalls.check_name(name)
    try:
        return syscalls.openat2(name, _DIRECTORY, _STAY_BELOW, dir_fd=dir_fd)
    except OSError as error:
        # Before Linux 5.6, or under a filter that does not know the call; EPERM is none of open's own answers here.
        if error.errno not in (errno.ENOSYS, errno.EPERM):
            raise
    fd = os.open(name, _DIRECTORY, dir_fd=dir_fd)
    if mount_id_of(fd) != mount_id_of(dir_fd):
        os.close(fd)
        raise OSError(errno.EXDEV, os.strerror(errno.EXDEV), name)
    return fd
