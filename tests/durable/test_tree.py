import contextlib
import errno
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from berth.durable.removal import PassedBy
from berth.durable.tree import (
    BLOCKED,
    COMPLETE,
    ENTRY_BUDGET,
    TIME_BUDGET,
    Step,
    durable_rmtree,
    durable_rmtree_step,
)
from berth.errors import ForbiddenError

WORKERS = pytest.mark.parametrize("workers", [1, 2, 3])

# Makes argv[2] directories below argv[1], each in the one before, with a file in each hundredth.
DEEP = """
import os
fd = os.open(sys.argv[1], os.O_RDONLY)
for depth in range(int(sys.argv[2])):
    os.mkdir("d", dir_fd=fd)
    if depth % 100 == 0:
        os.close(os.open("f", os.O_CREAT | os.O_WRONLY, dir_fd=fd))
    below = os.open("d", os.O_RDONLY | os.O_DIRECTORY, dir_fd=fd)
    os.close(fd)
    fd = below
"""
REMOVE = """
from berth.durable.tree import durable_rmtree
print(durable_rmtree(sys.argv[1], workers=int(sys.argv[2])))
"""
# Prints the most memory this process had resident, in KiB. getrusage(2) would count that of the forking test too.
PEAK = """
print(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM:")))
"""
STEP = """
from berth.durable.tree import durable_rmtree_step
limits = [None if word == "-" else float(word) for word in sys.argv[2:4]]
entries = None if limits[0] is None else int(limits[0])
print(*durable_rmtree_step(sys.argv[1], entry_limit=entries, time_limit=limits[1]))
"""


def fill(root: Path, directories: int, files: int) -> int:
    """Make a tree of directories with files each; return how many names it has, its own included."""
    root.mkdir()
    for number in range(directories):
        (root / f"d{number}").mkdir()
        for name in range(files):
            (root / f"d{number}" / f"f{name}").touch()
    return 1 + directories * (1 + files)


def names_below(root: Path) -> int:
    return 1 + sum(len(directories) + len(files) for _, directories, files in os.walk(root))


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Return the path of a tree that is yet to be made, beside a file and a directory that must stay."""
    (tmp_path / "beside").write_text("stays")
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "precious").write_text("stays")
    return tmp_path / "tree"


@pytest.fixture(autouse=True)
def outside_stays(tmp_path: Path) -> Iterator[None]:
    """Check after each test that nothing beside the tree was touched."""
    yield
    if (tmp_path / "outside").exists():
        assert (tmp_path / "beside").read_text() == "stays"
        assert (tmp_path / "outside" / "precious").read_text() == "stays"


# --- whole trees -----------------------------------------------------------------------------------------------------


@WORKERS
def test_removes_everything_and_counts_it(tree: Path, workers: int) -> None:
    count = fill(tree, 40, 25)
    assert durable_rmtree(str(tree), workers=workers) == count
    assert not tree.exists()


@WORKERS
def test_ragged_trees_are_removed_with_every_number_of_walkers(tree: Path, workers: int) -> None:
    seed = random.randrange(1 << 32)
    chance = random.Random(seed)
    for _ in range(25):
        tree.mkdir()
        directories = [tree]
        for number in range(chance.randrange(120)):
            directories.append(chance.choice(directories[-6:]) / f"d{number}")
            directories[-1].mkdir()
        for number in range(chance.randrange(200)):
            (chance.choice(directories) / f"f{number}").touch()
        count = names_below(tree)
        assert durable_rmtree(str(tree), workers=workers) == count, f"seed {seed}"
        assert not tree.exists()


@WORKERS
def test_leaves_no_descriptor_and_no_thread(tree: Path, workers: int) -> None:
    fill(tree, 20, 5)
    before = sorted(os.listdir("/proc/self/fd")), threading.enumerate()
    durable_rmtree(str(tree), workers=workers)
    assert (sorted(os.listdir("/proc/self/fd")), threading.enumerate()) == before


@WORKERS
def test_depth_costs_no_descriptors(children: Any, tree: Path, workers: int) -> None:
    tree.mkdir()
    depth = 20_000 if workers == 1 else 5_000
    children.run(DEEP, tree, depth)
    limit = (64, 64)
    out = children.run(REMOVE, tree, workers, preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, limit))
    assert int(out) == 1 + depth + depth // 100
    assert not tree.exists()


def test_wide_directories_are_read_in_bounded_memory(children: Any, tree: Path) -> None:
    tree.mkdir()
    fd = os.open(tree, os.O_RDONLY)
    os.close(os.open("0", os.O_CREAT | os.O_WRONLY, dir_fd=fd))
    (tree / "hard").mkdir()
    links = 150_000
    for start in range(0, links, 50_000):  # ext4 gives one inode 65,000 names
        source = f"s{start}"
        os.close(os.open(source, os.O_CREAT | os.O_WRONLY, dir_fd=fd))
        for number in range(start, start + 50_000):
            os.link(source, f"hard/{number:032}", src_dir_fd=fd, dst_dir_fd=fd)
    os.close(fd)
    code = REMOVE + PEAK
    removed, most_kib = map(int, children.run(code, tree, 2).split())
    assert removed == links + 6
    assert most_kib < 64 << 10


@pytest.mark.faults
def test_a_million_names_in_one_directory(children: Any, tree: Path) -> None:
    tree.mkdir()
    for number in range(1_000_000):
        os.mkdir(tree / f"{number}") if number % 5 == 0 else os.mknod(tree / f"{number}")
    code = REMOVE + PEAK
    removed, most_kib = map(
        int,
        subprocess.run(
            children.argv(code, tree, 2), capture_output=True, text=True, timeout=600, check=True
        ).stdout.split(),
    )
    assert removed == 1_000_001
    assert most_kib < 96 << 10


NAMES = [b"-rf", b"...", b" ", b"\n", b"new\nline", b"\xff\xfe", b"*", b"a" * 255, "é".encode(), b"\\", b"'\""]


@pytest.mark.parametrize("make", [os.mkdir, os.mknod], ids=["directory", "file"])
def test_any_name_is_removed(tree: Path, make: Callable[[bytes], None]) -> None:
    tree.mkdir()
    for name in NAMES:
        make(os.fsencode(tree) + b"/" + name)
    assert durable_rmtree(str(tree)) == len(NAMES) + 1


def test_what_is_no_file_is_removed_as_it_is(tree: Path) -> None:
    tree.mkdir()
    os.mkfifo(tree / "fifo")
    (tree / "link").symlink_to(tree.parent / "outside")
    (tree / "dangling").symlink_to("nowhere")
    (tree / "loop").symlink_to("loop")
    os.link(tree.parent / "beside", tree / "second name")
    assert durable_rmtree(str(tree)) == 6


def test_path_forms(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tree.parent)
    fill(tree, 1, 1)
    assert durable_rmtree("tree") == 3
    fill(tree, 1, 1)
    fd = os.open(tree.parent, os.O_RDONLY)
    assert durable_rmtree("tree", dir_fd=fd) == 3
    os.close(fd)


@pytest.mark.parametrize("path", ["", ".", "..", "tree/", "a/..", "a\0b"])
def test_path_that_does_not_end_in_a_name_is_refused(path: str) -> None:
    with pytest.raises(ValueError, match="name of a directory entry"):
        durable_rmtree(path)


def test_missing_tree_is_an_error(tree: Path) -> None:
    with pytest.raises(FileNotFoundError) as caught:
        durable_rmtree(str(tree))
    assert caught.value.filename == str(tree)


def test_root_that_is_a_file_or_a_link_is_refused_and_stays(tree: Path) -> None:
    tree.symlink_to("outside")
    with pytest.raises(NotADirectoryError):
        durable_rmtree(str(tree))
    with pytest.raises(NotADirectoryError):
        durable_rmtree(str(tree.parent / "beside"))
    assert tree.is_symlink()


# --- steps -----------------------------------------------------------------------------------------------------------


def test_steps_never_exceed_their_entries_and_end(tree: Path) -> None:
    count = fill(tree, 3, 4)
    removed = []
    while True:
        before = names_below(tree)
        step = durable_rmtree_step(str(tree), entry_limit=5)
        removed.append(step.removed_entries)
        if step.complete:
            break
        assert step == Step(5, False, ENTRY_BUDGET)
        assert names_below(tree) == before - 5
    assert step.stop_reason == COMPLETE
    assert sum(removed) == count
    assert max(removed) <= 5


@pytest.mark.parametrize("limit", [1, 2, 7, 64, 1000])
def test_every_limit_ends(tree: Path, limit: int) -> None:
    count = fill(tree, 7, 9)
    steps = []
    while not (steps and steps[-1].complete):
        steps.append(durable_rmtree_step(str(tree), entry_limit=limit))
    assert sum(step.removed_entries for step in steps) == count
    assert len(steps) == -(-count // limit)


def test_no_time_still_removes_one_entry(tree: Path) -> None:
    count = fill(tree, 2, 3)
    for _ in range(count - 1):
        assert durable_rmtree_step(str(tree), time_limit=0.0) == Step(1, False, TIME_BUDGET)
    assert durable_rmtree_step(str(tree), time_limit=0.0) == Step(1, True, COMPLETE)


def test_time_limit_ends_two_walkers(tree: Path) -> None:
    fill(tree, 60, 60)
    step = durable_rmtree_step(str(tree), time_limit=0.001, workers=2)
    assert step.stop_reason == TIME_BUDGET
    assert 0 < step.removed_entries < 60 * 61
    assert names_below(tree) == 60 * 61 + 1 - step.removed_entries


@pytest.mark.parametrize(
    "limits",
    [{"entry_limit": 0}, {"entry_limit": -1}, {"time_limit": -0.1}]
    + [{"time_limit": float(word)} for word in ("nan", "inf", "-inf")],
)
def test_senseless_limits_are_refused(tree: Path, limits: dict[str, Any]) -> None:
    fill(tree, 1, 1)
    with pytest.raises(ValueError, match="_limit is"):
        durable_rmtree_step(str(tree), **limits)
    assert names_below(tree) == 3


def test_killed_steps_are_gone_on_with(children: Any, tree: Path) -> None:
    fill(tree, 30, 30)
    code = STEP.replace("print(", "print('begun', flush=True); print(")
    for _ in range(6):
        child = children.start(code, tree, "-", "-")
        assert child.stdout.readline() == "begun\n"
        child.send_signal(signal.SIGKILL)
        child.wait()
        if not tree.exists():
            fill(tree, 30, 30)
    assert durable_rmtree_step(str(tree)).complete


# --- durability ------------------------------------------------------------------------------------------------------


def synced(calls: list[str]) -> list[str]:
    return [line.split("<", 1)[1].split(">")[0] for line in calls if line.startswith("fsync(") and line.endswith("= 0")]


def test_a_whole_removal_is_synced_once_in_the_directory_above(strace: Any, tree: Path) -> None:
    fill(tree, 3, 3)
    calls = strace(STEP, tree, "-", "-", trace="fsync,unlinkat").calls
    assert synced(calls) == [str(tree.parent)]
    assert calls[-1].startswith("fsync(")


def test_a_step_syncs_exactly_the_directories_that_lost_names_and_stay(strace: Any, tree: Path) -> None:
    fill(tree, 3, 3)
    calls = strace(STEP, tree, 6, "-", trace="fsync,unlinkat").calls  # one directory, and two files of the next
    (rest,) = [path for path in tree.iterdir() if len(list(path.iterdir())) == 1]
    assert synced(calls) == [str(rest), str(tree)]
    assert [line for line in calls if line.startswith("fsync(")] == calls[-2:]


def test_a_failed_sync_is_an_uncertain_outcome(strace: Any, tree: Path) -> None:
    fill(tree, 1, 3)
    code = f"""
from berth.errors import UncertainError
try:
{"".join("    " + line + chr(10) for line in STEP.splitlines())}
except UncertainError as error: print(error.errno, error.filename)
"""
    out = strace(code, tree, 2, "-", trace="fsync", inject=["fsync:error=EIO"]).output
    assert out == f"{errno.EIO} tree/d0\n"


# --- what cannot be removed ------------------------------------------------------------------------------------------


def collect(tree: Path, **limits: Any) -> tuple[Step, set[tuple[str, int]]]:
    passed: list[PassedBy] = []
    step = durable_rmtree_step(str(tree), on_passed=passed.append, **limits)
    return step, {(one.path, one.errno) for one in passed}


@WORKERS
def test_immutable_entries_are_passed_by(tree: Path, make_immutable: Callable[[Path], None], workers: int) -> None:
    count = fill(tree, 8, 5)
    make_immutable(tree / "d3" / "f2")
    make_immutable(tree / "d5")
    step, passed = collect(tree, workers=workers)
    assert passed == {("tree/d3/f2", errno.EPERM)} | {(f"tree/d5/f{n}", errno.EPERM) for n in range(5)}
    assert step == Step(count - 9, False, BLOCKED)
    assert names_below(tree) == 9


def test_whole_removal_names_the_first_entry_that_stays(tree: Path, make_immutable: Callable[[Path], None]) -> None:
    fill(tree, 1, 3)
    make_immutable(tree / "d0" / "f1")
    with pytest.raises(PermissionError) as caught:
        durable_rmtree(str(tree))
    assert caught.value.filename == str(tree / "d0" / "f1")
    assert names_below(tree) == 3


def test_progress_is_made_behind_many_blocked_entries(tree: Path, make_immutable: Callable[[Path], None]) -> None:
    fill(tree, 30, 2)
    for number in range(29):
        make_immutable(tree / f"d{number}" / "f0")
        os.unlink(tree / f"d{number}" / "f1")
    removed = 0
    while (step := durable_rmtree_step(str(tree), entry_limit=1)).stop_reason != BLOCKED:
        removed += step.removed_entries
    assert removed + step.removed_entries == 3
    assert names_below(tree) == 1 + 29 * 2


def test_directories_that_may_not_be_read_or_written_are_passed_by(
    readable_children: Any, other_user: list[str], open_directory: Path
) -> None:
    tree = open_directory / "tree"
    code = """
import json, os
from berth.durable.tree import durable_rmtree_step
root = sys.argv[1]
for name, mode in (("none", 0), ("empty", 0), ("read-only", 0o500), ("fine", 0o700)):
    os.makedirs(f"{root}/{name}")
    if name != "empty": open(f"{root}/{name}/file", "w").close()
    os.chmod(f"{root}/{name}", mode)
passed = []
step = durable_rmtree_step(root, on_passed=passed.append)
print(json.dumps([step, sorted([p.path, p.errno] for p in passed)]))
for name in ("none", "read-only"): os.chmod(f"{root}/{name}", 0o700)
"""
    step, passed = json.loads(readable_children.run(code, tree, prefix=other_user))
    assert passed == [["tree/none", errno.EACCES], ["tree/read-only/file", errno.EACCES]]
    assert step == [3, False, BLOCKED]


def test_entries_of_others_under_the_sticky_bit_are_passed_by(
    readable_children: Any, other_user: list[str], open_directory: Path
) -> None:
    tree = open_directory / "tree"
    tree.mkdir()
    (tree / "roots").touch()
    tree.chmod(0o1777)
    out = readable_children.run(STEP, tree, "-", "-", prefix=other_user)
    assert out == f"0 False {BLOCKED}\n"
    assert (tree / "roots").exists()


@pytest.mark.parametrize("inject", ["unlinkat:error=EBUSY:when=2", "unlinkat:error=EIO:when=2"])
def test_busy_and_broken_entries_are_passed_by(strace: Any, tree: Path, inject: str) -> None:
    fill(tree, 1, 4)
    out = strace(STEP, tree, "-", "-", trace="unlinkat", inject=[inject]).output
    assert out == f"3 False {BLOCKED}\n"
    assert durable_rmtree_step(str(tree)) == Step(3, True, COMPLETE)


# --- mounts and other devices ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["tree", "tree/d1"])
@pytest.mark.parametrize("kind", ["tmpfs", "bind"])
def test_a_mount_on_or_below_the_root_refuses_it_whole(
    tree: Path, mount: Callable[..., None], where: str, kind: str
) -> None:
    fill(tree, 3, 3)
    point = tree.parent / where
    if kind == "tmpfs":
        mount("-t", "tmpfs", "-o", "size=64k", "tmpfs", point)
    else:
        mount("--bind", tree.parent / "outside", point)
    before = names_below(tree)
    with pytest.raises(ForbiddenError) as caught:
        durable_rmtree_step(str(tree))
    assert caught.value.name == "mounted-tree"
    assert str(point) in caught.value.message
    assert names_below(tree) == before


def test_a_mount_that_the_table_does_not_show_is_not_entered(
    children: Any, tree: Path, mount: Callable[..., None]
) -> None:
    fill(tree, 3, 3)
    mount("--bind", tree.parent / "outside", tree / "d1")
    code = "from berth.durable import tree\ntree._refuse_mounts = lambda *_: None\n" + STEP
    assert children.run(code, tree, "-", "-") == f"8 False {BLOCKED}\n"


def test_a_mount_is_not_entered_where_openat2_is_unknown(strace: Any, tree: Path, mount: Callable[..., None]) -> None:
    fill(tree, 3, 3)
    mount("--bind", tree.parent / "outside", tree / "d1")
    code = "from berth.durable import tree\ntree._refuse_mounts = lambda *_: None\n" + STEP
    for answer in ("ENOSYS", "EPERM"):
        out = strace(code, tree, "-", "-", trace="openat2", inject=[f"openat2:error={answer}"]).output
        assert out.endswith(f" False {BLOCKED}\n")
    assert sorted(os.listdir(tree)) == ["d1"]


# --- a tree that changes ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [1, 2])
def test_a_directory_that_becomes_a_link_is_never_followed(children: Any, tree: Path, workers: int) -> None:
    swap = """
import os
while True:
    for number in range(40):
        try:
            os.rename(f"{sys.argv[1]}/d{number}", f"{sys.argv[2]}/moved{number}")
            os.symlink(sys.argv[3], f"{sys.argv[1]}/d{number}")
        except OSError: pass
"""
    moved = tree.parent / "moved"
    for _ in range(5):
        fill(tree, 40, 10)
        moved.mkdir()
        swapper = children.start(swap, tree, moved, tree.parent / "outside")
        with contextlib.suppress(ForbiddenError, OSError):
            while not durable_rmtree_step(str(tree), workers=workers).complete:
                pass
        swapper.kill()
        swapper.wait()
        shutil.rmtree(moved)
        if tree.exists():
            durable_rmtree(str(tree))


def test_a_directory_that_is_moved_away_stops_the_step(tree: Path) -> None:
    fill(tree, 1, 2000)
    (tree / "d0" / "below").mkdir()
    moved = []

    def move(count: int) -> None:
        if not moved:
            os.rename(tree / "d0", tree.parent / "elsewhere")
            moved.append(count)

    with pytest.raises(ForbiddenError) as caught:
        durable_rmtree_step(str(tree), on_removed=move)
    assert caught.value.name == "tree-moved"
    assert tree.exists()


def test_names_that_appear_while_a_directory_is_emptied_are_removed_too(tree: Path) -> None:
    fill(tree, 1, 1100)
    late = iter(range(3))

    def add(_count: int) -> None:
        for number in late:
            (tree / "d0" / f"late{number}").mkdir()

    assert durable_rmtree_step(str(tree), on_removed=add).complete


def test_a_directory_that_is_never_empty_is_passed_by_in_the_end(strace: Any, tree: Path) -> None:
    fill(tree, 1, 1)
    traced = strace(STEP, tree, "-", "-", trace="unlinkat", inject=["unlinkat:error=ENOTEMPTY:when=2+"])
    assert traced.output == f"1 False {BLOCKED}\n"
    assert sum("AT_REMOVEDIR" in line for line in traced.calls) == 3


# --- what is left of the process -------------------------------------------------------------------------------------


def test_directories_that_can_be_listed_and_not_gone_through_are_passed_by(
    readable_children: Any, other_user: list[str], open_directory: Path
) -> None:
    code = """
import json, os
from berth.durable.tree import durable_rmtree_step
root = sys.argv[1]
os.makedirs(f"{root}/d/below")
open(f"{root}/file", "w").close()
os.chmod(f"{root}/d", 0o600)
passed = []
step = durable_rmtree_step(root, on_passed=passed.append, workers=2)
print(json.dumps([step, [[p.path, p.errno] for p in passed]]))
os.chmod(f"{root}/d", 0o700)
"""
    step, passed = json.loads(readable_children.run(code, open_directory / "tree", prefix=other_user))
    assert passed == [["tree/d", errno.EACCES]]
    assert step == [1, False, BLOCKED]


def test_patience_ends_a_step_and_its_lack_does_not(tree: Path, make_immutable: Callable[[Path], None]) -> None:
    fill(tree, 6, 2)
    for number in range(6):
        make_immutable(tree / f"d{number}")
    step, passed = collect(tree, patience=3, entry_limit=5)
    assert (step, len(passed)) == (Step(0, False, BLOCKED), 3)
    (tree / "last").mkdir()
    step, passed = collect(tree)
    assert (step, len(passed)) == (Step(1, False, BLOCKED), 12)
    assert not (tree / "last").exists()


def test_blocked_names_beyond_what_is_remembered_hide_nothing(
    children: Any, tree: Path, make_immutable: Callable[[Path], None]
) -> None:
    tree.mkdir()
    for number in range(40):
        (tree / f"f{number}").touch()
    for name in sorted(os.listdir(tree))[:15]:
        make_immutable(tree / name)
    code = "from berth.durable import walk\nwalk.CHUNK = 5\n" + STEP
    assert children.run(code, tree, "-", "-") == f"25 False {BLOCKED}\n"


def test_an_interrupt_between_two_walkers_ends_both(children: Any, tree: Path) -> None:
    code = """
import os
from berth.durable import crew
from berth.durable.tree import durable_rmtree_step
help, main = crew._Crew._help, __import__("threading").main_thread()
def interrupted(self):
    if __import__("threading").current_thread() is main:
        raise KeyboardInterrupt
    help(self)
crew._Crew._help = interrupted
try: durable_rmtree_step(sys.argv[1], workers=2)
except KeyboardInterrupt: pass
"""
    for _ in range(4):
        tree.mkdir(exist_ok=True)
        for number in range(12):
            for below in range(12):
                (tree / f"d{number}" / f"e{below}" / "f").mkdir(parents=True, exist_ok=True)
        children.run(code, tree)  # it ends, which the time limit of the test sees to


def test_without_more_threads_one_walker_does_it_all(
    readable_children: Any, other_user: list[str], open_directory: Path
) -> None:
    code = """
import os, resource
from berth.durable.tree import durable_rmtree
for number in range(20): os.makedirs(f"{sys.argv[1]}/d{number}/e")
resource.setrlimit(resource.RLIMIT_NPROC, (1, 1))
print(durable_rmtree(sys.argv[1], workers=2))
"""
    assert readable_children.run(code, open_directory / "tree", prefix=other_user) == "41\n"


def test_a_tree_whose_holder_was_renamed_is_not_reported_as_gone(
    tree: Path, make_immutable: Callable[[Path], None]
) -> None:
    (tree.parent / "holder").mkdir()
    fill(tree.parent / "holder" / "tree", 1, 1)
    make_immutable(tree.parent / "holder" / "tree" / "d0" / "f0")
    step = durable_rmtree_step(
        str(tree.parent / "holder" / "tree"),
        on_passed=lambda _passed: os.rename(tree.parent / "holder", tree.parent / "renamed"),
    )
    os.rename(tree.parent / "renamed", tree.parent / "holder")  # immutable files are looked for where they were
    assert step == Step(0, False, BLOCKED)
