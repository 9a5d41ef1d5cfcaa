"""One command in its place: made behind a gate, looked at, and only then let begin.

The command of a host run stands at the keeper's gate. A sandboxed one stands at bubblewrap's, after the set-up, so that
what it will see can be read back from the kernel. Nothing of the caller's has been executed at that point.
"""

import contextlib
import errno
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from berth.errors import RUN_NOT_EXECUTABLE, RUN_NOT_FOUND, FailedError
from berth.host.cpuset import CpuSet
from berth.launch.request import RunRequest
from berth.launch.streams import Streams, relay_files
from berth.launch.terminal import foreground_terminal
from berth.launch.workspace import Workspace
from berth.linux.process import alone_in_group, read_status
from berth.linux.spawn import Command, Event, Keeper
from berth.sandbox.bubblewrap import User
from berth.sandbox.instance import Sandbox, prepare

_READY_TIMEOUT_S: Final = 30.0
_LOOK_S: Final = 0.5


class NotStartedError(FailedError):
    """The command could not be executed; `exit_code` is what a POSIX shell would answer."""

    def __init__(self, message: str, exit_code: int, fix: str = "") -> None:
        fix = fix or "Check its name, its permissions and the PATH it runs with."
        super().__init__("command-not-started", message, fix)
        self.exit_code = exit_code


@dataclass(slots=True)
class Placement:
    """The process of a run, seen from berth.

    Attributes:
        keeper: What ends everything inside; None before `begin`.
        sandbox: The sandbox around the command, or None on the host.
        terminal: The terminal whose foreground the command may become, or None.
        pid: The command on the host, bubblewrap around it in a sandbox.
        seen: The affinity mask that was read back.
        began_at: Seconds since 1970 when the gate was opened, or None.
        began_monotonic_s: The same moment on the monotonic clock.
    """

    request: RunRequest
    epoch: str
    workspace: Workspace
    claimed: CpuSet | None
    user: User | None
    held: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    streams: Streams = field(default_factory=Streams)
    keeper: Keeper | None = None
    sandbox: Sandbox | None = None
    terminal: int | None = None
    pid: int | None = None
    seen: CpuSet | None = None
    began_at: float | None = None
    began_monotonic_s: float = 0.0

    def begin(self, held_fds: Sequence[int]) -> None:
        """Make the process, read back its mask and its sandbox, and open the gate.

        Args:
            held_fds: Descriptors that the keeper holds until nothing is left inside: claims and locks.

        Raises:
            NotStartedError: The command could not be executed.
            AbilityError: No sandbox can be made here.
            FailedError: What was read back is not what was asked for, or a process on the way was killed.
        """
        command = self._sandbox_command() if self.request.sandbox else self._host_command()
        self.keeper = Keeper.start(command, held=held_fds)
        self.held.callback(self.keeper.close)
        self.streams.close_passed()
        self.pid = self._expect("ready").values[0]
        if self.sandbox is None:
            self._check_mask(read_status(self.pid)["Cpus_allowed_list"])
        self.keeper.go()
        self._expect("started")
        if self.sandbox is not None:
            self._look_into(self.sandbox)
            self.sandbox.let_begin()
        self.began_at, self.began_monotonic_s = time.time(), time.monotonic()

    def end(self, grace_s: float) -> None:
        """Ask everything inside to end, and kill it `grace_s` seconds later.

        In a sandbox bubblewrap's own two processes are spared at first: they would take the rest down without grace.
        """
        if self.keeper is not None:
            self.keeper.end(grace_s, spare=(self.pid or 0, self.sandbox.inside_pid) if self.sandbox else ())

    def close(self) -> None:
        """Kill whatever is left inside, wait until it is gone, and close every descriptor."""
        self.held.close()

    def _host_command(self) -> Command:
        # A pipeline shares one foreground: a part of it that took the terminal would stop the others.
        own = alone_in_group()
        self.terminal = foreground_terminal() if own else None
        if self.terminal is not None:
            self.held.callback(os.close, self.terminal)
        return Command(
            group="own" if own else "caller",
            argv=self.request.command,
            environment=self._host_environment(),
            mark=self.epoch,
            cpus=self._cpus(),
            directory=self.workspace.fd,
            terminal=self.terminal,
            streams=[(2, 1)] if self.request.output_to_stderr else [],
        )

    def _host_environment(self) -> dict[str, str]:
        """Return the caller's environment; PWD names the workspace, and stays where it does already, through links."""
        with contextlib.suppress(OSError, KeyError):
            if os.path.samestat(os.stat(os.environ["PWD"]), os.fstat(self.workspace.fd)):
                return dict(os.environ)
        return {**os.environ, "PWD": self.workspace.path}

    def _sandbox_command(self) -> Command:
        self.sandbox = prepare(
            self.request.command,
            workspace=self.workspace.fd,
            mark=self.epoch,
            terminal=os.environ.get("TERM"),
            user=self.user,
        )
        self.held.callback(self.sandbox.close)
        self.streams = relay_files(output_to_stderr=self.request.output_to_stderr)
        self.held.callback(self.streams.close_passed)
        return Command(
            argv=self.sandbox.argv,
            environment={"PATH": os.defpath},
            mark=self.epoch,
            cpus=self._cpus(),
            user=self.user,
            group="session",
            executable=self.sandbox.executable,
            leftover_grace=False,
            streams=self.streams.pairs,
            fds=self.sandbox.fds,
        )

    def _cpus(self) -> tuple[int, ...] | None:
        return None if self.claimed is None else tuple(self.claimed)

    def _look_into(self, sandbox: Sandbox) -> None:
        sandbox.close_passed()
        sandbox.wait_until_set_up()
        self._check_mask(sandbox.mask())
        program = self.request.command[0]
        if not sandbox.finds(program):
            fix = _hint(program, errno.ENOENT) or "Inside there are the system's programs and /workspace, nothing else."
            raise NotStartedError(f"{program!r} was not found in the sandbox", RUN_NOT_FOUND, fix)

    def _check_mask(self, listed: str) -> None:
        """Compare the claim with the mask that the kernel shows: it cuts a mask to the cpuset without a word."""
        self.seen = CpuSet.parse_list(listed)
        if self.claimed is not None and self.seen != self.claimed:
            raise FailedError(
                "mask-differs",
                f"the command was to run on CPUs {self.claimed}, and the kernel gives it {self.seen}",
                "Something else limits it: compare the cpuset that `berth doctor` shows, then try again.",
            )

    def _expect(self, kind: str) -> Event:
        assert self.keeper is not None
        deadline = time.monotonic() + _READY_TIMEOUT_S
        while (event := self.keeper.next_event(_LOOK_S)) is None and time.monotonic() < deadline:
            self.keeper.wake()  # the command's first deed may have been to stop it
        if event is not None and event.kind == kind:
            return event
        if event is not None and event.kind == "failed":
            raise self._not_started(event.values[0], at_gate=kind == "started")
        raise FailedError(
            "keeper-lost",
            f"the process that keeps the command {'was killed' if event else 'hung'} before the command began",
            "Try again; if it stays, `berth doctor` shows what this host lacks.",
        )

    def _not_started(self, code: int, *, at_gate: bool) -> FailedError:
        """Return the error for what the child could not do: take its place, or execute the command."""
        why = os.strerror(code)
        if not at_gate:
            return FailedError(
                "place-refused", f"the command could not be given its place: {why}", "See `berth doctor`."
            )
        missing = code in (errno.ENOENT, errno.ENOTDIR)
        program = "bwrap" if self.sandbox else self.request.command[0]
        exit_code = RUN_NOT_FOUND if missing else RUN_NOT_EXECUTABLE
        return NotStartedError(f"{program!r}: {why}", exit_code, _hint(program, code))


def _hint(program: str, code: int) -> str:
    """Return what to do about the commonest mistakes behind an error of execve(2), or nothing."""
    if code == errno.ENOEXEC:
        return "A script needs a first line that names its interpreter, such as #!/bin/sh."
    if code == errno.ENOENT and " " in program:
        return f"It is taken as one word. For a line of shell, write: sh -c {program!r}"
    if code == errno.ENOENT and "/" in program and os.path.exists(program):
        return "If the file is there, the interpreter that its first line names is not."
    return ""
