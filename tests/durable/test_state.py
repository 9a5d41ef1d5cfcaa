import json
import os
import shutil
import stat
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from berth.durable.state import State, StateFile
from berth.errors import FailedError, MalformedError
from durable.witness import contents, raised, read

# --- life ------------------------------------------------------------------------------------------------------------


def test_life(work: Path) -> None:
    path = str(work / "s")
    with StateFile.create(path, {"a": 1}) as state:
        assert state.read() == read(work) == State({"a": 1}, [])
        assert os.listdir(work) == ["s"]
        state.append({"step": 1})
        assert state.read() == read(work) == State({"a": 1}, [{"step": 1}])
        state.append(None)
        assert state.read() == read(work) == State({"a": 1}, [{"step": 1}, None])
        assert sorted(os.listdir(work)) == ["s", "s.log"]
        state.fold({"a": 2})
        assert state.read() == read(work) == State({"a": 2}, [])
        assert os.listdir(work) == ["s"]
        state.append("again")
    with StateFile.open(path) as state:
        state.append("after opening")
        assert state.read() == State({"a": 2}, ["again", "after opening"])
        state.fold({})
        state.fold({"b": 1})
    assert read(work) == State({"b": 1}, [])


def test_closing_twice_closes_nobody_elses_file(work: Path) -> None:
    with StateFile.create(str(work / "s"), {}) as state:
        state.append(1)
        state.close()
        fds = [os.open(work, os.O_RDONLY) for _ in range(3)]
    for fd in fds:
        os.close(fd)


@pytest.mark.parametrize("umask", [0, 0o022, 0o277])
def test_files_are_private_whatever_the_umask(work: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        with StateFile.create(str(work / "s"), {}) as state:
            state.append(1)
            modes = [stat.S_IMODE((work / name).stat().st_mode) for name in ("s", "s.log")]
            state.fold({})
    finally:
        os.umask(before)
    assert [*modes, stat.S_IMODE((work / "s").stat().st_mode)] == [0o600] * 3


def test_relative_to_a_descriptor_that_may_be_closed_and_moved(work: Path) -> None:
    (work / "a").mkdir()
    fd = os.open(work, os.O_RDONLY)
    state = StateFile.create("a/s", {}, dir_fd=fd)
    other = StateFile.open("a/s", dir_fd=fd)
    os.close(fd)
    (work / "a").rename(work / "b")
    with other, state:
        state.append(1)
        assert other.read() == State({}, [1])
        state.fold({"a": 2})
    assert read(work / "b") == State({"a": 2}, [])


def test_relative_to_the_working_directory(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(work)
    with StateFile.create("s", {"a": 1}) as state:
        state.append(1)
    assert read(work) == State({"a": 1}, [1])


@pytest.mark.parametrize("name", ["", ".", "..", "a/", "a/..", "a\0b"])
@pytest.mark.parametrize("function", [StateFile.open, lambda path: StateFile.create(path, {})])
def test_path_ends_in_a_name(work: Path, name: str, function: Callable[[str], StateFile]) -> None:
    (work / "a").mkdir()
    with pytest.raises(ValueError, match="name of a directory entry"):
        function(f"{work}/{name}")


def test_names_that_are_long_or_not_utf8(work: Path) -> None:
    for name in ("\u00fc" * 125, os.fsdecode(b"\xff\n"), "-rf"):
        with StateFile.create(os.path.join(work, name), {"a": 1}) as state:
            state.append(1)
            state.fold({"a": 2})
        with StateFile.open(os.path.join(work, name)) as state:
            assert state.read() == State({"a": 2}, [])


def test_name_too_long_for_a_log(work: Path) -> None:
    with pytest.raises(OSError, match="too long") as caught:
        StateFile.create(str(work / ("a" * 253)), {})
    assert caught.value.filename == str(work / ("a" * 253)) + ".log"
    assert os.listdir(work) == []


@settings(deadline=None, max_examples=20)
@given(
    st.dictionaries(st.text(), st.recursive(st.none() | st.text() | st.integers(), st.lists, max_leaves=4), max_size=3),
    st.lists(st.text() | st.floats(allow_nan=False, allow_infinity=False), max_size=3),
)
def test_what_is_on_the_disk_comes_back(document: dict[str, Any], records: list[Any]) -> None:
    document = {f"d{key}": value for key, value in document.items()}
    with tempfile.TemporaryDirectory() as directory, StateFile.create(f"{directory}/s", {}) as state:
        state.fold(document)
        for record in records:
            state.append(record)
        assert read(Path(directory)) == State(document, records)


# --- creating --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["file", "directory", "dangling link", "fifo"])
@pytest.mark.parametrize("name", ["s", "s.log"])
def test_existing_name_is_never_replaced(work: Path, kind: str, name: str) -> None:
    path = work / name
    make = {"file": path.touch, "directory": path.mkdir, "fifo": lambda: os.mkfifo(path)}
    make.get(kind, lambda: path.symlink_to("nowhere"))()
    before = contents(work)
    with pytest.raises(FileExistsError) as caught:
        StateFile.create(str(work / "s"), {"a": 1})
    assert caught.value.filename == str(path)
    assert contents(work) == before


# Each of six processes creates every state file with its own number; prints who won which.
RACE = """
import json, multiprocessing, os
from berth.durable.state import StateFile
directory, rounds = sys.argv[1], int(sys.argv[2])

def race(number, barrier, winners):
    for turn in range(rounds):
        barrier.wait()
        try:
            with StateFile.create(os.path.join(directory, str(turn)), {"winner": number}) as state:
                state.append(number)
        except FileExistsError:
            continue
        winners[turn * 6 + number] = 1

context = multiprocessing.get_context("fork")
barrier, winners = context.Barrier(6), context.RawArray("b", rounds * 6)
racers = [context.Process(target=race, args=(number, barrier, winners)) for number in range(6)]
for racer in racers: racer.start()
for racer in racers: racer.join()
assert all(racer.exitcode == 0 for racer in racers)
print(json.dumps([[n for n in range(6) if winners[turn * 6 + n]] for turn in range(rounds)]))
"""


def test_of_racing_creators_one_wins(children, work: Path) -> None:
    winners = json.loads(children.run(RACE, work, 40))
    assert [len(found) for found in winners] == [1] * 40
    for turn, (winner,) in enumerate(winners):
        with StateFile.open(str(work / str(turn))) as state:
            assert state.read() == State({"winner": winner}, [winner])
    assert len(os.listdir(work)) == 80  # no loser left a temporary


def test_document_that_cannot_be_written_changes_nothing(work: Path) -> None:
    with pytest.raises(MalformedError):
        StateFile.create(str(work / "s"), {"a": float("nan")})
    assert os.listdir(work) == []
    with StateFile.create(str(work / "s"), {"a": 1}) as state:
        state.append(1)
        before = contents(work)
        assert raised(state.append, b"x") == ["MalformedError", "state-not-json"]
        assert raised(state.fold, {"log": 1}) == ["MalformedError", "state-not-json"]
        assert contents(work) == before
        state.append(2)


def test_state_file_of_another_name_is_refused(work: Path, state: StateFile) -> None:
    shutil.copy(work / "s", work / "t")
    with pytest.raises(FailedError, match="renamed or copied"):
        StateFile.open(str(work / "t"))


@pytest.mark.parametrize("function", [StateFile.open, lambda path: StateFile.create(path, {})])
def test_directory_that_is_missing(work: Path, function: Callable[[str], StateFile]) -> None:
    with pytest.raises(FileNotFoundError) as caught:
        function(str(work / "missing" / "s"))
    assert caught.value.filename == str(work / "missing")


def test_file_that_is_missing(work: Path) -> None:
    with pytest.raises(FileNotFoundError) as caught:
        StateFile.open(str(work / "s"))
    assert caught.value.filename == str(work / "s")


# --- versions --------------------------------------------------------------------------------------------------------


def test_version_without_a_log(work: Path) -> None:
    (work / "s").write_text('{"schema_version": "0.1.0", "actions": [1]}')
    (work / "s.log").write_text("somebody's notes\n")
    with StateFile.open(str(work / "s")) as state:
        assert state.read() == State({"actions": [1]}, [])
        before = contents(work)
        assert raised(state.append, 1) == ["ForbiddenError", "state-without-log"]
        assert raised(state.fold, {"actions": []}) == ["FileExistsError", 17, str(work / "s.log")]
        assert contents(work) == before
        (work / "s.log").unlink()
        state.fold({"actions": [2]})
        state.append("now")
    assert json.loads((work / "s").read_text())["schema_version"] == "0.2.0"
    assert read(work) == State({"actions": [2]}, ["now"])


# --- several objects -------------------------------------------------------------------------------------------------


def test_document_replaced_by_another_object(work: Path, state: StateFile) -> None:
    with StateFile.open(str(work / "s")) as other:
        other.fold({"a": 2})
        other.append("three")
    before = contents(work)
    assert state.read() == State({"a": 2}, ["three"])
    assert raised(state.append, 1) == ["ForbiddenError", "state-changed"]
    assert raised(state.fold, {}) == ["ForbiddenError", "state-changed"]
    assert contents(work) == before


@pytest.mark.parametrize("how", ["appended", "removed"])
def test_log_changed_by_another_object(work: Path, state: StateFile, how: str) -> None:
    if how == "appended":
        with StateFile.open(str(work / "s")) as other:
            other.append("three")
    else:
        (work / "s.log").unlink()
    before = contents(work)
    assert raised(state.append, 1) == ["ForbiddenError", "state-changed"]
    assert contents(work) == before


def test_state_file_removed_meanwhile(work: Path, state: StateFile) -> None:
    (work / "s").unlink()
    before = contents(work)
    assert raised(state.append, 1) == ["ForbiddenError", "state-changed"]
    assert raised(state.fold, {}) == ["ForbiddenError", "state-changed"]
    assert raised(state.read) == ["FileNotFoundError", 2, str(work / "s")]
    assert contents(work) == before


# Folds and appends until its input ends: the records of document N are all N. A long document takes long to read, so
# that a fold can happen between the readings of the two files.
WRITE = """
import select
from berth.durable.state import StateFile
ballast = [0] * 20_000
with StateFile.create(sys.argv[1], {"n": 0, "ballast": ballast}) as state:
    print(flush=True)
    n = 0
    while not select.select([sys.stdin], [], [], 0)[0]:
        for _ in range(2): state.append(n)
        n += 1
        state.fold({"n": n, "ballast": ballast})
"""


def test_reader_sees_document_and_records_of_one_moment(children, work: Path) -> None:
    writer = children.start(WRITE, work / "s")
    writer.stdout.readline()
    seen = [(0, 0)]
    with StateFile.open(str(work / "s")) as state:
        while seen[-1][0] < 60:
            assert writer.poll() is None
            found = state.read()
            n = found.document["n"]
            assert found.records == [n] * len(found.records)
            seen.append((n, len(found.records)))
    writer.stdin.close()
    assert writer.wait() == 0
    assert seen == sorted(seen)  # records that were seen are never missing again
