"""Each trial alone: what it accepts, and what it sees through."""

import errno
import os
import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from berth.epoch import trials
from berth.epoch.trials import TrialError

# Carries out the trial argv[1] in the directory argv[2] and prints what it says.
TRY = """
import os
from berth.epoch import trials
try: getattr(trials, sys.argv[1])(os.open(sys.argv[2], os.O_RDONLY))
except trials.TrialError as error: print(error.why, end="")
else: print("works", end="")
"""
TRIALS = [
    trials.rename_file,
    trials.rename_directory,
    trials.examine_flags,
    trials.replace,
    trials.link,
    trials.sync_file,
    trials.sync_directory,
    trials.lock,
    trials.lock_between_processes,
]


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """Return the directory that is tried in; strace's log lies beside it."""
    path = tmp_path / "tried"
    path.mkdir()
    return path


@pytest.fixture
def fd(directory: Path) -> Iterator[int]:
    """Return a descriptor of it."""
    fd = os.open(directory, os.O_RDONLY)
    yield fd
    os.close(fd)


@pytest.mark.parametrize("one", TRIALS, ids=lambda one: one.__name__)
def test_works_here(directory: Path, fd: int, one: Callable[[int], None]) -> None:
    """And leaves no descriptor, and only names by which a killed probe's directory is known."""
    before = os.listdir("/proc/self/fd")
    one(fd)
    assert os.listdir("/proc/self/fd") == before
    assert all(re.fullmatch("[a-z]", path.name) for path in directory.rglob("*"))


def test_all_in_one_directory_do_not_disturb_each_other(fd: int) -> None:
    for one in TRIALS:
        one(fd)


@pytest.mark.parametrize("one", TRIALS[:6], ids=lambda one: one.__name__)
def test_what_cannot_be_tried_is_no_answer(directory: Path, mount, one: Callable[[int], None]) -> None:
    mount("-t", "tmpfs", "-o", "ro", "tmpfs", directory)
    fd = os.open(directory, os.O_RDONLY)
    try:
        with pytest.raises(OSError, match="Read-only") as caught:
            one(fd)
    finally:
        os.close(fd)
    assert not isinstance(caught.value, TrialError)


@pytest.mark.parametrize("code", ["EINVAL", "ENOSYS", "EPERM", "ENOTTY"])
def test_swap_may_be_refused(strace, directory: Path, code: str) -> None:
    assert strace(TRY, "examine_flags", directory, trace="renameat2", inject=[f"renameat2:error={code}"]).output == (
        "works"
    )
    assert os.listdir(directory) == []


@pytest.mark.parametrize(
    ("one", "call", "inject", "why"),
    [
        ("rename_file", "renameat2", "retval=0:when=1", "reported success and moved nothing"),
        ("rename_file", "renameat2", "retval=0:when=2", "onto an existing name succeeded"),
        ("rename_file", "renameat2", "error=ENOSYS:when=1", "Operation not supported"),
        ("rename_file", "renameat2", "error=EPERM:when=2", "Operation not permitted"),
        ("rename_directory", "renameat2", "retval=0:when=1", "reported success and moved nothing"),
        ("rename_directory", "renameat2", "retval=0:when=2", "onto an existing name succeeded"),
        ("examine_flags", "renameat2", "retval=0", "drops the flags"),
        ("replace", "/^rename(at)?$", "retval=0:when=1", "did not replace it"),
        ("replace", "/^rename(at)?$", "retval=0:when=2", "did not replace it"),
        ("link", "linkat", "error=EOPNOTSUPP:when=1", "cannot have a second name"),
        ("link", "linkat", "retval=0:when=2", "a link replaced an existing name"),
        ("link", "unlinkat", "retval=0", "did something else"),
        ("lock", "flock", "retval=0", "hold the same exclusive lock"),
        ("lock", "flock", "error=EAGAIN:when=1", "cannot be locked"),
    ],
)
def test_what_only_pretends_is_seen_through(
    strace, directory: Path, one: str, call: str, inject: str, why: str
) -> None:
    if call == "unlinkat":  # os.unlink is this or unlink, after whether a directory is given
        call = "/^unlink(at)?$"
    assert why in strace(TRY, one, directory, trace=call, inject=[f"{call}:{inject}"]).output


def test_lock_is_tried_by_a_second_and_a_third_process(directory: Path, tmp_path: Path, children) -> None:
    log = tmp_path / "log"
    words = ["strace", "-f", "-qq", "-o", log, "-e", "trace=flock,execve"]
    if subprocess.run(["strace", "-o", os.devnull, "true"], stderr=subprocess.DEVNULL).returncode != 0:
        pytest.skip("strace may not trace processes here")
    assert children.run(TRY, "lock_between_processes", directory, prefix=words) == "works"
    answers = [line.rsplit(" = ", 1)[1].split()[0:2] for line in log.read_text().splitlines() if "flock(" in line]
    assert answers == [["0"], ["-1", "EAGAIN"], ["0"]]
    pids = [line.split()[0] for line in log.read_text().splitlines() if "flock(" in line]
    assert len(set(pids)) == 3


def test_publication_never_replaces(fd: int, tmp_path: Path) -> None:
    there = tmp_path / "there"
    there.mkdir()
    to = os.open(there, os.O_RDONLY)
    try:
        trials.publish(fd, to)
        assert os.listdir(there) == []
        (there / "q").write_text("first")
        with pytest.raises(FileExistsError):  # the name is taken from the start
            trials.publish(fd, to)
    finally:
        os.close(to)
    assert [(path.name, path.read_text()) for path in there.iterdir()] == [("q", "first")]


def test_publication_on_another_file_system(fd: int, small_tmpfs: Path) -> None:
    to = os.open(small_tmpfs, os.O_RDONLY)
    try:
        with pytest.raises(OSError, match="cross-device") as caught:
            trials.publish(fd, to)
    finally:
        os.close(to)
    assert caught.value.errno == errno.EXDEV
    assert os.listdir(small_tmpfs) == []
