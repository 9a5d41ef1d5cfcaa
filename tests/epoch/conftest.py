"""State roots, and everything in them at a glance."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from berth.epoch.epoch import EpochRoot

_LOCKS = (".berth.lock", ".berth-reclaim.lock")
Snapshot = Callable[..., dict[str, tuple[int, int, bytes]]]


@pytest.fixture
def root(tmp_path: Path) -> Iterator[EpochRoot]:
    """Return an open state root."""
    with EpochRoot(str(tmp_path / "state")) as root:
        yield root


@pytest.fixture
def snapshot() -> Snapshot:
    """Return a function that returns every name below a directory with inode, mode and content, lock files apart."""

    def take(path: str | Path) -> dict[str, tuple[int, int, bytes]]:
        found = {}
        for below in Path(path).rglob("*"):
            status, content = below.lstat(), b""
            if below.is_symlink():
                content = os.fsencode(os.readlink(below))
            elif below.is_file():
                content = below.read_bytes()
            if below.name not in _LOCKS:
                found[str(below)] = (status.st_ino, status.st_mode, content)
        return found

    return take
