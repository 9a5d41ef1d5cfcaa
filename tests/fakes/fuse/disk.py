"""A FUSE file system with one file, `disk`, that logs every write and every fsync: a device whose past can be replayed.

The log is a sequence of records, each two little-endian numbers and then the bytes that were written: the offset (8
bytes) and the length (4 bytes). An fsync is a record with the largest offset and no bytes.

Usage: disk.py BACKING LOG MOUNT_POINT. It prints one line when the mount is there and ends when it is unmounted, or
with its parent. `libfuse3` is taken from the variable FUSE_LIBRARY_PATH.
"""

import errno
import os
import signal
import stat
import struct
import sys
from typing import Any, Final

import mfusepy

from berth.linux import syscalls

#: The head of a record, and the offset that says fsync.
HEAD: Final = struct.Struct("<QI")
SYNCED: Final = (1 << 64) - 1

_NAME: Final = "disk"


class Disk(mfusepy.Operations):  # type: ignore[misc]
    """The file, over the file `backing`.

    Args:
        backing: Path of the file below, which has its size already.
        log: Path of the log, which is made.
    """

    use_ns = True

    def __init__(self, backing: str, log: str) -> None:
        self._backing = os.open(backing, os.O_RDWR | os.O_CLOEXEC)
        self._log = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o600)

    def init(self, path: str) -> None:
        """Say that the mount is there."""
        print("mounted", flush=True)

    def getattr(self, path: str, fh: int | None = None) -> dict[str, Any]:
        """Describe the root or the file."""
        if path == "/":
            return {"st_mode": stat.S_IFDIR | 0o700, "st_nlink": 2}
        if path != f"/{_NAME}":
            raise mfusepy.FuseOSError(errno.ENOENT)
        return {"st_mode": stat.S_IFREG | 0o600, "st_nlink": 1, "st_size": os.fstat(self._backing).st_size}

    def readdir(self, path: str, fh: int) -> list[str]:
        """List the file."""
        return [".", "..", _NAME]

    def read(self, path: str, size: int, offset: int, fh: int) -> bytes:
        """Read from the file below."""
        return os.pread(self._backing, size, offset)

    def write(self, path: str, data: bytes, offset: int, fh: int) -> int:
        """Log the write, then do it: who hears of it finds it in the log."""
        self._append(offset, data)
        return os.pwrite(self._backing, data, offset)

    def fsync(self, path: str, datasync: int, fh: int) -> int:
        """Log that everything before has to last."""
        self._append(SYNCED, b"")
        return 0

    def _append(self, offset: int, data: bytes) -> None:
        record = HEAD.pack(offset, len(data)) + data
        if os.write(self._log, record) != len(record):
            raise mfusepy.FuseOSError(errno.ENOSPC)


def main() -> None:
    """Mount and serve until unmounted."""
    backing, log, mount_point = sys.argv[1:]
    syscalls.set_parent_death_signal(signal.SIGTERM)
    mfusepy.FUSE(Disk(backing, log), mount_point, foreground=True, nothreads=True, fsname="berth-test-disk")


if __name__ == "__main__":
    main()
