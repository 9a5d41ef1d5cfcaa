"""Start one command behind a gate, under a keeper of its own.

    keeper = Keeper.start(command, held=[lock_fd])
    event = keeper.next_event(timeout_s=5)      # Event("ready", (pid,)): look at the process, then
    keeper.go()

The thread that calls `start` may end at once: nothing is tied to it. See `keeper` for who ends what.
"""

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

from berth.linux.process import RUN_MARK

_PROGRAM: Final = (
    "import sys; sys.path.insert(0, sys.argv[1]); from berth.linux.keeper import main; main(int(sys.argv[2]))"
)
_EXIT_TIMEOUT_S: Final = 30.0
_SOURCE_ROOT: Final = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """What to execute, and the place it gets before it begins."""

    #: Program and arguments; a program without "/" is searched in the PATH of `environment`.
    argv: Sequence[str]
    environment: Mapping[str, str]
    #: The run's epoch id, put into the environment as BERTH_RUN.
    mark: str
    #: CPU numbers of the affinity mask, or None to keep the caller's.
    cpus: Sequence[int] | None = None
    #: (uid, gid, supplementary gids) to become, or None to stay who the caller is.
    user: tuple[int, int, Sequence[int]] | None = None
    #: Open directory to start in, or None for the caller's.
    directory: int | None = None
    #: Process group: `own`; `caller` to stay in berth's, as part of its pipeline; `session` for a session of its own,
    #: without a controlling terminal.
    group: Literal["own", "caller", "session"] = "own"
    #: Open program to execute instead of searching for argv[0], or None.
    executable: int | None = None
    #: What the command leaves is asked to end before it is killed; in a sandbox the kernel has killed it already.
    leftover_grace: bool = True
    #: Descriptor of the controlling terminal whose foreground the command becomes, or None.
    terminal: int | None = None
    #: (from, to) descriptor pairs to duplicate, after which only 0, 1, 2 and `fds` reach the command.
    streams: Sequence[tuple[int, int]] = ()
    fds: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class Event:
    """One message of the keeper: `ready`, `started`, `failed`, `stopped`, `ended`, or `lost` when it died itself."""

    kind: str
    values: tuple[int, ...] = ()


@dataclass(slots=True)
class Keeper:
    """A running keeper, seen from berth."""

    process: subprocess.Popen[bytes]
    control: socket.socket
    _pending: bytes = b""
    _stuck: bool = False
    _events: list[Event] = field(default_factory=list)

    @classmethod
    def start(cls, command: Command, *, held: Sequence[int] = ()) -> "Keeper":
        """Start a keeper that holds the descriptors `held` until nothing is left of `command`.

        Raises:
            OSError: The interpreter could not be started.
        """
        ours, theirs = socket.socketpair()
        pass_fds = {theirs.fileno(), *held, *command.fds}
        pass_fds.update(source for source, _ in command.streams)
        pass_fds.update(fd for fd in (command.directory, command.terminal, command.executable) if fd is not None)
        try:
            process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _PROGRAM, _SOURCE_ROOT, str(theirs.fileno())],
                env={RUN_MARK: command.mark},
                pass_fds=sorted(pass_fds),
                process_group=0,
            )
        except OSError:
            ours.close()
            raise
        finally:
            theirs.close()
        keeper = cls(process, ours)
        keeper._send(json.dumps(_specification(command)))
        return keeper

    def go(self) -> None:
        """Open the gate: the command begins."""
        self._send("go")

    def end(self, grace_s: float, *, spare: Sequence[int] = ()) -> None:
        """Ask everything inside but `spare` to end by SIGTERM, and kill all of it `grace_s` seconds later."""
        self._send(" ".join(map(str, ("end", int(grace_s * 1000), *spare))))

    def pause(self) -> None:
        """Stop everything inside, until `resume`."""
        self._send("pause")

    def resume(self) -> None:
        """Continue a stopped command, in the foreground where berth has it."""
        self._send("continue")

    def next_event(self, timeout_s: float | None = None, *, also: Sequence[int] = ()) -> Event | None:
        """Wait for the keeper's next message; None after `timeout_s` seconds or when one of `also` is readable."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while not self._events:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            readable, _, _ = select.select([self.control.fileno(), *also], [], [], left)
            if self.control.fileno() not in readable:
                return None
            self._receive()
        return self._events.pop(0)

    def close(self) -> None:
        """Let go: a keeper that still has something inside kills it and exits; wait until it has.

        One that reported processes it cannot end stays, with the claims, for as long as they do; it is not waited for.
        """
        self.control.close()
        if self._stuck:
            self.process.returncode = 0  # nobody will wait for it here
            return
        self.wake()
        try:
            self.process.wait(_EXIT_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.kill()
            self.process.wait()

    def wake(self) -> None:
        """Continue a keeper that something inside has stopped."""
        self.process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """Kill a keeper that does not answer: the kernel kills the command, the rest is left to its mark."""
        self.process.kill()

    def _send(self, line: str) -> None:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # its death is reported by next_event
            self.control.sendall(line.encode("ascii") + b"\n")

    def _receive(self) -> None:
        try:
            data = self.control.recv(4096)
        except ConnectionResetError:
            data = b""
        if not data:
            self._events.append(Event("lost"))
        *lines, self._pending = (self._pending + data).split(b"\n")
        for line in lines:
            kind, *values = line.decode("ascii").split()
            self._stuck = self._stuck or (kind == "ended" and len(values) > 2)
            self._events.append(Event(kind, tuple(map(int, values))))


def _specification(command: Command) -> dict[str, object]:
    """Return what the keeper needs as JSON values; bytes travel as latin-1 text, whatever the locale is."""

    def raw(text: str) -> str:
        return os.fsencode(text).decode("latin-1")

    environment = {**command.environment, RUN_MARK: command.mark}
    return {
        "argv": [raw(word) for word in command.argv],
        "environment": {raw(key): raw(value) for key, value in environment.items()},
        "cpus": None if command.cpus is None else list(command.cpus),
        "user": command.user,
        "directory": command.directory,
        "terminal": command.terminal,
        "streams": list(command.streams),
        "fds": list(command.fds),
        "group": os.getpgrp(),
        "group_mode": command.group,
        "executable": command.executable,
        "leftover_grace": command.leftover_grace,
        "ignored": [int(s) for s in _INHERITED_IGNORED],
    }


#: Signals that this process was started with ignored (nohup, background jobs); the command gets them ignored too.
_INHERITED_IGNORED: Final = tuple(
    number
    for number in (
        signal.SIGINT,
        signal.SIGQUIT,
        signal.SIGHUP,
        signal.SIGTERM,
        signal.SIGTSTP,
        signal.SIGTTIN,
        signal.SIGTTOU,
    )
    if signal.getsignal(number) is signal.SIG_IGN
)
