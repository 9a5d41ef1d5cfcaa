"""FUSE mounts for tests: file systems that honour, refuse or drop the flags of a rename, and lose answers.

The daemon is `fakes/fuse/daemon.py`; its docstring says what the mounts share. Call `skip_without_fuse` first.
"""

import contextlib
import functools
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

import pytest

import berth

#: What a daemon does with the flags of a rename:
#: `honours` hands them to the directory below; `rejects` answers EINVAL to any flag; `unknown` ENOSYS, which the kernel
#: turns into EINVAL; `ignores` drops them; `ignores-stale` drops them and denies a new name twice, so that the kernel
#: does not see it either; `checks-first` looks and then renames, which another client can get between.
Mode = Literal["honours", "rejects", "unknown", "ignores", "ignores-stale", "checks-first"]

#: What a client sees of a rename that the server did and whose answer is lost: an error, nothing until the daemon is
#: ended, or the end of the server.
LostReply = Literal["EIO", "EINTR", "hang", "die"]

_DAEMON: Final = Path(__file__).resolve().parents[1] / "fakes" / "fuse" / "daemon.py"
#: mfusepy would take libfuse 2 where both are installed, and that one has no flags.
_LIBRARY: Final = "libfuse3.so.3"
#: How long a daemon may take to end after its mount is gone, in seconds.
_END_S: Final = 10.0


@dataclass(frozen=True)
class FuseMount:
    """A mounted pass-through.

    Attributes:
        root: The mount point.
        backing: The directory below.
        daemon: The process that serves it.
    """

    root: Path
    backing: Path
    daemon: subprocess.Popen[bytes]

    def end(self) -> None:
        """Kill the daemon: a request that it held fails, and so does every other one from here on."""
        self.daemon.kill()
        self.daemon.wait()


@contextlib.contextmanager
def mounted_fuse(
    mode: Mode,
    backing: Path,
    mount_point: Path,
    *,
    window_ms: float = 0,
    flock: bool = True,
    fail_fsyncdir: bool = False,
    lose_reply: int = 0,
    lose_reply_prefix: str = "",
    lose_reply_how: LostReply = "EIO",
) -> Iterator[FuseMount]:
    """Show the directory `backing` at `mount_point`; both are made where they are missing.

    Args:
        mode: What happens to the flags of a rename.
        backing: The directory below.
        mount_point: An empty directory.
        window_ms: How long the daemon waits before each rename, after whatever was checked for it.
        flock: Whether locks of files hold across mounts of the same directory.
        fail_fsyncdir: Answer EIO to every fsync of a directory.
        lose_reply: Carry out the rename of this number, from 1 on, and then fail; 0 for never.
        lose_reply_prefix: Count only renames to names that begin with this.
        lose_reply_how: What its client sees.

    Raises:
        AssertionError: It cannot be mounted; or it is still in use at the end, after a body that did not fail.
    """
    words = [
        f"--parent={os.getpid()}",
        f"--window-ms={window_ms}",
        f"--lose-reply={lose_reply}",
        f"--lose-reply-how={lose_reply_how}",
    ]
    words.append(f"--lose-reply-prefix={lose_reply_prefix}")
    words += ["--no-flock"] * (not flock) + ["--fail-fsyncdir"] * fail_fsyncdir
    for directory in (backing, mount_point):
        directory.mkdir(exist_ok=True)
    backing, mount_point = backing.resolve(), mount_point.resolve()
    with tempfile.TemporaryFile() as errors:
        daemon = subprocess.Popen(
            [sys.executable, "-B", _DAEMON, *words, mode, backing, mount_point],
            env=os.environ | {"FUSE_LIBRARY_PATH": _LIBRARY, "PYTHONPATH": str(Path(berth.__file__).parents[1])},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
        )
        with _ended_afterwards(daemon, mount_point):
            assert daemon.stdout is not None
            if daemon.stdout.readline() != b"mounted\n":
                errors.seek(0)
                raise AssertionError(f"the FUSE daemon did not mount: {errors.read().decode(errors='replace').strip()}")
            yield FuseMount(mount_point, backing, daemon)


def skip_without_fuse() -> None:
    """Skip the test where a FUSE file system cannot be mounted here, with the reason."""
    reason = _missing()
    if reason is not None:
        pytest.skip(reason)


def missing_for_fuse() -> str | None:
    """Return what a FUSE daemon in Python would miss here, or None."""
    if importlib.util.find_spec("mfusepy") is None:
        return "the Python package mfusepy is not installed"
    if shutil.which("fusermount3") is None:
        return "fusermount3 (package fuse3) is not installed"
    if not os.access("/dev/fuse", os.R_OK | os.W_OK):
        return "/dev/fuse is missing, or may not be opened by this user"
    return None


@functools.cache
def _missing() -> str | None:
    if (reason := missing_for_fuse()) is not None:
        return reason
    with tempfile.TemporaryDirectory(prefix="berth-test-") as name:
        try:
            with mounted_fuse("honours", Path(name, "backing"), Path(name, "root")):
                return None
        except (AssertionError, OSError) as error:
            return f"FUSE cannot be mounted here: {error}"


@contextlib.contextmanager
def _ended_afterwards(daemon: subprocess.Popen[bytes], mount_point: Path) -> Iterator[None]:
    """Unmount at the end. Where somebody still uses the mount, it goes with them, and a test that passed fails."""
    in_use = False
    try:
        yield
        in_use = daemon.poll() is None and not _unmount(mount_point)
    finally:
        _end(daemon, mount_point)
    if in_use:
        raise AssertionError(f"{mount_point} was still in use at the end")


def _end(daemon: subprocess.Popen[bytes], mount_point: Path) -> None:
    """End the daemon, which unmounts; a dead one leaves its mount behind."""
    if _is_mounted(mount_point):
        _unmount(mount_point, lazily=True)
        daemon.terminate()
    try:
        daemon.wait(_END_S)
    except subprocess.TimeoutExpired:
        daemon.kill()
        daemon.wait()
    assert daemon.stdout is not None
    daemon.stdout.close()


def _unmount(mount_point: Path, *, lazily: bool = False) -> bool:
    words = ["fusermount3", "-u", *(["-z"] if lazily else []), "--", str(mount_point)]
    return subprocess.run(words, capture_output=True).returncode == 0


def _is_mounted(mount_point: Path) -> bool:
    """Look without asking the file system, whose daemon may be dead."""
    lines = Path("/proc/self/mountinfo").read_text().splitlines()
    return str(mount_point) in (line.split()[4] for line in lines)
