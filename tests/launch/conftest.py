"""A state root to publish into."""

import os
import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest

from berth.epoch.epoch import Epoch, EpochRoot


@pytest.fixture
def root(tmp_path: Path) -> Iterator[EpochRoot]:
    """Return an open state root."""
    with EpochRoot(str(tmp_path / "state")) as root:
        yield root


@pytest.fixture
def epoch(root: EpochRoot) -> Iterator[Epoch]:
    """Return an open epoch in it."""
    with root.open_epoch(secrets.token_hex(32)) as epoch:
        yield epoch


@pytest.fixture
def no_temporaries(root: EpochRoot) -> Iterator[None]:
    """Check that no temporary file is left anywhere in the state root when the test ends."""
    yield
    left = [name for _, _, files in os.walk(root.path) for name in files if name.endswith(".tmp")]
    assert left == []
