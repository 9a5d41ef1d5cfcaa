"""State roots."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from berth.epoch.epoch import EpochRoot


@pytest.fixture
def root(tmp_path: Path) -> Iterator[EpochRoot]:
    """Return an open state root."""
    with EpochRoot(str(tmp_path / "state")) as root:
        yield root
