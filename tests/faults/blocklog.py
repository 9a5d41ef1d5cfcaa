"""Power cuts at the level of the device: every write of a file system is logged, and its past is built anew.

A file system lies on a loop device on a file whose writes `fakes/fuse/disk.py` logs. Afterwards the image is rebuilt
write by write. After each one the power may have been cut, in two ways: everything written so far is there, or the
device has lost some of what came after the last flush, as a cache of its own may.
"""

import contextlib
import functools
import os
import random
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pytest

import berth
from faults.fuse import missing_for_fuse

_DAEMON: Final = Path(__file__).resolve().parents[1] / "fakes" / "fuse" / "disk.py"
#: mfusepy would take libfuse 2 where both are installed.
_LIBRARY: Final = "libfuse3.so.3"
#: The format of the log: see the daemon.
_HEAD: Final = struct.Struct("<QI")
_SYNCED: Final = (1 << 64) - 1
#: How long the daemon may take to end after its mount is gone, in seconds.
_END_S: Final = 10.0


@dataclass(frozen=True)
class Record:
    """One request to the device.

    Attributes:
        offset: Where something was written; None for a flush.
        data: What was written.
        end: Size of the log after it, in bytes.
    """

    offset: int | None
    data: bytes
    end: int


@dataclass(frozen=True)
class Cut:
    """One moment at which the power may be cut.

    Attributes:
        end: Size of the log at that moment, in bytes: what was acknowledged by then has to be there.
        lost: How many of the writes since the last flush the device has lost.
    """

    end: int
    lost: int


@contextlib.contextmanager
def logged(backing: Path, log: Path, mount_point: Path) -> Iterator[Path]:
    """Serve the file `backing` with a log of its writes, and return the path it is served at.

    Args:
        backing: A file of the wanted size.
        log: Path of the log, which is made.
        mount_point: A directory, which is made.

    Raises:
        AssertionError: It cannot be mounted.
    """
    mount_point.mkdir()
    with tempfile.TemporaryFile() as errors:
        daemon = subprocess.Popen(
            [sys.executable, "-B", _DAEMON, backing, log, mount_point],
            env=os.environ | {"FUSE_LIBRARY_PATH": _LIBRARY, "PYTHONPATH": str(Path(berth.__file__).parents[1])},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
        )
        try:
            assert daemon.stdout is not None
            if daemon.stdout.readline() != b"mounted\n":
                errors.seek(0)
                raise AssertionError(f"the FUSE daemon did not mount: {errors.read().decode(errors='replace').strip()}")
            yield mount_point / "disk"
        finally:
            _end(daemon, mount_point)


def read_log(log: Path) -> Iterator[Record]:
    """Read the log; what follows a torn last record is left out."""
    with open(log, "rb") as file:
        while len(head := file.read(_HEAD.size)) == _HEAD.size:
            offset, length = _HEAD.unpack(head)
            yield Record(None if offset == _SYNCED else offset, file.read(length), file.tell())


def copy(source: Path, target: Path) -> None:
    """Copy a sparse file as one."""
    subprocess.run(["cp", "--sparse=always", source, target], check=True)


def replay(start: Path, log: Path, built: Path, chance: random.Random, *, losses: int) -> Iterator[Cut]:
    """Build in the file `built` what the device may hold at each moment, one after the other.

    Whoever takes a cut may change `built`, for example by mounting it.

    Args:
        start: The image before the first write.
        log: The log.
        built: Path of the file that is built, each time anew.
        chance: Chooses what is lost.
        losses: How many choices are tried between two flushes, where there is something to choose.
    """
    flushed, written = start.with_suffix(".flushed"), start.with_suffix(".written")
    copy(start, flushed)
    copy(start, written)
    pending: list[Record] = []
    for record in read_log(log):
        if record.offset is None:
            for _ in range(losses if len(pending) > 1 else 0):
                kept = [one for one in pending if chance.random() < 0.5]
                copy(flushed, built)
                _apply(kept, built)
                yield Cut(pending[-1].end, len(pending) - len(kept))
            _apply(pending, flushed)
            pending = []
        else:
            pending.append(record)
            _apply([record], written)
            copy(written, built)
            yield Cut(record.end, 0)


def skip_without_log() -> None:
    """Skip the test where a FUSE file system cannot be mounted here, with the reason."""
    reason = _missing()
    if reason is not None:
        pytest.skip(reason)


@functools.cache
def _missing() -> str | None:
    if (reason := missing_for_fuse()) is not None:
        return reason
    with tempfile.TemporaryDirectory(prefix="berth-test-") as name:
        (Path(name) / "backing").touch()
        try:
            with logged(Path(name, "backing"), Path(name, "log"), Path(name, "mount")):
                return None
        except (AssertionError, OSError) as error:
            return f"FUSE cannot be mounted here: {error}"


def _end(daemon: "subprocess.Popen[bytes]", mount_point: Path) -> None:
    """Unmount, lazily where a loop device is only being let go of, and see the daemon end."""
    subprocess.run(["fusermount3", "-u", "-z", "--", mount_point], capture_output=True)
    try:
        daemon.wait(_END_S)
    except subprocess.TimeoutExpired:
        daemon.kill()
        daemon.wait()
    assert daemon.stdout is not None
    daemon.stdout.close()


def _apply(records: list[Record], image: Path) -> None:
    fd = os.open(image, os.O_WRONLY | os.O_CLOEXEC)
    try:
        for record in records:
            assert record.offset is not None
            os.pwrite(fd, record.data, record.offset)
    finally:
        os.close(fd)
