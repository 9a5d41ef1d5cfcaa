import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from berth.linux.process import (
    RUN_MARK,
    ProcessStat,
    all_pids,
    boot_id,
    command_line,
    descendants,
    end_marked,
    marked,
    read_stat,
    read_status,
    send_signal,
)

SLEEP = "print(flush=True)\nsys.stdin.read()\n"


@pytest.fixture
def sleeper(children) -> subprocess.Popen[str]:
    """Return a child that has begun and waits."""
    child = children.start(SLEEP)
    child.stdout.readline()
    return child


@pytest.fixture
def run() -> Iterator[str]:
    """Return the mark of a run; what still carries it when the test ends is killed."""
    mark = secrets.token_hex(32)
    yield mark
    end_marked(mark, not_before_ticks=0, timeout_s=10)


def stat_of(pid: int) -> ProcessStat:
    stat = read_stat(pid)
    assert stat is not None
    return stat


# --- looking ---------------------------------------------------------------------------------------------------------


def test_boot_id_is_one_uuid() -> None:
    assert re.fullmatch(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", boot_id())
    assert boot_id() == boot_id()


def test_stat_of_this_process() -> None:
    stat = stat_of(os.getpid())
    assert (stat.pid, stat.state, stat.parent) == (os.getpid(), "R", os.getppid())
    uptime = float(Path("/proc/uptime").read_text().split()[0])
    assert 0 < stat.start_ticks <= uptime * os.sysconf("SC_CLK_TCK")


def test_stat_agrees_with_ps(sleeper) -> None:
    if shutil.which("ps") is None:
        pytest.skip("ps (package procps) is not installed")
    words = subprocess.run(
        ["ps", "-o", "ppid=,state=", "-p", str(sleeper.pid)], capture_output=True, text=True, check=True
    ).stdout.split()
    stat = stat_of(sleeper.pid)
    assert (str(stat.parent), stat.state) == tuple(words)


@pytest.mark.parametrize("name", [b"a) Z 1 2 (b", b"()", b") R", b"\xff\n 0"])
def test_stat_of_a_misleading_name(children, name: bytes) -> None:
    child = children.start(
        "open('/proc/self/comm', 'wb').write(bytes.fromhex(sys.argv[1]))\nprint(flush=True)\nsys.stdin.read()\n",
        name.hex(),
    )
    child.stdout.readline()
    stat = stat_of(child.pid)
    assert stat.parent == os.getpid()
    assert stat.state in "RS"
    assert stat.start_ticks >= stat_of(os.getpid()).start_ticks


def test_no_such_process(sleeper) -> None:
    stat = stat_of(sleeper.pid)
    sleeper.kill()
    sleeper.wait()
    assert read_stat(sleeper.pid) is None
    assert not send_signal(stat, signal.SIGTERM)
    assert command_line(sleeper.pid) == "?"
    with pytest.raises(FileNotFoundError):
        read_status(sleeper.pid)


def test_status(sleeper) -> None:
    status = read_status(sleeper.pid)
    assert status["Pid"] == str(sleeper.pid)
    assert status["PPid"] == str(os.getpid())
    assert re.fullmatch(r"[0-9,-]+", status["Cpus_allowed_list"])


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (["sleep", "60"], "sleep 60"),
        (["a name\nwith a line", "60"], "a name?with a line 60"),
        ([b"\xff", "60"], "\\xff 60"),
        (["n" * 100, "60"], "n" * 77 + "..."),
    ],
)
def test_command_line_in_a_message(words: list[str], shown: str, until: Callable[..., None]) -> None:
    with subprocess.Popen(words, executable=shutil.which("sleep")) as process:
        try:
            until(lambda: command_line(process.pid) != "?")
            found = command_line(process.pid)
        finally:
            process.kill()
    assert found == shown


def test_pids_are_those_of_proc(sleeper) -> None:
    pids = all_pids()
    assert {1, os.getpid(), sleeper.pid} <= set(pids)
    assert pids == sorted(pids)


# --- descendants -----------------------------------------------------------------------------------------------------

# A chain of three below this process; the middle one has a zombie child too. Prints the pids, zombie last.
CHAIN = """
import os, time
def chain(left):
    pid = os.fork()
    if pid == 0:
        if left: chain(left - 1)
        print(os.getpid(), flush=True)
        time.sleep(60)
chain(2)
zombie = os.fork()
if zombie == 0: os._exit(0)
os.waitid(os.P_PID, zombie, os.WEXITED | os.WNOWAIT)
print(zombie, flush=True)
sys.stdin.read()
"""


def test_descendants_are_alive_and_in_order(children) -> None:
    child = children.start(CHAIN)
    pids = sorted(int(child.stdout.readline()) for _ in range(4))
    found = descendants(child.pid)
    for stat in found:
        os.kill(stat.pid, signal.SIGKILL)
    assert {stat.pid for stat in found} < set(pids)
    assert len(found) == 3
    assert [stat.parent for stat in found] == [child.pid, found[0].pid, found[1].pid]


def test_no_descendants(sleeper) -> None:
    assert descendants(sleeper.pid) == []


# --- identity --------------------------------------------------------------------------------------------------------


def test_signal_reaches_the_process(sleeper) -> None:
    assert send_signal(stat_of(sleeper.pid), signal.SIGTERM)
    assert sleeper.wait() == -signal.SIGTERM


@pytest.mark.parametrize("ticks", [-1, 1])
def test_signal_is_kept_from_a_process_of_another_start(sleeper, ticks: int) -> None:
    stat = stat_of(sleeper.pid)
    assert not send_signal(stat._replace(start_ticks=stat.start_ticks + ticks), signal.SIGKILL)
    assert send_signal(stat, 0)
    assert sleeper.poll() is None


def test_signal_to_another_users_process(readable_children, other_user) -> None:
    victim = readable_children.start(SLEEP)
    victim.stdout.readline()
    printed = readable_children.run(
        "from berth.linux.process import read_stat, send_signal\n"
        "try: send_signal(read_stat(int(sys.argv[1])), 15)\n"
        "except PermissionError: print('refused', end='')\n",
        victim.pid,
        prefix=other_user,
    )
    assert printed == "refused"
    assert victim.poll() is None


def test_reused_pid_is_another_process(children, as_root) -> None:
    """The kernel is made to give the pid of a dead process to a new one, in a pid namespace of its own."""
    prefix = ["unshare", "--pid", "--fork", "--mount-proc"]
    if subprocess.run([*prefix, "true"], stderr=subprocess.DEVNULL).returncode != 0:
        pytest.skip("pid namespaces cannot be made here")
    printed = children.run(
        "import os, time\n"
        "from berth.linux.process import read_stat, send_signal\n"
        "def sleeper():\n"
        "    pid = os.fork()\n"
        "    if pid == 0: time.sleep(60)\n"
        "    return pid\n"
        "first = sleeper()\n"
        "old = read_stat(first)\n"
        "os.kill(first, 9); os.waitpid(first, 0)\n"
        "time.sleep(0.05)\n"
        "open('/proc/sys/kernel/ns_last_pid', 'w').write(str(first - 1))\n"
        "second = sleeper()\n"
        "assert second == first, (first, second)\n"
        "sent = send_signal(old, 9)\n"
        "alive = os.waitpid(second, os.WNOHANG) == (0, 0)\n"
        "os.kill(second, 9)\n"
        "print(sent, alive, end='')\n",
        prefix=prefix,
    )
    assert printed == "False True"


# Starts a thread that sleeps, and ends the first one: /proc shows a zombie, and the process lives on.
DEAD_LEADER = """
import ctypes, threading, time
def rest():
    print("ready", flush=True)
    time.sleep(60)
threading.Thread(target=rest).start()
ctypes.CDLL(None).pthread_exit(None)
"""


@pytest.fixture
def dead_leader(children, run: str, until: Callable[..., None]) -> subprocess.Popen[str]:
    """Return a marked process whose first thread has ended while another lives."""
    child = children.start(DEAD_LEADER, env={RUN_MARK: run})
    assert child.stdout.readline() == "ready\n"
    until(lambda: stat_of(child.pid).state == "Z")
    return child


def test_process_whose_first_thread_has_ended_is_alive(dead_leader, run: str) -> None:
    assert dead_leader.pid in [stat.pid for stat in descendants(os.getpid())]
    assert end_marked(run, not_before_ticks=0, timeout_s=10) == (1, [])
    assert dead_leader.wait() == -signal.SIGKILL


# --- marks -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def marked_process(children) -> Callable[..., subprocess.Popen[str]]:
    """Return a function that starts a process with a mark."""

    def start(run: str | None, code: str = SLEEP) -> subprocess.Popen[str]:
        child = children.start(code, env={} if run is None else {RUN_MARK: run})
        child.stdout.readline()
        return child

    return start


def test_only_marked_processes_are_ended(run: str, marked_process, children) -> None:
    mine = [marked_process(run) for _ in range(3)]
    others = [
        marked_process(None),
        marked_process(secrets.token_hex(32)),
        marked_process(run[:-1]),
        marked_process(run + "0"),
        children.start(SLEEP, env={"X" + RUN_MARK: run, "OTHER": f"{RUN_MARK}={run}"}),
        children.start(SLEEP, f"{RUN_MARK}={run}", env={}),
    ]
    assert end_marked(run, not_before_ticks=0, timeout_s=10) == (3, [])
    assert [process.wait() for process in mine] == [-signal.SIGKILL] * 3
    assert [process.poll() for process in others] == [None] * 6


def test_earlier_processes_are_not_touched(run: str, marked_process) -> None:
    early = marked_process(run)
    time.sleep(0.03)  # The kernel counts starts in ticks of 10 ms.
    late = marked_process(run)
    since = stat_of(late.pid).start_ticks
    assert since > stat_of(early.pid).start_ticks
    assert [stat.pid for stat in marked(run, not_before_ticks=since)] == [late.pid]
    assert end_marked(run, not_before_ticks=since, timeout_s=10) == (1, [])
    assert late.wait() == -signal.SIGKILL
    assert early.poll() is None


def test_process_that_executes_itself_again_and_again_is_seen(run: str) -> None:
    """In the middle of execve(2) a process shows no environment, and it is no less marked for that."""
    code = "import os, sys; os.execv(sys.executable, sys.orig_argv)"
    words = [sys.executable, "-I", "-S", "-X", "frozen_modules=on", "-c", code]
    with subprocess.Popen(words, env={RUN_MARK: run}) as restless:
        try:
            began = time.monotonic()
            seen = []
            while len(seen) < 10 or time.monotonic() - began < 0.7:
                seen.append([stat.pid for stat in marked(run, not_before_ticks=0)])
        finally:
            restless.kill()
    assert [pids for pids in seen if pids != [restless.pid]] == []


def test_caller_and_zombies_are_left_out(run: str, children) -> None:
    printed = children.run(
        "import os\n"
        "from berth.linux.process import marked\n"
        "zombie = os.fork()\n"
        "if zombie == 0: os._exit(0)\n"
        "os.waitid(os.P_PID, zombie, os.WEXITED | os.WNOWAIT)\n"
        "print(marked(sys.argv[1], not_before_ticks=0), end='')\n",
        run,
        env={RUN_MARK: run},
    )
    assert printed == "[]"


def test_processes_that_keep_forking_are_ended(run: str, marked_process, until: Callable[..., None]) -> None:
    bomb = marked_process(
        run,
        "import os, time\n"
        "print(flush=True)\n"
        "for _ in range(40):\n"
        "    if os.fork() == 0:\n"
        "        os.setsid()\n"
        "        for _ in range(2):\n"
        "            time.sleep(0.005)\n"
        "            os.fork()\n"
        "        time.sleep(60)\n"
        "time.sleep(60)\n",
    )
    until(lambda: len(marked(run, not_before_ticks=0)) > 10)
    ended, left = end_marked(run, not_before_ticks=0, timeout_s=20)
    assert ended > 10
    assert left == []
    assert bomb.wait() == -signal.SIGKILL
    assert marked(run, not_before_ticks=0) == []


def test_another_users_process_is_neither_seen_nor_ended(readable_children, other_user, run: str) -> None:
    stranger = readable_children.start(SLEEP, env={RUN_MARK: run})
    stranger.stdout.readline()
    printed = readable_children.run(
        "from berth.linux.process import end_marked\n"
        "print(end_marked(sys.argv[1], not_before_ticks=0, timeout_s=0.1), end='')\n",
        run,
        prefix=other_user,
    )
    assert printed == "(0, [])"
    assert stranger.poll() is None


def test_host_that_hides_processes(readable_children, other_user) -> None:
    """With hidepid=1 another user's /proc/PID may not be entered; that stops nobody from seeing their own."""
    mount = "mount -t proc -o hidepid=1 proc /proc && exec"
    prefix = ["unshare", "--mount", "sh", "-c", f'{mount} {" ".join(other_user)} "$@"', "sh"]
    printed = readable_children.run(
        "import os, time\n"
        "from berth.linux.process import all_pids, descendants, marked, read_stat\n"
        "child = os.fork()\n"
        "if child == 0: time.sleep(60)\n"
        "found = [stat.pid for stat in descendants(os.getpid())]\n"
        "os.kill(child, 9)\n"
        "print(found == [child], marked('x', not_before_ticks=0), end='')\n",
        prefix=prefix,
    )
    assert printed == "True []"
