"""Linux system calls that the standard library does not wrap: one typed function each.

Every wrapper raises `OSError` with the errno of the call and the paths it was given. Constants carry the header they
come from. Nothing here decides anything, and nothing here imports the rest of berth.
"""

import ctypes
import errno
import os
from typing import Final

#: linux/fcntl.h: resolve relative paths against the working directory.
AT_FDCWD: Final = -100
#: linux/fs.h: fail with EEXIST where the target name exists.
RENAME_NOREPLACE: Final = 1
#: linux/fs.h: swap the two names atomically.
RENAME_EXCHANGE: Final = 2
#: linux/prctl.h
PR_SET_PDEATHSIG: Final = 1
#: linux/prctl.h
PR_SET_CHILD_SUBREAPER: Final = 36

#: System call numbers of renameat2: asm/unistd_64.h (x86-64), asm-generic/unistd.h (aarch64, riscv64).
_RENAMEAT2_NUMBER: Final = {"x86_64": 316, "aarch64": 276, "riscv64": 276}

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long
_libc.prctl.argtypes = [ctypes.c_int, ctypes.c_ulong, ctypes.c_ulong, ctypes.c_ulong, ctypes.c_ulong]


def check_name(name: str) -> bytes:
    """Return `name` encoded for the kernel, refusing anything that is not the name of one directory entry.

    ctypes would cut a name at an embedded NUL, and `/`, `.` and `..` would leave the directory.

    Raises:
        ValueError: `name` is empty, `.`, `..`, or holds NUL or `/`.
    """
    raw = os.fsencode(name)
    if raw in (b"", b".", b"..") or b"/" in raw or b"\0" in raw:
        raise ValueError(f"not the name of a directory entry: {name!r}")
    return raw


def check_path(path: str) -> bytes:
    """Return `path` encoded for the kernel.

    Raises:
        ValueError: `path` is empty or holds NUL.
    """
    raw = os.fsencode(path)
    if not raw or b"\0" in raw:
        raise ValueError(f"not a path: {path!r}")
    return raw


def renameat2(source: str, destination: str, flags: int, *, src_dir_fd: int, dst_dir_fd: int) -> None:
    """Rename with flags, see renameat2(2).

    The call goes through syscall(2): an interposed libc wrapper cannot drop the flag, and ENOSYS stays apart from
    EINVAL. Where the number is not known for this architecture, libc's wrapper is used.

    Args:
        source: A name, relative to `src_dir_fd`.
        destination: A name, relative to `dst_dir_fd`.
        flags: RENAME_NOREPLACE or RENAME_EXCHANGE.
        src_dir_fd: An open directory, or AT_FDCWD.
        dst_dir_fd: An open directory, or AT_FDCWD.

    Raises:
        ValueError: A path is empty or holds NUL.
        OSError: As the kernel says, with both paths; EOPNOTSUPP where the kernel or libc has no such call.
    """
    arguments = (
        ctypes.c_int(src_dir_fd),
        ctypes.c_char_p(check_path(source)),
        ctypes.c_int(dst_dir_fd),
        ctypes.c_char_p(check_path(destination)),
        ctypes.c_uint(flags),
    )
    number = _RENAMEAT2_NUMBER.get(os.uname().machine)
    if number is not None:
        result = _libc.syscall(ctypes.c_long(number), *arguments)
    elif hasattr(_libc, "renameat2"):
        result = _libc.renameat2(*arguments)
    else:
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP), source, None, destination)
    if result != 0:
        code = ctypes.get_errno()
        if code == errno.ENOSYS:
            code = errno.EOPNOTSUPP
        raise OSError(code, os.strerror(code), source, None, destination)


def set_parent_death_signal(signal_number: int) -> None:
    """Ask the kernel to send this process `signal_number` when the thread that created it ends, see prctl(2).

    The kernel forgets it when credentials change, so call it after dropping them, and compare the parent's pid
    afterwards: a parent that was gone already sends nothing.

    Raises:
        OSError: The kernel refused.
    """
    _prctl(PR_SET_PDEATHSIG, signal_number)


def set_child_subreaper() -> None:
    """Make orphaned descendants become children of this process instead of init's, see prctl(2).

    Raises:
        OSError: The kernel refused.
    """
    _prctl(PR_SET_CHILD_SUBREAPER, 1)


def _prctl(option: int, value: int) -> None:
    if _libc.prctl(option, value, 0, 0, 0) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
