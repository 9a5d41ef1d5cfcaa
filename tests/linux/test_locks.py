import contextlib
import errno
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from berth.linux.locks import lock_holders, open_lock_file, try_lock, wait_lock

# Locks the file argv[1] as argv[2] says, reports, and holds it until its input ends.
HOLD = """
import os
from berth.linux.locks import try_lock
fd = os.open(sys.argv[1], os.O_RDONLY)
print(try_lock(fd, shared=sys.argv[2] == "shared"), flush=True)
sys.stdin.read()
"""


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[int]:
    """Return a descriptor of an empty directory."""
    fd = os.open(tmp_path, os.O_RDONLY)
    yield fd
    os.close(fd)


@contextlib.contextmanager
def opened(name: str, directory: int) -> Iterator[int]:
    fd = open_lock_file(name, dir_fd=directory)
    try:
        yield fd
    finally:
        os.close(fd)


@pytest.fixture
def lock(directory: int) -> Iterator[int]:
    """Return a descriptor of the lock file `lock`."""
    with opened("lock", directory) as fd:
        yield fd


def locked_elsewhere(path: Path) -> bool:
    """Say whether a second open file of `path` is kept from locking it."""
    fd = os.open(path, os.O_RDONLY)
    try:
        return not try_lock(fd)
    finally:
        os.close(fd)


def test_lock_file_is_made_private_and_kept(tmp_path: Path, directory: int) -> None:
    with opened("lock", directory) as fd:
        os.write(fd, b"x")
        inode = os.fstat(fd).st_ino
        assert not os.get_inheritable(fd)
    assert (tmp_path / "lock").stat().st_mode & 0o7777 == 0o600
    with opened("lock", directory) as fd:
        assert os.fstat(fd).st_ino == inode
    assert (tmp_path / "lock").read_bytes() == b"x"


def test_link_in_place_of_the_lock_file(tmp_path: Path, directory: int) -> None:
    for target in ("missing", "existing"):
        (tmp_path / "existing").touch()
        (tmp_path / "lock").unlink(missing_ok=True)
        (tmp_path / "lock").symlink_to(target)
        with pytest.raises(OSError, match="symbolic links") as caught:
            open_lock_file("lock", dir_fd=directory)
        assert caught.value.errno == errno.ELOOP
    assert not (tmp_path / "missing").exists()


def test_fifo_in_place_of_the_lock_file(tmp_path: Path, directory: int) -> None:
    os.mkfifo(tmp_path / "lock")
    before = sorted(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError, match="not a regular file"):
        open_lock_file("lock", dir_fd=directory)
    assert sorted(os.listdir("/proc/self/fd")) == before


def test_directory_in_place_of_the_lock_file(tmp_path: Path, directory: int) -> None:
    (tmp_path / "lock").mkdir()
    with pytest.raises(IsADirectoryError):
        open_lock_file("lock", dir_fd=directory)


def test_socket_in_place_of_the_lock_file(tmp_path: Path, directory: int) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"/proc/self/fd/{directory}/lock")
        with pytest.raises(OSError, match="No such device"):
            open_lock_file("lock", dir_fd=directory)


@pytest.mark.parametrize(
    ("first", "second", "together"),
    [
        ("exclusive", "exclusive", False),
        ("exclusive", "shared", False),
        ("shared", "exclusive", False),
        ("shared", "shared", True),
    ],
)
def test_who_goes_together(children, tmp_path: Path, lock: int, first: str, second: str, together: bool) -> None:
    holder = children.start(HOLD, tmp_path / "lock", first)
    assert holder.stdout.readline() == "True\n"
    assert try_lock(lock, shared=second == "shared") is together


def test_holders_are_named(children, tmp_path: Path, lock: int) -> None:
    assert lock_holders(lock) == ()
    holders = [children.start(HOLD, tmp_path / "lock", "shared") for _ in range(3)]
    assert [holder.stdout.readline() for holder in holders] == ["True\n"] * 3
    assert lock_holders(lock) == tuple(sorted(holder.pid for holder in holders))
    holders[0].stdin.close()
    holders[0].wait()
    assert lock_holders(lock) == tuple(sorted(holder.pid for holder in holders[1:]))


def test_who_waits_is_no_holder(children, tmp_path: Path, lock: int) -> None:
    assert try_lock(lock)
    waiter = children.start(
        "import fcntl\n"
        "print('waiting', flush=True)\n"
        "fcntl.flock(open(sys.argv[1]), fcntl.LOCK_EX)\n"
        "print('got it', flush=True)\n",
        tmp_path / "lock",
    )
    waiter.stdout.readline()
    deadline = time.monotonic() + 10
    while f"-> FLOCK  ADVISORY  WRITE {waiter.pid} " not in Path("/proc/locks").read_text(encoding="ascii"):
        assert time.monotonic() < deadline, "the other process does not wait"
    assert lock_holders(lock) == (os.getpid(),)


def test_other_locks_are_not_counted(children, tmp_path: Path, lock: int, directory: int) -> None:
    (tmp_path / "other").touch()
    holder = children.start(HOLD, tmp_path / "other", "exclusive")
    assert holder.stdout.readline() == "True\n"
    record_lock = children.start(
        "import fcntl\nfile = open(sys.argv[1], 'r+')\nfcntl.lockf(file, fcntl.LOCK_EX)\n"
        "print(flush=True)\nsys.stdin.read()\n",
        tmp_path / "lock",
    )
    record_lock.stdout.readline()
    assert lock_holders(lock) == ()


def test_lock_falls_with_its_holder(children, tmp_path: Path, lock: int) -> None:
    holder = children.start(HOLD, tmp_path / "lock", "exclusive")
    assert holder.stdout.readline() == "True\n"
    assert not try_lock(lock)
    holder.kill()
    holder.wait()
    assert try_lock(lock)


def test_heir_of_the_descriptor_keeps_the_lock(children, tmp_path: Path, lock: int) -> None:
    """The first taker dies; the process that inherited the descriptor still holds the lock."""
    holder = children.start(
        "import os, time\n"
        "from berth.linux.locks import try_lock\n"
        "assert try_lock(os.open(sys.argv[1], os.O_RDONLY))\n"
        "heir = os.fork()\n"
        "if heir == 0:\n"
        "    sys.stdin.read()\n"
        "    os._exit(0)\n"
        "print(heir, flush=True)\n"
        "time.sleep(60)\n",
        tmp_path / "lock",
    )
    holder.stdout.readline()
    holder.kill()
    holder.wait()
    assert not try_lock(lock)
    holder.stdin.close()
    assert wait_lock(lock, 10)


def test_wait_gives_up_at_its_deadline(children, tmp_path: Path, lock: int) -> None:
    holder = children.start(HOLD, tmp_path / "lock", "shared")
    assert holder.stdout.readline() == "True\n"
    began = time.monotonic()
    assert not wait_lock(lock, 0.1)
    assert 0.1 <= time.monotonic() - began < 5


def test_wait_ends_when_the_lock_falls(children, tmp_path: Path, lock: int) -> None:
    holder = children.start(HOLD, tmp_path / "lock", "exclusive")
    assert holder.stdout.readline() == "True\n"
    holder.stdin.close()
    assert wait_lock(lock, 10)
    assert locked_elsewhere(tmp_path / "lock")


def test_lock_of_a_bad_descriptor_is_an_error() -> None:
    fd = os.open("/", os.O_RDONLY)
    os.close(fd)
    with pytest.raises(OSError, match="Bad file descriptor"):
        try_lock(fd)
