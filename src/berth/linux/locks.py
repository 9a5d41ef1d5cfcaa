"""flock(2) locks: taken, tried, waited for, and who holds them.

A lock belongs to the open file description: it is shared with every process that inherits the descriptor and falls
when the last of them closes it or dies. A lock file is never unlinked, because a second file under the same name would
be a second lock.
"""

import errno
import fcntl
import os
import stat
import time

from berth.linux.mounts import mount_of

_POLL_S = 0.01


def open_lock_file(name: str, *, dir_fd: int) -> int:
    """Open or create the lock file `name` in the directory `dir_fd` and return its descriptor, not yet locked.

    Raises:
        OSError: As open(2) says; ELOOP for a symbolic link; EINVAL where the name is not a regular file.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    fd = os.open(name, flags, 0o600, dir_fd=dir_fd)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, "the lock file is not a regular file", name)
    return fd


def try_lock(fd: int, *, shared: bool = False) -> bool:
    """Lock `fd` exclusively, or shared, without waiting; say whether that worked.

    Raises:
        OSError: Any failure but "somebody else holds it".
    """
    try:
        fcntl.flock(fd, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def wait_lock(fd: int, timeout_s: float) -> bool:
    """Lock `fd` exclusively, waiting at most `timeout_s` seconds; say whether that worked.

    Raises:
        OSError: Any failure but "somebody else holds it".
    """
    deadline = time.monotonic() + timeout_s
    while not try_lock(fd):
        if time.monotonic() >= deadline:
            return False
        time.sleep(_POLL_S)
    return True


def lock_holders(fd: int) -> tuple[int, ...]:
    """Return the pids that took a flock on the file behind `fd`, from /proc/locks (proc_locks(5)), ascending.

    The kernel names the process that took the lock, also where another inherited it and the first is gone. Locks of
    other pid namespaces have pid 0 and are left out.
    """
    status = os.fstat(fd)
    mount = mount_of(fd)
    major, minor = map(int, mount.device.split(":")) if mount else (os.major(status.st_dev), os.minor(status.st_dev))
    # The device of the whole file system: on btrfs each subvolume has an st_dev of its own.
    wanted = f"{major:02x}:{minor:02x}:{status.st_ino}"
    pids = set()
    with open("/proc/locks", encoding="ascii", errors="replace") as table:
        for line in table:
            fields = line.split()
            # "1: FLOCK ADVISORY WRITE 123 08:01:4567 0 EOF"; a waiting lock has "->" as its second field.
            if len(fields) >= 6 and fields[1] == "FLOCK" and fields[5] == wanted and fields[4].isdigit():
                pids.add(int(fields[4]))
    return tuple(sorted(pids - {0}))
