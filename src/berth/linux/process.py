"""Processes as /proc shows them: who they are, what belongs to whom, and how to end a marked one.

A pid alone never identifies a process. Its start time is compared, and a pidfd pins it, before a signal is sent.
"""

import contextlib
import os
import signal
import time
from typing import NamedTuple

from berth.errors import AbilityError

#: Environment variable that marks every process of a run; its value is the run's epoch id.
RUN_MARK = "BERTH_RUN"

_POLL_S = 0.005
#: How long a process may show no environment because it is in the middle of execve(2), in seconds.
_EXECVE_TIMEOUT_S = 1.0
#: Fields of /proc/PID/stat by their number in proc_pid_stat(5).
STATE, PARENT, FLAGS, THREADS, START, ENV_START, ENV_END = 3, 4, 9, 20, 22, 50, 51
#: A thread in one of these states runs no more code.
DEAD_STATES = "ZXx"
#: linux/sched.h: a kernel thread, which has no environment.
PF_KTHREAD = 0x00200000


class StatLine(NamedTuple):
    """One line of /proc/PID/stat.

    Attributes:
        name: The name of the thread, as bytes: it may hold anything, spaces and `)` too.
        after: The fields after the name; the first is field 3.
    """

    name: bytes
    after: list[bytes]

    def text(self, field: int) -> str:
        """Return a field by its number in proc_pid_stat(5)."""
        return self.after[field - 3].decode("ascii")

    def number(self, field: int) -> int:
        """Return a field by its number in proc_pid_stat(5), as a number."""
        return int(self.after[field - 3])


def parse_stat(text: bytes) -> StatLine:
    """Return the parts of a stat file: the name ends at the last `)`, whatever it holds.

    Raises:
        ValueError: There is no name in it.
    """
    end = text.rindex(b")")
    return StatLine(name=text[text.index(b"(") + 1 : end], after=text[end + 1 :].split())


def parse_status(text: str) -> dict[str, str]:
    """Return the text of a status file (proc_pid_status(5)) as a mapping of its keys."""
    pairs = (line.split(":", 1) for line in text.split("\n") if ":" in line)
    return {key: value.strip() for key, value in pairs}


class ProcessStat(NamedTuple):
    """Fields of /proc/PID/stat that berth uses (proc_pid_stat(5))."""

    pid: int
    state: str
    parent: int
    #: Start time in clock ticks since boot (field 22). Two processes may share a tick.
    start_ticks: int
    #: Number of threads (field 20).
    threads: int = 1

    @property
    def alive(self) -> bool:
        """Whether any thread can run code: a process whose first thread has ended is shown as a zombie."""
        return self.state not in DEAD_STATES or self.threads > 1


def boot_id() -> str:
    """Return the random id of this boot (random(4)): start times of another boot mean nothing."""
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        return file.read().strip()


def check_own_proc() -> None:
    """Refuse to go by a /proc of another pid namespace: every number in it would mean somebody else.

    Raises:
        AbilityError: /proc does not show this process.
    """
    try:
        shown = os.readlink("/proc/self")
    except OSError as error:
        shown = str(error)
    if shown != str(os.getpid()):
        raise AbilityError(
            "foreign-proc",
            f"/proc belongs to another pid namespace: it shows this process, {os.getpid()}, as {shown}",
            "Mount one for this namespace: `unshare --pid --fork --mount-proc`, or `mount -t proc proc /proc`.",
        )


def alone_in_group() -> bool:
    """Say whether no other process that /proc shows is in this process's group: it is no part of a pipeline."""
    group = os.getpgrp()
    return not any(pid != os.getpid() and _group_of(pid) == group for pid in all_pids())


def _group_of(pid: int) -> int:
    try:
        return os.getpgid(pid)
    except ProcessLookupError:
        return 0


def read_stat(pid: int) -> ProcessStat | None:
    """Return the state of `pid`, or None where there is no such process, or /proc hides it (hidepid of proc(5))."""
    line = _stat_line(f"/proc/{pid}")
    if line is None:
        return None
    return ProcessStat(
        pid=pid,
        state=line.text(STATE),
        parent=line.number(PARENT),
        start_ticks=line.number(START),
        threads=line.number(THREADS),
    )


def _stat_line(directory: str) -> StatLine | None:
    try:
        with open(f"{directory}/stat", "rb") as file:
            return parse_stat(file.read())
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return None


def read_status(pid: int) -> dict[str, str]:
    """Return /proc/PID/status (proc_pid_status(5)) as a mapping of its keys.

    Raises:
        OSError: The process is gone, or may not be read.
    """
    with open(f"/proc/{pid}/status", encoding="utf-8", errors="replace", newline="\n") as file:
        return parse_status(file.read())


def command_line(pid: int) -> str:
    """Return the command line of `pid` for a message, at most 80 characters, or "?" where it cannot be read.

    Control characters of another user's command line never reach a terminal.
    """
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            words = file.read(4096).decode("utf-8", "backslashreplace").split("\0")
    except OSError:
        return "?"
    if len(words) > 2 and os.path.basename(words[0]).startswith("python") and not words[1].startswith("-"):
        del words[0]  # the interpreter of a script says nothing
    words[0] = os.path.basename(words[0])
    text = "".join(c if c.isprintable() else "?" for c in " ".join(word for word in words if word))
    return (text[:77] + "...") if len(text) > 80 else (text or "?")


def all_pids(root: str = "/") -> list[int]:
    """Return the pid of every process that /proc shows, ascending; `root` is where the machine's files begin."""
    return sorted(int(name) for name in os.listdir(os.path.join(root, "proc")) if name.isascii() and name.isdigit())


def descendants(ancestor: int) -> list[ProcessStat]:
    """Return every living descendant of `ancestor`, parents before children, zombies left out.

    One pass over /proc: a process that forks meanwhile may be missed, so callers repeat until nothing is left.
    """
    stats = [stat for stat in map(read_stat, all_pids()) if stat is not None]
    children: dict[int, list[ProcessStat]] = {}
    for stat in stats:
        children.setdefault(stat.parent, []).append(stat)
    found: list[ProcessStat] = []
    queue = [ancestor]
    while queue:
        below = children.get(queue.pop(), [])
        found.extend(stat for stat in below if stat.alive)
        queue.extend(stat.pid for stat in below)
    return found


def send_signal(target: ProcessStat, number: int) -> bool:
    """Send `number` to exactly that process and say whether it was sent.

    False where the process is gone or its pid belongs to another process by now.

    Raises:
        PermissionError: The process belongs to another user.
    """
    try:
        pidfd = os.pidfd_open(target.pid)
    except ProcessLookupError:
        return False
    try:
        now = read_stat(target.pid)
        if now is None or now.start_ticks != target.start_ticks:
            return False
        signal.pidfd_send_signal(pidfd, number)
    except ProcessLookupError:
        return False
    finally:
        os.close(pidfd)
    return True


def marked(run: str, *, not_before_ticks: int) -> list[ProcessStat]:
    """Return the living processes that carry the mark of `run` and started no earlier than `not_before_ticks`.

    The mark is read from /proc/PID/environ, which shows the environment a program was started with. Processes of
    other users cannot be read and are left out, unless the caller is root.
    """
    wanted = f"{RUN_MARK}={run}".encode("ascii")
    found = []
    for pid in all_pids():
        stat = read_stat(pid)
        if stat is None or not stat.alive or stat.start_ticks < not_before_ticks or pid == os.getpid():
            continue
        with contextlib.suppress(OSError):
            if wanted in (read_environ(pid) or b"").split(b"\0"):
                found.append(stat)
    return found


def read_environ(pid: int, root: str = "/") -> bytes | None:
    """Return the environment `pid` was started with; where its first thread has ended, as another thread shows it.

    In the middle of execve(2) the new memory is in place and the environment in it is not yet: that is waited for, but
    not on a recorded machine, where nothing changes.

    Args:
        pid: The process.
        root: Where the files of the machine begin.

    Returns:
        The variables, each ended by NUL; None where the process has ended or may not be read.
    """
    directory = os.path.join(root, "proc", str(pid))
    deadline = time.monotonic() + (_EXECVE_TIMEOUT_S if root == "/" else 0.0)
    while True:
        line = _stat_line(directory)
        if line is None or (line.text(STATE) in DEAD_STATES and line.number(THREADS) <= 1):
            return None
        readable = False
        # The first thread, once it has ended, refuses or has none; another thread still shows it.
        for place in _thread_directories(directory) if line.text(STATE) in DEAD_STATES else [directory]:
            with contextlib.suppress(FileNotFoundError, ProcessLookupError, PermissionError):
                with open(f"{place}/environ", "rb") as file:
                    found = file.read()
                readable = True
                if found:
                    return found
        if not readable:
            return None
        if not _has_environment(directory) or time.monotonic() >= deadline:
            return b""
        time.sleep(_POLL_S / 10)


def _thread_directories(directory: str) -> list[str]:
    with contextlib.suppress(FileNotFoundError, ProcessLookupError, PermissionError):
        return [f"{directory}/task/{thread}" for thread in os.listdir(f"{directory}/task")]
    return []


def _has_environment(directory: str) -> bool:
    """Say whether a process has an environment or is about to get one."""
    line = _stat_line(directory)
    if line is None or line.number(FLAGS) & PF_KTHREAD:
        return False
    return line.number(ENV_END) == 0 or line.number(ENV_START) < line.number(ENV_END)


def end_marked(run: str, *, not_before_ticks: int, timeout_s: float) -> tuple[int, list[ProcessStat]]:
    """Kill every process that carries the mark of `run`, until none is left or `timeout_s` seconds are over.

    Returns:
        How many processes were signalled, and those that are still there.
    """
    deadline = time.monotonic() + timeout_s
    ended: set[tuple[int, int]] = set()
    while left := marked(run, not_before_ticks=not_before_ticks):
        for stat in left:
            with contextlib.suppress(PermissionError):
                if send_signal(stat, signal.SIGKILL):
                    ended.add((stat.pid, stat.start_ticks))
        if time.monotonic() >= deadline:
            return len(ended), marked(run, not_before_ticks=not_before_ticks)
        time.sleep(_POLL_S)
    return len(ended), []
