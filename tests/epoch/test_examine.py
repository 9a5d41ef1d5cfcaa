"""A directory is looked at before it becomes a state root, or is one already."""

import errno
import json
import os
import secrets
from pathlib import Path

import pytest

from berth.epoch import examine as module
from berth.epoch import names
from berth.epoch.epoch import EpochRoot
from berth.epoch.examine import examine
from berth.errors import AbilityError, FailedError, MalformedError

# Examines the directory argv[1] and prints the record or the name of the error.
EXAMINE = """
import json
from berth.epoch.examine import examine
from berth.errors import BerthError
try: print(json.dumps(examine(sys.argv[1]).document()))
except BerthError as error: print(json.dumps([type(error).__name__, error.name, error.message]))
"""


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """Return an empty directory."""
    path = tmp_path / "directory"
    path.mkdir()
    return path


def test_every_trial_and_nothing_left(directory: Path) -> None:
    found = examine(str(directory))
    assert found.refusal is None
    assert found.root == str(directory)
    assert {one.result for one in found.operations.values()} == {"works"}
    assert {"replace", "link", "sync-file", "lock-between-processes"} < set(found.operations)
    assert os.listdir(directory) == []


def test_descriptors_are_closed_whatever_comes_of_it(directory: Path, small_tmpfs: Path) -> None:
    before = os.listdir("/proc/self/fd")
    examine(str(directory), publication_root=str(directory))
    examine(str(directory), publication_root=str(small_tmpfs))
    with pytest.raises(MalformedError):
        examine(str(directory), publication_root=str(directory / "missing"))
    assert os.listdir("/proc/self/fd") == before


def test_root_in_use_is_probed_as_every_run_does_it(root: EpochRoot, snapshot) -> None:
    with root.open_epoch(secrets.token_hex(32)) as epoch:
        epoch.write("file", b"content")
        before = snapshot(root.path)
        assert examine(root.path).refusal is None
        assert snapshot(root.path) == before
    assert not any(name.startswith(module.PREFIX) for name in os.listdir(root.path))


@pytest.mark.parametrize("kind", ["missing", "file", "link", "dangling link", "below a file", "", "nul\0"])
def test_what_is_no_directory(tmp_path: Path, kind: str, snapshot) -> None:
    path = tmp_path / "path"
    match kind:
        case "file":
            path.write_text("a file")
        case "link":
            (tmp_path / "real").mkdir()
            path.symlink_to("real")
        case "dangling link":
            path.symlink_to("missing")
        case "below a file":
            (tmp_path / "file").touch()
            path = tmp_path / "file" / "below"
    before = snapshot(tmp_path)
    with pytest.raises(MalformedError) as caught:
        examine(kind if kind in ("", "nul\0") else str(path))
    assert caught.value.name == "bad-state-root"
    with pytest.raises(MalformedError):
        examine(str(tmp_path), publication_root=str(path) if kind else kind)
    assert snapshot(tmp_path) == before


@pytest.mark.parametrize("mode", [0o755, 0o700])
def test_directory_of_somebody_else(readable_children, other_user, open_directory: Path, mode: int) -> None:
    open_directory.chmod(mode)
    below = open_directory / "below"
    below.mkdir(mode=mode)
    open_directory.chmod(0o755)
    output = readable_children.run(EXAMINE, below, prefix=other_user)
    assert json.loads(output)["refusal"]["name"] == ("state-root" if mode == 0o700 else "probe-failed")
    assert os.strerror(errno.EACCES) in output
    assert os.listdir(below) == []


def test_read_only_mount(directory: Path, mount) -> None:
    mount("-t", "tmpfs", "-o", "ro", "tmpfs", directory)
    refusal = examine(str(directory)).refusal
    assert isinstance(refusal, FailedError)
    assert refusal.name == "probe-failed"
    assert os.strerror(errno.EROFS) in refusal.message


@pytest.mark.parametrize("kind", ["link", "fifo", "directory"])
def test_lock_file_that_is_none(directory: Path, kind: str, snapshot) -> None:
    path = directory / ".berth.lock"
    match kind:
        case "link":
            path.symlink_to("elsewhere")
        case "fifo":
            os.mkfifo(path)
        case "directory":
            path.mkdir()
    refusal = examine(str(directory)).refusal
    assert isinstance(refusal, FailedError)
    assert refusal.name == "root-lock"
    assert [entry.name for entry in directory.iterdir()] == [".berth.lock"]


@pytest.mark.parametrize("point", ["mkdirat:signal=KILL:when=2", "fsync:signal=KILL:when=2"])
def test_what_a_killed_one_left_is_removed_once_it_is_old(strace, directory: Path, point: str) -> None:
    with pytest.raises(AssertionError):  # the child did not end with success
        strace(EXAMINE, directory, trace="mkdirat,fsync", inject=[point])
    (left,) = directory.iterdir()
    assert left.name.startswith(module.PREFIX)
    assert all(map(names.is_probe, os.listdir(left)))
    examine(str(directory))
    assert list(directory.iterdir()) == [left]  # it may be just being made
    os.utime(left, (1, 1))
    assert examine(str(directory)).refusal is None
    assert os.listdir(directory) == []


def test_names_that_only_resemble_ours_are_kept(directory: Path) -> None:
    kept = [directory / name for name in (f"{module.PREFIX}1234567", f"{module.PREFIX}12345678x", "x")]
    for path in kept:
        path.mkdir()
        os.utime(path, (1, 1))
    foreign = directory / f"{module.PREFIX}12345678"
    foreign.mkdir()
    (foreign / "precious").write_text("keep me")
    os.utime(foreign, (1, 1))
    assert isinstance(examine(str(directory)).refusal, FailedError)
    assert (foreign / "precious").read_text() == "keep me"
    assert all(path.is_dir() for path in kept)


def test_what_cannot_be_removed_is_in_the_record(strace, directory: Path) -> None:
    last = sum(line.startswith("unlinkat(") for line in strace(EXAMINE, directory, trace="unlinkat").calls)
    output = strace(EXAMINE, directory, trace="unlinkat", inject=[f"unlinkat:error=EIO:when={last}"]).output
    assert '"verdict": "refused"' in output
    assert '"name": "probe-failed"' in output
    (left,) = directory.iterdir()
    assert left.name.startswith(module.PREFIX)


def test_publication_root_across_a_mount_is_found_at_once(directory: Path, small_tmpfs: Path) -> None:
    found = examine(str(directory), publication_root=str(small_tmpfs))
    assert isinstance(found.refusal, AbilityError)
    assert found.refusal.name == "publication-elsewhere"
    assert found.operations["publish"].errno == "EXDEV"
    assert os.listdir(directory) == os.listdir(small_tmpfs) == []
