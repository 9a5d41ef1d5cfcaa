"""The power cuts of `images` lose what was not synced and keep what was; nothing is left mounted."""

import os
import subprocess
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Literal

import pytest

from faults.images import Kind, mounted, mounted_overlay, mounted_tmpfs, skip_without


def mounts_below(directory: Path) -> list[str]:
    lines = Path("/proc/self/mountinfo").read_text().splitlines()
    return [line for line in lines if f" {directory}/" in line]


def loops_on(directory: Path) -> list[str]:
    listed = subprocess.run(["losetup", "--noheadings", "--output", "BACK-FILE"], capture_output=True, text=True)
    return [line for line in listed.stdout.splitlines() if line.startswith(f"{directory}/")]


@pytest.mark.parametrize("kind", ["ext4", "xfs", "btrfs"])
def test_cut_keeps_what_was_synced_and_nothing_else(tmp_path: Path, kind: Kind) -> None:
    skip_without(kind)
    with mounted(kind, tmp_path) as image:
        for name in ("synced", "unsynced"):
            (image.root / name).write_bytes(b"content")
            if name == "synced":
                image.sync()
        image.cut()
        assert (image.root / "synced").read_bytes() == b"content"
        assert not (image.root / "unsynced").exists()
        assert image.root.is_mount()
    assert (mounts_below(tmp_path), loops_on(tmp_path)) == ([], [])


@pytest.mark.parametrize("kind", ["ext4", "tmpfs", "overlay"])
def test_failure_inside_leaves_nothing_mounted(tmp_path: Path, kind: Literal["ext4", "tmpfs", "overlay"]) -> None:
    skip_without(kind)
    makers: dict[str, Callable[[Path], AbstractContextManager[object]]] = {
        "ext4": partial(mounted, "ext4"),
        "tmpfs": mounted_tmpfs,
        "overlay": mounted_overlay,
    }

    def fail_inside() -> None:
        with makers[kind](tmp_path):
            assert len(mounts_below(tmp_path)) == 1
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail_inside()
    assert (mounts_below(tmp_path), loops_on(tmp_path)) == ([], [])


def test_mount_that_is_in_use_at_the_end_is_an_error_and_goes(tmp_path: Path) -> None:
    skip_without("tmpfs")
    with pytest.raises(AssertionError, match="still in use"), mounted_tmpfs(tmp_path) as root:
        fd = os.open(root, os.O_RDONLY)
    assert mounts_below(tmp_path) == []
    os.close(fd)


def test_overlay_shows_its_lower_layer(tmp_path: Path) -> None:
    skip_without("overlay")
    (tmp_path / "lower").mkdir()
    (tmp_path / "lower" / "file").write_bytes(b"old")
    with mounted_overlay(tmp_path, options=("volatile",)) as overlay:
        assert (overlay.root / "file").read_bytes() == b"old"
        (overlay.root / "file").write_bytes(b"new")
        assert (overlay.upper / "file").read_bytes() == b"new"
        assert (overlay.lower / "file").read_bytes() == b"old"
