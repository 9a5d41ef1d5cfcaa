"""`cross_client` holds two mounts of one store to their promises: it passes the good ones and counts what others break.

Two FUSE daemons over one directory are the two clients. The short forms run with every test run, the long ones with
`make faults`, which print the counts.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import berth
from faults.fuse import Mode, mounted_fuse, skip_without_fuse

_SCRIPT = Path(__file__).with_name("cross_client.py")
#: Long enough that both clients have looked before either has renamed, in every round.
_WINDOW_MS = 30
#: Broken promises are looked for in a few rounds; each lasts as long as the window.
_ROUNDS = 10


@contextlib.contextmanager
def two_clients(directory: Path, mode: Mode, **options: Any) -> Iterator[tuple[Path, Path]]:
    skip_without_fuse()
    roots = (directory / "one", directory / "two")
    with contextlib.ExitStack() as mounts:
        for root in roots:
            mounts.enter_context(mounted_fuse(mode, directory / "store", root, **options))
        yield roots
        assert os.listdir(directory / "store") == []


def words(*arguments: object) -> list[str]:
    return [sys.executable, "-B", str(_SCRIPT), *map(str, arguments)]


def cross_client(*arguments: object) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(Path(berth.__file__).parents[1])}
    return subprocess.run(words(*arguments), env=environment, capture_output=True, text=True, timeout=600)


def violations(done: subprocess.CompletedProcess[str]) -> dict[str, int]:
    """Return how often each promise was broken, of an answer in JSON whose exit code says the same."""
    answer = json.loads(done.stdout)
    counts = {name: promise["violated"] for name, promise in answer["promises"].items()}
    assert all(promise["tried"] > 0 for promise in answer["promises"].values())
    assert (done.returncode, answer["verdict"]) == ((1, "violated") if any(counts.values()) else (0, "held"))
    return counts


# --- held and violated -----------------------------------------------------------------------------------------------


def test_store_that_keeps_its_promises(tmp_path: Path) -> None:
    with two_clients(tmp_path, "honours") as roots:
        done = cross_client(*roots, "--rounds", 60, "--json")
        assert violations(done) == {"one-winner": 0, "nothing-lost": 0, "visible": 0, "file-lock": 0}, done.stdout
        assert json.loads(done.stdout)["promises"]["one-winner"]["tried"] == 60


@pytest.mark.parametrize("mode", ["ignores", "checks-first"])
def test_store_that_lets_two_clients_win(tmp_path: Path, mode: Mode) -> None:
    with two_clients(tmp_path, mode, window_ms=_WINDOW_MS) as roots:
        counts = violations(cross_client(*roots, "--rounds", _ROUNDS, "--json"))
    assert counts["one-winner"] > 0
    assert counts["nothing-lost"] == counts["one-winner"]
    assert (counts["visible"], counts["file-lock"]) == (0, 0)


def test_store_that_refuses_the_flag_has_no_winner(tmp_path: Path) -> None:
    with two_clients(tmp_path, "rejects") as roots:
        counts = violations(cross_client(*roots, "--rounds", _ROUNDS, "--json"))
    assert counts == {"one-winner": _ROUNDS, "nothing-lost": 0, "visible": 0, "file-lock": 0}


def test_store_whose_locks_stay_on_each_client(tmp_path: Path) -> None:
    with two_clients(tmp_path, "honours", flock=False) as roots:
        counts = violations(cross_client(*roots, "--rounds", _ROUNDS, "--json"))
    assert counts == {"one-winner": 0, "nothing-lost": 0, "visible": 0, "file-lock": _ROUNDS}


def test_words_say_which_promise_was_broken_and_how_often(tmp_path: Path) -> None:
    with two_clients(tmp_path, "honours", flock=False) as roots:
        done = cross_client(*roots, "--rounds", 3)
    lines = done.stdout.splitlines()
    assert (done.returncode, done.stderr) == (1, "")
    assert [line.split("  ")[0] for line in map(str.strip, lines[:4])] == ["held 3 times"] * 3 + ["VIOLATED 3 of 3"]
    assert "a lock on a file keeps the other client out" in lines[3]
    assert "held by both" in lines[3]
    assert "locks on directories stay on each client" in done.stdout
    assert "do not keep their promises" in lines[-1]


# --- arguments and errors --------------------------------------------------------------------------------------------


def test_roots_that_are_no_two_clients_of_one_store(tmp_path: Path) -> None:
    skip_without_fuse()
    (tmp_path / "file").touch()
    with (
        two_clients(tmp_path, "honours") as roots,
        mounted_fuse("honours", tmp_path / "x", tmp_path / "other") as other,
    ):
        for arguments, name in (
            ((roots[0], tmp_path / "file"), "not-a-directory"),
            ((tmp_path / "missing", roots[1]), "not-a-directory"),
            ((roots[0], roots[0]), "same-mount"),
            ((tmp_path, tmp_path / "x"), "same-mount"),
            ((roots[0], other.root, "--patience", 0.1), "not-the-same-store"),
        ):
            done = cross_client(*arguments, "--json")
            error = json.loads(done.stdout)["error"]
            assert (done.returncode, error["code"], error["name"]) == (2, 2, name), done.stderr
            assert str(arguments[0]) in error["message"] or str(arguments[1]) in error["message"]
        assert os.listdir(other.root) == []


@pytest.mark.parametrize("arguments", [(), ("/",), ("/", "/tmp", "--rounds", "0"), ("/", "/tmp", "--rounds", "many")])
def test_malformed_command_lines(arguments: tuple[str, ...]) -> None:
    done = cross_client(*arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert "usage:" in done.stderr


def test_error_of_a_root_is_no_verdict(tmp_path: Path) -> None:
    """One client ends in the middle: nothing is known then, and the other one cleans up."""
    skip_without_fuse()
    with (
        mounted_fuse("honours", tmp_path / "store", tmp_path / "one") as one,
        mounted_fuse("honours", tmp_path / "store", tmp_path / "two", lose_reply=5, lose_reply_how="die") as two,
    ):
        done = cross_client(one.root, two.root, "--rounds", 20, "--json")
        error = json.loads(done.stdout)["error"]
        assert (done.returncode, error["name"]) == (2, "cannot-try")
        assert "could not be put to the test" in error["message"]
        assert os.listdir(tmp_path / "store") == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_run_cleans_up(tmp_path: Path, number: signal.Signals) -> None:
    with two_clients(tmp_path, "honours") as roots:
        environment = os.environ | {"PYTHONPATH": str(Path(berth.__file__).parents[1])}
        command = words(*roots, "--rounds", 100_000)
        with subprocess.Popen(command, stderr=subprocess.DEVNULL, env=environment) as running:
            deadline = time.monotonic() + 30
            while not list((tmp_path / "store").glob("*/target-*")):
                assert time.monotonic() < deadline
                time.sleep(0.001)
            running.send_signal(number)
            assert running.wait(30) in (128 + number, -number)


# --- long ------------------------------------------------------------------------------------------------------------


@pytest.mark.faults
def test_store_that_keeps_its_promises_in_1000_rounds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with two_clients(tmp_path, "honours") as roots:
        done = cross_client(*roots, "--rounds", 1000, "--json")
        assert not any(violations(done).values()), done.stdout
    with capsys.disabled():
        print(f"\n{done.stdout}", end="")


@pytest.mark.faults
@pytest.mark.parametrize("mode", ["ignores", "checks-first"])
def test_race_is_lost_without_a_widened_window(tmp_path: Path, mode: Mode, capsys: pytest.CaptureFixture[str]) -> None:
    with two_clients(tmp_path, mode) as roots:
        counts = violations(cross_client(*roots, "--rounds", 1000, "--json"))
    with capsys.disabled():
        print(f"\n{mode}, 1000 rounds: {counts}")
    assert counts["one-winner"] > 0
