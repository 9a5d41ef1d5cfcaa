import contextlib
import os
import secrets
import stat
import subprocess
import time
from pathlib import Path

import pytest

from berth.epoch import names
from berth.epoch.capability import Accepted
from berth.epoch.epoch import EpochRoot
from berth.errors import FailedError, ForbiddenError, MalformedError

# Opens the epoch argv[2] in the root argv[1], and holds it until its input ends.
HOLD = """
from berth.epoch.epoch import EpochRoot
root = EpochRoot(sys.argv[1])
epoch = root.open_epoch(sys.argv[2])
print("open", flush=True)
sys.stdin.read()
"""


def new_id() -> str:
    return secrets.token_hex(32)


def entries(root: EpochRoot) -> list[str]:
    return sorted(set(os.listdir(root.path)) - {".berth.lock"})


# --- the root --------------------------------------------------------------------------------------------------------


def test_root_is_made_private_with_its_parents(tmp_path: Path) -> None:
    with EpochRoot(str(tmp_path / "a" / "b")) as root:
        assert root.path == str(tmp_path / "a" / "b")
        assert os.listdir(root.path) == [".berth.lock"]
    for path in (tmp_path / "a", tmp_path / "a" / "b"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o700


@pytest.mark.parametrize("kind", ["file", "link", "dangling link", "below a file"])
def test_root_that_is_no_directory(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "state"
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
            path = tmp_path / "file" / "state"
    before = {entry: entry.lstat().st_mtime_ns for entry in tmp_path.rglob("*")}
    with pytest.raises(MalformedError) as caught:
        EpochRoot(str(path))
    assert caught.value.name == "bad-state-root"
    assert ("a symbolic link" if "link" in kind else "not a directory") in caught.value.message
    assert {entry: entry.lstat().st_mtime_ns for entry in tmp_path.rglob("*")} == before


@pytest.mark.parametrize("mode", [0o777, 0o1777, 0o702])
def test_root_that_everybody_may_write(tmp_path: Path, mode: int) -> None:
    (tmp_path / "state").mkdir()
    (tmp_path / "state").chmod(mode)
    with pytest.raises(MalformedError) as caught:
        EpochRoot(str(tmp_path / "state"))
    assert caught.value.name == "open-state-root"
    assert os.listdir(tmp_path / "state") == []


def test_root_of_somebody_else(as_root, tmp_path: Path) -> None:
    (tmp_path / "state").mkdir()
    os.chown(tmp_path / "state", 65534, 65534)
    with pytest.raises(MalformedError) as caught:
        EpochRoot(str(tmp_path / "state"))
    assert caught.value.name == "foreign-state-root"
    assert os.listdir(tmp_path / "state") == []


def test_root_of_root_that_may_not_be_written(readable_children, other_user, open_directory: Path) -> None:
    open_directory.chmod(0o755)
    printed = readable_children.run(
        "from berth.epoch.epoch import EpochRoot\n"
        "from berth.errors import FailedError\n"
        "for path in sys.argv[1:]:\n"
        "    try: EpochRoot(path)\n"
        "    except FailedError as error: print(error.name)\n",
        open_directory,
        open_directory / "below",
        prefix=other_user,
    )
    assert printed == "root-lock\nstate-root\n"


def test_root_without_the_ability_leaves_nothing_open(strace, tmp_path: Path) -> None:
    traced = strace(
        "import os\n"
        "from berth.epoch.epoch import EpochRoot\n"
        "from berth.errors import AbilityError\n"
        "before = os.listdir('/proc/self/fd')\n"
        "try: EpochRoot(sys.argv[1])\n"
        "except AbilityError as error: print(error.name, os.listdir('/proc/self/fd') == before, end='')\n",
        tmp_path / "state",
        trace="renameat2",
        inject=["renameat2:error=EINVAL"],
    )
    assert traced.output == "no-noreplace True"
    assert os.listdir(tmp_path / "state") == [".berth.lock"]


@pytest.mark.parametrize("kind", ["link", "fifo", "directory"])
def test_lock_file_that_is_none(root: EpochRoot, kind: str) -> None:
    path = Path(root.path) / ".berth.lock"
    path.unlink()
    match kind:
        case "link":
            path.symlink_to("elsewhere")
        case "fifo":
            os.mkfifo(path)
        case "directory":
            path.mkdir()
    with pytest.raises(FailedError) as caught:
        root.open_epoch(new_id())
    assert caught.value.name == "root-lock"
    assert entries(root) == []


# --- open and adopt --------------------------------------------------------------------------------------------------


def test_epoch_is_a_private_directory(root: EpochRoot) -> None:
    epoch = new_id()
    with root.open_epoch(epoch) as opened:
        path = Path(root.path) / f".standalone-work-{epoch}"
        assert (opened.id, opened.path) == (epoch, str(path))
        assert stat.S_IMODE(path.stat().st_mode) == 0o700
        assert os.path.samestat(path.stat(), os.fstat(opened.fd))
        assert not os.get_inheritable(opened.fd)
    assert root.active() == [epoch]


def test_epoch_is_durable_before_it_is_used(strace, tmp_path: Path) -> None:
    epoch = new_id()
    (tmp_path / "state").mkdir(mode=0o700)
    traced = strace(HOLD, tmp_path / "state", epoch, trace="mkdirat,flock,fsync,renameat2")
    begin = next(number for number, line in enumerate(traced.calls) if "mkdirat" in line and epoch in line)
    tail = [line for line in traced.calls[begin:] if epoch in line or "fsync" in line]
    assert [line.split("(")[0] for line in tail] == ["mkdirat", "flock", "fsync"]
    assert f"<{tmp_path}/state>)" in tail[-1]


@pytest.mark.parametrize("bad", ["", "x", "0" * 63, "0" * 65, "A" * 64, "../" + "0" * 61])
def test_only_exact_ids_are_opened(root: EpochRoot, bad: str) -> None:
    with pytest.raises(ValueError, match="not an epoch id"):
        root.open_epoch(bad)
    with pytest.raises(ValueError, match="not an epoch id"):
        root.adopt(bad)
    assert entries(root) == []


def test_id_is_opened_once(root: EpochRoot) -> None:
    epoch = new_id()
    with root.open_epoch(epoch), pytest.raises(FileExistsError):
        root.open_epoch(epoch)


def test_listing_shows_exact_names_only(root: EpochRoot) -> None:
    ids = sorted(new_id() for _ in range(3))
    for epoch in reversed(ids):
        root.open_epoch(epoch).__exit__()
    for name in (names.ACTIVE_PREFIX + "0" * 63, names.ACTIVE_PREFIX + "F" * 64, "x" + names.active_name(ids[0])):
        (Path(root.path) / name).mkdir()
    assert root.active() == ids
    assert root.retired() == []


def test_held_epoch_is_not_adopted_until_its_owner_is_killed(root: EpochRoot, children) -> None:
    epoch = new_id()
    owner = children.start(HOLD, root.path, epoch)
    assert owner.stdout.readline() == "open\n"
    assert root.active() == [epoch]
    assert root.adopt(epoch) is None
    owner.kill()
    owner.wait()
    adopted = root.adopt(epoch)
    assert adopted is not None
    with adopted:
        assert root.adopt(epoch) is None
    assert os.listdir(Path(root.path) / names.active_name(epoch)) == []


def test_epoch_that_is_gone_is_not_adopted(root: EpochRoot) -> None:
    assert root.adopt(new_id()) is None


@pytest.mark.parametrize("kind", ["link", "file"])
def test_what_stands_in_place_of_an_epoch_is_never_followed(root: EpochRoot, tmp_path: Path, kind: str) -> None:
    victim = tmp_path / "victim"
    victim.mkdir()
    (victim / "request.json").write_text("{}")
    epoch = new_id()
    path = Path(root.path) / names.active_name(epoch)
    if kind == "link":
        path.symlink_to(victim)
    else:
        path.write_text("")
    with pytest.raises(NotADirectoryError):
        root.adopt(epoch)
    with pytest.raises(FileExistsError):
        root.open_epoch(epoch)
    assert os.listdir(victim) == ["request.json"]
    assert path.is_symlink() == (kind == "link")


def test_many_open_at_once(tmp_path: Path, children) -> None:
    """Ten processes make the root, probe it and open an epoch at the same time; all succeed."""
    ids = sorted(new_id() for _ in range(10))
    code = "sys.stdin.readline()\n" + HOLD
    processes = [children.start(code, tmp_path / "new" / "state", epoch) for epoch in ids]
    for process in processes:
        process.stdin.write("\n")
        process.stdin.flush()
    assert [process.stdout.readline() for process in processes] == ["open\n"] * 10
    with EpochRoot(str(tmp_path / "new" / "state")) as root:
        assert root.active() == ids
        assert [root.adopt(epoch) for epoch in ids] == [None] * 10
        assert entries(root) == [names.active_name(epoch) for epoch in ids]


def test_no_start_takes_a_fresh_epoch_for_a_leftover(root: EpochRoot, children) -> None:
    """While one process opens epochs, another adopts whatever looks free: it never gets one."""
    opener = children.start(
        "import secrets\n"
        "from berth.epoch.epoch import EpochRoot\n"
        "root, held = EpochRoot(sys.argv[1]), []\n"
        "print(flush=True)\n"
        "for _ in range(100): held.append(root.open_epoch(secrets.token_hex(32)))\n"
        "print('done', flush=True)\n"
        "sys.stdin.read()\n",
        root.path,
    )
    opener.stdout.readline()
    tried = 0
    deadline = time.monotonic() + 30
    while len(root.active()) < 100 and time.monotonic() < deadline:
        for epoch in root.active()[-3:]:
            assert root.adopt(epoch) is None
            tried += 1
    assert opener.stdout.readline() == "done\n"
    assert tried > 0


# --- files of an epoch -----------------------------------------------------------------------------------------------


def test_files_of_an_epoch(root: EpochRoot) -> None:
    with root.open_epoch(new_id()) as epoch:
        assert epoch.read("request.json") is None
        epoch.write("request.json", b"one")
        epoch.write("request.json", b"two")
        assert epoch.read("request.json") == b"two"
        assert os.listdir(epoch.path) == ["request.json"]


def test_link_in_an_epoch_is_not_followed(root: EpochRoot, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("secret")
    with root.open_epoch(new_id()) as epoch:
        (Path(epoch.path) / "request.json").symlink_to(tmp_path / "secret")
        with pytest.raises(OSError, match="symbolic links"):
            epoch.read("request.json")


def test_publishing_never_replaces(root: EpochRoot, tmp_path: Path) -> None:
    fd = os.open(tmp_path, os.O_RDONLY)
    try:
        with root.open_epoch(new_id()) as epoch:
            epoch.write("record.json", b"mine")
            epoch.publish("record.json", dir_fd=fd, as_name="published")
            assert epoch.read("record.json") is None
            epoch.write("record.json", b"another")
            with pytest.raises(FileExistsError):
                epoch.publish("record.json", dir_fd=fd, as_name="published")
            assert epoch.read("record.json") == b"another"
    finally:
        os.close(fd)
    assert (tmp_path / "published").read_bytes() == b"mine"


# --- retirement ------------------------------------------------------------------------------------------------------


def test_retirement(root: EpochRoot) -> None:
    epoch = new_id()
    with root.open_epoch(epoch) as opened:
        opened.write("file", b"content")
        before = time.time_ns() // 1_000_000
        name = opened.retire()
        after = time.time_ns() // 1_000_000
    parsed = names.parse_retired(name)
    assert parsed is not None
    assert parsed[0] == epoch
    assert before <= int(parsed[1][:12], 16) <= after
    assert (root.active(), root.retired()) == ([], [parsed])
    assert entries(root) == [name]
    assert (Path(root.path) / name / "file").read_bytes() == b"content"


def test_retirement_with_a_given_id(root: EpochRoot) -> None:
    epoch = new_id()
    with root.open_epoch(epoch) as opened:
        assert opened.retire("ab" * 16) == f".retired-standalone-work-{epoch}-{'ab' * 16}"
        with pytest.raises(ForbiddenError):
            opened.retire()
    for bad in ("", "AB" * 16, "ab" * 15):
        with root.open_epoch(new_id()) as opened, pytest.raises(ValueError, match="retirement id"):
            opened.retire(bad)


def test_retirement_is_one_rename_and_one_sync(strace, tmp_path: Path) -> None:
    epoch = new_id()
    (tmp_path / "state").mkdir(mode=0o700)
    traced = strace(
        "import os\n"
        "from berth.epoch.epoch import EpochRoot\n"
        "epoch = EpochRoot(sys.argv[1]).open_epoch(sys.argv[2])\n"
        "os.getpriority(os.PRIO_PROCESS, 0)\n"
        "epoch.retire('0' * 32)\n",
        tmp_path / "state",
        epoch,
        trace="getpriority,renameat2,rename,renameat,fsync,fdatasync,mkdirat,unlinkat",
    )
    begin = next(index for index, line in enumerate(traced.calls) if line.startswith("getpriority"))
    rename, sync = traced.calls[begin + 1 :]
    root = f"<{tmp_path}/state>"
    assert rename.startswith("renameat2(")
    assert rename.count(root) == 2
    assert rename.endswith("RENAME_NOREPLACE) = 0")
    assert sync.startswith("fsync(")
    assert f"{root})" in sync


@pytest.mark.parametrize("kind", ["directory", "empty directory", "file", "link"])
def test_collision_keeps_both(root: EpochRoot, kind: str) -> None:
    epoch = new_id()
    other = Path(root.path) / names.retired_name(epoch, "0" * 32)
    match kind:
        case "directory":
            other.mkdir()
            (other / "theirs").write_text("theirs")
        case "empty directory":
            other.mkdir()
        case "file":
            other.write_text("theirs")
        case "link":
            other.symlink_to("nowhere")
    with root.open_epoch(epoch) as opened:
        opened.write("mine", b"mine")
        before = [(path, path.lstat().st_ino) for path in sorted(Path(root.path).rglob("*"))]
        with pytest.raises(FileExistsError):
            opened.retire("0" * 32)
        assert [(path, path.lstat().st_ino) for path in sorted(Path(root.path).rglob("*"))] == before
        assert root.active() == [epoch]


@pytest.mark.parametrize("swap", ["moved", "replaced", "link"])
def test_epoch_that_was_swapped_is_not_retired(root: EpochRoot, swap: str) -> None:
    epoch = new_id()
    with root.open_epoch(epoch) as opened:
        path = Path(opened.path)
        path.rename(path.with_name("moved"))
        if swap == "replaced":
            path.mkdir()
        elif swap == "link":
            path.symlink_to("moved")
        before = entries(root)
        with pytest.raises(ForbiddenError) as caught:
            opened.retire()
        assert caught.value.name == "epoch-moved"
        assert entries(root) == before


def test_retired_epoch_stays_locked_until_let_go(root: EpochRoot, children) -> None:
    """The lock follows the directory: what is retired and still held is not free."""
    epoch = new_id()
    with root.open_epoch(epoch) as opened:
        name = opened.retire()
        printed = children.run(
            "import os\nfrom berth.linux.locks import try_lock\n"
            "print(try_lock(os.open(sys.argv[1], os.O_RDONLY)), end='')\n",
            os.path.join(root.path, name),
        )
        assert printed == "False"


def test_collision_syncs_nothing(strace, tmp_path: Path, snapshot) -> None:
    epoch = new_id()
    with EpochRoot(str(tmp_path / "state")) as root, root.open_epoch(epoch) as opened:
        opened.write("mine", b"mine")
    other = tmp_path / "state" / names.retired_name(epoch, "0" * 32)
    other.mkdir()
    (other / "theirs").write_bytes(b"theirs")
    before = snapshot(tmp_path / "state")
    traced = strace(
        "import os\n"
        "from berth.epoch.epoch import EpochRoot\n"
        "epoch = EpochRoot(sys.argv[1]).adopt(sys.argv[2])\n"
        "os.getpriority(os.PRIO_PROCESS, 0)\n"
        "try: epoch.retire('0' * 32)\n"
        "except FileExistsError as error: print(error.filename, error.filename2, end='')\n",
        tmp_path / "state",
        epoch,
        trace="getpriority,/rename,/sync,/link,mkdirat",
    )
    begin = next(index for index, line in enumerate(traced.calls) if line.startswith("getpriority"))
    (rename,) = traced.calls[begin + 1 :]
    assert "RENAME_NOREPLACE) = -1 EEXIST" in rename
    assert traced.output == f"{names.active_name(epoch)} {names.retired_name(epoch, '0' * 32)}"
    assert snapshot(tmp_path / "state") == before


# --- the root, and what can be wrong with it -------------------------------------------------------------------------


def test_root_that_is_missing_is_made_only_where_that_is_asked_for(tmp_path: Path) -> None:
    with pytest.raises(MalformedError) as caught:
        EpochRoot(str(tmp_path / "a" / "b"), create=False)
    assert caught.value.name == "bad-state-root"
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("create", [True, False])
def test_root_on_a_read_only_mount(tmp_path: Path, mount, create: bool) -> None:
    (tmp_path / "state").mkdir(mode=0o700)
    mount("-t", "tmpfs", "-o", "ro,mode=700", "tmpfs", tmp_path / "state")
    before = os.listdir("/proc/self/fd")
    with pytest.raises(FailedError, match="Read-only") as caught:
        EpochRoot(str(tmp_path / "state"), create=create, accepted=Accepted(volatile=True))
    assert caught.value.name == "root-lock"
    assert os.listdir("/proc/self/fd") == before


def test_root_without_locks(strace, tmp_path: Path) -> None:
    code = (
        "from berth.epoch.epoch import EpochRoot\n"
        "from berth.errors import BerthError\n"
        "try: EpochRoot(sys.argv[1])\n"
        "except BerthError as error: print(type(error).__name__, error.name, end='')\n"
    )
    traced = strace(code, tmp_path / "state", trace="flock", inject=["flock:error=ENOLCK"])
    assert traced.output == "FailedError root-lock"
    assert os.listdir(tmp_path / "state") == [".berth.lock"]


# --- the same epoch again --------------------------------------------------------------------------------------------


def test_epoch_is_gone_on_with(root: EpochRoot) -> None:
    epoch = new_id()
    with root.open_epoch(epoch, again=True) as opened:  # there is none yet
        opened.write("file", b"content")
        inode = os.fstat(opened.fd).st_ino
    with root.open_epoch(epoch, again=True) as opened:
        assert os.fstat(opened.fd).st_ino == inode
        assert opened.read("file") == b"content"
    assert root.active() == [epoch]


def test_epoch_that_another_process_holds_is_not_gone_on_with(root: EpochRoot, children) -> None:
    epoch = new_id()
    owner = children.start(HOLD, root.path, epoch)
    assert owner.stdout.readline() == "open\n"
    with pytest.raises(ForbiddenError) as caught:
        root.open_epoch(epoch, again=True)
    assert caught.value.name == "epoch-held"
    owner.kill()
    owner.wait()
    with root.open_epoch(epoch, again=True) as opened:
        assert opened.id == epoch


def test_retired_epoch_is_never_gone_on_with(root: EpochRoot) -> None:
    epoch = new_id()
    with root.open_epoch(epoch) as opened:
        opened.write("file", b"content")
        opened.retire()
    with root.open_epoch(epoch, again=True) as opened:
        assert opened.read("file") is None
    assert (root.active(), [one for one, _ in root.retired()]) == ([epoch], [epoch])


def test_epoch_that_is_retired_while_it_is_opened_is_not_gone_on_with(
    root: EpochRoot, children, tmp_path: Path
) -> None:
    """Its holder retires it and lets go after another process has opened the directory, and before that locks it."""
    if subprocess.run(["strace", "-o", os.devnull, "true"], capture_output=True).returncode != 0:
        pytest.skip("strace may not trace processes here")
    epoch = new_id()
    with root.open_epoch(epoch) as opened:
        path = opened.path
        # Only the flock of the epoch's own directory is delayed, by a second, which is ample for the rename.
        prefix = ["strace", "-o", os.devnull, "-P", path, "-e", "trace=flock", "-e", "inject=flock:delay_enter=1000000"]
        other = children.start(
            "from berth.epoch.epoch import EpochRoot\n"
            "from berth.errors import ForbiddenError\n"
            "root = EpochRoot(sys.argv[1])\n"
            "try: root.open_epoch(sys.argv[2], again=True)\n"
            "except ForbiddenError as error: print(error.name, flush=True)\n"
            "else: print('opened', flush=True)\n",
            root.path,
            epoch,
            prefix=prefix,
        )
        wait_until_open(path, other.pid)
        opened.retire()
    assert other.stdout.readline() == "epoch-held\n"
    assert root.active() == []


def wait_until_open(path: str, pid: int) -> None:
    """Wait until a child of the process `pid` has the directory `path` open."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
            with contextlib.suppress(FileNotFoundError, PermissionError):  # it may not be a child of ours yet
                for fd in os.listdir(f"/proc/{child}/fd"):
                    with contextlib.suppress(FileNotFoundError):
                        if os.readlink(f"/proc/{child}/fd/{fd}") == path:
                            return
    raise AssertionError("nobody opened it")
