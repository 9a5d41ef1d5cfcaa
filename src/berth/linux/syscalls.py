"""Linux system calls that the standard library does not wrap: one typed function each.

Every wrapper raises `OSError` with the errno of the call and the paths it was given. Constants carry the header they
come from. Nothing here decides anything, and nothing here imports the rest of berth.
"""

import ctypes
import errno
import os
import struct
from collections.abc import Sequence
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
#: linux/prctl.h
PR_SET_NO_NEW_PRIVS: Final = 38
#: linux/prctl.h
PR_SET_SECCOMP: Final = 22
#: linux/seccomp.h
SECCOMP_MODE_FILTER: Final = 2
#: linux/sched.h: the namespaces that unshare(2) can make new.
CLONE_NEWNS: Final = 0x0002_0000
CLONE_NEWUTS: Final = 0x0400_0000
CLONE_NEWIPC: Final = 0x0800_0000
CLONE_NEWUSER: Final = 0x1000_0000
CLONE_NEWPID: Final = 0x2000_0000
CLONE_NEWNET: Final = 0x4000_0000

#: linux/openat2.h: cross no mount, bind mounts of the same file system included.
RESOLVE_NO_XDEV: Final = 0x01
#: linux/openat2.h: follow no symbolic link, not even on the way.
RESOLVE_NO_SYMLINKS: Final = 0x04
#: linux/openat2.h: stay below the directory descriptor.
RESOLVE_BENEATH: Final = 0x08
#: linux/openat2.h: treat the directory descriptor as the root, for `/`, `..` and absolute links.
RESOLVE_IN_ROOT: Final = 0x10
#: linux/memfd.h: the file may be executed, whatever the sysctl vm.memfd_noexec says (Linux 6.3).
MFD_EXEC: Final = 0x10

#: System call number of openat2: the same on every architecture (asm-generic/unistd.h).
_OPENAT2_NUMBER: Final = 437
#: System call numbers of renameat2: asm/unistd_64.h (x86-64), asm-generic/unistd.h (aarch64, riscv64).
_RENAMEAT2_NUMBER: Final = {"x86_64": 316, "aarch64": 276, "riscv64": 276}.get(os.uname().machine)

_libc = ctypes.CDLL(None, use_errno=True)
# syscall(2), once for each call made through it: ctypes converts fewer objects that way, which is most of the cost.
_renameat2 = ctypes.CFUNCTYPE(
    ctypes.c_long,
    ctypes.c_long,
    ctypes.c_int,
    ctypes.c_char_p,
    ctypes.c_int,
    ctypes.c_char_p,
    ctypes.c_uint,
    use_errno=True,
)(("syscall", _libc))
_openat2 = ctypes.CFUNCTYPE(
    ctypes.c_long,
    ctypes.c_long,
    ctypes.c_int,
    ctypes.c_char_p,
    ctypes.c_char_p,
    ctypes.c_size_t,
    use_errno=True,
)(("syscall", _libc))
_libc.unshare.argtypes = [ctypes.c_int]
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
    if b"\0" in raw or not raw:
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
    raw_source, raw_destination = check_path(source), check_path(destination)
    if _RENAMEAT2_NUMBER is not None:
        result = _renameat2(_RENAMEAT2_NUMBER, src_dir_fd, raw_source, dst_dir_fd, raw_destination, flags)
    elif hasattr(_libc, "renameat2"):
        result = _libc.renameat2(src_dir_fd, raw_source, dst_dir_fd, raw_destination, ctypes.c_uint(flags))
    else:
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP), source, None, destination)
    if result != 0:
        code = ctypes.get_errno()
        if code == errno.ENOSYS:
            code = errno.EOPNOTSUPP
        raise OSError(code, os.strerror(code), source, None, destination)


def openat2(path: str, flags: int, resolve: int, *, dir_fd: int) -> int:
    """Open `path` with rules for how it is resolved, see openat2(2), and return the descriptor, close-on-exec.

    Raises:
        ValueError: `path` is empty or holds NUL.
        OSError: As the kernel says, with the path; ENOSYS before Linux 5.6.
    """
    how = ctypes.create_string_buffer(struct.pack("=QQQ", flags | os.O_CLOEXEC, 0, resolve), 24)
    result = _openat2(_OPENAT2_NUMBER, dir_fd, check_path(path), how, len(how))
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), path)
    return int(result)


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


def unshare(flags: int) -> None:
    """Put this process into new namespaces, see unshare(2); `os.unshare` exists from Python 3.12 on.

    Args:
        flags: CLONE_NEW* bits. CLONE_NEWUSER works in a process of one thread only.

    Raises:
        OSError: As the kernel says: EPERM where it is forbidden, ENOSPC where a limit of namespaces is reached.
    """
    if _libc.unshare(flags) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


def set_no_new_privileges() -> None:
    """Give up, for this process and all it starts, what set-user-ID programs would add, see prctl(2).

    Raises:
        OSError: The kernel refused.
    """
    _prctl(PR_SET_NO_NEW_PRIVS, 1)


def set_seccomp_filter(program: Sequence[tuple[int, int, int, int]]) -> None:
    """Put this thread and what it starts under a seccomp filter, for good, see seccomp(2).

    Call `set_no_new_privileges` before; the kernel wants that of everybody without CAP_SYS_ADMIN.

    Args:
        program: Classic BPF, one `struct sock_filter` (linux/filter.h) each: code, jump if true, jump if false, value.

    Raises:
        OSError: EINVAL where the kernel has no filters or the program is none; EACCES without no-new-privileges.
    """
    filters = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *instruction) for instruction in program))
    # struct sock_fprog: the length, then the address at the alignment of a pointer.
    described = ctypes.create_string_buffer(struct.pack("@HP", len(program), ctypes.addressof(filters)))
    _prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.addressof(described))


def _prctl(option: int, value: int, address: int = 0) -> None:
    if _libc.prctl(option, value, address, 0, 0) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
