"""`berth bind snapshot` as it is called."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from berth.binding.snapshot import decode_snapshot
from cli.conftest import Berth


def bind(berth: Berth, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        berth.words("bind", "snapshot", *words), capture_output=True, text=True, timeout=60, cwd=berth.workspace
    )


def test_snapshot_is_written_once_and_never_over_another(berth: Berth) -> None:
    done = bind(berth, "--pid", str(os.getpid()))
    assert done.returncode == 0, done.stderr
    path = berth.workspace / "snapshot.json"
    data = path.read_bytes()
    assert decode_snapshot(data, source="it").workload.target_pids == [os.getpid()]
    again = bind(berth, "--pid", str(os.getpid()))
    assert (again.returncode, "exists already" in again.stderr) == (2, True)
    assert (path.read_bytes(), os.listdir(berth.workspace)) == (data, ["snapshot.json"])


def test_json_is_one_document_and_no_file(berth: Berth) -> None:
    done = bind(berth, "--pid", str(os.getpid()), "--json")
    assert json.loads(done.stdout)["workload"]["target_pids"] == [os.getpid()]
    assert os.listdir(berth.workspace) == []


@pytest.mark.parametrize(
    ("words", "code", "name"),
    [
        ((), 2, "no-target"),
        (("--match", "("), 2, "bad-pattern"),
        (("--pid", "1", "--sample", "nan"), 2, "bad-sample"),
        (("--pid", "1", "--sample", "-1"), 2, "bad-sample"),
        (("--rank-map", "rank0"), 2, "bad-rank-map"),
        (("--pid", "4194305"), 4, "no-such-process"),
    ],
)
def test_bad_requests_write_nothing(berth: Berth, words: tuple[str, ...], code: int, name: str) -> None:
    done = bind(berth, *words, "--json")
    error = json.loads(done.stdout)["error"]
    assert (done.returncode, error["code"], error["name"]) == (code, code, name)
    assert os.listdir(berth.workspace) == []


def test_directory_that_is_not_there(berth: Berth, tmp_path: Path) -> None:
    done = bind(berth, "--pid", str(os.getpid()), "-o", str(tmp_path / "missing" / "s.json"))
    assert (done.returncode, "could not be written" in done.stderr) == (2, True)
