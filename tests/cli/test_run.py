"""`berth run` from the outside: what passes through, what is recorded, what is refused."""

import contextlib
import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

SHELL = ("sh", "-c")
STRACE = ("strace", "-f", "-qq", "-y", "-e", "trace=renameat2,fsync")


@pytest.mark.parametrize(
    ("command", "status"),
    [
        (["true"], 0),
        (["false"], 1),
        (["sh", "-c", "exit 7"], 7),
        (["sh", "-c", "kill -9 $$"], 137),
        (["sh", "-c", "kill -TERM $$"], 143),
        (["no-such-thing"], 127),
        (["./not-executable"], 126),
    ],
)
def test_exit_status_of_the_command_is_passed_through(berth, kind, command, status):
    (berth.workspace / "not-executable").write_text("#!/bin/sh\n")
    ended = berth.run(*kind, "--", *command)
    assert ended.returncode == status, ended.stderr
    record = berth.record()
    assert record["command_started"] is (status not in (126, 127))
    assert len(berth.retired()) == 1
    assert berth.active() == []


def test_streams_are_passed_through_byte_by_byte(berth, kind):
    data = bytes(range(256)) * 1000
    ended = berth.run(*kind, "--", *SHELL, "cat; echo oops >&2", input=data, text=False)
    assert ended.stdout == data
    assert ended.stderr == b"oops\n"


def test_a_reader_that_leaves_early_ends_the_run_quietly(berth, kind):
    words = " ".join(["exec", "python3", "-m", "berth", "run", *kind, "--", "yes"])
    words = words.replace("python3", berth.words()[0])
    ended = subprocess.run(
        ["sh", "-c", f"{{ {words}; echo $? >&2; }} | head -n 1".replace("exec ", "")],
        env=berth.environment(),
        cwd=berth.workspace,
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert ended.stdout == "y\n"
    assert ended.stderr == "141\n"
    assert berth.record()["exit"]["outcome"] == "failed"


def test_output_that_is_closed_or_full_gives_no_traceback(berth):
    with open("/dev/full", "w") as full:
        ended = berth.run("--json", "--", "true", stdout=full, stderr=subprocess.PIPE, capture_output=False)
    assert "Traceback" not in ended.stderr
    assert ended.returncode == 125
    closed = subprocess.run(
        ["sh", "-c", '"$@" <&- >&- 2>&-', "sh", *berth.words("run", "--", "sh", "-c", "echo lost; exit 3")],
        env=berth.environment(),
        timeout=30,
    )
    assert closed.returncode == 3


def test_the_record_says_what_ran_where_and_how_it_ended(berth):
    odd = os.fsdecode(b"\xff")
    berth.run("--cores", "1", "--timeout", "50", "--", "sh", "-c", "exit 3", odd)
    record = berth.record()
    assert record["schema_version"] == "0.2.0"
    assert record["command"] == ["sh", "-c", "exit 3", "\\xff"]
    assert record["kind"] == "host"
    assert record["workspace"] == str(berth.workspace)
    assert record["cores_asked"] == {"cores": 1, "cpus": None, "shared": False}
    assert record["cores_seen"] == record["cores_claimed"]
    assert record["exit"] == {"outcome": "failed", "code": 3, "signal": None, "error": None}
    assert record["command_started"] is True
    assert 0 < record["duration_seconds"] < 50
    assert (berth.state_root / "records" / f"{record['epoch']}.json").is_file()
    assert berth.retired()[0].startswith(f".retired-standalone-work-{record['epoch']}-")


def test_json_is_one_document_and_the_commands_output_goes_to_stderr(berth, kind):
    ended = berth.run("--json", *kind, "--", "echo", "hello")
    assert json.loads(ended.stdout) == berth.record()
    assert ended.stderr == "hello\n"


def test_the_time_limit_ends_everything_inside(berth, kind, tmp_path):
    mark = f"3{os.getpid()}{time.monotonic_ns() % 100000}"
    script = f"trap '' TERM; sleep {mark} & setsid sleep {mark} & wait"
    started = time.monotonic()
    ended = berth.run(*kind, "--timeout", "0.3", "--", *SHELL, script)
    assert ended.returncode == 124
    assert time.monotonic() - started < 10
    assert running(mark) == []
    assert berth.record()["exit"]["outcome"] == "timed-out"


def test_a_command_may_clean_up_when_its_time_is_over(berth, kind):
    script = "trap 'echo clean > cleaned; exit 0' TERM; sleep 30 & wait"
    ended = berth.run(*kind, "--timeout", "0.5", "--", *SHELL, script)
    assert ended.returncode == 124
    assert (berth.workspace / "cleaned").read_text() == "clean\n"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_to_berth_ends_everything_inside(berth, kind, number):
    mark = f"4{os.getpid()}{time.monotonic_ns() % 100000}"
    process = berth.start(*kind, "--", *SHELL, f"setsid sleep {mark} & sleep {mark}")
    wait_until(lambda: len(running(mark)) >= 2)
    process.send_signal(number)
    assert process.wait(timeout=15) == 128 + number
    assert running(mark) == []
    assert berth.record()["exit"]["outcome"] == "stopped"


def test_what_outlives_the_command_is_ended_and_said(berth):
    mark = f"5{os.getpid()}{time.monotonic_ns() % 100000}"
    ended = berth.run("--", *SHELL, f"setsid sleep {mark} & sleep {mark} & exit 4")
    assert ended.returncode == 4
    assert "2 processes outlived the command" in ended.stderr
    assert running(mark) == []
    assert berth.record()["processes_ended"] == 2


def test_a_claimed_core_is_the_commands_mask(berth, kind):
    ended = berth.run(*kind, "--cores", "1", "--", "grep", "Cpus_allowed_list", "/proc/self/status")
    assert ended.stdout.split()[1] == berth.record()["cores_seen"]


def test_without_a_claim_the_callers_mask_stays(berth, kind):
    before = os.sched_getaffinity(0)
    one = {max(before)}
    os.sched_setaffinity(0, one)
    try:
        ended = berth.run(*kind, "--", "grep", "Cpus_allowed_list", "/proc/self/status")
    finally:
        os.sched_setaffinity(0, before)
    assert ended.stdout.split()[1] == str(*one)


def test_claimed_cores_are_refused_to_others_with_the_holders_pid(berth, kind):
    cpu = str(max(os.sched_getaffinity(0)))
    with holding(berth, *kind, "--cpus", cpu) as holder:
        error = json.loads(berth.run("--json", "--cpus", cpu, "--", "true").stdout)["error"]
        assert error["name"] == "cores-claimed"
        assert f"pid {holder.pid} " in error["message"]
    assert berth.run("--cpus", cpu, "--", "true").returncode == 0


def test_shared_cores_go_together_and_never_with_an_owner(berth):
    cpu = str(max(os.sched_getaffinity(0)))
    with holding(berth, "--share-cores", "--cpus", cpu):
        assert berth.run("--share-cores", "--cpus", cpu, "--", "true").returncode == 0
        assert berth.run("--cpus", cpu, "--", "true").returncode == 125


def test_cores_are_chosen_among_those_that_nobody_holds(berth):
    cpus = sorted(os.sched_getaffinity(0))
    if len(cpus) < 2:
        pytest.skip("needs two CPUs")
    with holding(berth, "--cores", "1"):
        taken = berth.run("--json", "--cores", "1", "--", "true")
        record = json.loads(taken.stdout)
        refused = berth.run("--cores", str(len(cpus)), "--", "true")
        held = berth.run("--cpus", record["cores_claimed"], "--", "true")
    assert taken.returncode == 0
    assert refused.returncode == 125
    assert held.returncode == 0


@contextlib.contextmanager
def holding(berth, *options):
    """A run that is up and holds its claims until the end of the block."""
    words = [*options, "--", *SHELL, "echo up; exec sleep 60"]
    with berth.start(*words, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout.readline() == b"up\n"
            yield process
        finally:
            process.terminate()


BAD = [
    ([], "empty-command"),
    (["--", ""], "empty-command"),
    (["--cores", "0", "--", "true"], "bad-cores"),
    (["--cores", "99999", "--", "true"], "too-many-cores"),
    (["--cores", "x", "--", "true"], "bad-usage"),
    (["--cores", "1", "--cpus", "0", "--", "true"], "cores-and-cpus"),
    (["--cpus", "3-1", "--", "true"], "bad-cpu-list"),
    (["--cpus", "a", "--", "true"], "bad-cpu-list"),
    (["--cpus", "", "--", "true"], "bad-cpu-list"),
    (["--cpus", "0-99999999999", "--", "true"], "bad-cpu-list"),
    (["--cpus", "60000", "--", "true"], "cpus-outside-cpuset"),
    (["--share-cores", "--", "true"], "nothing-to-share"),
    (["--timeout", "0", "--", "true"], "bad-timeout"),
    (["--timeout", "nan", "--", "true"], "bad-timeout"),
    (["--workspace", "/no/such/directory", "--", "true"], "bad-workspace"),
    (["--sandbox", "--workspace", "/", "--", "true"], "unsafe-workspace"),
    (["--no-such-option", "--", "true"], "bad-usage"),
    (["--state-root", "/proc/self", "--", "true"], None),
]


@pytest.mark.parametrize(("words", "name"), BAD, ids=[" ".join(words) for words, _ in BAD])
def test_a_bad_request_is_one_paragraph_and_125(berth, words, name):
    plain = berth.run(*words)
    assert plain.returncode == 125
    assert plain.stdout == ""
    assert plain.stderr.startswith("berth: ")
    assert "Traceback" not in plain.stderr
    error = json.loads(berth.run("--json", *words).stdout)["error"]
    assert error["code"] == 125
    assert error["message"]
    assert name in (None, error["name"])
    assert not berth.state_root.exists() or berth.active() == []


def test_cpus_outside_the_cpuset_name_both_lists(berth):
    allowed = f"{min(os.sched_getaffinity(0))}"
    ended = berth.run("--cpus", f"{allowed},60000", "--", "true")
    assert "60000" in ended.stderr
    assert "effective cpuset, which is " in ended.stderr


def test_no_bubblewrap_is_said_and_nothing_runs(berth, tmp_path):
    if os.path.exists("/usr/local/bin/bwrap"):
        pytest.skip("another bwrap is installed in /usr/local/bin")
    shim = tmp_path / "bin"
    shim.mkdir()
    words = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", 'mount --bind /dev/null "$0"; exec "$@"']
    found = subprocess.run(["sh", "-c", "command -v bwrap"], capture_output=True, text=True).stdout.strip()
    if not found or subprocess.run(["unshare", "--user", "--map-root-user", "--mount", "true"]).returncode:
        pytest.skip("needs bubblewrap and user namespaces, to hide the one in the other")
    ended = subprocess.run(
        [*words, found, *berth.words("run", "--sandbox", "--", "touch", "ran")],
        env=berth.environment(),
        cwd=berth.workspace,
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 125
    assert "bubblewrap" in ended.stderr
    assert "install bubblewrap" in ended.stderr
    assert not (berth.workspace / "ran").exists()


def test_a_root_without_noreplace_is_refused_before_anything_runs(berth):
    ended = subprocess.run(
        [*STRACE, "-o", "/dev/null", "-e", "inject=renameat2:error=EINVAL", *berth.words("run", "--", "touch", "ran")],
        env=berth.environment(),
        cwd=berth.workspace,
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 125
    assert "RENAME_NOREPLACE" in ended.stderr
    assert not (berth.workspace / "ran").exists()
    assert sorted(os.listdir(berth.state_root)) == [".berth.lock"]


def test_retirement_is_one_noreplace_rename_and_one_fsync_of_the_root(berth, tmp_path):
    log = tmp_path / "strace"
    subprocess.run(
        [*STRACE, "-o", str(log), *berth.words("run", "--", "true")],
        env=berth.environment(),
        check=True,
    )
    lines = [line.split(maxsplit=1)[1] for line in log.read_text().splitlines()]
    at = next(number for number, line in enumerate(lines) if '".retired-standalone-work-' in line)
    assert lines[at].startswith("renameat2(")
    assert lines[at].endswith("RENAME_NOREPLACE) = 0")
    assert [line for line in lines[at + 1 :] if line.startswith("fsync(")] == lines[at + 1 :]
    (synced,) = lines[at + 1 :]
    assert f"<{berth.state_root}>)" in synced


def test_a_full_disk_while_recording_keeps_the_work_state_whole(berth, full_disk):
    words = ["--allow-volatile", "--state-root", str(full_disk / "state"), "--"]
    fill = f"cat /dev/zero > {full_disk}/zeros 2>/dev/null; exit 5"
    ended = berth.run(*words, *SHELL, fill)
    assert ended.returncode == 125
    assert "No space left on device" in ended.stderr
    assert "Traceback" not in ended.stderr
    (full_disk / "zeros").unlink()
    again = berth.run(*words, "true")
    assert again.returncode == 0, again.stderr
    outcomes = [json.loads(path.read_text())["exit"]["outcome"] for path in (full_disk / "state/records").glob("*")]
    assert sorted(outcomes) == ["interrupted", "succeeded"]


@pytest.fixture
def full_disk(tmp_path):
    """A small file system that a command can fill."""
    if os.geteuid() != 0:
        pytest.skip("mounting a small file system needs root")
    mount = tmp_path / "small"
    mount.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k,mode=755", "tmpfs", str(mount)], check=True)
    yield mount
    subprocess.run(["umount", "-l", str(mount)], check=True)


def test_ignored_signals_stay_ignored_in_the_command(berth):
    ended = berth.run("--", *SHELL, "kill -HUP $$; echo alive", preexec_fn=lambda: signal.signal(1, signal.SIG_IGN))
    assert ended.stdout == "alive\n"


def test_a_run_inside_a_run(berth):
    inner = " ".join(berth.words("run", "--", "sh", "-c", "'exit 6'"))
    assert berth.run("--", *SHELL, inner).returncode == 6
    assert len(berth.records()) == len(berth.retired()) == 2


def running(mark: str) -> list[int]:
    """Pids of living processes with `mark` as an argument of their own."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                arguments = (entry / "cmdline").read_bytes().split(b"\0")
                state = (entry / "stat").read_text().rsplit(")", 1)[1].split()[0]
            except OSError:
                continue
            if mark.encode() in arguments and state not in "ZX":
                found.append(int(entry.name))
    return found


def wait_until(condition, seconds=10):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)


def test_pwd_names_the_workspace(berth):
    assert berth.run("--", "printenv", "PWD").stdout == f"{berth.workspace}\n"
    link = berth.workspace.parent / "link"
    link.symlink_to(berth.workspace)
    words = ["sh", "-c", 'cd "$0"; exec "$@"', str(link), *berth.words("run", "--", "printenv", "PWD")]
    assert subprocess.run(words, env=berth.environment(), capture_output=True, text=True).stdout == f"{link}\n"


def test_a_killed_bubblewrap_is_a_command_that_was_killed(berth, sandbox_works):
    if not sandbox_works:
        pytest.skip("bubblewrap cannot make a sandbox here; see `berth doctor`")
    words = ["--json", "--sandbox", "--", *SHELL, "echo up >&2; sleep 60"]
    with berth.start(*words, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stderr.readline() == b"up\n"
        (keeper,) = children_of(process.pid)
        (bwrap,) = children_of(keeper)
        os.kill(bwrap, signal.SIGKILL)
        assert process.wait(timeout=15) == 137
    assert berth.record()["exit"] == {"outcome": "failed", "code": None, "signal": 9, "error": None}


def test_a_killed_keeper_is_said_and_nothing_lives_on(berth, kind):
    mark = f"6{os.getpid()}{time.monotonic_ns() % 100000}"
    script = f"setsid sleep {mark} & (setsid sleep {mark} &); echo up >&2; sleep {mark}"
    with berth.start(*kind, "--", *SHELL, script, stderr=subprocess.PIPE) as process:
        assert process.stderr.readline() == b"up\n"
        wait_until(lambda: len(running(mark)) >= 3)
        (keeper,) = children_of(process.pid)
        os.kill(keeper, signal.SIGKILL)
        assert process.wait(timeout=15) == 125
        assert b"was killed" in process.stderr.read()
    assert running(mark) == []
    assert berth.record()["exit"]["error"] == "keeper-lost"


def children_of(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_a_command_that_stops_its_keeper_gains_nothing(berth):
    started = time.monotonic()
    ended = berth.run("--timeout", "1", "--", *SHELL, "kill -STOP $PPID; sleep 60")
    assert ended.returncode == 124
    assert time.monotonic() - started < 20


def test_a_process_whose_first_thread_has_left_is_ended(berth):
    mark = f"8{os.getpid()}{time.monotonic_ns() % 100000}"
    program = (
        "import ctypes, threading, time, sys\n"
        "threading.Thread(target=time.sleep, args=(60,)).start()\n"
        "ctypes.CDLL(None).syscall(60 if sys.maxsize and __import__('os').uname().machine == 'x86_64' else 93, 0)\n"
    )
    (berth.workspace / "leaderless.py").write_text(program)
    script = f"{berth.words()[0]} leaderless.py {mark} > /dev/null 2>&1 & sleep 0.5"
    ended = berth.run("--", *SHELL, script)
    assert ended.returncode == 0
    assert berth.record()["processes_ended"] == 1
    assert berth.record()["processes_stuck"] == []


def test_a_foreign_proc_is_refused(berth):
    if subprocess.run(["unshare", "--user", "--map-root-user", "--pid", "--fork", "true"]).returncode != 0:
        pytest.skip("needs user namespaces, to have a pid namespace without its own /proc")
    words = ["unshare", "--user", "--map-root-user", "--pid", "--fork", *berth.words("run", "--", "touch", "ran")]
    ended = subprocess.run(words, env=berth.environment(), cwd=berth.workspace, capture_output=True, text=True)
    assert ended.returncode == 125
    assert "another pid namespace" in ended.stderr
    assert not (berth.workspace / "ran").exists()


def test_ignored_sigchld_of_the_parent_changes_nothing(berth, kind):
    ended = berth.run(*kind, "--", *SHELL, "exit 6", preexec_fn=lambda: signal.signal(17, signal.SIG_IGN))
    assert ended.returncode == 6


def test_an_answer_that_nobody_reads_does_not_change_the_status(berth):
    words = " ".join(berth.words("run", "--json", "--", "false"))
    script = f"{{ {words}; echo $? >&2; }} | true"
    ended = subprocess.run(["sh", "-c", script], env=berth.environment(), capture_output=True, text=True)
    assert ended.stderr.splitlines()[-1] == "1"
    noisy = "exec 2> /dev/full; " + " ".join(berth.words("run", "--", "sh", "-c", "'sleep 60 & exit 7'"))
    assert subprocess.run(["sh", "-c", noisy], env=berth.environment()).returncode == 7


def test_the_commands_own_json_option_is_not_berths(berth):
    refused = berth.run("--cores", "99999", "true", "--json")
    assert refused.stdout == ""
    assert refused.stderr.startswith("berth: ")
