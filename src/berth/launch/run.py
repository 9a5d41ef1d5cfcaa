"""Run one command: claims, work-state, gate, command, record, retirement, in that order and only here.

    look      at the host: effective cpuset, cores, who holds what
    check     the request against it
    claim     cores, by kernel locks that the keeper shares
    write     request.json into a fresh epoch, durably, before any process exists
    do        the process behind its gate; its mask and its sandbox are read back; then the gate opens
    look      again, when the command has ended: nothing inside is left
    record    record.json, published without replacing; then the epoch is retired, and the claims fall

`start` does everything up to the open gate and `Run.wait` the rest. They may be called from different threads.
"""

import contextlib
import os
import pwd
import secrets
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from berth.claims.claims import Claim
from berth.epoch.epoch import Epoch, EpochRoot
from berth.errors import (
    RUN_FAILED,
    RUN_NOT_EXECUTABLE,
    RUN_TIMED_OUT,
    SIGNAL_BASE,
    BerthError,
    FailedError,
)
from berth.launch import store
from berth.launch.claiming import claim_cores
from berth.launch.placement import NotStartedError, Placement
from berth.launch.record import Ending, ending_of, exit_code_of, request_document, run_record
from berth.launch.request import RunRequest, check_request
from berth.launch.terminal import stop_with_command
from berth.launch.workspace import Workspace, check_reachable, open_host_workspace, open_sandbox_workspace
from berth.linux.keeper import STUCK_AFTER_S
from berth.linux.process import boot_id, check_own_proc, end_marked, read_stat
from berth.linux.signals import SignalInbox
from berth.linux.spawn import Event, Keeper
from berth.sandbox.bubblewrap import User, probe

#: What a command gets between SIGTERM and SIGKILL when its time is over or berth is told to end, in seconds.
GRACE_S: Final = 2.0
_LOST_TIMEOUT_S: Final = 10.0
#: How often the keeper is looked after while it has nothing to say, in seconds.
_LOOK_S: Final = 5.0
_MARGIN_S: Final = 5.0


@dataclass(frozen=True, slots=True)
class Finished:
    """A run that is over: everything inside is gone, the record is published, the epoch is retired.

    Attributes:
        exit_code: What `berth run` ends with.
        record: The published record.
        record_path: Where it is.
    """

    exit_code: int
    record: Mapping[str, object]
    record_path: str


@dataclass(slots=True)
class Run:
    """One command that has begun, until its record is published and its epoch retired."""

    root: EpochRoot
    epoch: Epoch
    document: dict[str, object]
    claim: Claim | None
    placement: Placement
    held: contextlib.ExitStack
    _ended_by: str | int | None = None
    _ended: Event | None = None
    _patience_ends: float | None = None

    def wait(self, inbox: SignalInbox | None = None) -> Finished:
        """Wait for the end, taking signals from `inbox` as requests to end; then record and retire.

        Raises:
            NotStartedError: The command could not be executed.
            FailedError: The keeper was killed, or the record or the retirement failed; the work-state is kept then.
            UncertainError: A change is visible and may not be durable.
        """
        keeper = self.placement.keeper
        assert keeper is not None
        with self.held:
            while self._ended is None:
                left = self._time_left()
                event = keeper.next_event(
                    _LOOK_S if left is None else min(left, _LOOK_S), also=[inbox.fileno()] if inbox else []
                )
                if event is not None:
                    self._on_event(event)
                else:
                    self._look_after(keeper)
                for number in inbox.take() if inbox else []:
                    self._on_signal(number)
                if self._time_left() == 0.0:
                    self._end("timed-out")
            self.placement.streams.finish()
            return self._conclude(self._ended)

    def _look_after(self, keeper: Keeper) -> None:
        """Wake a keeper that something inside stopped; kill one that does not do what it was told in time."""
        stat = read_stat(keeper.process.pid)
        if stat is not None and stat.state == "T":
            keeper.wake()
        if self._patience_ends is not None and time.monotonic() >= self._patience_ends:
            keeper.kill()

    def _time_left(self) -> float | None:
        """Return the seconds until the time limit, or None where there is none any more."""
        limit = self.placement.request.timeout_s
        if limit is None or self._ended_by is not None:
            return None
        return max(0.0, self.placement.began_monotonic_s + limit - time.monotonic())

    def _on_event(self, event: Event) -> None:
        if event.kind in ("ended", "lost"):
            self._ended = event
        elif event.kind == "stopped" and self.placement.terminal is not None:
            stop_with_command()
            self._resume()

    def _on_signal(self, number: int) -> None:
        if number == signal.SIGCONT:
            self._resume()
        elif number == signal.SIGTSTP:
            self._pause()
        else:
            self._end(number)

    def _pause(self) -> None:
        """Stop with everything inside: in a sandbox the terminal's Ctrl-Z reaches only berth."""
        if self.placement.keeper is not None:
            self.placement.keeper.pause()
            stop_with_command()
            self._resume()

    def _resume(self) -> None:
        if self.placement.keeper is not None:
            self.placement.keeper.resume()

    def _end(self, reason: str | int) -> None:
        """Ask everything inside to end; the second time, kill it at once. The first reason is the one recorded."""
        grace_s = GRACE_S if self._ended_by is None else 0.0
        self._ended_by = self._ended_by or reason
        self._patience_ends = self._patience_ends or time.monotonic() + GRACE_S + STUCK_AFTER_S + _MARGIN_S
        self.placement.end(grace_s)

    def _conclude(self, ended: Event) -> Finished:
        """Turn what was seen into an ending, record it, retire the epoch."""
        if ended.kind == "lost":
            count, _ = end_marked(self.epoch.id, not_before_ticks=_start_ticks(), timeout_s=_LOST_TIMEOUT_S)
            ended = Event("lost", (-1, count))
        error = self._own_failure(ended)
        if error is None:
            ending, exit_code = self._ending(ended)
            return self.record(ending, exit_code, ended)
        self.record(Ending("failed", error=error.name), RUN_FAILED, ended)
        raise error

    def _own_failure(self, ended: Event) -> BerthError | None:
        """Return what kept berth from running the command to its end, or None."""
        if ended.kind == "lost":
            return FailedError("keeper-lost", "the process that kept the command was killed, and the command with it")
        sandbox = self.placement.sandbox
        exited = ended.values[0] >= 0 and os.WIFEXITED(ended.values[0])
        if sandbox is not None and exited and self._ended_by is None and not sandbox.command_began():
            self.placement.began_at = None
            program = self.placement.request.command[0]
            return NotStartedError(
                f"{program!r} was found in the sandbox and could not be executed", RUN_NOT_EXECUTABLE
            )
        return None

    def _ending(self, ended: Event) -> tuple[Ending, int]:
        status = ended.values[0]
        code = os.WEXITSTATUS(status) if status >= 0 and os.WIFEXITED(status) else None
        number = os.WTERMSIG(status) if status >= 0 and os.WIFSIGNALED(status) else None
        if self._ended_by == "timed-out":
            return Ending("timed-out", code, number), RUN_TIMED_OUT
        if isinstance(self._ended_by, int):
            return Ending("stopped", code, number), SIGNAL_BASE + self._ended_by
        ending = ending_of(code, number)
        return ending, exit_code_of(ending)

    def record(self, ending: Ending, exit_code: int, ended: Event | None) -> Finished:
        """Publish the record and retire the epoch.

        Raises:
            FailedError: One of them failed; the work-state is kept, and the next start finishes it.
            UncertainError: One of them is visible and may not be durable.
        """
        placement = self.placement
        values = ended.values if ended else ()
        record = run_record(
            self.document,
            ending,
            claimed=self.claim.cpus if self.claim else None,
            seen=placement.seen,
            sandbox=placement.sandbox.facts if placement.sandbox and placement.sandbox.facts else None,
            started_at=placement.began_at,
            ended_at=time.time(),
            duration_s=None if placement.began_at is None else time.monotonic() - placement.began_monotonic_s,
            # In a sandbox the kernel ends what the command leaves, and nobody counts it.
            processes_ended=values[1] if len(values) > 1 and placement.sandbox is None else 0,
            stuck=values[2:],
            pid=placement.pid,
        )
        path = store.publish(self.root, self.epoch, record)
        try:
            self.epoch.retire()
        except OSError as error:
            raise FailedError(
                "not-retired",
                f"the run is recorded in {path!r}, but its work-state {self.epoch.path!r} could not be retired: "
                f"{error.strerror}",
                "The next start of berth tries again.",
            ) from error
        return Finished(exit_code, record, path)


def start(request: RunRequest, root: EpochRoot, *, sandbox_user: User | None = None) -> Run:
    """Give the command its place and let it begin.

    Args:
        request: What to run.
        root: The open state root.
        sandbox_user: Whom a sandbox of root becomes where the workspace belongs to root, or None.

    Raises:
        MalformedError: The request can never work here.
        ForbiddenError: The cores are claimed by others.
        AbilityError: This host lacks what the request needs.
        NotStartedError: The command could not be executed; that is recorded.
        FailedError: Something else failed; where the epoch was open already, that is recorded.
    """
    check_request(request)
    check_own_proc()
    with contextlib.ExitStack() as stack:
        workspace = _open_workspace(request, root)
        stack.callback(os.close, workspace.fd)
        user = _sandbox_user(workspace, sandbox_user) if request.sandbox else None
        if request.sandbox:
            probe(user)
            if user is not None:
                check_reachable(workspace, user)
        claim = claim_cores(request)
        if claim is not None:
            stack.callback(claim.release)
        epoch = stack.enter_context(_open_epoch(root))
        document = request_document(
            epoch.id,
            request,
            storage=root.capability.brief(),
            boot_id=boot_id(),
            pid=os.getpid(),
            start_ticks=_start_ticks(),
            now=time.time(),
        )
        store.write_request(epoch, document)
        keeper_lock = store.lock_keeper(epoch)
        stack.callback(os.close, keeper_lock)
        placement = Placement(request, epoch.id, workspace, claim.cpus if claim else None, user)
        stack.callback(placement.close)
        run = Run(root, epoch, document, claim, placement, stack)
        try:
            placement.begin([keeper_lock, *(claim.fds if claim else ())])
        except (BerthError, OSError) as error:
            placement.close()
            name = error.name if isinstance(error, BerthError) else "system-call"
            run.record(Ending("not-started", error=name), RUN_FAILED, None)
            raise
        run.held = stack.pop_all()
    return run


def _open_workspace(request: RunRequest, root: EpochRoot) -> Workspace:
    if request.sandbox:
        return open_sandbox_workspace(request.workspace, state_root=root.path, settings=request.settings_directories)
    return open_host_workspace(request.workspace)


def _open_epoch(root: EpochRoot) -> Epoch:
    try:
        return root.open_epoch(secrets.token_hex(32))
    except OSError as error:
        raise FailedError(
            "epoch-not-opened",
            f"no work-state could be made in {root.path!r}: {error.strerror}",
            "Free space or repair the file system, or choose another --state-root.",
        ) from error


def _sandbox_user(workspace: Workspace, configured: User | None) -> User | None:
    """Return whom root becomes before bubblewrap: the workspace's owner, or the configured user where that is root."""
    if os.geteuid() != 0:
        return None
    if workspace.owner == 0:
        return configured
    try:
        account = pwd.getpwuid(workspace.owner)
    except KeyError:
        return workspace.owner, workspace.group, ()
    return account.pw_uid, account.pw_gid, tuple(os.getgrouplist(account.pw_name, account.pw_gid))


def _start_ticks() -> int:
    stat = read_stat(os.getpid())
    assert stat is not None
    return stat.start_ticks
