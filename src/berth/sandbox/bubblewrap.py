"""Run bubblewrap: find it, try what works here, prepare one sandbox, look at it before its command begins.

A sandbox that waits at its gate has been set up but has not executed anything of the caller's. Everything the record
says about it is read back from the kernel at that moment, not derived from the options.
"""

import contextlib
import functools
import json
import os
import select
import shutil
import stat
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from berth.errors import AbilityError, FailedError
from berth.linux.process import RUN_MARK, read_status
from berth.sandbox import policy
from berth.sandbox.fixes import user_namespace_fix
from berth.sandbox.policy import Abilities, Channels, SystemLayout

#: How long bubblewrap may take to set a sandbox up, in seconds.
SET_UP_TIMEOUT_S: Final = 20.0
#: Said where root found nobody to become (design, section 6, "Who runs").
ROOT_OUTSIDE: Final = (
    "the command is root outside the sandbox: its workspace belongs to root, and no sandbox.user is set in the settings"
)
_POLL_S: Final = 0.0005
#: Top-level names that are links into /usr on merged systems and directories on others.
_TOP_LEVEL: Final = ("/bin", "/lib", "/lib32", "/lib64", "/libx32", "/sbin")
#: What links below /usr point to and the dynamic loader reads.
_ETC: Final = ("/etc/alternatives", "/etc/ld.so.cache", "/etc/ld.so.conf", "/etc/ld.so.conf.d")

User = tuple[int, int, tuple[int, ...]]


def find_bubblewrap() -> str:
    """Return the path of bwrap.

    Raises:
        AbilityError: It is not installed, or is set-user-ID, which the sandbox design excludes (CVE-2026-41163).
    """
    path = shutil.which("bwrap") or shutil.which("bwrap", path="/usr/local/bin:/usr/bin:/bin")
    if path is None:
        raise AbilityError(
            "no-bubblewrap",
            "bubblewrap (the program bwrap) is not installed, and a command meant for a sandbox never runs without one",
            "Install it: `apt-get install bubblewrap` or `dnf install bubblewrap`, then see `berth doctor`.",
        )
    if os.stat(path).st_mode & stat.S_ISUID:
        raise AbilityError(
            "setuid-bubblewrap",
            f"{path} is installed set-user-ID root, which berth refuses: it would run with more rights than its caller",
            f"Take the bit away with `chmod u-s {path}`; bubblewrap then uses user namespaces.",
        )
    return path


def system_layout() -> SystemLayout:
    """Return which system directories, links and files of this host a sandbox gets read-only."""
    links = {path: os.readlink(path) for path in _TOP_LEVEL if os.path.islink(path)}
    directories = [path for path in _TOP_LEVEL if path not in links and os.path.isdir(path)]
    return SystemLayout(
        directories=("/usr", *directories), links=links, files=tuple(path for path in _ETC if os.path.exists(path))
    )


@functools.cache
def probe(user: User | None = None) -> Abilities:
    """Try on this host, as `user`, which form of the sandbox works, the strongest first.

    Raises:
        AbilityError: None works; the message holds what bubblewrap said.
    """
    bwrap = find_bubblewrap()
    first_words = ""
    for disable_userns, fresh_proc in ((True, True), (False, True), (True, False), (False, False)):
        abilities = Abilities(
            disable_userns=disable_userns,
            fresh_proc=fresh_proc,
            downgrades=_downgrades(disable_userns=disable_userns, fresh_proc=fresh_proc),
        )
        words = _try(bwrap, abilities, user)
        if words is None:
            return abilities
        first_words = first_words or words
    raise AbilityError(
        "no-sandbox", f"bubblewrap cannot set up a sandbox here: {first_words}", user_namespace_fix(first_words)
    )


def _downgrades(*, disable_userns: bool, fresh_proc: bool) -> tuple[str, ...]:
    found = []
    if not disable_userns:
        found.append("further user namespaces can be made inside: bubblewrap's --disable-userns does not work here")
    if not fresh_proc:
        found.append("the host's processes are visible inside, read-only: a new /proc cannot be mounted here")
    return tuple(found)


def _try(bwrap: str, abilities: Abilities, user: User | None) -> str | None:
    """Run `true` in a sandbox; return None where it worked, or else what bubblewrap said."""
    with contextlib.ExitStack() as stack:
        etc = {path: stack.enter_context(_memory_file(content)) for path, content in policy.ETC_FILES.items()}
        listed = policy.operations(system_layout(), abilities, Channels(workspace=None, etc=etc), {})
        try:
            tried = subprocess.run(
                [bwrap, *policy.arguments(listed, ["/bin/sh", "-c", ":"])],
                pass_fds=tuple(etc.values()),
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="backslashreplace",
                cwd="/",
                timeout=SET_UP_TIMEOUT_S,
                user=None if user is None else user[0],
                group=None if user is None else user[1],
                extra_groups=None if user is None else user[2],
            )
        except subprocess.TimeoutExpired:
            return f"it had not ended after {SET_UP_TIMEOUT_S:.0f} s"
        except OSError as error:
            return str(error)
    return None if tried.returncode == 0 else (tried.stderr.strip() or f"exit code {tried.returncode}")


@contextlib.contextmanager
def _memory_file(content: str) -> Iterator[int]:
    fd = os.memfd_create("berth")
    try:
        os.write(fd, content.encode())
        os.lseek(fd, 0, os.SEEK_SET)
        yield fd
    finally:
        os.close(fd)


@dataclass(slots=True)
class Sandbox:
    """One sandbox in the making: its argument list, and the channels to look at it and let it begin.

    Attributes:
        argv: bwrap with all its arguments and the command.
        fds: Descriptors that the bwrap process must inherit.
        inside_pid: Host pid of the first process inside, once `wait_until_set_up` has returned.
        facts: What was read back before the command began.
    """

    argv: list[str]
    fds: tuple[int, ...]
    inside_pid: int
    facts: dict[str, object]
    _layout: SystemLayout
    _abilities: Abilities
    _workspace: int
    _gate_write: int
    _status_read: int
    _status: bytes = b""

    def wait_until_set_up(self) -> None:
        """Wait until bubblewrap has finished the set-up and stands at the gate, then read back what it made.

        Raises:
            FailedError: It ended or hung before that, or what it made is not what was asked for.
        """
        deadline = time.monotonic() + SET_UP_TIMEOUT_S
        self.inside_pid = int(self._read_status(deadline).get("child-pid", 0))
        try:
            while not _has_no_privilege(status := read_status(self.inside_pid)):
                if time.monotonic() > deadline:
                    raise _set_up_failed(f"it was not done after {SET_UP_TIMEOUT_S:.0f} s")
                time.sleep(_POLL_S)
            self.facts = self._read_back(status)
        except (FileNotFoundError, ProcessLookupError) as error:
            raise _set_up_failed("it ended during the set-up") from error

    def mask(self) -> str:
        """Return the affinity list of the process that will execute the command."""
        return read_status(self.inside_pid)["Cpus_allowed_list"]

    def finds(self, program: str) -> bool:
        """Say whether there is a file for `program` inside, searched as the command's PATH says."""
        root = f"/proc/{self.inside_pid}/root"
        if "/" in program:
            candidates = [os.path.join(policy.INSIDE_WORKSPACE, program)]
        else:
            path = policy.environment({}, terminal=None)["PATH"]
            candidates = [os.path.join(directory, program) for directory in path.split(":")]
        return any(os.path.lexists(root + os.path.normpath(candidate)) for candidate in candidates)

    def let_begin(self) -> None:
        """Open the gate."""
        os.write(self._gate_write, b"g")

    def command_began(self) -> bool:
        """Say, once bwrap has ended, whether the command was executed."""
        while data := os.read(self._status_read, 4096):
            self._status += data
        return b'"exit-code"' in self._status

    def close_passed(self) -> None:
        """Close the descriptors that bwrap has inherited by now."""
        for fd in self.fds:
            os.close(fd)
        self.fds = ()

    def close(self) -> None:
        """Close every descriptor that is still open here."""
        self.close_passed()
        for fd in (self._gate_write, self._status_read):
            os.close(fd)

    def _read_status(self, deadline: float) -> dict[str, int]:
        """Return the first document that bubblewrap writes: its child and the namespaces."""
        while b"}" not in self._status:
            readable, _, _ = select.select([self._status_read], [], [], max(0.0, deadline - time.monotonic()))
            data = os.read(self._status_read, 4096) if readable else b""
            if not data:
                raise _set_up_failed("it ended during the set-up" if readable else "it hangs")
            self._status += data
        first: dict[str, int] = json.loads(self._status[: self._status.index(b"}") + 1])
        return first

    def _read_back(self, status: Mapping[str, str]) -> dict[str, object]:
        root = f"/proc/{self.inside_pid}/root"
        workspace = root + policy.INSIDE_WORKSPACE
        if not os.path.samestat(os.stat(workspace), os.fstat(self._workspace)):
            raise _set_up_failed("its /workspace is not the workspace that was opened")
        with open(f"/proc/{self.inside_pid}/net/dev", encoding="ascii") as table:
            interfaces = [line.split(":")[0].strip() for line in table if ":" in line]
        uid_outside = int(status["Uid"].split()[0])
        return {
            "uid_inside": policy.INSIDE_ID,
            "uid_outside": uid_outside,
            "capabilities": status["CapBnd"],
            "no_new_privileges": status["NoNewPrivs"] == "1",
            "network_interfaces": interfaces,
            "devices": sorted(os.listdir(f"{root}/dev")),
            "read_only": list(self._layout.read_only),
            "writable": [policy.INSIDE_WORKSPACE, "/tmp", "/dev/shm"],
            "downgrades": [*self._abilities.downgrades, *([ROOT_OUTSIDE] if uid_outside == 0 else [])],
        }


def prepare(command: Sequence[str], *, workspace: int, mark: str, terminal: str | None, user: User | None) -> Sandbox:
    """Prepare a sandbox for `command`; nothing is started yet.

    Args:
        command: Program and arguments as seen inside.
        workspace: The open directory that becomes /workspace; stays the caller's to close.
        mark: The run's epoch id.
        terminal: Value of TERM inside, or None.
        user: Who will execute bwrap, or None for the caller.

    Raises:
        AbilityError: No sandbox can be made here.
        OSError: Out of descriptors or memory.
    """
    bwrap = find_bubblewrap()
    abilities = probe(user)
    layout = system_layout()
    with contextlib.ExitStack() as opened:

        def keep(fd: int) -> int:
            opened.callback(os.close, fd)
            return fd

        etc = {path: keep(_detached_memory_file(content)) for path, content in policy.ETC_FILES.items()}
        gate_read, gate_write = os.pipe2(os.O_CLOEXEC)
        keep(gate_write)
        # Open for reading and writing, the gate never reports end of file: bubblewrap would take that for "begin".
        try:
            gate = keep(os.open(f"/proc/self/fd/{gate_read}", os.O_RDWR | os.O_CLOEXEC))
        finally:
            os.close(gate_read)
        status_read, status = map(keep, os.pipe2(os.O_CLOEXEC))
        passed = keep(os.dup(workspace))
        channels = Channels(workspace=passed, etc=etc, gate=gate, status=status)
        variables = policy.environment({RUN_MARK: mark}, terminal=terminal)
        listed = policy.operations(layout, abilities, channels, variables)
        sandbox = Sandbox(
            argv=[bwrap, *policy.arguments(listed, command)],
            fds=(passed, gate, status, *etc.values()),
            inside_pid=0,
            facts={},
            _layout=layout,
            _abilities=abilities,
            _workspace=workspace,
            _gate_write=gate_write,
            _status_read=status_read,
        )
        opened.pop_all()
    return sandbox


def _detached_memory_file(content: str) -> int:
    with _memory_file(content) as fd:
        return os.dup(fd)


def _has_no_privilege(status: Mapping[str, str]) -> bool:
    """bubblewrap drops every capability as the last step before its gate, so this says that the set-up is complete."""
    return all(int(status[key], 16) == 0 for key in ("CapEff", "CapPrm", "CapBnd")) and status["NoNewPrivs"] == "1"


def _set_up_failed(why: str) -> FailedError:
    return FailedError(
        "sandbox-set-up",
        f"bubblewrap did not complete the sandbox: {why}",
        "What it said is above. `berth doctor` tries each ability on its own.",
    )
