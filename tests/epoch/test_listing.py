import os
import secrets
import subprocess
from pathlib import Path

import pytest

from berth.epoch import names
from berth.epoch.epoch import EpochRoot
from berth.epoch.listing import count_entries, list_epochs
from berth.errors import FailedError, MalformedError

LIST = """
from berth.epoch.listing import list_epochs
from berth.errors import BerthError
try: print([one.state for one in list_epochs(sys.argv[1])], end="")
except BerthError as error: print(type(error).__name__, error.name, end="")
"""


def test_states_and_their_order(root: EpochRoot, make_retired) -> None:
    with root.open_epoch("a" * 64), root.open_epoch("b" * 64) as left:
        os.close(os.dup(left.fd))
    late = make_retired(root.path, at_ms=2_000, epoch="0" * 64)
    early = make_retired(root.path, at_ms=1_000, epoch="f" * 64)
    (Path(root.path) / f"{names.ACTIVE_PREFIX}no-id").mkdir()
    with root.open_epoch("c" * 64):
        found = list_epochs(root.path)
    assert [(one.name, one.state, one.epoch, one.retired_at_ms, one.holders) for one in found] == [
        (names.active_name("a" * 64), "left", "a" * 64, None, ()),
        (names.active_name("b" * 64), "left", "b" * 64, None, ()),
        (names.active_name("c" * 64), "active", "c" * 64, None, (os.getpid(),)),
        (f"{names.ACTIVE_PREFIX}no-id", "foreign", None, None, ()),
        (early.name, "retired", "f" * 64, 1_000, ()),
        (late.name, "retired", "0" * 64, 2_000, ()),
    ]


def test_retired_and_still_held(root: EpochRoot) -> None:
    with root.open_epoch(secrets.token_hex(32)) as epoch:
        epoch.retire()
        (one,) = list_epochs(root.path)
        assert (one.state, one.holders) == ("retired", (os.getpid(),))
    (one,) = list_epochs(root.path)
    assert (one.state, one.holders) == ("retired", ())


@pytest.mark.parametrize("kind", ["link", "file"])
def test_what_is_no_directory_is_foreign(tmp_path: Path, kind: str) -> None:
    for name in (names.active_name("a" * 64), names.retired_name("a" * 64, "b" * 32)):
        if kind == "link":
            (tmp_path / name).symlink_to(tmp_path)
        else:
            (tmp_path / name).touch()
    assert [(one.state, one.epoch) for one in list_epochs(str(tmp_path))] == [("foreign", "a" * 64)] * 2


def test_nothing_is_made_and_nothing_locked(tmp_path: Path, make_retired, strace, snapshot) -> None:
    root = tmp_path / "root"
    root.mkdir()
    make_retired(root)
    before = snapshot(root)
    traced = strace(LIST, root, trace="flock,mkdirat,renameat2,unlinkat,fsync")
    assert (traced.output, traced.calls) == ("['retired']", [])
    assert snapshot(root) == before
    assert not (root / ".berth.lock").exists()


@pytest.mark.parametrize("kind", ["missing", "file", "link", "nul"])
def test_what_is_no_root(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "path"
    if kind == "file":
        path.touch()
    elif kind == "link":
        path.symlink_to(tmp_path)
    with pytest.raises(MalformedError) as caught:
        list_epochs(str(path) if kind != "nul" else "a\0b")
    assert caught.value.name == "bad-state-root"


@pytest.mark.parametrize("which", ["root", "epoch"])
def test_what_may_not_be_read_is_not_called_foreign(
    readable_children, other_user, open_directory: Path, make_retired, which: str
) -> None:
    make_retired(open_directory)
    open_directory.chmod(0o700 if which == "root" else 0o755)
    assert readable_children.run(LIST, open_directory, prefix=other_user) == "FailedError state-root"


def test_epochs_that_come_and_go_are_never_foreign(root: EpochRoot, children) -> None:
    """Another process opens, retires and removes epochs while this one lists them."""
    child = children.start(
        "import os, secrets\n"
        "from berth.epoch.epoch import EpochRoot\n"
        "root = EpochRoot(sys.argv[1])\n"
        "print(flush=True)\n"
        "while True:\n"
        "    with root.open_epoch(secrets.token_hex(32)) as epoch: name = epoch.retire()\n"
        "    os.rmdir(name, dir_fd=root.fd)\n",
        root.path,
    )
    child.stdout.readline()
    seen: set[str] = set()
    for _ in range(1500):
        seen |= {one.state for one in list_epochs(root.path)}
    assert "foreign" not in seen
    assert seen & {"active", "left", "retired"}


# --- counting --------------------------------------------------------------------------------------------------------


def test_count_is_that_of_find(tmp_path: Path, make_retired) -> None:
    first, second = make_retired(tmp_path, files=5), make_retired(tmp_path, files=0)
    below = first / "a" / "b"
    below.mkdir(parents=True)
    (below / "c").touch()
    (first / "link").symlink_to("/")
    find = subprocess.run(["find", first, second], capture_output=True, text=True, check=True).stdout
    assert count_entries(str(tmp_path), [first.name, second.name], most=1000) == (len(find.splitlines()), True)
    assert count_entries(str(tmp_path), [], most=1000) == (0, True)


def test_count_stops(tmp_path: Path, make_retired) -> None:
    for _ in range(3):
        make_retired(tmp_path, files=10)
    count, whole = count_entries(str(tmp_path), os.listdir(tmp_path), most=15)
    assert 15 <= count < 33
    assert not whole


def test_count_of_what_is_gone_is_not_whole(tmp_path: Path) -> None:
    assert count_entries(str(tmp_path), ["gone"], most=1000) == (1, False)


def test_unreadable_is_a_failure_not_an_empty_list(readable_children, other_user, open_directory: Path) -> None:
    open_directory.chmod(0o711)
    assert readable_children.run(LIST, open_directory, prefix=other_user) == f"{FailedError.__name__} state-root"
