import json
import os
import secrets
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from berth.epoch import names
from berth.epoch.capability import Accepted, Capability
from berth.epoch.probe import probe
from berth.errors import AbilityError, FailedError, ForbiddenError

# Probes the directory argv[1] and prints why it is refused, as JSON.
PROBE = """
import json, os
from berth.epoch.probe import probe
error = probe(os.open(sys.argv[1], os.O_RDONLY), sys.argv[1]).refusal
print(json.dumps(error and [type(error).__name__, error.name, error.message]))
"""

# Probes the directory argv[1] with every trial and prints the record.
RECORD = """
import json, os
from berth.epoch.capability import Accepted
from berth.epoch.probe import probe
print(json.dumps(probe(os.open(sys.argv[1], os.O_RDONLY), sys.argv[1], thorough=True).document()))
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
    assert probe(root_fd, str(root)).refusal is None
    assert os.listdir(root) == []


def test_probe_leaves_no_descriptor(root: Path, root_fd: int) -> None:
    before = os.listdir("/proc/self/fd")
    assert probe(root_fd, str(root)).refusal is None
    assert os.listdir("/proc/self/fd") == before


def test_success_is_tried_before_refusal(strace, root: Path) -> None:
    traced = strace(PROBE, root, trace="renameat2")
    assert traced.output == "null\n"
    *renames, swap = traced.calls
    assert [line.rsplit(" = ", 1)[1].split()[0:2] for line in renames] == [["0"], ["-1", "EEXIST"]] * 2
    assert all("RENAME_NOREPLACE" in line for line in renames)
    assert "RENAME_EXCHANGE" in swap
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
    assert probe(root_fd, str(root)).refusal is None
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
    assert probe(root_fd, str(root)).refusal is None
    assert sorted(os.listdir(path)) == ["a", "b", "d"]
    holder.kill()
    holder.wait()
    assert probe(root_fd, str(root)).refusal is None
    assert os.listdir(root) == []


@pytest.mark.parametrize(
    "point", ["renameat2:signal=KILL:when=1", "renameat2:signal=KILL:when=4", "unlinkat:signal=KILL:when=2"]
)
def test_killed_probe_is_cleaned_up_by_the_next(strace, root: Path, root_fd: int, point: str) -> None:
    with pytest.raises(AssertionError):  # The child did not end with success.
        strace(PROBE, root, trace=point.split(":", maxsplit=1)[0], inject=[point])
    assert len(os.listdir(root)) == 1
    assert names.is_probe(os.listdir(root)[0])
    assert probe(root_fd, str(root)).refusal is None
    assert os.listdir(root) == []


def test_names_that_only_resemble_a_probe_are_kept(root: Path, root_fd: int) -> None:
    for name in (f"{names.PROBE_PREFIX}1-2-xyz", f"x{names.PROBE_PREFIX}1-2-{'0' * 32}", "a"):
        leftover(root, name)
    before = sorted(root.rglob("*"))
    assert probe(root_fd, str(root)).refusal is None
    assert sorted(root.rglob("*")) == before


def test_foreign_content_under_a_probes_name_is_never_deleted(root: Path, root_fd: int) -> None:
    (leftover(root) / "precious").write_text("keep me")
    found = probe(root_fd, str(root))
    assert isinstance(found.refusal, FailedError)
    assert "not empty" in found.refusal.message
    assert found.operations["create-and-sync"].result == "not tried"
    assert [path.name for path in root.rglob("precious")] == ["precious"]


def test_link_under_a_probes_name_is_not_followed(tmp_path: Path, root: Path, root_fd: int) -> None:
    victim = leftover(tmp_path, "victim")
    link = root / f"{names.PROBE_PREFIX}1-2-{'0' * 32}"
    link.symlink_to(victim)
    assert probe(root_fd, str(root)).refusal is None
    assert sorted(os.listdir(victim)) == ["a", "b", "d"]
    assert link.is_symlink()


def test_leftover_that_something_is_mounted_in_is_not_emptied(root: Path, root_fd: int, mount) -> None:
    kept = root.parent / "kept"
    kept.mkdir()
    (kept / "precious").write_text("keep me")
    below = leftover(root) / "d"
    mount("--bind", kept, below)
    found = probe(root_fd, str(root))
    assert isinstance(found.refusal, ForbiddenError)
    assert found.operations["remove-leftovers"].result == "failed"
    assert (kept / "precious").read_text() == "keep me"


def test_directory_that_may_not_be_written(readable_children, other_user, open_directory: Path) -> None:
    open_directory.chmod(0o755)
    output = readable_children.run(PROBE, open_directory, prefix=other_user)
    kind, name, message = json.loads(output)
    assert (kind, name) == ("FailedError", "probe-failed")
    assert "Permission denied" in message


# --- what is found, and written down ---------------------------------------------------------------------------------

FLAG = ["rename-noreplace-file", "rename-noreplace-directory", "examine-flags"]
QUICK = ["remove-leftovers", "create-and-sync", *FLAG, "sync-directory", "lock"]
THOROUGH = [*QUICK, "replace", "link", "sync-file", "lock-between-processes"]


def results(found: Capability) -> dict[str, str]:
    return {name: one.result for name, one in found.operations.items()}


@pytest.mark.parametrize(("thorough", "tried"), [(False, QUICK), (True, THOROUGH)])
def test_record_says_what_was_tried_where(root: Path, root_fd: int, thorough: bool, tried: list[str]) -> None:
    found = probe(root_fd, str(root), thorough=thorough).document()
    table = subprocess.run(
        ["findmnt", "--noheadings", "--output", "FSTYPE,TARGET,MAJ:MIN,SOURCE", "--target", root],
        capture_output=True,
        text=True,
        check=True,
    )
    assert table.stdout.split() == [
        found["file_system"],
        found["mount_point"],
        found["device"],
        found["source"],
    ]
    assert list(found["operations"]) == [*tried, "remove-and-sync"]
    for one in found["operations"].values():
        assert (one["result"], one["why"], one["errno"]) == ("works", "", None)
        assert one["seconds"] >= 0
    del found["operations"], found["probed_at"], found["options"], found["source"], found["mount_point"]
    assert found == {
        "schema_version": "0.2.0",
        "root": str(root),
        "publication_root": None,
        "kernel": os.uname().release,
        "device": f"{os.major(root.stat().st_dev)}:{os.minor(root.stat().st_dev)}",
        "file_system": found["file_system"],
        "medium": "local",
        "durable": True,
        "trust_network": False,
        "allow_volatile": False,
        "probe_scope": "this mount of this host, now",
        "cluster_lock_verified": False,
        "verdict": "qualified",
        "refusal": None,
    }


@pytest.mark.parametrize(
    ("call", "inject", "broken", "name"),
    [
        # Whoever takes the flag and drops it is seen by the swap alone: the kernel itself refuses the existing target.
        ("renameat2", "retval=0:when=5", "examine-flags", "no-noreplace"),
        ("renameat2", "error=EIO:when=5", "examine-flags", "probe-failed"),
        ("flock", "retval=0", "lock", "unfit-root"),
        ("flock", "error=ENOLCK:when=2+", "lock", "probe-failed"),
        ("flock", "error=EAGAIN:when=2", "lock", "unfit-root"),
        ("fsync", "error=EIO:when=1", "create-and-sync", "probe-failed"),
        ("fsync", "error=EINVAL:when=2", "sync-directory", "probe-failed"),
        ("fsync", "error=EIO:when=3", "sync-file", "probe-failed"),
        ("fsync", "error=EIO:when=4", "remove-and-sync", "uncertain"),
        ("rename", "error=EIO:when=1", "replace", "probe-failed"),
        ("linkat", "error=EPERM:when=1", "link", "unfit-root"),
        ("linkat", "retval=0:when=1", "link", "unfit-root"),
        ("linkat", "retval=0:when=2", "link", "unfit-root"),
        ("write", "error=ENOSPC:when=1", "rename-noreplace-file", "probe-failed"),
        ("mkdirat", "error=EROFS:when=1", "create-and-sync", "probe-failed"),
        ("mkdirat", "error=EDQUOT:when=3", "rename-noreplace-directory", "probe-failed"),
    ],
)
def test_what_fails_is_named_and_leaves_nothing(
    strace, root: Path, call: str, inject: str, broken: str, name: str
) -> None:
    # os.replace is renameat or rename, after the architecture and the interpreter.
    call = {"rename": "/^rename(at)?$"}.get(call, call)
    traced = strace(RECORD, root, trace=call, inject=[f"{call}:{inject}"])
    found = json.loads(traced.output)
    assert (found["verdict"], found["refusal"]["name"]) == ("refused", name)
    assert {
        one: state["result"] for one, state in found["operations"].items() if state["result"] != "works"
    }.items() >= {broken: "does not" if name in ("no-noreplace", "unfit-root") else "failed"}.items()
    assert os.listdir(root) == []


@pytest.mark.parametrize(
    ("call", "turns"),
    [("mkdirat", (1, 2, 4)), ("renameat2", (2, 5)), ("flock", (1, 3)), ("fsync", (1, 3, 4)), ("unlinkat", (1, 9))],
)
def test_probe_killed_at_any_call_leaves_what_the_next_removes(
    strace, root: Path, root_fd: int, call: str, turns: tuple[int, ...]
) -> None:
    for turn in turns:
        with pytest.raises(AssertionError):  # the child did not end with success
            strace(RECORD, root, trace=call, inject=[f"{call}:signal=KILL:when={turn}"])
        assert all(map(names.is_probe, os.listdir(root)))
        assert probe(root_fd, str(root)).refusal is None
        assert os.listdir(root) == []


def test_probe_that_cannot_clean_up_says_so_and_the_next_does(strace, root: Path, root_fd: int) -> None:
    last = sum(line.startswith("unlinkat(") for line in strace(RECORD, root, trace="unlinkat").calls)
    found = json.loads(strace(RECORD, root, trace="unlinkat", inject=[f"unlinkat:error=EIO:when={last}"]).output)
    assert found["operations"]["remove-and-sync"]["result"] == "failed"
    assert found["operations"]["remove-and-sync"]["errno"] == "EIO"
    assert found["verdict"] == "refused"
    assert [names.is_probe(name) for name in os.listdir(root)] == [True]
    assert probe(root_fd, str(root)).refusal is None
    assert os.listdir(root) == []


@pytest.mark.parametrize(
    ("inject", "why"),
    [
        ("retval=0", "two processes hold the same exclusive lock (flock)"),
        ("error=EAGAIN", "a lock (flock) that was released cannot be had"),
        ("error=ENOLCK", "a second process cannot use the lock: OSError: [Errno 37] No locks available"),
    ],
)
def test_locks_that_fail_between_processes_only(
    strace, children, root: Path, tmp_path: Path, inject: str, why: str
) -> None:
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec strace -o /dev/null -e inject=flock:{inject} {sys.executable} "$@"\n')
    python.chmod(0o755)
    found = json.loads(children.run("sys.executable = sys.argv[2]\n" + RECORD, root, python))
    assert found["operations"]["lock"]["result"] == "works"
    assert found["operations"]["lock-between-processes"]["why"] == why
    assert (found["verdict"], found["refusal"]["name"]) == ("refused", "unfit-root")
    assert os.listdir(root) == []


# --- kinds of file systems -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("accepted", "name"),
    [(Accepted(), "volatile-root"), (Accepted(network=True), "volatile-root"), (Accepted(volatile=True), None)],
)
def test_root_that_keeps_nothing_is_accepted_by_name_only(small_tmpfs: Path, accepted: Accepted, name: str) -> None:
    fd = os.open(small_tmpfs, os.O_RDONLY)
    try:
        found = probe(fd, str(small_tmpfs), accepted=accepted)
    finally:
        os.close(fd)
    assert (found.refusal and found.refusal.name) == name
    assert set(results(found).values()) == {"works"}
    assert (found.medium, found.durable) == ("volatile", False)
    assert found.document()["allow_volatile"] == accepted.volatile
    assert os.listdir(small_tmpfs) == []


def test_accepting_replaces_no_trial(small_tmpfs: Path, strace) -> None:
    code = RECORD.replace("thorough=True", "accepted=Accepted(network=True, volatile=True)")
    output = strace(code, small_tmpfs, trace="renameat2", inject=["renameat2:error=EINVAL"]).output
    assert json.loads(output)["refusal"]["name"] == "no-noreplace"
    assert os.listdir(small_tmpfs) == []


def test_overlay_that_syncs_nothing_is_volatile(tmp_path: Path, mount) -> None:
    mount("-t", "tmpfs", "tmpfs", make(tmp_path / "below"))
    lower, upper, work, top = (make(tmp_path / "below" / name) for name in ("lower", "upper", "work", "top"))
    mount("-t", "overlay", "overlay", "-o", f"lowerdir={lower},upperdir={upper},workdir={work},volatile", top)
    fd = os.open(top, os.O_RDONLY)
    try:
        found = probe(fd, str(top))
    finally:
        os.close(fd)
    assert isinstance(found.refusal, AbilityError)
    assert (found.refusal.name, found.medium) == ("volatile-root", "volatile")


def test_without_the_mount_table_nothing_is_known_and_nothing_made(as_root, children, root: Path) -> None:
    prefix = ["unshare", "--mount", "sh", "-c", 'umount -l /proc && exec "$@"', "sh"]
    if subprocess.run([*prefix, "true"], stderr=subprocess.DEVNULL).returncode != 0:
        pytest.skip("root may not unmount /proc here")
    kind, name, message = json.loads(children.run(PROBE, root, prefix=prefix))
    assert (kind, name) == ("FailedError", "probe-failed")
    assert "/proc" in message
    assert os.listdir(root) == []


# --- the publication root --------------------------------------------------------------------------------------------


def make(path: Path) -> Path:
    path.mkdir()
    return path


def published(root_fd: int, root: Path, there: Path) -> Capability:
    fd = os.open(there, os.O_RDONLY)
    try:
        return probe(root_fd, str(root), publication=(fd, str(there)))
    finally:
        os.close(fd)


def test_publication_root_is_tried_too(root: Path, root_fd: int) -> None:
    there = make(root.parent / "there")
    found = published(root_fd, root, there)
    assert found.refusal is None
    assert results(found)["publish"] == "works"
    assert found.document()["publication_root"] == str(there)
    assert os.listdir(there) == os.listdir(root) == []


@pytest.mark.parametrize(
    ("words", "what"),
    [(["-t", "tmpfs", "tmpfs"], "another file system"), (["--bind"], "another mount of the same file system")],
)
def test_publication_root_on_another_mount(root: Path, root_fd: int, mount, words: list[str], what: str) -> None:
    there = make(root.parent / "there")
    mount(*words, *([make(root.parent / "other")] if words == ["--bind"] else []), there)
    found = published(root_fd, root, there)
    assert isinstance(found.refusal, AbilityError)
    assert found.refusal.name == "publication-elsewhere"
    assert f"{str(there)!r} lies on {what}" in found.refusal.message
    assert (found.operations["publish"].result, found.operations["publish"].errno) == ("does not", "EXDEV")
    assert os.listdir(there) == os.listdir(root) == []


def test_publication_root_that_may_not_be_written(readable_children, other_user, open_directory: Path) -> None:
    open_directory.chmod(0o755)
    root = make(open_directory / "root")
    root.chmod(0o777)
    there = make(open_directory / "there")
    code = RECORD.replace("thorough=True", "publication=(os.open(sys.argv[2], os.O_RDONLY), sys.argv[2])")
    found = json.loads(readable_children.run(code, root, there, prefix=other_user))
    assert found["refusal"]["name"] == "probe-failed"
    assert str(there) in found["refusal"]["message"]
    assert os.listdir(root) == os.listdir(there) == []


def test_old_leftovers_in_the_publication_root_are_removed_and_fresh_ones_kept(root: Path, root_fd: int) -> None:
    """Nobody holds a lock there, so a fresh directory may be one that is just being made."""
    there = make(root.parent / "there")
    old, fresh = leftover(there), leftover(there, f"{names.PROBE_PREFIX}1-1-{secrets.token_hex(16)}")
    os.utime(old, (1, 1))
    assert published(root_fd, root, there).refusal is None
    assert list(there.iterdir()) == [fresh]


def test_leftovers_of_others_are_left_to_them(
    readable_children, other_user: list[str], open_directory: Path, as_root: None
) -> None:
    open_directory.chmod(0o1777)
    foreign = leftover(open_directory)
    out = readable_children.run(RECORD, open_directory, prefix=other_user)
    assert json.loads(out)["verdict"] == "qualified"
    assert foreign.is_dir()
