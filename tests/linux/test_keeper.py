import fcntl
import os
import secrets
import signal
import sys
import termios
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from berth.linux.keeper import LEFTOVER_GRACE_S
from berth.linux.process import ProcessStat, descendants, end_marked, marked, read_stat
from berth.linux.spawn import Event

PYTHON = (sys.executable, "-I", "-S", "-c")

# Daemonises in both usual ways, and a third that ignores SIGTERM; touches argv[1] when all three are there.
DAEMONS = """
import os, signal, sys, time
for way in range(3):
    if os.fork() == 0:
        os.setsid()
        if way == 2: signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if os.fork(): os._exit(0)
        os.chdir("/")
        if way == 0: os.setsid()
        open(f"{sys.argv[1]}-{way}", "w").close()
        time.sleep(60)
        os._exit(0)
while not all(os.path.exists(f"{sys.argv[1]}-{way}") for way in range(3)): time.sleep(0.005)
open(sys.argv[1], "w").close()
if sys.argv[2] == "stay": time.sleep(60)
"""

# Stands for berth: starts a command under a keeper, lets it begin, and waits.
BERTH = """
import os, time
from berth.linux.spawn import Command, Keeper
mark, begin, *argv = sys.argv[1:]
keeper = Keeper.start(Command(argv=argv, environment=os.environ, mark=mark))
print(keeper.process.pid, *keeper.next_event(20).values, flush=True)
if begin == "go": keeper.go()
time.sleep(60)
"""


def stat_of(pid: int) -> ProcessStat:
    stat = read_stat(pid)
    assert stat is not None
    return stat


@pytest.fixture
def daemons(launcher, tmp_path: Path, until: Callable[..., None]):
    """Return a command that has daemonised three processes and stays, with its keeper."""
    keeper = launcher.begin(*PYTHON, DAEMONS, str(tmp_path / "daemons"), "stay")
    until((tmp_path / "daemons").exists)
    assert len(launcher.left()) == 5  # the keeper, the command, three daemons
    return keeper


# --- who dies with whom ----------------------------------------------------------------------------------------------


def test_death_of_berth_ends_everything(launcher, children, tmp_path: Path, until: Callable[..., None]) -> None:
    berth = children.start(BERTH, launcher.mark, "go", *PYTHON, DAEMONS, tmp_path / "daemons", "stay")
    berth.stdout.readline()
    until((tmp_path / "daemons").exists)
    assert len(launcher.left()) >= 5
    berth.kill()
    until(lambda: launcher.left() == [], 5)


def test_death_of_berth_closes_the_gate(launcher, children, tmp_path: Path, until: Callable[..., None]) -> None:
    berth = children.start(BERTH, launcher.mark, "wait", "touch", tmp_path / "marker")
    berth.stdout.readline()
    berth.kill()
    until(lambda: launcher.left() == [], 5)
    assert os.listdir(tmp_path) == []


def test_death_of_the_keeper_ends_the_command(daemons, launcher, until: Callable[..., None]) -> None:
    """The kernel ends the command; the daemons carry the mark, by which berth ends them."""
    command = descendants(daemons.process.pid)[0]
    daemons.process.kill()
    assert launcher.events(daemons) == [Event("lost")]
    until(lambda: read_stat(command.pid) is None, 5)
    ended, left = end_marked(launcher.mark, not_before_ticks=command.start_ticks, timeout_s=5)
    assert (ended, left) == (3, [])


def test_death_of_the_keeper_closes_the_gate(launcher, tmp_path: Path, until: Callable[..., None]) -> None:
    keeper = launcher.start("touch", str(tmp_path / "marker"))
    launcher.expect(keeper, "ready")
    keeper.process.kill()
    assert launcher.events(keeper) == [Event("lost")]
    until(lambda: launcher.left() == [], 5)
    assert os.listdir(tmp_path) == []


def test_death_of_both_ends_the_command(launcher, children, tmp_path: Path, until: Callable[..., None]) -> None:
    berth = children.start(BERTH, launcher.mark, "go", "sleep", "60")
    keeper, command = map(int, berth.stdout.readline().split())
    until(lambda: Path(f"/proc/{command}/cmdline").read_bytes() == b"sleep\x0060\0")
    os.kill(berth.pid, signal.SIGSTOP)
    os.kill(keeper, signal.SIGKILL)
    berth.kill()
    until(lambda: launcher.left() == [], 5)


def test_command_killed_at_the_gate(launcher, tmp_path: Path, until: Callable[..., None]) -> None:
    """Opening the gate of a command that is dead already reports its death and does not end the keeper."""
    keeper = launcher.start("touch", str(tmp_path / "marker"))
    (pid,) = launcher.expect(keeper, "ready")
    os.kill(keeper.process.pid, signal.SIGSTOP)
    until(lambda: stat_of(keeper.process.pid).state == "T")
    keeper.go()
    os.kill(pid, signal.SIGKILL)
    until(lambda: stat_of(pid).state == "Z")
    os.kill(keeper.process.pid, signal.SIGCONT)
    events = launcher.events(keeper)
    assert events[-1].kind == "ended"
    assert os.waitstatus_to_exitcode(events[-1].values[0]) == -signal.SIGKILL
    assert os.listdir(tmp_path) == []


def test_claims_fall_when_nothing_is_left(launcher, tmp_path: Path) -> None:
    """What the keeper holds is held until the last process of the run is gone, and the command does not hold it."""
    (tmp_path / "claim").touch()
    held = os.open(tmp_path / "claim", os.O_RDONLY)
    fcntl.flock(held, fcntl.LOCK_EX)
    keeper = launcher.begin("sleep", "60", held=[held])
    os.close(held)
    again = os.open(tmp_path / "claim", os.O_RDONLY)
    try:
        with pytest.raises(BlockingIOError):
            fcntl.flock(again, fcntl.LOCK_EX | fcntl.LOCK_NB)
        keeper.end(0)
        launcher.events(keeper)
        keeper.close()
        fcntl.flock(again, fcntl.LOCK_EX | fcntl.LOCK_NB)
    finally:
        os.close(again)


# --- what outlives the command ---------------------------------------------------------------------------------------


def test_what_outlives_the_command_is_ended_and_counted(launcher, tmp_path: Path) -> None:
    """Daemons get SIGTERM; the one that ignores it gets SIGKILL after the grace."""
    began = time.monotonic()
    keeper = launcher.begin(*PYTHON, DAEMONS, str(tmp_path / "daemons"), "end")
    (ended,) = launcher.events(keeper)
    assert (os.waitstatus_to_exitcode(ended.values[0]), ended.values[1:]) == (0, (3,))
    assert LEFTOVER_GRACE_S <= time.monotonic() - began < LEFTOVER_GRACE_S + 8
    keeper.close()
    assert launcher.left() == []


def test_what_heeds_the_request_costs_no_grace(launcher) -> None:
    keeper = launcher.begin("sh", "-c", "setsid sleep 60 & sleep 0.1")
    began = time.monotonic()
    (ended,) = launcher.events(keeper)
    assert ended.values == (0, 1)
    assert time.monotonic() - began < 0.1 + LEFTOVER_GRACE_S


def test_end_kills_daemons_too(daemons, launcher) -> None:
    daemons.end(0)
    (ended,) = launcher.events(daemons)
    assert os.waitstatus_to_exitcode(ended.values[0]) in (-signal.SIGTERM, -signal.SIGKILL)
    assert ended.values[2:] == ()
    daemons.close()
    assert launcher.left() == []


def test_process_whose_first_thread_has_ended_is_ended(launcher, tmp_path: Path, until: Callable[..., None]) -> None:
    code = (
        "import ctypes, sys, threading, time\n"
        "threading.Thread(target=lambda: (open(sys.argv[1], 'w').close(), time.sleep(60))).start()\n"
        "ctypes.CDLL(None).pthread_exit(None)\n"
    )
    keeper = launcher.begin("sh", "-c", '"$@" & sleep 60', "sh", *PYTHON, code, str(tmp_path / "begun"))
    until((tmp_path / "begun").exists)
    until(lambda: any(stat.state == "Z" for stat in descendants(keeper.process.pid)))
    keeper.end(0)
    began = time.monotonic()
    (ended,) = launcher.events(keeper)
    assert ended.values[2:] == ()
    assert time.monotonic() - began < 5


@pytest.mark.parametrize("ending", ["end", "close"])
def test_fork_bomb_is_ended_completely(launcher, tmp_path: Path, until: Callable[..., None], ending: str) -> None:
    """A tree that keeps forking, in sessions of its own and with orphans, up to 200 processes."""
    code = (
        "import os, sys, time\n"
        "budget = os.open(sys.argv[1], os.O_RDONLY)\n"  # One byte is read for every process; the offset is shared.
        "while os.read(budget, 1):\n"
        "    if os.fork() == 0:\n"
        "        os.setsid()\n"
        "        if os.fork(): os._exit(0)\n"
        "time.sleep(60)\n"
    )
    (tmp_path / "budget").write_bytes(b"x" * 200)
    keeper = launcher.begin(*PYTHON, code, str(tmp_path / "budget"))
    until(lambda: len(descendants(keeper.process.pid)) > 50)
    if ending == "end":
        keeper.end(0)
        (ended,) = launcher.events(keeper)
        assert ended.values[2:] == ()
    keeper.close()
    assert launcher.left() == []


@pytest.mark.parametrize("session", ["", "os.setsid()"])
def test_process_that_changes_its_pid_all_the_time_is_ended(launcher, tmp_path: Path, session: str) -> None:
    code = f"import os\nwhile True:\n    if os.fork(): os._exit(0)\n    {session or 'pass'}\n"
    keeper = launcher.begin("sh", "-c", '"$@" & sleep 60', "sh", *PYTHON, code)
    assert keeper.next_event(0.1) is None
    keeper.end(0)
    began = time.monotonic()
    (ended,) = launcher.events(keeper)
    assert ended.values[2:] == ()
    assert time.monotonic() - began < 5
    keeper.close()
    assert [launcher.left() for _ in range(5)] == [[]] * 5  # One look may miss it.


# --- the terminal ----------------------------------------------------------------------------------------------------

# A session leader with the terminal argv[2] on descriptor 0; reports who is in the foreground.
TERMINAL = """
import fcntl, os, signal, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
from berth.linux.spawn import Command, Keeper
keeper = Keeper.start(Command(argv=["sh", "-c", sys.argv[2]], environment=os.environ, mark=sys.argv[1], terminal=0))
pid, = keeper.next_event(20).values
print("command" if os.tcgetpgrp(0) == pid else "other", flush=True)
keeper.go()
while (event := keeper.next_event(20)).kind not in ("ended", "lost"):
    if event.kind == "stopped":
        print("berth" if os.tcgetpgrp(0) == os.getpgrp() else "other", flush=True)
        keeper.resume()
print("berth" if os.tcgetpgrp(0) == os.getpgrp() else "other", os.waitstatus_to_exitcode(event.values[0]), flush=True)
keeper.close()
"""


@pytest.mark.parametrize(
    ("script", "reported"),
    [
        ("exit 3", ["command", "berth 3"]),
        ("kill -TSTP $$; exit 4", ["command", "berth", "berth 4"]),
        ('read line; test "$line" = typed', ["command", "berth 0"]),
        ("kill -KILL $$", ["command", "berth -9"]),
    ],
)
def test_command_is_the_terminals_foreground(launcher, children, script: str, reported: list[str]) -> None:
    outside, inside = os.openpty()
    try:
        child = children.start(
            TERMINAL, launcher.mark, script, stdin=inside, start_new_session=True, env={"PATH": os.environ["PATH"]}
        )
        os.write(outside, b"typed\n")
        assert [child.stdout.readline().strip() for _ in reported] == reported
        assert child.wait(20) == 0
    finally:
        os.close(outside)
        os.close(inside)


def test_ctrl_c_reaches_the_command_alone(launcher, children) -> None:
    outside, inside = os.openpty()
    try:
        child = children.start(
            TERMINAL,
            launcher.mark,
            "trap 'exit 9' INT; echo begun > /dev/tty; while :; do sleep 0.01; done",
            stdin=inside,
            start_new_session=True,
            env={"PATH": os.environ["PATH"]},
        )
        assert child.stdout.readline() == "command\n"
        seen = b""
        while b"begun" not in seen:
            seen += os.read(outside, 100)
        os.write(outside, termios.tcgetattr(inside)[6][termios.VINTR])
        assert child.stdout.readline() == "berth 9\n"
        assert child.wait(20) == 0
    finally:
        os.close(outside)
        os.close(inside)


def test_keeper_is_named_and_hears_no_terminal_signal(launcher) -> None:
    keeper = launcher.begin("sleep", "60")
    assert Path(f"/proc/{keeper.process.pid}/comm").read_text() == "berth-keeper\n"
    for number in (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP, signal.SIGTERM, signal.SIGTSTP):
        os.kill(keeper.process.pid, number)
    assert keeper.next_event(0.05) is None
    assert marked(launcher.mark, not_before_ticks=0) != []
    keeper.end(0)
    assert [event.kind for event in launcher.events(keeper)] == ["ended"]


def test_other_runs_are_not_touched(launcher, children) -> None:
    bystander = children.start("print(flush=True)\nsys.stdin.read()\n", env={"BERTH_RUN": secrets.token_hex(32)})
    bystander.stdout.readline()
    keeper = launcher.begin("sleep", "60")
    keeper.end(0)
    launcher.events(keeper)
    assert bystander.poll() is None
