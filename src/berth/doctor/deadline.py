"""Try something in a child process that cannot take its parent along: it may hang, crash or change who it is.

    tried = start(action, timeout_s=5)
    words = tried.answer()

The child is a fork, so an action may be any callable and sees what its parent has loaded. Call it from a process of one
thread: a fork takes only the calling thread along.
"""

import contextlib
import os
import select
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, NoReturn

from berth.durable.files import write_all
from berth.linux import syscalls
from berth.linux.process import descendants, read_stat, send_signal

#: How long a killed child may need to be gone; one that hangs in the kernel is left behind.
_END_TIMEOUT_S: Final = 1.0
_POLL_S: Final = 0.005


class NoAnswerError(Exception):
    """The child gave no answer; the text says why, as the end of a sentence that begins with what was tried."""


@dataclass(frozen=True, slots=True)
class Trial:
    """A child that tries something; ask for its answer exactly once."""

    pid: int
    fd: int
    deadline: float
    timeout_s: float

    def answer(self) -> str:
        """Return what the action returned; afterwards the child and everything it started are gone.

        Raises:
            NoAnswerError: The action failed, was killed, or its time is over.
        """
        data = None
        try:
            data = self._read()
        finally:
            os.close(self.fd)
            _end(self.pid, kill=data is None)
        if data is None:
            raise NoAnswerError(f"gave no answer within {self.timeout_s:g} s")
        if not data:
            raise NoAnswerError("ended without an answer")
        text = data[1:].decode("utf-8", "surrogateescape")
        if data[:1] == b"-":
            raise NoAnswerError(f"failed: {text}")
        return text

    def _read(self) -> bytes | None:
        """Return all the child wrote, or None when its time is over."""
        data = b""
        while select.select([self.fd], [], [], max(0.0, self.deadline - time.monotonic()))[0]:
            part = os.read(self.fd, 65536)
            if not part:
                return data
            data += part
        return None


def start(action: Callable[[], str], *, timeout_s: float) -> Trial:
    """Start `action` in a child that has `timeout_s` seconds.

    Raises:
        NoAnswerError: There is no process or descriptor left for it.
    """
    parent = os.getpid()
    try:
        read, write = os.pipe2(os.O_CLOEXEC)
    except OSError as error:
        raise NoAnswerError(f"could not be started: {error.strerror}") from error
    try:
        pid = os.fork()
    except OSError as error:
        os.close(read)
        os.close(write)
        raise NoAnswerError(f"could not be started: {error.strerror}") from error
    if pid == 0:
        _child(action, write, parent)
    os.close(write)
    return Trial(pid, read, time.monotonic() + timeout_s, timeout_s)


def attempt(action: Callable[[], str], *, timeout_s: float) -> str:
    """Start `action` in a child and return its answer.

    Raises:
        NoAnswerError: The action could not be started, failed, was killed, or its time is over.
    """
    return start(action, timeout_s=timeout_s).answer()


def _child(action: Callable[[], str], write: int, parent: int) -> NoReturn:
    """Act, answer and exit; nothing of the parent's is flushed or cleaned up here."""
    try:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGPIPE):
            signal.signal(number, signal.SIG_DFL)
        syscalls.set_parent_death_signal(signal.SIGKILL)
        syscalls.set_child_subreaper()  # an orphan stays below this child, where `_end` finds it
        if os.getppid() == parent:
            answer = b"+" + action().encode("utf-8", "surrogateescape")
            write_all(write, answer)
    except Exception as error:  # noqa: BLE001 - the one place of this process: what failed becomes the answer
        with contextlib.suppress(OSError):
            write_all(write, b"-" + _describe(error).encode("utf-8", "surrogateescape"))
    finally:
        os._exit(0)


def _describe(error: Exception) -> str:
    if isinstance(error, NoAnswerError):
        return str(error)
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror} ({error.filename})" if error.filename else error.strerror
    return f"{type(error).__name__}: {error}"


def _end(pid: int, *, kill: bool) -> None:
    """Wait until the child is gone, but not for ever; with `kill`, end it and everything below it first."""
    if kill:
        for stat in (*descendants(pid), read_stat(pid)):
            with contextlib.suppress(PermissionError):
                if stat is not None:
                    send_signal(stat, signal.SIGKILL)
    deadline = time.monotonic() + _END_TIMEOUT_S
    while os.waitpid(pid, os.WNOHANG)[0] == 0 and time.monotonic() < deadline:
        time.sleep(_POLL_S)
