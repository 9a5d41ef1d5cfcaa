"""The FUSE mounts of `fuse` do to renames, locks and syncs what they say; nothing is left mounted."""

import contextlib
import errno
import fcntl
import os
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from berth.durable.files import durable_rename_noreplace, fsync_directory
from berth.errors import UncertainError
from berth.linux.syscalls import AT_FDCWD, RENAME_EXCHANGE, RENAME_NOREPLACE, renameat2
from faults.fuse import FuseMount, LostReply, Mode, mounted_fuse, skip_without_fuse

# Renames argv[1] to argv[2] with RENAME_NOREPLACE and prints the error number.
RENAME = """
from berth.linux.syscalls import AT_FDCWD, RENAME_NOREPLACE, renameat2
try: renameat2(sys.argv[1], sys.argv[2], RENAME_NOREPLACE, src_dir_fd=AT_FDCWD, dst_dir_fd=AT_FDCWD)
except OSError as error: print(error.errno)
"""


@pytest.fixture(autouse=True)
def fuse() -> None:
    """Skip every test of this module where FUSE does not work."""
    skip_without_fuse()


def rename(root: Path, old: str, new: str, flags: int) -> int:
    """Return the error number, 0 for success."""
    try:
        renameat2(str(root / old), str(root / new), flags, src_dir_fd=AT_FDCWD, dst_dir_fd=AT_FDCWD)
    except OSError as error:
        return error.errno or -1
    return 0


def contents(directory: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in directory.iterdir()}


@contextlib.contextmanager
def two_clients(mode: Mode, directory: Path, *, flock: bool = True) -> Iterator[tuple[FuseMount, FuseMount]]:
    store = directory / "store"
    with (
        mounted_fuse(mode, store, directory / "one", flock=flock) as one,
        mounted_fuse(mode, store, directory / "two", flock=flock) as two,
    ):
        yield one, two


@pytest.mark.parametrize(
    ("mode", "onto_nothing", "onto_a_file", "exchanged"),
    [
        ("honours", 0, errno.EEXIST, "swapped"),
        ("rejects", errno.EINVAL, errno.EEXIST, "refused"),
        ("unknown", errno.EINVAL, errno.EEXIST, "refused"),
        ("ignores", 0, errno.EEXIST, "lost"),
        ("ignores-stale", 0, 0, "lost"),
        ("checks-first", 0, errno.EEXIST, "refused"),
    ],
)
def test_flags_of_a_rename(tmp_path: Path, mode: Mode, onto_nothing: int, onto_a_file: int, exchanged: str) -> None:
    """The kernel itself answers EEXIST for a target that it sees, whatever the daemon would do."""
    with mounted_fuse(mode, tmp_path / "store", tmp_path / "root") as mount:
        (mount.root / "new").write_text("new")
        assert rename(mount.root, "new", "name", RENAME_NOREPLACE) == onto_nothing
        if onto_nothing:
            (mount.root / "new").rename(mount.root / "name")
        (mount.root / "other").write_text("other")
        assert rename(mount.root, "other", "name", RENAME_NOREPLACE) == onto_a_file
        left = {"name": "new", "other": "other"} if onto_a_file else {"name": "other"}
        assert contents(mount.backing) == left
    with mounted_fuse(mode, tmp_path / "pair", tmp_path / "root") as mount:
        (mount.backing / "a").write_text("a")
        (mount.backing / "b").write_text("b")
        assert rename(mount.root, "a", "b", RENAME_EXCHANGE) == (errno.EINVAL if exchanged == "refused" else 0)
        expected = {"swapped": {"a": "b", "b": "a"}, "refused": {"a": "a", "b": "b"}, "lost": {"b": "a"}}
        assert contents(mount.backing) == expected[exchanged]


def test_what_one_client_does_the_other_sees(tmp_path: Path) -> None:
    with two_clients("honours", tmp_path) as (one, two):
        assert os.listdir(two.root) == []
        (one.root / "directory").mkdir()
        (one.root / "directory" / "file").write_text("first")
        assert (two.root / "directory" / "file").read_text() == "first"
        (two.root / "directory" / "file").write_text("second, and longer")
        assert (one.root / "directory" / "file").read_text() == "second, and longer"
        (two.root / "directory").rename(two.root / "renamed")
        assert os.listdir(one.root) == ["renamed"]
        assert (one.root / "renamed").stat().st_ino == (two.root / "renamed").stat().st_ino


@pytest.mark.parametrize("shared", [True, False])
def test_lock_of_a_file_is_seen_by_the_other_client(tmp_path: Path, shared: bool) -> None:
    with (
        two_clients("honours", tmp_path, flock=shared) as (one, two),
        open(one.root / "lock", "w") as mine,
        open(two.root / "lock", "w") as other,
    ):
        fcntl.flock(mine, fcntl.LOCK_EX | fcntl.LOCK_NB)
        with pytest.raises(BlockingIOError) if shared else contextlib.nullcontext():
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        fcntl.flock(mine, fcntl.LOCK_UN)
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_lock_of_a_directory_never_is(tmp_path: Path) -> None:
    """The kernel keeps it to itself: an epoch that is held on one client looks abandoned on another."""
    with two_clients("honours", tmp_path) as (one, two):
        fds = [os.open(mount.root, os.O_RDONLY) for mount in (one, two)]
        for fd in fds:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        for fd in fds:
            os.close(fd)


@pytest.mark.parametrize("how", ["EIO", "EINTR"])
def test_lost_reply_is_an_error_after_the_rename(tmp_path: Path, how: LostReply) -> None:
    store, root = tmp_path / "store", tmp_path / "root"
    with mounted_fuse("honours", store, root, lose_reply=2, lose_reply_prefix="retired-", lose_reply_how=how) as mount:
        for name in ("a", "b", "c"):
            (mount.root / name).write_text(name)
        assert rename(mount.root, "a", "not-counted", RENAME_NOREPLACE) == 0
        assert rename(mount.root, "b", "retired-b", RENAME_NOREPLACE) == 0
        assert rename(mount.root, "c", "retired-c", RENAME_NOREPLACE) == getattr(errno, how)
        assert contents(mount.root) == {"not-counted": "a", "retired-b": "b", "retired-c": "c"}


@pytest.mark.parametrize("how", ["hang", "die"])
def test_server_that_never_replies(tmp_path: Path, how: LostReply, children) -> None:
    with mounted_fuse("honours", tmp_path / "store", tmp_path / "root", lose_reply=1, lose_reply_how=how) as mount:
        (mount.backing / "old").write_text("old")
        client = children.start(RENAME, mount.root / "old", mount.root / "new")
        if how == "hang":
            deadline = time.monotonic() + 30
            while not (mount.backing / "new").exists():
                assert time.monotonic() < deadline
                time.sleep(0.001)
            assert client.poll() is None
            mount.end()
        answer = int(client.stdout.readline())
        assert answer in (errno.ECONNABORTED, errno.ENOTCONN)
        assert contents(mount.backing) == {"new": "old"}


def test_directory_that_cannot_be_synced(tmp_path: Path) -> None:
    with mounted_fuse("honours", tmp_path / "store", tmp_path / "root", fail_fsyncdir=True) as mount:
        with pytest.raises(OSError, match="Input/output"):
            fsync_directory(str(mount.root))
        (mount.root / "old").write_text("old")
        with pytest.raises(UncertainError) as caught:
            durable_rename_noreplace(str(mount.root / "old"), str(mount.root / "new"))
        assert caught.value.errno == errno.EIO
        assert contents(mount.backing) == {"new": "old"}


# --- what is left ----------------------------------------------------------------------------------------------------


def test_failure_inside_leaves_neither_mount_nor_process(tmp_path: Path) -> None:
    seen: list[FuseMount] = []

    def fail_inside() -> None:
        with mounted_fuse("honours", tmp_path / "store", tmp_path / "root") as mount:
            seen.append(mount)
            assert is_mounted(mount.root)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail_inside()
    assert not is_mounted(tmp_path / "root")
    assert seen[0].daemon.returncode is not None


def test_dead_daemon_leaves_no_mount(tmp_path: Path) -> None:
    with mounted_fuse("honours", tmp_path / "store", tmp_path / "root") as mount:
        mount.end()
        with pytest.raises(OSError, match="not connected"):
            os.listdir(mount.root)
    assert not is_mounted(tmp_path / "root")


def test_daemon_ends_with_its_parent(tmp_path: Path) -> None:
    """A test run that is killed leaves nothing mounted."""
    code = (
        "import os, sys\nfrom pathlib import Path\nfrom faults.fuse import mounted_fuse\n"
        "with mounted_fuse('honours', Path(sys.argv[1], 'store'), Path(sys.argv[1], 'root')) as mount:\n"
        "    print(mount.daemon.pid, flush=True)\n    sys.stdin.read()\n"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(
        [sys.executable, "-c", code, tmp_path], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as parent:
        assert parent.stdout is not None
        daemon = os.pidfd_open(int(parent.stdout.readline()))
        assert is_mounted(tmp_path / "root")
        parent.kill()
    assert select.select([daemon], [], [], 30)[0], "the daemon lives on"
    assert not is_mounted(tmp_path / "root")
    os.close(daemon)


def test_mount_in_use_at_the_end_is_an_error_and_goes(tmp_path: Path) -> None:
    with (
        pytest.raises(AssertionError, match="still in use"),
        mounted_fuse("honours", tmp_path / "store", tmp_path / "root") as mount,
    ):
        fd = os.open(mount.root, os.O_RDONLY)
    assert not is_mounted(tmp_path / "root")
    os.close(fd)


def test_daemon_that_cannot_mount_says_why(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with (
        pytest.raises(AssertionError, match="did not mount"),
        mounted_fuse("sometimes", tmp_path / "store", tmp_path / "root"),  # type: ignore[arg-type]
    ):
        pass


def is_mounted(path: Path) -> bool:
    return f" {path} " in Path("/proc/self/mountinfo").read_text()
