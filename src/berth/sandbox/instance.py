"""One sandbox: prepared, set up, looked at, and only then let begin.

A sandbox that waits at its gate has been set up but has not executed anything of the caller's. Everything the record
says about it is read back from the kernel at that moment, not derived from the options.
"""

import contextlib
import errno
import fcntl
import json
import os
import select
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from berth.errors import FailedError
from berth.linux import syscalls
from berth.linux.process import RUN_MARK, read_status
from berth.sandbox import policy
from berth.sandbox.bubblewrap import SET_UP_TIMEOUT_S, User, find_bubblewrap, memory_file, probe, system_layout
from berth.sandbox.policy import Abilities, Channels, SystemLayout

#: Said where root found nobody to become (design, section 6, "Who runs").
ROOT_OUTSIDE: Final = (
    "the command is root outside the sandbox: its workspace belongs to root, and no sandbox.user is set in the settings"
)
_POLL_S: Final = 0.0005


@dataclass(slots=True)
class Sandbox:
    """One sandbox in the making: its argument list, and the channels to look at it and let it begin.

    Attributes:
        argv: bwrap with all its arguments and the command.
        executable: A sealed copy of bwrap to execute, or None for the installed one.
        fds: Descriptors that the bwrap process must inherit.
        inside_pid: Host pid of the first process inside, once `wait_until_set_up` has returned.
        facts: What was read back before the command began.
    """

    argv: list[str]
    executable: int | None
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
        """Say whether there is a file for `program` inside, searched as the command's PATH says.

        Links are followed as they will be inside. Where the kernel cannot do that, the answer is yes: bubblewrap says
        it then.
        """
        if "/" in program:
            candidates = [os.path.join(policy.INSIDE_WORKSPACE, program)]
        else:
            path = policy.environment({}, terminal=None)["PATH"]
            candidates = [os.path.join(directory, program) for directory in path.split(":")]
        root = os.open(f"/proc/{self.inside_pid}/root", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            return any(_exists(candidate, root) for candidate in candidates)
        finally:
            os.close(root)

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
        for fd in (self._gate_write, self._status_read, *([] if self.executable is None else [self.executable])):
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

        etc = {path: keep(memory_file(content)) for path, content in policy.ETC_FILES.items()}
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
        executable = keep(sealed_copy(bwrap)) if user is None and os.geteuid() == 0 else None
        variables = policy.environment({RUN_MARK: mark}, terminal=terminal)
        listed = policy.operations(layout, abilities, channels, variables)
        sandbox = Sandbox(
            argv=[bwrap, *policy.arguments(listed, command)],
            executable=executable,
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


def _exists(path: str, root: int) -> bool:
    try:
        os.close(syscalls.openat2(path, os.O_PATH, syscalls.RESOLVE_IN_ROOT, dir_fd=root))
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:  # another kind of refusal, or a kernel without openat2(2): not known to be missing
        return True
    return True


def sealed_copy(path: str) -> int:
    """Return a descriptor of an executable copy of `path` in memory that nobody can write, not even root.

    A sandbox of root that finds its way to the program that set it up, through /proc/PID/exe, then finds only this
    copy (CVE-2019-5736 is that attack on another program).

    Raises:
        OSError: The file cannot be read, or files in memory cannot be sealed here.
    """
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    try:
        fd = os.memfd_create("bwrap", flags | syscalls.MFD_EXEC)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        fd = os.memfd_create("bwrap", flags)
    with open(path, "rb") as program:
        data = program.read()
    while data:
        data = data[os.write(fd, data) :]
    seals = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


def _has_no_privilege(status: Mapping[str, str]) -> bool:
    """bubblewrap drops every capability as the last step before its gate, so this says that the set-up is complete."""
    return all(int(status[key], 16) == 0 for key in ("CapEff", "CapPrm", "CapBnd")) and status["NoNewPrivs"] == "1"


def _set_up_failed(why: str) -> FailedError:
    return FailedError(
        "sandbox-set-up",
        f"bubblewrap did not complete the sandbox: {why}",
        "What it said is above. `berth doctor` tries each ability on its own.",
    )
