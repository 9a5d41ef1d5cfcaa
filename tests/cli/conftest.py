"""Run the real command line, with a state root and a workspace of its own."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from berth.epoch.names import parse_active, parse_retired


@dataclass(frozen=True)
class Berth:
    """One state root and one workspace, and the commands that use them."""

    state_root: Path
    workspace: Path

    def words(self, *words: str) -> list[str]:
        return [sys.executable, "-m", "berth", *words]

    def environment(self, **more: str) -> dict[str, str]:
        return {**os.environ, "BERTH_STATE_ROOT": str(self.state_root), **more}

    def run(self, *words: str, **options: Any) -> subprocess.CompletedProcess[str]:
        options = {"capture_output": True, "text": True, "timeout": 60, "cwd": self.workspace, **options}
        return subprocess.run(self.words("run", *words), env=options.pop("env", self.environment()), **options)

    def start(self, *words: str, **options: Any) -> subprocess.Popen[bytes]:
        return subprocess.Popen(self.words("run", *words), env=self.environment(), cwd=self.workspace, **options)

    def records(self) -> list[dict[str, Any]]:
        return [json.loads(path.read_text()) for path in sorted((self.state_root / "records").glob("*"))]

    def record(self) -> dict[str, Any]:
        (only,) = self.records()
        return only

    def active(self) -> list[str]:
        return [name for name in os.listdir(self.state_root) if parse_active(name)]

    def retired(self) -> list[str]:
        return [name for name in os.listdir(self.state_root) if parse_retired(name)]


@pytest.fixture
def berth(tmp_path: Path) -> Berth:
    workspace = tmp_path / "workspace"
    workspace.mkdir()
    return Berth(tmp_path / "state", workspace)


@pytest.fixture(params=["host", "sandbox"])
def kind(request: pytest.FixtureRequest, sandbox_works: bool) -> Sequence[str]:
    """The options of each kind of run."""
    if request.param == "host":
        return []
    if not sandbox_works:
        pytest.skip("bubblewrap cannot make a sandbox here; see `berth doctor`")
    return ["--sandbox"]


@pytest.fixture(scope="session")
def sandbox_works() -> bool:
    from berth.errors import AbilityError
    from berth.sandbox.bubblewrap import probe

    try:
        probe()
    except AbilityError:
        return False
    return True
