"""An empty directory, and a state file in it."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from berth.durable.state import StateFile


@pytest.fixture
def work(tmp_path: Path) -> Iterator[Path]:
    """Return an empty directory; strace's log lies beside it. No descriptor may be left open."""
    path = tmp_path / "work"
    path.mkdir()
    yield path
    assert [name for name in map(_shown, os.listdir("/proc/self/fd")) if name.startswith(str(path))] == []


def _shown(fd: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    except FileNotFoundError:  # the listing itself
        return ""


@pytest.fixture
def state(work: Path) -> Iterator[StateFile]:
    """Return the new state file `s` with two records."""
    with StateFile.create(str(work / "s"), {"a": 1}) as state:
        state.append("one")
        state.append("two")
        yield state
