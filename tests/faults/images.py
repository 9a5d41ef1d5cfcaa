"""Real file systems for tests: images on loop devices, tmpfs and overlayfs, and power cuts on them.

Each is a context manager that mounts below a directory of the test and takes everything away again, whatever happened
in between. Call `skip_without` first: it tries the kind once on this machine and says what is missing.

A power cut here loses what the file system had not handed to its device. What a device loses from its own cache is the
subject of `blocklog`.
"""

import contextlib
import fcntl
import functools
import os
import shutil
import struct
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

import pytest

Kind = Literal["ext4", "xfs", "btrfs"]

#: Size in MiB, above what the makers of the file systems demand (xfs 300, btrfs 109); the images are sparse.
_SIZE_MIB: Final = {"ext4": 256, "xfs": 320, "btrfs": 256}
#: How each is made on a plain file; ext4 writes its tables at once, so that no kernel thread does it during a test.
_MAKE: Final = {
    "ext4": ("mkfs.ext4", "-q", "-F", "-E", "lazy_itable_init=0,lazy_journal_init=0"),
    "xfs": ("mkfs.xfs", "-q", "-f"),
    "btrfs": ("mkfs.btrfs", "-q", "-f"),
}
_PACKAGE: Final = {"mkfs.ext4": "e2fsprogs", "mkfs.xfs": "xfsprogs", "mkfs.btrfs": "btrfs-progs"}
#: btrfs commits on its own every 30 s; a test that copies an image wants only what was asked for.
_OPTIONS: Final = {"ext4": ("loop",), "xfs": ("loop",), "btrfs": ("loop", "commit=300")}

#: How long others may keep an unmounted image busy, in seconds.
_RELEASE_S: Final = 30.0

#: FS_IOC_SHUTDOWN (linux/fs.h; as XFS_IOC_GOINGDOWN and EXT4_IOC_SHUTDOWN in older headers): _IOR('X', 125, __u32).
SHUTDOWN: Final = 0x8004587D
#: Its argument: stop at once and write nothing more, not even the log (FS_SHUTDOWN_FLAGS_NOLOGFLUSH, which is 2).
WITHOUT_LOG: Final = struct.pack("=I", 2)


@dataclass(frozen=True)
class Image:
    """A mounted file system in a file.

    Attributes:
        kind: Its type.
        path: The image file.
        root: The mount point.
    """

    kind: Kind
    path: Path
    root: Path

    def sync(self) -> None:
        """Hand everything that was written so far to the device; other file systems are left alone."""
        _run("sync", "--file-system", self.root)

    def stop(self) -> None:
        """Cut the power: nothing that the file system has not written by now will be there after `restart`.

        ext4 and xfs answer every call with EIO from here on. btrfs cannot be stopped like that: its image is copied
        and it goes on, so end whoever writes to it before.

        Raises:
            OSError: The file system refused, or the image could not be copied.
        """
        if self.kind == "btrfs":
            _run("cp", "--sparse=always", self.path, self._copy)
            return
        fd = os.open(self.root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.ioctl(fd, SHUTDOWN, WITHOUT_LOG)
        finally:
            os.close(fd)

    def restart(self) -> None:
        """Switch on again: mount what was there at the cut. Nobody may hold a file of the old mount any more.

        Raises:
            AssertionError: It cannot be unmounted, or what is left cannot be mounted.
        """
        _run("umount", self.root)
        self.wait_until_free()
        if self._copy.exists():
            self._copy.replace(self.path)
        self.mount()

    def cut(self) -> None:
        """Cut the power and switch on again."""
        self.stop()
        self.restart()

    def mount(self) -> None:
        """Mount the image at `root`; the loop device goes with the mount."""
        _run("mount", "-t", self.kind, "-o", ",".join(_OPTIONS[self.kind]), self.path, self.root)

    def wait_until_free(self) -> None:
        """Wait until no device holds the file: a mount namespace that was made meanwhile has a copy of the mount.

        Raises:
            AssertionError: That takes too long.
        """
        deadline = time.monotonic() + _RELEASE_S
        while os.path.realpath(self.path) in map(_read_line, Path("/sys/block").glob("loop*/loop/backing_file")):
            assert time.monotonic() < deadline, f"another mount namespace still holds {self.path}"
            time.sleep(0.01)

    @property
    def _copy(self) -> Path:
        return self.path.with_suffix(".cut")


@dataclass(frozen=True)
class Overlay:
    """A mounted overlayfs.

    Attributes:
        lower: The read-only layer; fill it before mounting.
        upper: The layer that takes the changes.
        root: The mount point.
    """

    lower: Path
    upper: Path
    root: Path


@contextlib.contextmanager
def mounted(kind: Kind, directory: Path, *, size_mib: int | None = None, words: Sequence[str] = ()) -> Iterator[Image]:
    """Make a file system of `kind` in `directory`/image and mount it at `directory`/root.

    Args:
        kind: Its type.
        directory: An existing directory.
        size_mib: Size of the sparse image.
        words: More words for the command that makes the file system.
    """
    path = directory / "image"
    make_image(kind, path, size_mib=size_mib, words=words)
    with attached(kind, path, directory / "root") as image:
        yield image
    path.unlink()


def make_image(kind: Kind, path: Path, *, size_mib: int | None = None, words: Sequence[str] = ()) -> None:
    """Make the file `path` an empty file system; the arguments are those of `mounted`."""
    with open(path, "xb") as file:
        file.truncate((size_mib or _SIZE_MIB[kind]) << 20)
    maker, *rest = _MAKE[kind]
    _run(_command(maker) or maker, *rest, *words, path)


@contextlib.contextmanager
def attached(kind: Kind, path: Path, root: Path) -> Iterator[Image]:
    """Mount the image `path`, which is there already, at `root`, which is made where it is missing."""
    image = Image(kind, path, root)
    root.mkdir(exist_ok=True)
    with _unmounted_afterwards(root):
        image.mount()
        yield image
    image.wait_until_free()


@contextlib.contextmanager
def mounted_tmpfs(directory: Path, *, size: str = "64m") -> Iterator[Path]:
    """Mount a tmpfs of `size` at `directory`/root and return the mount point."""
    root = directory / "root"
    root.mkdir()
    with _unmounted_afterwards(root):
        _run("mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", root)
        yield root


@contextlib.contextmanager
def mounted_overlay(directory: Path, *, options: Sequence[str] = ()) -> Iterator[Overlay]:
    """Mount an overlayfs at `directory`/root, with its layers lower, upper and work beside it.

    Args:
        directory: An existing directory; a `lower` that is there already is used as it is.
        options: More mount options, such as `volatile` or `redirect_dir=on`.
    """
    lower, upper, work, root = (directory / name for name in ("lower", "upper", "work", "root"))
    for layer in (lower, upper, work, root):
        layer.mkdir(exist_ok=True)
    layers = (f"lowerdir={lower}", f"upperdir={upper}", f"workdir={work}")
    with _unmounted_afterwards(root):
        _run("mount", "-t", "overlay", "-o", ",".join((*layers, *options)), "overlay", root)
        yield Overlay(lower, upper, root)


def skip_without(kind: Kind | Literal["tmpfs", "overlay"]) -> None:
    """Skip the test where a file system of `kind` cannot be made and mounted here, with the reason."""
    reason = _missing(kind)
    if reason is not None:
        pytest.skip(reason)


@functools.cache
def _missing(kind: Kind | Literal["tmpfs", "overlay"]) -> str | None:
    if os.geteuid() != 0:
        return f"mounting {kind} needs root"
    if kind in _MAKE and _command(_MAKE[kind][0]) is None:
        return f"{_MAKE[kind][0]} (package {_PACKAGE[_MAKE[kind][0]]}) is not installed"
    with tempfile.TemporaryDirectory(prefix="berth-test-") as name:
        try:
            with _mounted_any(kind, Path(name)):
                return None
        except (AssertionError, OSError) as error:
            return f"{kind} cannot be mounted here: {error}"


def _mounted_any(
    kind: Kind | Literal["tmpfs", "overlay"], directory: Path
) -> contextlib.AbstractContextManager[Image | Path | Overlay]:
    if kind == "tmpfs":
        return mounted_tmpfs(directory)
    if kind == "overlay":
        return mounted_overlay(directory)
    return mounted(kind, directory)


@contextlib.contextmanager
def _unmounted_afterwards(root: Path) -> Iterator[None]:
    """Unmount `root` at the end. Where somebody still uses it, it goes with them, and a test that passed fails."""
    try:
        yield
    except BaseException:
        if root.is_mount():
            subprocess.run(["umount", "--lazy", root], capture_output=True)
        raise
    if subprocess.run(["umount", root], capture_output=True).returncode != 0:
        _run("umount", "--lazy", root)
        raise AssertionError(f"{root} was still in use at the end")


def _command(name: str) -> str | None:
    """Find `name`, also where the makers of file systems lie and only root's PATH leads."""
    return shutil.which(name, path=f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin")


def _read_line(path: Path) -> str:
    try:
        return path.read_text().rstrip("\n")
    except OSError:  # the device was freed at this moment
        return ""


def _run(*words: str | Path) -> None:
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 0, f"{' '.join(map(str, words))}: {done.stderr.strip()}"
