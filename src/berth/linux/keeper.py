"""The keeper: the process between berth and one command, which ends everything inside when berth is gone.

berth starts it as a fresh interpreter (`spawn.Keeper`), so it has one thread that lives as long as it does. It is the
subreaper of everything that the command starts: orphans become its children, so "no child left" proves that nothing
inside is left. It holds the run's claims open until then.

What each death does:

- berth dies: the control socket reports end of file, and the keeper kills everything inside, then exits.
- the keeper dies: the command gets SIGKILL from the kernel (PR_SET_PDEATHSIG); berth ends the rest by its mark.
- both die: the kernel ends the command; the next start of berth ends the rest by its mark.

Control socket, one line a message. berth sends the specification as JSON, then `go`, `end GRACE_MS PID...` (ask all but
these to end, kill after the grace), `pause` (stop everything) and `continue`. The keeper sends `ready PID`, `started`,
`failed ERRNO`, `stopped SIGNAL` and, when nothing is left inside, `ended WAIT_STATUS LEFT STUCK...`: how many processes
outlived the command and were ended, and the pids that could not be ended.
"""

import contextlib
import json
import os
import selectors
import signal
import socket
import time
from typing import Any, Final, NoReturn

from berth.linux import process, syscalls
from berth.linux.child import TERMINAL_SIGNALS, become_command

#: What processes that outlive their command get between SIGTERM and SIGKILL, in seconds.
LEFTOVER_GRACE_S: Final = 1.0
#: How long SIGKILL is repeated before a process counts as stuck (uninterruptible, or another user's), in seconds.
STUCK_AFTER_S: Final = 10.0
_POLL_S: Final = 0.002
_STUCK_POLL_S: Final = 0.5

#: A fork bomb may win a pass; it does not win this many.
_FREEZE_PASSES: Final = 100


class _Keeper:
    """One command and everything it starts."""

    def __init__(self, control: socket.socket) -> None:
        self.control = control
        self.selector = selectors.DefaultSelector()
        self.pending = b""
        self.spec: dict[str, Any] = {}
        self.child = 0
        self.gate = -1
        self.report: int | None = None
        self.executing = False
        self.released = False
        self.deadline: float | None = None
        self.spared: frozenset[int] = frozenset()
        self.paused: list[process.ProcessStat] = []

    def run(self) -> None:
        """Serve berth until nothing is left inside, or berth is gone."""
        wakeup_read, wakeup_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(wakeup_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda _number, _frame: None)
        self.selector.register(self.control, selectors.EVENT_READ, self.on_control)
        self.selector.register(wakeup_read, selectors.EVENT_READ, lambda: self.on_children(wakeup_read))
        while True:
            timeout = None if self.deadline is None else max(0.0, self.deadline - time.monotonic())
            ready = self.selector.select(timeout)
            if self.deadline is not None and time.monotonic() >= self.deadline:
                self.finish(kill_at_once=True)
            for key, _ in ready:
                key.data()

    def on_control(self) -> None:
        try:
            data = self.control.recv(65536)
        except ConnectionResetError:
            data = b""
        if not data:
            self.finish(kill_at_once=True)
        *lines, self.pending = (self.pending + data).split(b"\n")
        for line in lines:
            if self.spec:
                self.on_message(line.decode("ascii").split())
            else:
                self.spec = json.loads(line)
                self.start()

    def on_message(self, words: list[str]) -> None:
        match words[0]:
            case "go":
                with contextlib.suppress(BrokenPipeError):  # it was killed at the gate; its status says so
                    os.write(self.gate, b"g")
                    self.released = True
            case "end" if not self.released:
                self.finish(kill_at_once=True)
            case "end":
                self.spared = frozenset(map(int, words[2:]))
                self.deadline = time.monotonic() + int(words[1]) / 1000
                self.ask_to_end()
            case "pause":
                self.paused = self.freeze()
            case "continue":
                self.go_on()

    def go_on(self) -> None:
        """Continue what was paused from outside, or else the command that was stopped at the terminal."""
        self.take_terminal(self.child, from_group=self.spec["group"])
        for stat in self.paused:
            with contextlib.suppress(PermissionError):
                process.send_signal(stat, signal.SIGCONT)
        if not self.paused and self.spec["group_mode"] != "caller":
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.child, signal.SIGCONT)
        self.paused = []

    def start(self) -> None:
        """Fork the command behind its gate."""
        gate_read, self.gate = os.pipe2(os.O_CLOEXEC)
        self.report, report_write = os.pipe2(os.O_CLOEXEC)
        parent = os.getpid()
        try:
            self.child = os.fork()
        except OSError as error:  # no more processes, or no memory
            self.tell(f"failed {error.errno}")
            os._exit(1)
        if self.child == 0:
            os.close(self.gate)  # or the child would never see the keeper's end of it close
            become_command(self.spec, parent=parent, gate=gate_read, report=report_write)
        os.close(gate_read)
        os.close(report_write)
        os.set_blocking(self.report, False)
        self.selector.register(self.report, selectors.EVENT_READ, self.on_report)

    def on_report(self) -> None:
        """Pass on what the child says of itself: `r` at the gate, `x` before it executes, an errno where it fails."""
        if self.report is None:
            return
        said, at_end = b"", False
        with contextlib.suppress(BlockingIOError):
            while data := os.read(self.report, 64):
                said += data
            at_end = True
        if said.startswith(b"r"):
            self.tell(f"ready {self.child}")
            said = said[1:]
        if said.startswith(b"x"):
            self.executing = True
            said = said[1:]
        if not said and not at_end:
            return
        self.selector.unregister(self.report)
        os.close(self.report)
        self.report = None
        if said:
            self.tell(f"failed {int(said)}")
        elif self.executing:
            self.tell("started")

    def on_children(self, wakeup: int) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(wakeup, 4096)
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG | os.WUNTRACED)
                if pid == 0:
                    return
                if pid != self.child:
                    continue
                if os.WIFSTOPPED(status):
                    self.take_terminal(self.spec["group"], from_group=self.child)
                    self.tell(f"stopped {os.WSTOPSIG(status)}")
                else:
                    self.finish(status=status)

    def ask_to_end(self) -> None:
        """Send SIGTERM, and SIGCONT so that it is heard, to all but the spared; a lone gate simply closes."""
        for stat in process.descendants(os.getpid()):
            if stat.pid not in self.spared:
                with contextlib.suppress(PermissionError):
                    process.send_signal(stat, signal.SIGTERM)
                    process.send_signal(stat, signal.SIGCONT)

    def finish(self, *, status: int | None = None, kill_at_once: bool = False) -> NoReturn:
        """End everything inside, tell berth, and exit: the claims fall with this process."""
        self.on_report()
        self.take_terminal(self.spec.get("group", 0), from_group=self.child)
        left = len(process.descendants(os.getpid())) if status is not None else 0
        if left and not kill_at_once and self.spec["leftover_grace"]:
            self.ask_to_end()
            grace_ends = time.monotonic() + LEFTOVER_GRACE_S
            status = self.reap_until(min(grace_ends, self.deadline or grace_ends), status)
        status, stuck = self.kill_all(status)
        self.tell(" ".join(map(str, ("ended", -1 if status is None else status, left, *stuck))))
        while stuck:  # they still occupy the claimed cores, so the claims stay with them
            time.sleep(_STUCK_POLL_S)
            _, stuck = self.kill_all(status, patience_s=0.0)
        os._exit(0)

    def kill_all(self, status: int | None, patience_s: float = STUCK_AFTER_S) -> tuple[int | None, list[int]]:
        """Kill every descendant, forking ones too, until no child is left; return the status and the stuck pids."""
        deadline = time.monotonic() + patience_s
        pause_s = _POLL_S
        while True:
            self.freeze()
            for stat in process.descendants(os.getpid()):
                with contextlib.suppress(PermissionError):
                    process.send_signal(stat, signal.SIGKILL)
            status = self.catch_children(time.monotonic() + pause_s, status)
            pause_s = min(2 * pause_s, _STUCK_POLL_S)
            left = process.descendants(os.getpid())
            if not left and self.childless():
                return status, []
            if time.monotonic() >= deadline:
                return status, [stat.pid for stat in left] or self.children()

    def catch_children(self, deadline: float, status: int | None) -> int | None:
        """Kill and reap what becomes a child of the keeper, until nothing new does or `deadline` has passed.

        A process that forks and exits over and over has another pid before a pass over /proc reaches it. But each time
        it is orphaned it becomes a child of the keeper, and those the kernel lists in one short file. Their pids are
        theirs until they are reaped here.
        """
        seen: list[int] = []
        while (children := self.children()) != seen and time.monotonic() < deadline:
            for pid in children:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
            status = self.reap_until(0.0, status)
            seen = children
        return self.reap_until(deadline, status)

    def children(self) -> list[int]:
        """Return the pids of the keeper's children; none where the kernel has no such list (CONFIG_PROC_CHILDREN)."""
        with contextlib.suppress(FileNotFoundError), open(f"/proc/self/task/{os.getpid()}/children") as listed:
            return [int(pid) for pid in listed.read().split()]
        return []

    def freeze(self) -> list[process.ProcessStat]:
        """Stop descendants until a pass finds no new one, and return those that ran: a stopped one cannot fork."""
        stopped: dict[tuple[int, int], process.ProcessStat] = {}
        for _ in range(_FREEZE_PASSES):
            new = [s for s in process.descendants(os.getpid()) if (s.pid, s.start_ticks) not in stopped]
            for stat in new:
                stopped[stat.pid, stat.start_ticks] = stat
                with contextlib.suppress(PermissionError):
                    process.send_signal(stat, signal.SIGSTOP)
            if not new:
                break
        return [stat for stat in stopped.values() if stat.state != "T"]

    def reap_until(self, deadline: float, status: int | None) -> int | None:
        """Reap children until none is left or `deadline` has passed; return the command's status once known."""
        pause_s = _POLL_S / 4
        while True:
            try:
                pid, ended = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return status
            if pid == self.child:
                status = ended
            elif pid == 0:
                if time.monotonic() >= deadline:
                    return status
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, _STUCK_POLL_S / 10)

    def childless(self) -> bool:
        try:
            os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return True
        return False

    def take_terminal(self, group: int, *, from_group: int) -> None:
        """Make `group` the terminal's foreground where `from_group` is: nobody else's foreground is ever taken."""
        terminal = self.spec.get("terminal")
        if terminal is None:
            return
        with contextlib.suppress(OSError):  # the terminal hung up, or the group is gone: nothing to hand over
            if os.tcgetpgrp(terminal) == from_group:
                os.tcsetpgrp(terminal, group)

    def tell(self, message: str) -> None:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self.control.sendall(message.encode("ascii") + b"\n")


def main(control_fd: int) -> NoReturn:
    """Be the keeper whose control socket is the inherited descriptor `control_fd`."""
    for number in (*TERMINAL_SIGNALS, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the descriptor of the listing itself
            os.set_inheritable(int(name), int(name) <= 2)
    with contextlib.suppress(OSError), open("/proc/self/comm", "wb") as comm:
        comm.write(b"berth-keeper")
    syscalls.set_child_subreaper()
    keeper = _Keeper(socket.socket(fileno=control_fd))
    try:
        keeper.run()
    except Exception:  # noqa: BLE001 - the one place of this process: whatever broke, nothing inside lives on
        keeper.kill_all(None)
    os._exit(1)
