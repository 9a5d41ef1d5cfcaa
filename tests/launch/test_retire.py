import os
import secrets
from pathlib import Path

import pytest

from berth.epoch import names
from berth.epoch.epoch import EpochRoot
from berth.errors import FailedError, ForbiddenError, MalformedError
from berth.launch.retire import retire_left

# Retires the epoch argv[2] of the root argv[1] and prints the name of the error.
RETIRE = """
from berth.epoch.epoch import EpochRoot
from berth.launch.retire import retire_left
from berth.errors import BerthError
root = EpochRoot(sys.argv[1])
try: print("retired", retire_left(root, sys.argv[2]) != "", end="")
except BerthError as error: print(type(error).__name__, error.name, end="")
"""
#: Renames of a probe, which come first.
PROBE_RENAMES = 5
#: Syncs of a probe, which come first.
PROBE_SYNCS = 3


@pytest.fixture
def left(root: EpochRoot) -> str:
    """Return the id of an active epoch that nobody holds."""
    epoch = secrets.token_hex(32)
    with root.open_epoch(epoch) as opened:
        opened.write("state", b"content")
    return epoch


def test_left_epoch_is_retired_as_it_is(root: EpochRoot, left: str) -> None:
    name = retire_left(root, left)
    assert names.parse_retired(name) == root.retired()[0]
    assert root.active() == []
    assert (Path(root.path) / name / "state").read_bytes() == b"content"


@pytest.mark.parametrize("bad", ["", "a" * 63, "a" * 65, "A" * 64, "a" * 63 + "g", "../" + "a" * 61, "a" * 63 + "\n"])
def test_what_is_no_epoch_id(root: EpochRoot, snapshot, left: str, bad: str) -> None:
    before = snapshot(root.path)
    with pytest.raises(MalformedError) as caught:
        retire_left(root, bad)
    assert caught.value.name == "bad-epoch"
    assert snapshot(root.path) == before


def test_epoch_that_is_not_there_or_retired_already(root: EpochRoot, left: str) -> None:
    retire_left(root, left)
    for epoch in (left, "0" * 64):
        with pytest.raises(MalformedError) as caught:
            retire_left(root, epoch)
        assert caught.value.name == "no-such-epoch"


def test_held_epoch(root: EpochRoot, snapshot) -> None:
    with root.open_epoch(secrets.token_hex(32)) as epoch:
        before = snapshot(root.path)
        with pytest.raises(ForbiddenError) as caught:
            retire_left(root, epoch.id)
        assert caught.value.name == "epoch-held"
        assert snapshot(root.path) == before


def test_epoch_of_a_run_waits_for_its_record(root: EpochRoot, snapshot, left: str) -> None:
    (Path(root.path) / names.active_name(left) / "request.json").write_text("{}")
    before = snapshot(root.path)
    with pytest.raises(ForbiddenError) as caught:
        retire_left(root, left)
    assert caught.value.name == "epoch-of-a-run"
    assert snapshot(root.path) == before
    adopted = root.adopt(left)  # and it was let go of
    assert adopted is not None
    adopted.__exit__()


@pytest.mark.parametrize("kind", ["file", "link", "link to a directory"])
def test_what_stands_in_place_of_an_epoch(root: EpochRoot, snapshot, tmp_path: Path, kind: str) -> None:
    path = Path(root.path) / names.active_name("a" * 64)
    if kind == "file":
        path.touch()
    else:
        path.symlink_to(tmp_path if kind == "link to a directory" else "nowhere")
    before = snapshot(root.path)
    with pytest.raises(FailedError) as caught:
        retire_left(root, "a" * 64)
    assert caught.value.name == "not-retired"
    assert snapshot(root.path) == before


def test_epoch_that_is_a_mount_point(root: EpochRoot, left: str, mount) -> None:
    mount("-t", "tmpfs", "tmpfs", Path(root.path) / names.active_name(left))
    with pytest.raises(FailedError, match="busy"):
        retire_left(root, left)
    assert root.active() == [left]


def test_epoch_from_a_lower_layer_cannot_be_renamed(tmp_path: Path, mount) -> None:
    """The probe's own directory can: an overlay renames only what was made in it. Nothing is copied instead."""
    mount("-t", "tmpfs", "tmpfs", make(tmp_path / "layers"))
    lower, upper, work, top = (make(tmp_path / "layers" / name) for name in ("lower", "upper", "work", "top"))
    make(lower / names.active_name("a" * 64))
    options = f"lowerdir={lower},upperdir={upper},workdir={work},redirect_dir=off"
    mount("-t", "overlay", "overlay", "-o", options, top)
    with EpochRoot(str(top)) as root, pytest.raises(FailedError, match="cross-device") as caught:
        retire_left(root, "a" * 64)
    assert caught.value.name == "not-retired"
    assert sorted(set(os.listdir(top)) - {".berth.lock"}) == [names.active_name("a" * 64)]


def make(path: Path) -> Path:
    path.mkdir()
    return path


@pytest.mark.parametrize("code", ["EEXIST", "EINVAL", "ENOSYS", "EIO", "EROFS"])
def test_refused_rename_changes_nothing_and_syncs_nothing(
    root: EpochRoot, snapshot, left: str, strace, code: str
) -> None:
    before = snapshot(root.path)
    inject = f"renameat2:error={code}:when={PROBE_RENAMES + 1}"
    traced = strace(RETIRE, root.path, left, trace="renameat2,fsync,renameat,rename", inject=[inject])
    assert traced.output == "FailedError not-retired"
    assert ".retired-" in traced.calls[-1]  # nothing after the refused rename: no sync, no second try
    assert snapshot(root.path) == before


def test_sync_that_fails_after_the_rename_is_uncertain(root: EpochRoot, left: str, strace) -> None:
    inject = f"fsync:error=EIO:when={PROBE_SYNCS + 1}"
    traced = strace(RETIRE, root.path, left, trace="renameat2,fsync", inject=[inject])
    assert traced.output == "UncertainError uncertain"
    assert [call.split("(")[0] for call in traced.calls[-2:]] == ["renameat2", "fsync"]  # never tried again
    assert (root.active(), [epoch for epoch, _ in root.retired()]) == ([], [left])


@pytest.mark.parametrize("point", [f"renameat2:when={PROBE_RENAMES + 1}", f"fsync:when={PROBE_SYNCS + 1}"])
def test_killed_retirement_is_whole_or_not_at_all(root: EpochRoot, left: str, strace, point: str) -> None:
    call, when = point.split(":")
    with pytest.raises(AssertionError):  # the child did not end with success
        strace(RETIRE, root.path, left, trace=call, inject=[f"{call}:signal=KILL:{when}"])
    assert [*root.active(), *(epoch for epoch, _ in root.retired())] == [left]
    if root.active():
        retire_left(root, left)
    (retired,) = root.retired()
    assert (Path(root.path) / names.retired_name(*retired) / "state").read_bytes() == b"content"
