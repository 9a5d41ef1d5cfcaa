"""Retired epochs are removed, within budgets, and nothing else is."""

import contextlib
import math
import os
import random
import secrets
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from berth.epoch import names
from berth.epoch.epoch import EpochRoot
from berth.epoch.reclaim import MOST_TOLD, UNLIMITED, Budgets, Reclaimed, reclaim
from berth.errors import FailedError, MalformedError, UncertainError
from berth.linux.locks import open_lock_file, try_lock

LOCK = ".berth-reclaim.lock"
# Makes one step in the root argv[1], with the budget of entries argv[2] if there is one, and prints what came of it.
STEP = """
from berth.epoch.epoch import EpochRoot
from berth.epoch.reclaim import UNLIMITED, Budgets, reclaim
from berth.errors import BerthError
budgets = Budgets(entries=int(sys.argv[2])) if len(sys.argv) > 2 else UNLIMITED
try: found = reclaim(EpochRoot(sys.argv[1]), budgets)
except BerthError as error: print(type(error).__name__, error.name, end="")
else: print(found and found.stop_reason, end="")
"""
# Holds the directory or file argv[1] by a flock until its input ends.
HOLD = """
import fcntl, os
fcntl.flock(os.open(sys.argv[1], os.O_RDONLY), fcntl.LOCK_EX)
print(flush=True)
sys.stdin.read()
"""


def step(root: EpochRoot, budgets: Budgets = UNLIMITED, **more: object) -> Reclaimed:
    found = reclaim(root, budgets, **more)  # type: ignore[arg-type]
    assert found is not None
    return found


def entries(root: EpochRoot) -> list[str]:
    return sorted(set(os.listdir(root.path)) - {".berth.lock", LOCK})


def count(path: str | Path) -> int:
    """Count the names below a directory, with an independent tool."""
    return len(subprocess.run(["find", path, "-mindepth", "1"], capture_output=True, check=True).stdout.splitlines())


# --- what goes and what stays ----------------------------------------------------------------------------------------


def test_only_retired_epochs_are_removed(root: EpochRoot, make_retired, snapshot) -> None:
    with root.open_epoch(secrets.token_hex(32)) as left:
        left.write("file", b"content")
    for name in ("records", "x.retired-standalone-work-", ".berth-probe-1-2-x", "file"):
        (Path(root.path) / name).mkdir()
        (Path(root.path) / name / "file").write_text("content")
    with root.open_epoch(secrets.token_hex(32)) as active:
        active.write("file", b"content")
        before = snapshot(root.path)
        retired = [make_retired(root.path, files=number) for number in range(3)]
        (retired[1] / "below").mkdir()
        (retired[1] / "below" / "link").symlink_to(active.path)
        found = step(root)
        assert snapshot(root.path) == before
    assert sorted(found.removed_roots) == sorted(path.name for path in retired)
    assert found.removed_entries == 1 + 2 + 3 + 2
    assert (found.scanned, found.candidates, found.held, found.selected) == (11, 3, 0, 3)
    assert (found.partial, found.blocked, found.stop_reason, found.backlog_roots) == (None, {}, "complete", 0)


def test_nothing_to_do(root: EpochRoot) -> None:
    found = step(root)
    assert os.listdir(root.path) == [".berth.lock"]  # no lock file in what holds nothing to remove
    assert (found.scanned, found.stop_reason, found.backlog_roots) == (0, "empty", 0)


def test_oldest_goes_first_whatever_its_epoch_id(root: EpochRoot, make_retired) -> None:
    order = [3, 1, 2, 0]
    made = {at: make_retired(root.path, at_ms=1_000_000 + at, epoch=f"{9 - at}" * 64).name for at in order}
    for at in sorted(order):
        assert step(root, Budgets(seconds=None)).removed_roots == [made[at]]


def test_retired_epochs_of_the_one_that_is_opened_go_first(root: EpochRoot, make_retired) -> None:
    mine, other = "a" * 64, "b" * 64
    make_retired(root.path, at_ms=1, epoch=other)
    newer = make_retired(root.path, at_ms=9, epoch=mine)
    older = make_retired(root.path, at_ms=8, epoch=mine)
    assert step(root, Budgets(roots=2, seconds=None), first=mine).removed_roots == [older.name, newer.name]
    assert [epoch for epoch, _ in root.retired()] == [other]


def test_held_epochs_wait_for_their_holder(root: EpochRoot, make_retired, children) -> None:
    oldest, newer = make_retired(root.path, at_ms=1), make_retired(root.path, at_ms=2)
    holder = children.start(HOLD, oldest)
    holder.stdout.readline()
    found = step(root)
    assert (found.removed_roots, found.held, found.candidates, found.backlog_roots) == ([newer.name], 1, 1, 1)
    assert count(oldest) == 3
    holder.kill()
    holder.wait()
    assert step(root).removed_roots == [oldest.name]


def test_lock_files_are_never_removed(root: EpochRoot, make_retired) -> None:
    make_retired(root.path)
    step(root)
    before = os.stat(os.path.join(root.path, LOCK)).st_ino
    make_retired(root.path)
    step(root)
    assert os.stat(os.path.join(root.path, LOCK)).st_ino == before


# --- budgets ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "budget",
    [
        {"roots": -1},
        {"roots": 10**7},
        {"entries": 0},
        {"entries": -5},
        {"entries": 10**400},
        {"seconds": 0.0},
        {"seconds": -1.0},
        {"seconds": math.nan},
        {"seconds": math.inf},
        {"seconds": -math.inf},
        {"seconds": 1e300},
        {"discovery": 0},
        {"discovery": 10**12},
    ],
    ids=str,
)
def test_budget_that_makes_no_sense(budget: dict[str, float]) -> None:
    with pytest.raises(MalformedError) as caught:
        Budgets(**budget)  # type: ignore[arg-type]
    assert caught.value.name == "bad-budget"
    assert next(iter(budget)) in caught.value.message


def test_defaults() -> None:
    assert Budgets() == Budgets(roots=1, entries=4096, seconds=0.05, discovery=65_536)


def test_eight_names_at_two_a_step(root: EpochRoot, make_retired) -> None:
    path = make_retired(root.path, files=7)
    left = 8
    while left:
        found = step(root, Budgets(entries=2, seconds=None))
        assert found.removed_entries == 2
        left -= 2
        assert (count(path) + 1 if path.exists() else 0) == left
        last = left == 0
        assert (found.stop_reason, found.partial) == (("complete", None) if last else ("entry-budget", path.name))
        assert found.removed_roots == ([path.name] if last else [])
    assert entries(root) == []


@pytest.mark.parametrize("call", ["unlinkat", "fsync", "openat"])
def test_eight_names_at_two_a_step_whatever_is_killed_between(root: EpochRoot, make_retired, strace, call: str) -> None:
    path = make_retired(root.path, files=5)
    (path / "below").mkdir()
    (path / "below" / "file").touch()
    # A probe comes first: it removes 8 names, syncs 3 times, and opens a few dozen files with the interpreter's start.
    first = {"unlinkat": 9, "fsync": 4, "openat": 50}[call]
    names_before = 8
    for turn in range(60):
        inject = f"{call}:signal=KILL:when={first + turn % 4}"
        with contextlib.suppress(AssertionError):  # killed
            strace(STEP, root.path, 2, trace=call, inject=[inject])
        left = count(path) + 1 if path.exists() else 0
        assert names_before - 2 <= left <= names_before
        names_before = left
        if turn % 4 == 3 and left:  # one that is not killed always gets further
            found = step(root, Budgets(entries=2, seconds=None))
            assert 1 <= found.removed_entries <= 2
            names_before -= found.removed_entries
        if not path.exists():
            break
    assert entries(root) == []


def test_entry_budget_spans_epochs(root: EpochRoot, make_retired) -> None:
    first, second = make_retired(root.path, files=2, at_ms=1), make_retired(root.path, files=9, at_ms=2)
    found = step(root, Budgets(roots=5, entries=7, seconds=None))
    assert (found.removed_entries, found.removed_roots, found.partial) == (7, [first.name], second.name)
    assert (found.stop_reason, found.backlog_roots) == ("entry-budget", 1)
    found = step(root, Budgets(roots=5, entries=6, seconds=None))
    assert (found.removed_entries, found.stop_reason) == (6, "complete")


def test_root_budget(root: EpochRoot, make_retired) -> None:
    for at in range(3):
        make_retired(root.path, at_ms=at)
    found = step(root, Budgets(roots=2, seconds=None))
    assert (len(found.removed_roots), found.selected, found.candidates) == (2, 2, 3)
    assert (found.stop_reason, found.backlog_roots) == ("root-limit", 1)


def test_no_roots_means_only_look(root: EpochRoot, make_retired, snapshot) -> None:
    make_retired(root.path)
    before = snapshot(root.path)
    found = step(root, Budgets(roots=0))
    assert (found.stop_reason, found.candidates, found.removed_entries, found.backlog_roots) == ("disabled", 1, 0, 1)
    assert snapshot(root.path) == before


def test_least_time_still_removes_something_every_step(root: EpochRoot, make_retired, strace) -> None:
    """Every system call takes ten times as long as the whole step may."""
    path = make_retired(root.path, files=3)
    code = STEP.replace("entries=int(sys.argv[2])", "seconds=0.001")
    reasons = []
    for _ in range(4):
        before = count(path)
        slow = "unlinkat:delay_enter=10000:when=9+"  # after the probe's
        reasons.append(strace(code, root.path, "x", trace="unlinkat", inject=[slow]).output)
        if not path.exists():
            break
        assert count(path) == before - 1
    assert reasons == ["time-budget"] * 3 + ["complete"]


def test_time_is_over_before_the_first_and_something_goes_all_the_same(root: EpochRoot, make_retired) -> None:
    """Looking at 600 names outlasts a millisecond by far."""
    for at in range(3):
        make_retired(root.path, files=1, at_ms=at)
    for number in range(600):
        os.mkdir(f"{root.path}/{names.active_name(f'{number:064x}')}")
    for left in (2, 1, 0):
        for _ in range(2):
            found = step(root, Budgets(roots=3, seconds=0.001))
            assert found.removed_entries >= 1
            if len(root.retired()) == left:
                break
        assert len(root.retired()) <= left


def test_root_of_too_many_names_is_left_alone(root: EpochRoot, make_retired, snapshot) -> None:
    for number in range(10):
        (Path(root.path) / f"file-{number}").touch()
    make_retired(root.path)
    (Path(root.path) / LOCK).touch()
    total = len(os.listdir(root.path))
    before = snapshot(root.path)
    found = step(root, Budgets(discovery=total - 1))
    assert (found.stop_reason, found.scanned, found.removed_entries, found.selected) == (
        "discovery-budget",
        total - 1,
        0,
        0,
    )
    assert snapshot(root.path) == before
    assert step(root, Budgets(discovery=total)).stop_reason == "complete"


def test_sum_of_steps(root: EpochRoot, make_retired) -> None:
    removed = [make_retired(root.path, files=2, at_ms=at).name for at in range(4)]
    total = Reclaimed()
    for left in (3, 2, 1, 0, 0):
        total.add(step(root, Budgets(seconds=None)))
        assert total.backlog_roots == left
    assert (total.removed_roots, total.removed_entries) == (removed, 12)
    assert (total.candidates, total.stop_reason) == (0, "complete")


# --- what is not in order --------------------------------------------------------------------------------------------


Spoil = Callable[[Path, pytest.FixtureRequest], None]


def malformed_active(root: Path, _request: pytest.FixtureRequest) -> None:
    (root / f"{names.ACTIVE_PREFIX}{'A' * 64}").mkdir()


def malformed_retired(root: Path, _request: pytest.FixtureRequest) -> None:
    (root / f"{names.RETIRED_PREFIX}{'a' * 64}-{'b' * 31}").mkdir()


def not_unicode(root: Path, _request: pytest.FixtureRequest) -> None:
    os.mkdir(os.fsencode(root) + b"/" + os.fsencode(names.RETIRED_PREFIX) + b"\xff\n")


def link_as_retired(root: Path, _request: pytest.FixtureRequest) -> None:
    (root / names.retired_name("a" * 64, "b" * 32)).symlink_to(root.parent)


def dangling_link_as_active(root: Path, _request: pytest.FixtureRequest) -> None:
    (root / names.active_name("a" * 64)).symlink_to("nowhere")


def file_as_retired(root: Path, _request: pytest.FixtureRequest) -> None:
    (root / names.retired_name("a" * 64, "b" * 32)).write_text("content")


def fifo_as_retired(root: Path, _request: pytest.FixtureRequest) -> None:
    os.mkfifo(root / names.retired_name("a" * 64, "b" * 32))


def foreign_owner(root: Path, request: pytest.FixtureRequest) -> None:
    request.getfixturevalue("as_root")
    path = root / names.retired_name("a" * 64, "b" * 32)
    path.mkdir()
    os.chown(path, 65534, 65534)


def other_file_system(root: Path, request: pytest.FixtureRequest) -> None:
    path = root / names.retired_name("a" * 64, "b" * 32)
    path.mkdir()
    request.getfixturevalue("mount")("-t", "tmpfs", "tmpfs", path)


def other_mount_of_the_same(root: Path, request: pytest.FixtureRequest) -> None:
    path, elsewhere = root / names.retired_name("a" * 64, "b" * 32), root.parent / "elsewhere"
    path.mkdir()
    elsewhere.mkdir()
    (elsewhere / "precious").write_text("keep me")
    request.getfixturevalue("mount")("--bind", elsewhere, path)


@pytest.mark.parametrize(
    "spoil",
    [
        malformed_active,
        malformed_retired,
        not_unicode,
        link_as_retired,
        dangling_link_as_active,
        file_as_retired,
        fifo_as_retired,
        foreign_owner,
        other_file_system,
        other_mount_of_the_same,
    ],
    ids=lambda spoil: spoil.__name__,
)
def test_one_reserved_name_that_is_no_epoch_and_nothing_is_removed(
    root: EpochRoot, make_retired, request: pytest.FixtureRequest, snapshot, spoil: Spoil
) -> None:
    for at in range(3):
        make_retired(root.path, at_ms=at)
    spoil(Path(root.path), request)
    before = snapshot(root.path)
    for budgets in (Budgets(), UNLIMITED):
        with pytest.raises(FailedError) as caught:
            reclaim(root, budgets)
        assert caught.value.name == "foreign-name"
        assert "Nothing was removed" in caught.value.message
        caught.value.message.encode()  # can be shown
    assert snapshot(root.path) == before


def test_subvolume_is_no_epoch_of_this_file_system(root: EpochRoot, tmp_path: Path, mount) -> None:
    """A subvolume of btrfs is no mount and has a device number of its own."""
    image, top = tmp_path / "image", tmp_path / "btrfs"
    with open(image, "wb") as file:
        file.truncate(128 << 20)
    if subprocess.run(["which", "mkfs.btrfs"], capture_output=True).returncode != 0:
        pytest.skip("mkfs.btrfs (package btrfs-progs) is not installed")
    subprocess.run(["mkfs.btrfs", "-q", "-f", image], check=True, capture_output=True)
    top.mkdir()
    mount("-o", "loop", image, top)
    with EpochRoot(str(top / "state")) as there:
        with there.open_epoch(secrets.token_hex(32)) as epoch:
            epoch.retire()
        subvolume = Path(there.path) / names.retired_name("a" * 64, "b" * 32)
        made = subprocess.run(["btrfs", "subvolume", "create", subvolume], capture_output=True)
        assert made.returncode == 0, made.stderr
        with pytest.raises(FailedError, match="another file system") as caught:
            reclaim(there, UNLIMITED)
        assert caught.value.name == "foreign-name"
        assert len(there.retired()) == 2


@pytest.mark.parametrize("words", [["-t", "tmpfs", "tmpfs"], ["--bind"]], ids=["tmpfs", "bind"])
def test_epoch_with_a_mount_inside_is_left_whole_and_the_others_go(
    root: EpochRoot, make_retired, mount, snapshot, tmp_path: Path, words: list[str]
) -> None:
    kept, gone = make_retired(root.path, at_ms=1), make_retired(root.path, at_ms=2)
    point, elsewhere = kept / "a" / "b", tmp_path / "elsewhere"
    point.mkdir(parents=True)
    elsewhere.mkdir()
    (elsewhere / "precious").write_text("keep me")
    mount(*words, *([elsewhere] if words == ["--bind"] else []), point)
    before = snapshot(kept)
    found = step(root)
    assert (found.removed_roots, list(found.blocked), found.stop_reason) == ([gone.name], [kept.name], "blocked")
    assert str(point) in found.blocked[kept.name]
    assert snapshot(kept) == before
    assert (elsewhere / "precious").read_text() == "keep me"


@pytest.mark.parametrize("kind", ["link", "fifo", "directory"])
def test_lock_file_that_is_none(root: EpochRoot, make_retired, kind: str, snapshot) -> None:
    make_retired(root.path)
    path = Path(root.path) / LOCK
    match kind:
        case "link":
            path.symlink_to("elsewhere")
        case "fifo":
            os.mkfifo(path)
        case "directory":
            path.mkdir()
    before = snapshot(root.path)
    with pytest.raises(FailedError) as caught:
        reclaim(root)
    assert caught.value.name == "reclaim-lock"
    assert snapshot(root.path) == before


# --- what cannot be removed ------------------------------------------------------------------------------------------


def test_blocked_epoch_never_keeps_the_others_waiting(root: EpochRoot, make_retired, make_immutable) -> None:
    oldest = make_retired(root.path, files=1, at_ms=1)
    make_immutable(oldest / "file-0")
    others = [make_retired(root.path, files=1, at_ms=at).name for at in (2, 3)]
    for name in others:
        found = step(root, Budgets(roots=1, seconds=None))
        assert found.removed_roots == [name]
        assert list(found.blocked) == [oldest.name]
        assert "Operation not permitted" in found.blocked[oldest.name]
    found = step(root, Budgets(roots=1, seconds=None))
    assert (found.stop_reason, found.removed_entries, found.backlog_roots) == ("blocked", 0, 1)
    assert [(one.path, os.strerror(one.errno)) for one in found.passed_by] == [
        (f"{oldest.name}/file-0", "Operation not permitted")
    ]


def test_partly_blocked_epoch_loses_what_can_go_once(root: EpochRoot, make_retired, make_immutable) -> None:
    oldest = make_retired(root.path, files=5, at_ms=1)
    make_immutable(oldest / "file-2")
    newer = make_retired(root.path, files=1, at_ms=2)
    found = step(root, Budgets(roots=1, seconds=None))
    assert (found.removed_entries, found.stop_reason, list(found.blocked)) == (4, "root-limit", [oldest.name])
    assert step(root, Budgets(roots=1, seconds=None)).removed_roots == [newer.name]
    assert os.listdir(oldest) == ["file-2"]


def test_only_so_many_are_told_about(root: EpochRoot, make_retired, mount) -> None:
    """The sticky directory of somebody else's files, by an attribute that works for root too: append-only."""
    path = make_retired(root.path, files=MOST_TOLD + 20)
    if subprocess.run(["chattr", "+a", path], capture_output=True).returncode != 0:
        pytest.skip("this file system has no append-only directories")
    try:
        found = step(root)
    finally:
        subprocess.run(["chattr", "-a", path], check=True)
    assert len(found.passed_by) == MOST_TOLD
    assert (found.stop_reason, count(path)) == ("blocked", MOST_TOLD + 20)


def test_removed_and_not_synced_is_uncertain(root: EpochRoot, make_retired, strace) -> None:
    make_retired(root.path)
    inject = ["fsync:error=EIO:when=4"]  # the first after the probe's
    assert strace(STEP, root.path, 2, trace="fsync", inject=inject).output == f"{UncertainError.__name__} uncertain"
    assert step(root).stop_reason == "complete"


# --- what changes under our hands ------------------------------------------------------------------------------------


def test_retired_root_swapped_for_a_link_after_it_was_checked(root: EpochRoot, make_retired, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.mkdir()
    (victim / "precious").write_text("keep me")
    first, second = make_retired(root.path, files=1, at_ms=1), make_retired(root.path, files=1, at_ms=2)

    def swap(_count: int) -> None:
        """Called when the first epoch is gone, and both were checked long ago."""
        if not second.is_symlink():
            second.rename(tmp_path / "moved")
            second.symlink_to(victim)

    with pytest.raises(FailedError) as caught:
        reclaim(root, UNLIMITED, on_removed=swap)
    assert caught.value.name == "not-reclaimed"
    assert "Not a directory" in caught.value.message
    assert not first.exists()
    assert (victim / "precious").read_text() == "keep me"
    assert count(tmp_path / "moved") == 1


def test_retired_root_that_is_gone_after_it_was_checked(root: EpochRoot, make_retired, tmp_path: Path) -> None:
    make_retired(root.path, at_ms=1)
    second, third = make_retired(root.path, at_ms=2), make_retired(root.path, at_ms=3)

    def move(_count: int) -> None:
        if second.exists():
            second.rename(tmp_path / "moved")

    with pytest.raises(FailedError, match="No such file"):
        reclaim(root, UNLIMITED, on_removed=move)
    assert count(tmp_path / "moved") == count(third) == 3


def test_directory_moved_out_of_the_tree_while_it_is_emptied(root: EpochRoot, make_retired, tmp_path: Path) -> None:
    """Of what lies beside its new place nothing goes: the walker sees on the way up that it is elsewhere."""
    path = make_retired(root.path, files=0)
    below, elsewhere = path / "below", tmp_path / "elsewhere"
    below.mkdir()
    elsewhere.mkdir()
    (elsewhere / "precious").write_text("keep me")
    for number in range(1100):  # it is told about every 1,024
        (below / f"{number}").touch()

    def move(_count: int) -> None:
        if below.exists():
            below.rename(elsewhere / "moved")

    found = step(root, on_removed=move)
    assert (list(found.blocked), found.removed_roots, found.stop_reason) == ([path.name], [], "blocked")
    assert (elsewhere / "precious").read_text() == "keep me"
    assert path.is_dir()
    assert step(root).removed_roots == [path.name]


def test_link_put_in_place_of_a_directory_while_the_tree_is_removed(root: EpochRoot, children, tmp_path: Path) -> None:
    """Another process swaps a sub-directory for a link to a victim and back, all the time."""
    victim = tmp_path / "victim"
    victim.mkdir()
    (victim / "precious").write_text("keep me")
    path = Path(root.path) / names.retired_name("a" * 64, "b" * 32)
    path.mkdir()
    swapper = children.start(
        "import os\n"
        "root, victim = sys.argv[1:]\n"
        "os.symlink(victim, root + '/../link')\n"
        "print(flush=True)\n"
        "while True:\n"
        "    try:\n"
        "        os.mkdir(root + '/d')\n"
        "        open(root + '/d/file', 'w').close()\n"
        "        os.rename(root + '/d', root + '/e')\n"
        "        os.symlink(victim, root + '/d')\n"
        "    except OSError: pass\n",
        path,
        victim,
    )
    swapper.stdout.readline()
    deadline = time.monotonic() + 1.0
    while time.monotonic() < deadline:
        path.mkdir(exist_ok=True)
        with contextlib.suppress(FailedError):
            reclaim(root, Budgets(entries=3))
    swapper.kill()
    swapper.wait()
    assert (victim / "precious").read_text() == "keep me"


# --- several at once, and kills --------------------------------------------------------------------------------------


def test_two_steps_do_not_overlap(root: EpochRoot, make_retired, children) -> None:
    path = make_retired(root.path)
    fd = open_lock_file(LOCK, dir_fd=root.fd)
    try:
        assert try_lock(fd)
        assert reclaim(root) is None
        assert children.run(STEP, root.path) == "None"
        assert count(path) == 3
    finally:
        os.close(fd)
    assert children.run(STEP, root.path) == "complete"


def test_many_at_once_remove_everything_once(root: EpochRoot, make_retired, children) -> None:
    for _ in range(16):
        make_retired(root.path, files=20)
    code = (
        "from berth.epoch.epoch import EpochRoot\n"
        "from berth.epoch.reclaim import Budgets, reclaim\n"
        "root, removed = EpochRoot(sys.argv[1]), 0\n"
        "sys.stdin.readline()\n"
        "while root.retired():\n"
        "    found = reclaim(root, Budgets(entries=50), wait_s=30)\n"
        "    removed += found.removed_entries\n"
        "print(removed, flush=True)\n"
    )
    processes = [children.start(code, root.path) for _ in range(4)]
    for process in processes:
        process.stdin.write("\n")
        process.stdin.flush()
    assert sum(int(process.stdout.readline()) for process in processes) == 16 * 21
    assert entries(root) == []


def test_step_waits_for_one_that_is_under_way(root: EpochRoot, make_retired, children) -> None:
    make_retired(root.path)
    (Path(root.path) / LOCK).touch()
    holder = children.start(HOLD, Path(root.path) / LOCK)
    holder.stdout.readline()
    assert reclaim(root) is None
    holder.stdin.close()
    assert step(root, wait_s=30).stop_reason == "complete"


def test_killed_reclaim_is_finished_by_the_next(root: EpochRoot, make_retired, children) -> None:
    """SIGKILL at random points; BERTH_TEST_SEED repeats a run."""
    seed = int(os.environ.get("BERTH_TEST_SEED") or random.SystemRandom().randrange(1 << 32))
    print(f"BERTH_TEST_SEED={seed}")
    chance = random.Random(seed)
    code = STEP.replace("reclaim(EpochRoot(sys.argv[1]), budgets)", "(print(flush=True), reclaim(root, budgets))[1]")
    code = code.replace("try: found", "root = EpochRoot(sys.argv[1])\ntry: found")
    with root.open_epoch(secrets.token_hex(32)) as active:
        active.write("file", b"content")
        for _ in range(4):
            for at in range(3):
                path = make_retired(root.path, files=200, at_ms=at)
                (path / "below").mkdir()
            child = children.start(code, root.path)
            child.stdout.readline()
            time.sleep(chance.uniform(0, 0.02))  # the random point
            child.kill()
            child.wait()
            found = step(root)
            assert (found.stop_reason, root.retired()) == ("complete" if found.candidates else "empty", [])
            assert active.read("file") == b"content"


def test_memory_is_bounded_by_what_may_be_removed(root: EpochRoot, children) -> None:
    """Looking at 3,000 retired epochs keeps a few hundred in mind, as looking at 500 does."""
    code = (
        "import tracemalloc\n"
        "from berth.epoch.epoch import EpochRoot\n"
        "from berth.epoch.reclaim import Budgets, reclaim\n"
        "root = EpochRoot(sys.argv[1])\n"
        "reclaim(root, Budgets(roots=0))\n"
        "tracemalloc.start()\n"
        "assert reclaim(root, Budgets(roots=0)).candidates == int(sys.argv[2])\n"
        "print(tracemalloc.get_traced_memory()[1])\n"
    )
    peaks, made = [], 0
    for total in (500, 3000):
        for number in range(made, total):
            os.mkdir(f"{root.path}/{names.retired_name(f'{number:064x}', f'{number:032x}')}")
        made = total
        peaks.append(int(children.run(code, root.path, total)))
    assert peaks[1] - peaks[0] < 200_000  # all of them would be most of a megabyte
