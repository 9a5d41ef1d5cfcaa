"""Many processes rename to one name at the same time: exactly one gets it, and nobody loses anything.

The short form runs with every test run, the long one with `make faults`, which prints the counts.
"""

import errno
import multiprocessing
import os
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Barrier
from pathlib import Path

import pytest

from berth.durable.files import durable_rename_noreplace
from berth.epoch import names

_RACERS = 16
_BARRIER_TIMEOUT_S = 60.0
_FORK = multiprocessing.get_context("fork")

#: Renames an entry of one open directory into another: source, destination, their directories, what all racers wait at.
Rename = Callable[[str, str, int, int, Barrier], None]


@dataclass(frozen=True)
class Course:
    """What is raced for, in a directory of its own per round.

    Attributes:
        directories: Whether the sources are directories.
        source_below: Name of the directory that holds the sources; empty for the same one that holds the target.
        source: Name of a racer's source.
        target: The one name.
    """

    directories: bool
    source_below: str
    source: Callable[[int], str]
    target: str


#: Directories take the name of a retired epoch, in one directory.
RETIREMENT = Course(
    True, "", lambda racer: names.active_name(f"{racer:064x}"), names.retired_name("f" * 64, names.retirement_id(1, 2))
)
#: Files are moved into another directory.
PUBLICATION = Course(False, "epoch", lambda racer: f"result-{racer}", "result.json")


def rename_noreplace(source: str, target: str, source_fd: int, target_fd: int, _barrier: Barrier) -> None:
    durable_rename_noreplace(source, target, src_dir_fd=source_fd, dst_dir_fd=target_fd)


def check_then_rename(source: str, target: str, source_fd: int, target_fd: int, barrier: Barrier) -> None:
    """What must never be done; everybody has looked before anybody renames."""
    free = target not in os.listdir(target_fd)
    barrier.wait(_BARRIER_TIMEOUT_S)
    if not free:
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), target)
    os.rename(source, target, src_dir_fd=source_fd, dst_dir_fd=target_fd)


@pytest.mark.parametrize("course", [RETIREMENT, PUBLICATION], ids=["retirement", "publication"])
def test_one_of_16_processes_wins_each_of_60_rounds(tmp_path: Path, course: Course) -> None:
    check_fair(tmp_path, course, rounds=60)


@pytest.mark.faults
@pytest.mark.parametrize("course", [RETIREMENT, PUBLICATION], ids=["retirement", "publication"])
def test_one_of_16_processes_wins_each_of_1000_rounds(
    tmp_path: Path, course: Course, capsys: pytest.CaptureFixture[str]
) -> None:
    counts = check_fair(tmp_path, course, rounds=1000)
    with capsys.disabled():
        print(f"\n{_RACERS} processes, 1000 rounds: {dict(counts)}")


def test_race_notices_a_check_before_a_plain_rename(tmp_path: Path) -> None:
    """The same race, lost: every process is told that it won, and the bytes of one are left."""
    outcomes = race(tmp_path, PUBLICATION, check_then_rename, rounds=3)
    assert outcomes == [["won"] * _RACERS] * 3
    for round_ in range(3):
        place = tmp_path / str(round_)
        assert os.listdir(place / PUBLICATION.source_below) == []
        assert (place / PUBLICATION.target).read_text() in [content(round_, racer) for racer in range(_RACERS)]


def check_fair(directory: Path, course: Course, *, rounds: int) -> Counter[str]:
    """Race and check every round; return how often each outcome was met."""
    outcomes = race(directory, course, rename_noreplace, rounds=rounds)
    assert len(outcomes) == rounds
    for round_, seen in enumerate(outcomes):
        assert Counter(seen) == {"won": 1, "FileExistsError": _RACERS - 1}, f"round {round_}"
        winner = seen.index("won")
        place = directory / str(round_)
        expected = {course.target: content(round_, winner)}
        expected |= {
            os.path.join(course.source_below, course.source(racer)): content(round_, racer)
            for racer in range(_RACERS)
            if racer != winner
        }
        assert contents(place) == expected, f"round {round_}"
    return Counter(outcome for seen in outcomes for outcome in seen)


def race(directory: Path, course: Course, rename: Rename, *, rounds: int) -> list[list[str]]:
    """Let all processes rename to one name per round, and return what each was told, by round and racer."""
    for round_ in range(rounds):
        lay_out(directory / str(round_), course, round_)
    barrier = _FORK.Barrier(_RACERS)
    results = [_FORK.Pipe(duplex=False) for _ in range(_RACERS)]
    racers = [
        _FORK.Process(target=run, args=(directory, course, rename, rounds, number, barrier, results[number][1]))
        for number in range(_RACERS)
    ]
    for racer in racers:
        racer.start()
    for _, writer in results:
        writer.close()
    try:
        told = [reader.recv() for reader, _ in results]
    finally:
        for racer, (reader, _) in zip(racers, results, strict=True):
            reader.close()
            racer.kill()
            racer.join()
            racer.close()
    return [list(seen) for seen in zip(*told, strict=True)]


def run(
    directory: Path,
    course: Course,
    rename: Rename,
    rounds: int,
    number: int,
    barrier: Barrier,
    writer: Connection,
) -> None:
    """Be one of the racers."""
    outcomes = []
    for round_ in range(rounds):
        target_fd = os.open(directory / str(round_), os.O_RDONLY | os.O_DIRECTORY)
        source_fd = os.open(course.source_below or ".", os.O_RDONLY | os.O_DIRECTORY, dir_fd=target_fd)
        barrier.wait(_BARRIER_TIMEOUT_S)
        try:
            rename(course.source(number), course.target, source_fd, target_fd, barrier)
            outcomes.append("won")
        except OSError as error:
            outcomes.append(type(error).__name__)
        os.close(source_fd)
        os.close(target_fd)
    writer.send(outcomes)


def lay_out(place: Path, course: Course, round_: int) -> None:
    (place / course.source_below).mkdir(parents=True)
    for racer in range(_RACERS):
        path = place / course.source_below / course.source(racer)
        if course.directories:
            path.mkdir()
            path = path / "job.json"
        path.write_text(content(round_, racer))


def content(round_: int, racer: int) -> str:
    return f"round {round_}, racer {racer}"


def contents(place: Path) -> dict[str, str]:
    """Return the content of every file below `place`; a directory of one file is named after the directory."""
    files = [path for path in place.rglob("*") if path.is_file()]
    return {
        str((path.parent if path.name == "job.json" else path).relative_to(place)): path.read_text() for path in files
    }
