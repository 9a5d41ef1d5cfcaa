import errno
import os
import shutil
import signal
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from berth.linux import syscalls

# Renames argv[1] to argv[2] in argv[3] and prints the error number.
RENAME = """
import os
from berth.linux import syscalls
fd = os.open(sys.argv[3], os.O_RDONLY)
try:
    syscalls.renameat2(sys.argv[1], sys.argv[2], syscalls.RENAME_NOREPLACE, src_dir_fd=fd, dst_dir_fd=fd)
except OSError as error:
    print(error.errno, end="")
"""


@given(st.binary(min_size=1, max_size=300))
def test_name_is_checked_as_the_kernel_reads_it(raw: bytes) -> None:
    name = os.fsdecode(raw)
    if b"/" in raw or b"\0" in raw or raw in (b".", b".."):
        with pytest.raises(ValueError, match="directory entry"):
            syscalls.check_name(name)
    else:
        assert syscalls.check_name(name) == raw


@pytest.mark.parametrize("name", ["", ".", "..", "/", "a/", "/a", "a/b", "\0", "a\0", "../a"])
def test_what_is_no_name(name: str) -> None:
    with pytest.raises(ValueError, match="directory entry"):
        syscalls.check_name(name)


@pytest.mark.parametrize("name", ["a", "...", "-rf", " ", "\n", "ü", "\udcff"])
def test_what_is_a_name(name: str) -> None:
    assert syscalls.check_name(name) == os.fsencode(name)


@pytest.mark.parametrize("path", ["", "a\0b", "\0"])
def test_what_is_no_path(path: str) -> None:
    with pytest.raises(ValueError, match="not a path"):
        syscalls.check_path(path)


def test_noreplace(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("a")
    (tmp_path / "b").write_text("b")
    fd = os.open(tmp_path, os.O_RDONLY)
    try:
        with pytest.raises(FileExistsError) as caught:
            syscalls.renameat2("a", "b", syscalls.RENAME_NOREPLACE, src_dir_fd=fd, dst_dir_fd=fd)
        assert (caught.value.filename, caught.value.filename2) == ("a", "b")
        syscalls.renameat2("a", "c", syscalls.RENAME_NOREPLACE, src_dir_fd=fd, dst_dir_fd=fd)
    finally:
        os.close(fd)
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"b": "b", "c": "a"}


def test_exchange(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("a")
    (tmp_path / "b").mkdir()
    at = syscalls.AT_FDCWD
    syscalls.renameat2(str(tmp_path / "a"), str(tmp_path / "b"), syscalls.RENAME_EXCHANGE, src_dir_fd=at, dst_dir_fd=at)
    assert (tmp_path / "a").is_dir()
    assert (tmp_path / "b").read_text() == "a"


@pytest.mark.parametrize(
    ("source", "destination", "code"),
    [
        ("missing", "free", errno.ENOENT),
        ("directory", "directory/inside", errno.EINVAL),
        ("directory", "missing/inside", errno.ENOENT),
        ("directory", "n" * 256, errno.ENAMETOOLONG),
    ],
)
def test_errors_are_the_kernels_own(tmp_path: Path, source: str, destination: str, code: int) -> None:
    (tmp_path / "directory").mkdir()
    fd = os.open(tmp_path, os.O_RDONLY)
    try:
        with pytest.raises(OSError, match=r"directory|argument|too long") as caught:
            syscalls.renameat2(source, destination, syscalls.RENAME_NOREPLACE, src_dir_fd=fd, dst_dir_fd=fd)
    finally:
        os.close(fd)
    assert (caught.value.errno, caught.value.filename, caught.value.filename2) == (code, source, destination)


@pytest.mark.parametrize(("injected", "seen"), [("ENOSYS", errno.EOPNOTSUPP), ("EINVAL", errno.EINVAL)])
def test_missing_call_is_told_from_a_refused_flag(strace, tmp_path: Path, injected: str, seen: int) -> None:
    (tmp_path / "a").touch()
    traced = strace(RENAME, "a", "b", tmp_path, trace="renameat2", inject=[f"renameat2:error={injected}"])
    assert traced.output == str(seen)


def test_machine_whose_number_is_not_known(children, tmp_path: Path) -> None:
    """setarch gives the machine a name without a number, so that the C library's wrapper is used."""
    if shutil.which("setarch") is None:
        pytest.skip("setarch (package util-linux) is not installed")
    (tmp_path / "a").touch()
    (tmp_path / "b").touch()
    prefix = ["setarch", "linux32"]
    machine = children.run("import os; print(os.uname().machine, end='')", prefix=prefix)
    if machine == os.uname().machine:
        pytest.skip("this machine has no other name")
    assert children.run(RENAME, "a", "b", tmp_path, prefix=prefix) == str(errno.EEXIST)
    assert children.run(RENAME, "a", "c", tmp_path, prefix=prefix) == ""
    assert sorted(os.listdir(tmp_path)) == ["b", "c"]


def test_parent_death_signal(children) -> None:
    """A child of a process that dies gets the signal, and dies of it."""
    family = children.start(
        "import os, signal, time\n"
        "from berth.linux import syscalls\n"
        "read, write = os.pipe()\n"
        "if os.fork() == 0:\n"
        "    syscalls.set_parent_death_signal(signal.SIGTERM)\n"
        "    signal.signal(signal.SIGTERM, lambda *_: (os.write(1, b'told\\n'), os._exit(0)))\n"
        "    os.write(write, b'x')\n"
        "    while True: time.sleep(60)\n"
        "os.read(read, 1)\n"
        "print('ready', flush=True)\n"
        "sys.stdin.read()\n"
    )
    assert family.stdout.readline() == "ready\n"
    family.send_signal(signal.SIGKILL)
    assert family.stdout.readline() == "told\n"


@pytest.mark.parametrize("subreaper", [True, False])
def test_subreaper_inherits_orphans(children, subreaper: bool) -> None:
    printed = children.run(
        "import os, time\n"
        "from berth.linux import syscalls\n"
        "if sys.argv[1] == 'True': syscalls.set_child_subreaper()\n"
        "read, write = os.pipe()\n"
        "if os.fork() == 0:\n"
        "    parent = os.getpid()\n"
        "    if os.fork() == 0:\n"
        "        while os.getppid() == parent: time.sleep(0.001)\n"
        "        os.write(write, str(os.getppid()).encode())\n"
        "    os._exit(0)\n"
        "print(os.read(read, 20).decode() == str(os.getpid()), end='')\n",
        subreaper,
    )
    assert printed == str(subreaper)


def test_refused_prctl_is_an_error() -> None:
    with pytest.raises(OSError, match="Invalid argument") as caught:
        syscalls.set_parent_death_signal(9999)
    assert caught.value.errno == errno.EINVAL
