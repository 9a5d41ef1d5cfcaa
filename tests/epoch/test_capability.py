import json
import os
import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest

from berth.epoch import names
from berth.epoch.capability import probe_noreplace
from berth.errors import FailedError

# Probes the directory argv[1] and prints the error, as JSON.
PROBE = """
import json, os
from berth.epoch.capability import probe_noreplace
from berth.errors import BerthError
try: probe_noreplace(os.open(sys.argv[1], os.O_RDONLY), sys.argv[1])
except BerthError as error: print(json.dumps([type(error).__name__, error.name, error.message]))
else: print("null")
"""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Return an empty directory; strace's log lies beside it."""
    path = tmp_path / "root"
    path.mkdir()
    return path


@pytest.fixture
def root_fd(root: Path) -> Iterator[int]:
    """Return a descriptor of it."""
    fd = os.open(root, os.O_RDONLY)
    yield fd
    os.close(fd)


def leftover(root: Path, name: str | None = None) -> Path:
    """Make what a killed probe leaves."""
    path = root / (name or f"{names.PROBE_PREFIX}{os.getpid()}-1234567-{secrets.token_hex(16)}")
    path.mkdir()
    (path / "a").write_text("second")
    (path / "b").write_text("first")
    (path / "d").mkdir()
    return path


def test_this_file_system_passes_and_is_left_as_it_was(root: Path, root_fd: int) -> None:
    probe_noreplace(root_fd, str(root))
    assert os.listdir(root) == []


def test_probe_leaves_no_descriptor(root: Path, root_fd: int) -> None:
    before = os.listdir("/proc/self/fd")
    probe_noreplace(root_fd, str(root))
    assert os.listdir("/proc/self/fd") == before


def test_success_is_tried_before_refusal(strace, root: Path) -> None:
    traced = strace(PROBE, root, trace="renameat2")
    assert traced.output == "null\n"
    assert [line.rsplit(" = ", 1)[1].split()[0:2] for line in traced.calls] == [["0"], ["-1", "EEXIST"]] * 2
    assert all("RENAME_NOREPLACE" in line for line in traced.calls)
    assert all(f"<{root}/{names.PROBE_PREFIX}" in line for line in traced.calls)


@pytest.mark.parametrize(
    "inject",
    [
        "error=EINVAL",
        "error=ENOSYS",
        "error=EPERM",
        "error=EOPNOTSUPP",
        "error=EINVAL:when=2+",
        "error=EINVAL:when=3+",
        "retval=0",
        "retval=0:when=2",
        "retval=0:when=3",
        "retval=0:when=4",
    ],
)
def test_file_system_that_does_not_know_the_flag(strace, root: Path, inject: str) -> None:
    """It refuses the call, or says that it succeeded and does nothing, from the first rename on or a later one."""
    kind, name, message = json.loads(strace(PROBE, root, trace="renameat2", inject=[f"renameat2:{inject}"]).output)
    assert (kind, name) == ("AbilityError", "no-noreplace")
    assert str(root) in message
    assert os.listdir(root) == []


def test_disk_error_is_not_a_missing_ability(strace, root: Path) -> None:
    output = strace(PROBE, root, trace="renameat2", inject=["renameat2:error=EIO:when=1"]).output
    assert json.loads(output)[:2] == ["FailedError", "probe-failed"]
    assert os.listdir(root) == []


def test_leftovers_of_killed_probes_are_removed(root: Path, root_fd: int) -> None:
    for _ in range(3):
        leftover(root)
    (root / f"{names.PROBE_PREFIX}1-1-{secrets.token_hex(16)}").mkdir()
    probe_noreplace(root_fd, str(root))
    assert os.listdir(root) == []


def test_probe_of_a_living_process_is_kept(root: Path, root_fd: int, children) -> None:
    path = leftover(root)
    holder = children.start(
        "import fcntl, os\n"
        "fcntl.flock(os.open(sys.argv[1], os.O_RDONLY), fcntl.LOCK_EX)\n"
        "print(flush=True)\nsys.stdin.read()\n",
        path,
    )
    holder.stdout.readline()
    probe_noreplace(root_fd, str(root))
    assert sorted(os.listdir(path)) == ["a", "b", "d"]
    holder.kill()
    holder.wait()
    probe_noreplace(root_fd, str(root))
    assert os.listdir(root) == []


@pytest.mark.parametrize(
    "point", ["renameat2:signal=KILL:when=1", "renameat2:signal=KILL:when=4", "unlinkat:signal=KILL:when=2"]
)
def test_killed_probe_is_cleaned_up_by_the_next(strace, root: Path, root_fd: int, point: str) -> None:
    with pytest.raises(AssertionError):  # The child did not end with success.
        strace(PROBE, root, trace=point.split(":", maxsplit=1)[0], inject=[point])
    assert len(os.listdir(root)) == 1
    assert names.is_probe(os.listdir(root)[0])
    probe_noreplace(root_fd, str(root))
    assert os.listdir(root) == []


def test_names_that_only_resemble_a_probe_are_kept(root: Path, root_fd: int) -> None:
    for name in (f"{names.PROBE_PREFIX}1-2-xyz", f"x{names.PROBE_PREFIX}1-2-{'0' * 32}", "a"):
        leftover(root, name)
    before = sorted(root.rglob("*"))
    probe_noreplace(root_fd, str(root))
    assert sorted(root.rglob("*")) == before


def test_foreign_content_under_a_probes_name_is_never_deleted(root: Path, root_fd: int) -> None:
    (leftover(root) / "precious").write_text("keep me")
    with pytest.raises(FailedError, match="not empty"):
        probe_noreplace(root_fd, str(root))
    assert [path.name for path in root.rglob("precious")] == ["precious"]


def test_link_under_a_probes_name_is_not_followed(tmp_path: Path, root: Path, root_fd: int) -> None:
    victim = leftover(tmp_path, "victim")
    (root / f"{names.PROBE_PREFIX}1-2-{'0' * 32}").symlink_to(victim)
    with pytest.raises(FailedError):
        probe_noreplace(root_fd, str(root))
    assert sorted(os.listdir(victim)) == ["a", "b", "d"]


def test_directory_that_may_not_be_written(readable_children, other_user, open_directory: Path) -> None:
    open_directory.chmod(0o755)
    output = readable_children.run(PROBE, open_directory, prefix=other_user)
    kind, name, message = json.loads(output)
    assert (kind, name) == ("FailedError", "probe-failed")
    assert "Permission denied" in message
