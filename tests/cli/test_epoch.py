"""`berth epoch` as a user meets it: options, exit codes, documents, signals."""

import contextlib
import fcntl
import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import berth
from berth.cli.epoch import command
from berth.cli.main import VERBS, main
from berth.epoch import names
from berth.epoch.epoch import EpochRoot

SOURCES = Path(berth.__file__).parent.parent
ENVIRONMENT = {
    **{name: value for name, value in os.environ.items() if not name.startswith("BERTH_")},
    "PYTHONPATH": f"{SOURCES}:{os.environ.get('PYTHONPATH', '')}",
}
LOCKS = {".berth.lock", ".berth-reclaim.lock"}
#: Renames and syncs of the probe that comes first.
PROBE_RENAMES, PROBE_SYNCS = 5, 3

Done = subprocess.CompletedProcess[str]


def epoch(*words: str | Path, prefix: Sequence[str] = (), **changes: str) -> Done:
    """Run the verb: in this process, through the door that every failure goes through, or after the words `prefix`."""
    argv, environment = ["epoch", *map(str, words)], {**ENVIRONMENT, **changes}
    if prefix:
        python = [*prefix, sys.executable, "-m", "berth", *argv]
        return subprocess.run(python, capture_output=True, text=True, env=environment, timeout=60)
    before, output, errors = dict(os.environ), io.StringIO(), io.StringIO()
    os.environ.clear()
    os.environ.update(environment)
    try:
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors):
            code = main(argv)
    finally:
        os.environ.clear()
        os.environ.update(before)
    return Done(argv, code, output.getvalue(), errors.getvalue())


def document(done: Done, code: int = 0) -> dict[str, Any]:
    assert done.returncode == code, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def failed(done: Done, code: int, name: str) -> str:
    """Check the JSON answer of a failure and return its message."""
    answer = document(done, code)
    error = answer["error"] if "error" in answer else answer["refusal"]  # the record of a probe is one in any case
    assert (error["code"], error["name"]) == (code, name)
    assert list(error) == ["code", "name", "message", "fix"]
    assert "Traceback" not in done.stderr
    message: str = error["message"]
    return message


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Return a state root that no process has open."""
    EpochRoot(str(tmp_path / "state")).__exit__()
    return tmp_path / "state"


@pytest.fixture
def strace_words(tmp_path: Path) -> Callable[..., list[str]]:
    """Return a function that returns the words before a command that inject a failure into it."""
    if subprocess.run(["strace", "-o", os.devnull, "true"], capture_output=True).returncode != 0:
        pytest.skip("strace may not trace processes here")

    def words(*rules: str) -> list[str]:
        log = str(tmp_path / "strace.log")
        return ["strace", "-qq", "-y", "-o", log, *(word for rule in rules for word in ("-e", f"inject={rule}"))]

    return words


def entries(root: Path) -> list[str]:
    return sorted(set(os.listdir(root)) - LOCKS)


def test_the_menu_says_what_the_verb_says() -> None:
    assert command.short_help == VERBS["epoch"][1]


# --- what is wrong with ROOT -----------------------------------------------------------------------------------------

ALL = [("probe",), ("list",), ("retire", "a" * 64), ("reclaim",)]


def on(root: str | Path, words: Sequence[str]) -> list[str]:
    return [words[0], str(root), *words[1:], "--json"]


@pytest.mark.parametrize("words", ALL, ids=lambda words: words[0])
@pytest.mark.parametrize("kind", ["missing", "file", "link"])
def test_root_that_is_no_directory_is_2(tmp_path: Path, kind: str, words: Sequence[str]) -> None:
    path = tmp_path / "path"
    if kind == "file":
        path.write_text("content")
    elif kind == "link":
        (tmp_path / "real").mkdir()
        path.symlink_to("real")
    before = {entry.name: entry.lstat().st_mtime_ns for entry in tmp_path.rglob("*")}
    message = failed(epoch(*on(path, words)), 2, "bad-state-root")
    assert repr(str(path)) in message
    assert {entry.name: entry.lstat().st_mtime_ns for entry in tmp_path.rglob("*")} == before


@pytest.mark.parametrize("words", [words for words in ALL if words[0] != "list"], ids=lambda words: words[0])
def test_root_on_a_read_only_mount_is_67(root: Path, mount, make_retired, words: Sequence[str]) -> None:
    kept = make_retired(root)
    mount("--bind", "-o", "ro", root, root)
    code, name = (66, "reclaim-lock") if words[0] == "reclaim" else (67, "root-lock")
    assert os.strerror(30) in failed(epoch(*on(root, words)), code, name)
    assert len(os.listdir(kept)) == 3


def test_list_reads_a_read_only_mount(root: Path, mount, make_retired) -> None:
    make_retired(root)
    mount("--bind", "-o", "ro", root, root)
    assert [one["state"] for one in document(epoch("list", root, "--json"))["epochs"]] == ["retired"]


@pytest.mark.parametrize("words", ALL, ids=lambda words: words[0])
def test_root_without_permission_is_67(
    readable_children, other_user, open_directory: Path, words: Sequence[str]
) -> None:
    below = open_directory / "below"
    below.mkdir(mode=0o700)
    code = (
        f"sys.path += {[path for path in sys.path if 'packages' in path]!r}\n"
        "from berth.cli.main import main\nsys.exit(main(sys.argv[1:]))\n"
    )
    done = subprocess.run(
        [*other_user, *readable_children.argv(code, "epoch", *on(below, words))],
        capture_output=True,
        text=True,
        env={"PATH": os.environ["PATH"], "HOME": str(open_directory)},
    )
    if "No module named" in done.stderr:
        pytest.skip("other users may not read what berth imports")
    assert "Permission denied" in failed(done, 67, "state-root")


@pytest.mark.parametrize("words", [words for words in ALL if words[0] != "list"], ids=lambda words: words[0])
@pytest.mark.parametrize("kind", ["link", "fifo", "directory"])
def test_lock_file_that_is_none_is_67(tmp_path: Path, kind: str, words: Sequence[str]) -> None:
    name, code, error = ".berth.lock", 67, "root-lock"
    if words[0] == "reclaim":
        name, code, error = ".berth-reclaim.lock", 66, "reclaim-lock"
    path = tmp_path / name
    match kind:
        case "link":
            path.symlink_to("elsewhere")
        case "fifo":
            os.mkfifo(path)
        case "directory":
            path.mkdir()
    tmp_path.chmod(0o700)
    assert name in failed(epoch(*on(tmp_path, words)), code, error)
    assert os.listdir(tmp_path) == [name]


@pytest.mark.parametrize("words", [words for words in ALL if words[0] != "list"], ids=lambda words: words[0])
def test_root_that_a_restart_empties_is_67_until_it_is_accepted(small_tmpfs: Path, words: Sequence[str]) -> None:
    small_tmpfs.chmod(0o700)
    refused = epoch(*on(small_tmpfs, words))
    if words[0] == "probe":
        assert document(refused, 67)["refusal"]["name"] == "volatile-root"
    else:
        failed(refused, 67, "volatile-root")
    for accepting in ({"BERTH_ALLOW_VOLATILE": "1"}, {}):
        option = [] if accepting else ["--allow-volatile"]
        done = epoch(*on(small_tmpfs, words), *option, **accepting)
        assert done.returncode == (2 if words[0] == "retire" else 0), done.stdout


# --- probe -----------------------------------------------------------------------------------------------------------


def test_probe_prints_the_record_and_leaves_nothing(tmp_path: Path) -> None:
    found = document(epoch("probe", tmp_path, "--json"))
    assert list(found) == [
        "schema_version",
        "root",
        "publication_root",
        "probed_at",
        "kernel",
        "device",
        "mount_point",
        "file_system",
        "source",
        "options",
        "medium",
        "operations",
        "durable",
        "trust_network",
        "allow_volatile",
        "probe_scope",
        "cluster_lock_verified",
        "verdict",
        "refusal",
    ]
    assert (found["verdict"], found["root"], found["refusal"]) == ("qualified", str(tmp_path), None)
    assert {one["result"] for one in found["operations"].values()} == {"works"}
    assert os.listdir(tmp_path) == []


def test_probe_for_people(tmp_path: Path) -> None:
    done = epoch("probe", tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    *operations, verdict = done.stdout.splitlines()
    assert {line.split()[1] for line in operations} == {"works"}
    assert verdict.startswith(f"qualified: {tmp_path} (")
    assert verdict.endswith("local; outlasts a power cut)")


@pytest.mark.parametrize("code", ["EINVAL", "ENOSYS"])
def test_probe_of_a_root_without_the_flag_is_67(tmp_path: Path, strace_words, code: str) -> None:
    where = tmp_path / "where"
    where.mkdir()
    done = epoch("probe", where, "--json", prefix=strace_words(f"renameat2:error={code}"))
    found = document(done, 67)
    assert (found["verdict"], found["refusal"]["name"]) == ("refused", "no-noreplace")
    assert os.listdir(where) == []
    done = epoch("probe", where, prefix=strace_words("renameat2:retval=0:when=5"))
    assert done.returncode == 67
    assert "drops the flags" in done.stderr
    assert "refused: " in done.stdout


def test_probe_of_a_publication_root(tmp_path: Path, small_tmpfs: Path) -> None:
    there = tmp_path / "there"
    there.mkdir()
    found = document(epoch("probe", tmp_path, "--publication-root", there, "--json"))
    assert (found["publication_root"], found["operations"]["publish"]["result"]) == (str(there), "works")
    found = document(epoch("probe", there, "--publication-root", small_tmpfs, "--json"), 67)
    assert (found["refusal"]["name"], found["operations"]["publish"]["errno"]) == ("publication-elsewhere", "EXDEV")
    assert os.listdir(there) == os.listdir(small_tmpfs) == []
    for bad in (there / "missing", ""):
        failed(epoch("probe", there, "--publication-root", bad, "--json"), 2, "bad-state-root")


# --- list and retire -------------------------------------------------------------------------------------------------


def test_list_for_people_and_as_a_document(root: Path, make_retired) -> None:
    retired = make_retired(root, at_ms=1_700_000_000_000, epoch="c" * 64)
    (root / f"{names.ACTIVE_PREFIX}nobody's").mkdir()
    with EpochRoot(str(root)) as opened:
        opened.open_epoch("b" * 64).__exit__()
        with opened.open_epoch("a" * 64):
            done, listed = epoch("list", root), document(epoch("list", root, "--json"))
    assert done.stdout.splitlines() == [
        f"active   {'a' * 64}  held by {os.getpid()}",
        f"left     {'b' * 64}",
        f"foreign  {names.ACTIVE_PREFIX + chr(110) + 'obody' + chr(39) + 's'!r}",
        f"retired  {'c' * 64}  2023-11-14 22:13:20Z",
    ]
    assert done.stderr == "1 active, 1 left, 1 retired, 1 foreign.\n"
    assert (list(listed), listed["root"]) == (["schema_version", "root", "epochs"], str(root))
    assert listed["epochs"][-1] == {
        "name": retired.name,
        "state": "retired",
        "epoch": "c" * 64,
        "retired_at_ms": 1_700_000_000_000,
        "holders": [],
    }


@pytest.mark.parametrize("bad", ["a" * 63, "A" * 64, "a" * 62 + "/a", "../state", "", "a" * 65])
def test_retire_refuses_what_is_no_id_with_2(root: Path, bad: str) -> None:
    (root / names.active_name("a" * 64)).mkdir()
    assert repr(bad) in failed(epoch("retire", root, "--json", bad), 2, "bad-epoch")
    assert entries(root) == [names.active_name("a" * 64)]


def test_retire(root: Path) -> None:
    for digit in "ab":
        (root / names.active_name(digit * 64)).mkdir()
    found = document(epoch("retire", root, "a" * 64, "--json"))
    done = epoch("retire", root, "b" * 64)
    assert (done.returncode, done.stderr) == (0, "")
    assert found == {
        "schema_version": "0.2.0",
        "root": str(root),
        "epoch": "a" * 64,
        "retired": found["retired"],
    }
    assert [os.path.join(root, name) for name in entries(root)] == [found["retired"], done.stdout.strip()]
    failed(epoch("retire", root, "a" * 64, "--json"), 2, "no-such-epoch")


def test_retire_leaves_what_is_in_use_or_a_runs_with_4(root: Path) -> None:
    path = root / names.active_name("a" * 64)
    path.mkdir()
    fd = os.open(path, os.O_RDONLY)
    fcntl.flock(fd, fcntl.LOCK_EX)
    failed(epoch("retire", root, "a" * 64, "--json"), 4, "epoch-held")
    os.close(fd)
    (path / "request.json").write_text("{}")
    failed(epoch("retire", root, "a" * 64, "--json"), 4, "epoch-of-a-run")
    assert entries(root) == [path.name]


@pytest.mark.parametrize(
    ("rule", "name", "retired"),
    [
        (f"renameat2:error=EEXIST:when={PROBE_RENAMES + 1}", "not-retired", False),
        (f"renameat2:error=EIO:when={PROBE_RENAMES + 1}", "not-retired", False),
        (f"fsync:error=EIO:when={PROBE_SYNCS + 1}", "uncertain", True),
    ],
)
def test_failed_retirement_is_72(root: Path, strace_words, rule: str, name: str, retired: bool) -> None:
    (root / names.active_name("a" * 64)).mkdir()
    failed(epoch("retire", root, "a" * 64, "--json", prefix=strace_words(rule)), 72, name)
    (only,) = entries(root)
    assert (names.parse_retired(only) is not None) == retired


# --- reclaim ---------------------------------------------------------------------------------------------------------


def test_reclaim_as_a_document(root: Path, make_retired) -> None:
    first, second = make_retired(root, at_ms=1), make_retired(root, at_ms=2, files=5)
    found = document(epoch("reclaim", root, "--seconds", "30", "--json"))
    assert found == {
        "schema_version": "0.2.0",
        "root": str(root),
        "scanned": 4,
        "candidates": 2,
        "held": 0,
        "selected": 1,
        "removed_roots": [first.name],
        "removed_entries": 4,
        "partial": None,
        "blocked": {},
        "passed_by": [],
        "stop_reason": "root-limit",
        "backlog": {"roots": 1, "entries": 6, "entries_complete": True},
    }
    found = document(epoch("reclaim", root, "--seconds", "30", "--entries", "2", "--json"))
    assert (found["partial"], found["stop_reason"], found["backlog"]["entries"]) == (second.name, "entry-budget", 4)


def test_reclaim_for_people(root: Path, make_retired) -> None:
    for at in range(2):
        make_retired(root, at_ms=at)
    done = epoch("reclaim", root, "--seconds", "30")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == ("1 retired epoch removed, 4 names in all; 1 retired left, with 4 names (root-limit).\n")


def test_reclaim_all(root: Path, make_retired) -> None:
    for at in range(5):
        (make_retired(root, at_ms=at) / "below").mkdir()
    found = document(epoch("reclaim", root, "--all", "--json"))
    assert (len(found["removed_roots"]), found["removed_entries"], found["stop_reason"]) == (5, 25, "complete")
    assert found["backlog"] == {"roots": 0, "entries": 0, "entries_complete": True}
    assert entries(root) == []
    assert document(epoch("reclaim", root, "--all", "--json"))["stop_reason"] == "empty"


def test_reclaim_all_shows_progress_on_a_terminal(root: Path, make_retired) -> None:
    for _ in range(3):
        make_retired(root, files=600)
    ours, theirs = os.openpty()
    words = [sys.executable, "-m", "berth", "epoch", "reclaim", str(root), "--all"]
    with subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=theirs, env={**ENVIRONMENT, "TERM": "xterm"}
    ) as process:
        os.close(theirs)
        shown = b""
        while True:
            try:
                shown += os.read(ours, 4096)
            except OSError:  # EIO: closed by the last process that had it open
                break
        os.close(ours)
    assert process.returncode == 0
    assert b"Reclaiming" in shown
    assert b"100%" in shown


@pytest.mark.parametrize(
    "words",
    [
        ["--roots", "-1"],
        ["--entries", "0"],
        ["--entries", "-3"],
        ["--entries", "1" + "0" * 400],
        ["--entries", "1.5"],
        ["--entries", "many"],
        ["--seconds", "nan"],
        ["--seconds", "inf"],
        ["--seconds", "-inf"],
        ["--seconds", "0"],
        ["--seconds", "-1"],
        ["--seconds", "1e300"],
        ["--seconds", "1e999"],
        ["--discovery", "0"],
        ["--discovery", "-1"],
        ["--watch", "nan"],
        ["--watch", "0"],
        ["--watch", "-1"],
        ["--watch", "inf"],
        ["--all", "--entries", "5"],
        ["--all", "--watch", "5"],
    ],
    ids=lambda words: "=".join(words)[:20],
)
def test_reclaim_refuses_absurd_budgets_with_2(root: Path, make_retired, words: list[str]) -> None:
    kept = make_retired(root)
    done = epoch("reclaim", root, *words)
    assert (done.returncode, done.stdout) == (2, "")
    assert words[0].strip("-") in done.stderr
    assert "Traceback" not in done.stderr
    assert "unexpected" not in done.stderr
    assert len(os.listdir(kept)) == 3


def test_reclaim_of_a_root_that_is_not_in_order_is_66(root: Path, make_retired) -> None:
    kept = make_retired(root)
    (root / f"{names.RETIRED_PREFIX}x").mkdir()
    assert "Nothing was removed" in failed(epoch("reclaim", root, "--all", "--json"), 66, "foreign-name")
    assert len(os.listdir(kept)) == 3


def test_reclaim_with_a_bad_lock_file_of_its_own_is_66(root: Path, make_retired) -> None:
    kept = make_retired(root)
    os.mkfifo(root / ".berth-reclaim.lock")
    failed(epoch("reclaim", root, "--json"), 66, "reclaim-lock")
    assert len(os.listdir(kept)) == 3


def test_reclaim_that_cannot_be_synced_is_66_and_uncertain(root: Path, make_retired, strace_words) -> None:
    make_retired(root)
    prefix = strace_words("fsync:error=EIO:when=1")
    failed(epoch("reclaim", root, "--seconds", "30", "--json", prefix=prefix), 66, "uncertain")


def test_reclaim_that_is_kept_from_some_of_it_is_3(root: Path, make_retired, make_immutable) -> None:
    kept, gone = make_retired(root, at_ms=1), make_retired(root, at_ms=2)
    make_immutable(kept / "file-1")
    done = epoch("reclaim", root, "--all", "--json")
    found = document(done, 3)
    assert (found["removed_roots"], found["stop_reason"], list(found["blocked"])) == (
        [gone.name],
        "blocked",
        [kept.name],
    )
    assert found["passed_by"] == [{"path": f"{kept.name}/file-1", "errno": 1}]
    assert found["backlog"] == {"roots": 1, "entries": 2, "entries_complete": True}
    assert f"{kept.name} stays: " in done.stderr


def test_reclaim_of_a_root_of_too_many_names_is_3(root: Path, make_retired) -> None:
    kept = make_retired(root)
    found = document(epoch("reclaim", root, "--discovery", "1", "--json"), 3)
    assert (found["stop_reason"], found["removed_entries"]) == ("discovery-budget", 0)
    assert len(os.listdir(kept)) == 3


# --- reclaim --watch -------------------------------------------------------------------------------------------------


@dataclass
class Watch:
    """A maintenance process."""

    process: subprocess.Popen[str]

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline()

    def end(self, number: int) -> tuple[int, str]:
        self.process.send_signal(number)
        output, _ = self.process.communicate(timeout=30)
        return self.process.returncode, output


@pytest.fixture
def until() -> Callable[..., None]:
    """Return a function that waits until a condition holds, and fails after a number of seconds."""

    def wait(condition: Callable[[], object], timeout_s: float = 30.0) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline, "it did not happen in time"
            time.sleep(0.002)

    return wait


@pytest.fixture
def watch(root: Path, watch_of: Callable[..., Watch]) -> Callable[..., Watch]:
    """Return a function that starts a maintenance process of the root."""
    return lambda *words: watch_of(root, *words)


@pytest.fixture
def watch_of() -> Iterator[Callable[..., Watch]]:
    """Return a function that starts a maintenance process of any root; it is killed when the test ends."""
    started = []

    def start(root: Path, *words: str) -> Watch:
        argv = [sys.executable, "-u", "-m", "berth", "epoch", "reclaim", str(root), *words]
        started.append(subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, env=ENVIRONMENT))
        return Watch(started[-1])

    yield start
    for process in started:
        process.kill()
        process.communicate()


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGHUP, 129)], ids=["TERM", "INT", "HUP"]
)
def test_watch_goes_on_until_a_signal_and_sums_up(root: Path, make_retired, watch, number: int, code: int) -> None:
    for at in range(3):
        make_retired(root, at_ms=at)
    process = watch("--watch", "0.01", "--seconds", "30")
    for left in ("2 retired left", "1 retired left", "0 retired left"):
        assert left in process.line()
    make_retired(root)  # what comes later is seen too
    assert "1 retired epoch removed, 4 names in all; 0 retired left" in process.line()
    ended, summary = process.end(number)
    assert ended == code
    assert summary.startswith("4 retired epochs removed, 16 names in all; 0 retired left (")
    assert summary.count("\n") == 1


def test_watch_as_a_document(root: Path, make_retired, watch, until) -> None:
    made = [make_retired(root, at_ms=at).name for at in range(2)]
    process = watch("--watch", "0.01", "--seconds", "30", "--json")
    until(lambda: not any(map(names.parse_retired, os.listdir(root))))
    code, output = process.end(signal.SIGTERM)
    found = json.loads(output)
    assert (code, found["removed_roots"], found["removed_entries"]) == (143, made, 8)
    assert found["backlog"] == {"roots": 0, "entries": 0, "entries_complete": True}


def test_watch_knows_no_discovery_budget_and_a_step_does(tmp_path: Path, make_retired, mount, watch_of, until) -> None:
    top = tmp_path / "top"
    top.mkdir()
    mount("-t", "tmpfs", "-o", "mode=700", "tmpfs", top)
    for number in range(65_536):
        os.mknod(top / str(number))
    retired = make_retired(top)
    found = document(epoch("reclaim", top, "--allow-volatile", "--json"), 3)
    assert (found["stop_reason"], found["scanned"], found["removed_entries"]) == ("discovery-budget", 65_536, 0)
    process = watch_of(top, "--watch", "30", "--allow-volatile", "--json")
    until(lambda: not retired.exists())
    assert process.end(signal.SIGTERM)[0] == 143
    assert len(os.listdir(top)) == 65_536 + 1  # and the lock file


def test_watch_keeps_a_discovery_budget_that_is_given(root: Path, make_retired, watch, until) -> None:
    kept = make_retired(root)
    process = watch("--watch", "30", "--discovery", "1")
    until((root / ".berth-reclaim.lock").exists)  # the first step began: from here on signals wait for its end
    code, output = process.end(signal.SIGTERM)
    assert code == 143
    assert "(discovery-budget)" in output
    assert len(os.listdir(kept)) == 3


# --- berth run -------------------------------------------------------------------------------------------------------


def test_run_makes_one_step_when_it_starts(berth, make_retired) -> None:
    assert berth.run("--", "true").returncode == 0
    assert len(berth.retired()) == 1
    old = [make_retired(berth.state_root, at_ms=at).name for at in (1, 2)]
    assert berth.run("--", "true").returncode == 0
    assert old[0] not in berth.retired()
    assert len(berth.retired()) == 3  # the newer old one, and those of both runs
    assert len(berth.records()) == 2


def test_run_makes_none_where_the_settings_say_so(berth, make_retired, as_root, tmp_path: Path) -> None:
    etc = tmp_path / "etc-berth"
    etc.mkdir()
    (etc / "config.toml").write_text("[epoch]\nreclaim_at_start = false\n")
    berth.run("--", "true")
    old = make_retired(berth.state_root, at_ms=1).name
    if Path("/etc/berth").exists():
        pytest.skip("this machine has settings of its own")
    script = 'mount -t tmpfs tmpfs /etc && mkdir /etc/berth && mount --bind "$0" /etc/berth && exec "$@"'
    private = ["unshare", "--mount", "sh", "-c", script, str(etc)]
    done = subprocess.run(
        [*private, *berth.words("run", "--", "true")],
        env={**berth.environment(), "PYTHONPATH": str(SOURCES)},
        cwd=berth.workspace,
        capture_output=True,
        text=True,
    )
    if "mount" in done.stderr:
        pytest.skip("root may not mount here")
    assert done.returncode == 0, done.stderr
    assert old in berth.retired()
    assert len(berth.retired()) == 3


@pytest.mark.parametrize("spoil", ["malformed", "link", "lock file", "budget"])
def test_disordered_root_keeps_no_command_from_running(berth, make_retired, spoil: str) -> None:
    berth.run("--", "true")
    old = make_retired(berth.state_root, at_ms=1)
    match spoil:
        case "malformed":
            (berth.state_root / f"{names.RETIRED_PREFIX}x").mkdir()
        case "link":
            (berth.state_root / names.retired_name("a" * 64, "b" * 32)).symlink_to("/")
        case "lock file":
            (berth.state_root / ".berth-reclaim.lock").unlink(missing_ok=True)
            (berth.state_root / ".berth-reclaim.lock").symlink_to("/nowhere")
        case "budget":
            (berth.state_root / ".berth-reclaim.lock").unlink(missing_ok=True)
            os.mkfifo(berth.state_root / ".berth-reclaim.lock")
    done = berth.run("--", "sh", "-c", "echo ran; exit 7")
    assert (done.returncode, done.stdout) == (7, "ran\n")
    assert done.stderr.startswith("berth: ")
    assert "Traceback" not in done.stderr
    assert len(os.listdir(old)) == 3


def test_run_on_a_root_that_a_restart_empties(berth, small_tmpfs: Path) -> None:
    words = ["--state-root", str(small_tmpfs / "state")]
    refused = berth.run(*words, "--", "true")
    assert (refused.returncode, refused.stdout) == (125, "")
    assert "--allow-volatile" in refused.stderr
    assert berth.run(*words, "--allow-volatile", "--", "true").returncode == 0
    assert berth.run(*words, "--", "true", env=berth.environment(BERTH_ALLOW_VOLATILE="yes")).returncode == 0


# --- where it is easy to do the wrong thing --------------------------------------------------------------------------


@pytest.mark.parametrize("words", [*ALL, ("reclaim", "--all")], ids=lambda words: "".join(words[:2])[:12])
def test_empty_root_is_not_the_current_directory(
    root: Path, make_retired, monkeypatch: pytest.MonkeyPatch, words: Sequence[str]
) -> None:
    make_retired(root)
    before = entries(root), sorted(os.listdir(root))
    monkeypatch.chdir(root)
    failed(epoch(words[0], "", *words[1:], "--json"), 2, "bad-state-root")
    assert (entries(root), sorted(os.listdir(root))) == before


def test_full_disk_can_be_freed(tmp_path: Path, make_retired, mount) -> None:
    root = tmp_path / "full"
    root.mkdir()
    mount("-t", "tmpfs", "-o", "mode=700,size=256k", "tmpfs", root)
    retired = make_retired(root)
    (root / ".berth-reclaim.lock").touch(mode=0o600)
    with pytest.raises(OSError, match="No space left"):
        (retired / "large").write_bytes(b"x" * (1 << 20))
    failed(epoch("probe", root, "--allow-volatile", "--json"), 67, "probe-failed")
    found = document(epoch("reclaim", root, "--all", "--allow-volatile", "--json"))
    assert (found["removed_roots"], found["stop_reason"]) == ([retired.name], "complete")


def test_retired_epochs_that_are_held_are_no_empty_root(root: Path, make_retired) -> None:
    retired = make_retired(root)
    gone = make_retired(root)
    fd = os.open(retired, os.O_RDONLY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        assert document(epoch("reclaim", root, "--all", "--json"), 3)["removed_roots"] == [gone.name]
        done = epoch("reclaim", root, "--all")
    finally:
        os.close(fd)
    assert (done.returncode, "(held)" in done.stdout, "berth epoch list" in done.stderr) == (3, True, True)


def test_backlog_of_a_root_with_too_many_names_is_all_of_it(root: Path, make_retired) -> None:
    for at in range(5):
        make_retired(root, at_ms=at)
    done = epoch("reclaim", root, "--discovery", "2", "--json")
    assert document(done, 3)["backlog"]["roots"] == 5
    assert "Raise --discovery" in done.stderr


def test_backlog_is_not_counted_across_mounts(root: Path, make_retired, mount) -> None:
    retired = make_retired(root)
    (retired / "mounted").mkdir()
    mount("--bind", "/usr", retired / "mounted")
    found = document(epoch("reclaim", root, "--json"), 3)
    assert found["backlog"] == {"roots": 1, "entries": 5, "entries_complete": False}


def test_probe_refuses_what_a_run_would(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    failed(epoch("probe", tmp_path, "--json"), 67, "open-state-root")


def test_watch_goes_on_once_the_root_is_in_order_again(root: Path, make_retired, watch, until) -> None:
    retired = make_retired(root)
    foreign = root / f"{names.RETIRED_PREFIX}x"
    foreign.mkdir()
    process = watch("--watch", "0.05", "--seconds", "30", "--json")
    until((root / ".berth-reclaim.lock").exists)
    assert retired.exists()
    foreign.rmdir()
    until(lambda: not retired.exists())
    assert process.end(signal.SIGTERM)[0] == 143


def test_request_of_any_size_is_not_read_to_be_seen(root: Path) -> None:
    left = root / names.active_name("a" * 64)
    left.mkdir()
    with open(left / "request.json", "wb") as file:
        file.truncate(1 << 40)
    failed(epoch("retire", root, "a" * 64, "--json"), 4, "epoch-of-a-run")
