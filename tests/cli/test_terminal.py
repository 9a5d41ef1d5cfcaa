"""`berth run` at a terminal: the command is the foreground job, as if berth were not between."""

import os
import pty
import re
import select
import signal
import sys
import time

import pytest

from berth.linux.process import descendants


class Terminal:
    """A shell with job control on a terminal of its own, typed into like a person would."""

    def __init__(self, berth) -> None:
        self.directory = berth.workspace
        self.pid, self.fd = pty.fork()
        if self.pid == 0:
            os.chdir(berth.workspace)
            env = berth.environment(PS1="$ ", HISTFILE="", PATH=os.environ["PATH"])
            os.execvpe("bash", ["bash", "--norc", "--noprofile", "-i"], env)
        self.seen = ""
        self.type("b() { " + f"{sys.executable} -m berth run" + ' "$@"; }; stty -echo; echo rea""dy')
        self.expect("ready")

    def type(self, text: str) -> None:
        os.write(self.fd, text.encode() + b"\n")

    def press(self, control: bytes) -> None:
        os.write(self.fd, control)

    def expect(self, pattern: str, seconds: float = 10.0) -> re.Match[str]:
        deadline = time.monotonic() + seconds
        while not (match := re.search(pattern, self.seen)):
            readable, _, _ = select.select([self.fd], [], [], max(0.0, deadline - time.monotonic()))
            assert readable, f"no {pattern!r} within {seconds} s in {self.seen!r}"
            self.seen += os.read(self.fd, 4096).decode(errors="replace")
        self.seen = self.seen[match.end() :]
        return match

    def close(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        os.close(self.fd)


@pytest.fixture
def terminal(berth):
    if not os.path.exists("/bin/bash"):
        pytest.skip("needs bash, whose job control is well known")
    opened = Terminal(berth)
    yield opened
    opened.close()


def test_the_command_is_the_foreground_and_reads_the_terminal(terminal):
    terminal.type("b -- sh -c 'echo up; read word; echo got $word'; echo status $?")
    terminal.expect("up")
    terminal.type("hello")
    terminal.expect("got hello")
    terminal.expect("status 0")


def test_ctrl_c_reaches_the_command(terminal, berth):
    terminal.type("b -- sh -c 'echo up; exec sleep 60'; echo status $?")
    terminal.expect("up")
    terminal.press(b"\x03")
    terminal.expect("status 130")
    assert berth.record()["exit"]["signal"] == signal.SIGINT


def test_ctrl_c_ends_a_sandbox(terminal, berth, sandbox_works):
    if not sandbox_works:
        pytest.skip("bubblewrap cannot make a sandbox here; see `berth doctor`")
    terminal.type("b --sandbox -- sh -c 'echo up; exec sleep 60'; echo status $?")
    terminal.expect("up")
    terminal.press(b"\x03")
    terminal.expect("status 130")
    assert berth.record()["exit"]["outcome"] == "stopped"


def test_ctrl_z_stops_the_job_and_fg_continues_it(terminal):
    terminal.type("b -- sh -c 'echo up; read word; echo got $word'")
    terminal.expect("up")
    terminal.press(b"\x1a")
    terminal.expect("Stopped")
    terminal.type("echo shell is back")
    terminal.expect("shell is back")
    terminal.type("fg")
    terminal.expect("berth run")
    time.sleep(0.2)
    terminal.type("again")
    terminal.expect("got again")


def test_ctrl_z_stops_a_sandbox_and_fg_continues_it(terminal, berth, sandbox_works):
    if not sandbox_works:
        pytest.skip("bubblewrap cannot make a sandbox here; see `berth doctor`")
    terminal.type("b --sandbox -- sh -c 'echo u\"\"p; while :; do sleep 0.05; echo x >> ticks; done'")
    terminal.expect("up")
    terminal.press(b"\x1a")
    terminal.expect("Stopped")
    ticks = berth.workspace / "ticks"
    before = ticks.stat().st_size if ticks.exists() else 0
    time.sleep(0.3)
    assert (ticks.stat().st_size if ticks.exists() else 0) == before
    terminal.type("fg")
    terminal.expect("berth run")
    deadline = time.monotonic() + 10
    while not ticks.exists() or ticks.stat().st_size == before:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    terminal.press(b"\x03")
    terminal.type('echo st""atus $?')
    terminal.expect("status 130")


def test_a_background_job_leaves_the_terminal_alone(terminal):
    terminal.type("b -- sh -c 'sleep 0.3; echo d\"\"one' &")
    terminal.type("read line; echo line $line")
    time.sleep(0.1)
    terminal.type("mine")
    terminal.expect("line mine")
    terminal.expect("done")


@pytest.mark.parametrize("script", [False, True], ids=["own job", "part of a script"])
def test_the_terminal_is_given_back_when_berth_is_killed(terminal, script):
    run = f"{sys.executable} -m berth run -- sh -c 'echo u\"\"p; exec sleep 60'"
    with open(f"{terminal.directory}/script.sh", "w") as file:
        file.write(f"{run}\nsleep 0.2\nread word\necho got $word\n")
    terminal.type("sh script.sh" if script else f'{run}; read word; echo g""ot $word')
    terminal.expect("up")
    (berth,) = [stat.pid for stat in descendants(terminal.pid) if b"\0-m\0berth\0run\0" in cmdline(stat.pid)]
    os.kill(berth, signal.SIGKILL)
    time.sleep(0.5)
    terminal.type("mine")
    terminal.expect("got mine")


def test_a_pipeline_keeps_the_terminal_together(terminal):
    """`less` and the like read the terminal while berth's command feeds them."""
    terminal.type(
        "b -- sh -c 'echo fed; sleep 0.3' | sh -c 'read line; read word < /dev/tty; echo g\"\"ot $line $word'"
    )
    time.sleep(0.6)
    terminal.type("typed")
    terminal.expect("got fed typed")


def cmdline(pid: int) -> bytes:
    with open(f"/proc/{pid}/cmdline", "rb") as file:
        return file.read()
