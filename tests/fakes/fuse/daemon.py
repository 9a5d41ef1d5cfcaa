"""A FUSE pass-through over a directory, as a process of its own, that treats the flags of a rename as it is told.

Two of these over one directory are two clients of one store. Nothing is cached between them, names, inode numbers and
locks of files are those of the directory below, and a request is answered before the next one is read. Locks of
directories never leave a client: the kernel does not hand them to a FUSE file system.

Usage: daemon.py [options] MODE BACKING MOUNT_POINT. It prints one line when the mount is there and ends when it is
unmounted, or when `--parent` ends. `libfuse3` is taken from the variable FUSE_LIBRARY_PATH.
"""

import argparse
import contextlib
import errno
import fcntl
import os
import select
import signal
import stat
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, Final

import mfusepy

from berth.linux import syscalls

#: How often the mode `ignores-stale` denies a new name: once when the kernel revalidates it, once when it looks anew.
_DENIALS: Final = 2
#: The fields of `struct stat` that are handed up as they are; the times go as nanoseconds.
_ATTRIBUTES: Final = ("st_mode", "st_ino", "st_nlink", "st_uid", "st_gid", "st_size", "st_blocks", "st_rdev")
_TIMES: Final = ("st_atime", "st_mtime", "st_ctime")


class Store(mfusepy.Operations):  # type: ignore[misc]
    """The directory below, seen through FUSE.

    Args:
        options: The words of the command line.
    """

    use_ns = True

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._root = os.open(options.backing, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self._rename: Callable[[str, str, int], None] = {
            "honours": self._rename_honouring,
            "rejects": self._rename_refusing,
            "unknown": self._rename_refusing,
            "ignores": self._rename_ignoring,
            "ignores-stale": self._rename_ignoring,
            "checks-first": self._rename_checking_first,
        }[options.mode]
        self._renames = 0
        self._denials: dict[str, int] = {}

    def init(self, path: str) -> None:
        """Say that the mount is there: the kernel has sent its first request."""
        print("mounted", flush=True)

    # --- renames ---

    def rename(self, old: str, new: str, flags: int = 0) -> int:
        """Rename as the mode says, then lose the answer where that was ordered."""
        self._rename(_below(old), _below(new), flags)
        if os.path.basename(new).startswith(self._options.lose_reply_prefix):
            self._renames += 1
            if self._renames == self._options.lose_reply:
                _lose_reply(self._options.lose_reply_how)
        return 0

    def _rename_honouring(self, old: str, new: str, flags: int) -> None:
        self._widen_window()
        syscalls.renameat2(old, new, flags, src_dir_fd=self._root, dst_dir_fd=self._root)

    def _rename_refusing(self, old: str, new: str, flags: int) -> None:
        if flags:
            number = errno.EINVAL if self._options.mode == "rejects" else errno.ENOSYS
            raise OSError(number, os.strerror(number))
        self._replace(old, new)

    def _rename_ignoring(self, old: str, new: str, flags: int) -> None:
        self._widen_window()
        self._replace(old, new)
        if self._options.mode == "ignores-stale" and flags == syscalls.RENAME_NOREPLACE:
            # Once for every name: whoever cleans up afterwards must find it.
            self._denials[new] = 0 if new in self._denials else _DENIALS

    def _rename_checking_first(self, old: str, new: str, flags: int) -> None:
        if flags & ~syscalls.RENAME_NOREPLACE:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        if flags and os.path.lexists(os.path.join(self._options.backing, new)):
            raise OSError(errno.EEXIST, os.strerror(errno.EEXIST))
        self._widen_window()
        self._replace(old, new)

    def _replace(self, old: str, new: str) -> None:
        os.replace(old, new, src_dir_fd=self._root, dst_dir_fd=self._root)

    def _widen_window(self) -> None:
        """Give another client time between what was checked for this rename and the rename."""
        time.sleep(self._options.window_ms / 1000)

    # --- names ---

    def getattr(self, path: str, fh: int | None = None) -> dict[str, Any]:
        """Return the attributes of a file, also of one that is open and has no name any more."""
        if fh is not None:
            return _attributes(os.fstat(fh))
        name = _below(path)
        if self._denials.get(name, 0) > 0:
            self._denials[name] -= 1
            raise OSError(errno.ENOENT, os.strerror(errno.ENOENT))
        return _attributes(os.stat(name, dir_fd=self._root, follow_symlinks=False))

    def readdir(self, path: str, fh: int) -> Iterator[tuple[str, dict[str, Any], int]]:
        """Return every entry with its type and inode number; an entry of number 0 would count as deleted."""
        fd = self._open_directory(path)
        try:
            for name in (".", "..", *os.listdir(fd)):
                try:
                    status = os.stat(name, dir_fd=fd, follow_symlinks=False)
                except FileNotFoundError:  # another client was quicker
                    continue
                yield name, {"st_ino": status.st_ino, "st_mode": stat.S_IFMT(status.st_mode)}, 0
        finally:
            os.close(fd)

    def fsyncdir(self, path: str, datasync: int, fh: int) -> int:
        """Sync a directory, or fail where that was ordered."""
        if self._options.fail_fsyncdir:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        fd = self._open_directory(path)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
        return 0

    def mkdir(self, path: str, mode: int) -> int:
        """Make a directory."""
        os.mkdir(_below(path), mode, dir_fd=self._root)
        return 0

    def rmdir(self, path: str) -> int:
        """Remove an empty directory."""
        os.rmdir(_below(path), dir_fd=self._root)
        return 0

    def unlink(self, path: str) -> int:
        """Remove a name."""
        os.unlink(_below(path), dir_fd=self._root)
        return 0

    def link(self, target: str, source: str) -> int:
        """Give `source` the second name `target`."""
        os.link(_below(source), _below(target), src_dir_fd=self._root, dst_dir_fd=self._root, follow_symlinks=False)
        return 0

    def chmod(self, path: str, mode: int) -> int:
        """Change permission bits."""
        os.chmod(_below(path), stat.S_IMODE(mode), dir_fd=self._root)
        return 0

    # --- open files ---

    def create(self, path: str, mode: int, flags: int) -> int:
        """Make a file and open it."""
        return os.open(_below(path), _own_flags(flags) | os.O_CREAT, mode, dir_fd=self._root)

    def open(self, path: str, flags: int) -> int:
        """Open a file."""
        return os.open(_below(path), _own_flags(flags), dir_fd=self._root)

    def read(self, path: str, size: int, offset: int, fh: int) -> bytes:
        """Read from an open file."""
        return os.pread(fh, size, offset)

    def write(self, path: str, data: bytes, offset: int, fh: int) -> int:
        """Write into an open file."""
        return os.pwrite(fh, data, offset)

    def truncate(self, path: str, length: int, fh: int | None = None) -> int:
        """Cut or extend a file."""
        if fh is not None:
            os.ftruncate(fh, length)
            return 0
        own = self.open(path, os.O_WRONLY)
        try:
            os.ftruncate(own, length)
        finally:
            os.close(own)
        return 0

    def fsync(self, path: str, datasync: int, fh: int) -> int:
        """Sync an open file."""
        os.fsync(fh)
        return 0

    def release(self, path: str, fh: int) -> int:
        """Close an open file; its lock goes with it."""
        os.close(fh)
        return 0

    def _open_directory(self, path: str) -> int:
        return os.open(_below(path), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=self._root)


class LockingStore(Store):
    """A store whose clients see each other's locks on files."""

    def flock(self, path: str, fh: int, operation: int) -> int:
        """Lock or unlock. Nobody may wait here, because the next request would wait too: EAGAIN instead."""
        fcntl.flock(fh, operation | fcntl.LOCK_NB)
        return 0


class _Server(mfusepy.FUSE):  # type: ignore[misc]
    """The library drops the flags of a rename; this class hands them on."""

    def rename_fuse_3(self, old: bytes, new: bytes, flags: int) -> int:
        self.operations.rename(os.fsdecode(old), os.fsdecode(new), flags)
        return 0


def _below(path: str) -> str:
    """Make a path of the mount one that is relative to the directory below."""
    return path.lstrip("/") or "."


def _own_flags(flags: int) -> int:
    """The kernel says where to write, also in files that are opened for appending."""
    return (flags | os.O_CLOEXEC) & ~os.O_APPEND


def _attributes(status: os.stat_result) -> dict[str, Any]:
    return {name: getattr(status, name) for name in _ATTRIBUTES} | {
        name: getattr(status, f"{name}_ns") for name in _TIMES
    }


def _lose_reply(how: str) -> None:
    """Do what a client sees where the server has done its part and the answer is lost."""
    while how == "hang":
        signal.pause()
    if how == "die":
        os._exit(1)
    number = {"EIO": errno.EIO, "EINTR": errno.EINTR}[how]
    raise OSError(number, os.strerror(number))


def _end_with(parent: int, mount_point: str) -> None:
    """Unmount and end once `parent` has ended. A death signal may come just before the library waits, and be missed."""
    with contextlib.suppress(ProcessLookupError):  # it has ended already
        select.select([os.pidfd_open(parent)], [], [])
    subprocess.run(["fusermount3", "-u", "-z", "--", mount_point], stderr=subprocess.DEVNULL)
    os._exit(1)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    modes = ("honours", "rejects", "unknown", "ignores", "ignores-stale", "checks-first")
    parser.add_argument("mode", choices=modes, help="what happens to the flags of a rename")
    parser.add_argument("backing", help="the directory below")
    parser.add_argument("mount_point")
    parser.add_argument("--parent", type=int, default=0, metavar="PID", help="unmount and end when this process ends")
    parser.add_argument("--window-ms", type=float, default=0, help="wait between the check and the rename")
    parser.add_argument("--no-flock", action="store_true", help="let the locks of files stay on each client")
    parser.add_argument("--fail-fsyncdir", action="store_true", help="answer EIO to every fsync of a directory")
    parser.add_argument("--lose-reply", type=int, default=0, metavar="N", help="carry out the N-th rename and fail")
    parser.add_argument("--lose-reply-prefix", default="", help="count only renames to names that begin with this")
    parser.add_argument("--lose-reply-how", choices=("EIO", "EINTR", "hang", "die"), default="EIO")
    return parser.parse_args()


def main() -> None:
    """Mount and serve until unmounted."""
    options = _parse()
    if options.parent:
        threading.Thread(target=_end_with, args=(options.parent, options.mount_point), daemon=True).start()
    os.umask(0)
    _Server(
        Store(options) if options.no_flock else LockingStore(options),
        options.mount_point,
        foreground=True,
        nothreads=True,
        fsname=f"berth-test-{options.mode}",
        use_ino=True,
        readdir_ino=True,
        hard_remove=True,
        entry_timeout=0,
        attr_timeout=0,
        negative_timeout=0,
    )


if __name__ == "__main__":
    main()
