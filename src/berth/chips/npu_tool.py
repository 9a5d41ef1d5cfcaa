"""Run `npu-smi` and return what it prints.

It can hang for good, on a dead card or under a preloaded limiter, and what it starts can outlive it and hold its
output open. So each call has a time limit, a session of its own that is killed as one, and no preloaded library, and
the answer is complete when the program has ended, whoever holds the pipe.

It opens every chip it sees. Where the caller is not in the mount namespace of the first process, the driver gives those
chips to the caller's namespace until that is empty; whether to ask there is for the caller to decide.
"""

import contextlib
import os
import selectors
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import IO, Final

NPU_SMI: Final = "npu-smi"
#: Arguments of the answers that `npu_smi`, `npu_list` and `npu_topo` read.
INFO: Final = ("info",)
MAP: Final = ("info", "-m")
LIST: Final = ("info", "-l")
TOPO: Final = ("info", "-t", "topo")

#: Eight cards are listed in a few seconds; a driver that resets a card answers late.
DEFAULT_TIMEOUT_S: Final = 20.0
#: Where driver packages put the program, for a PATH that does not say so.
_OTHER_PLACES: Final = "/usr/local/bin:/usr/local/sbin:/usr/bin"
#: A table of 64 cards with all their processes is below 100 KB.
_OUTPUT_LIMIT: Final = 4 << 20
#: How long a killed program may take to end; one inside the driver may not end at all.
_KILL_TIMEOUT_S: Final = 2.0
_DROPPED: Final = ("LD_PRELOAD", "LD_AUDIT", "LANGUAGE")


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What came of one call. Either `text` or `reason` is None.

    Attributes:
        command: Program and arguments.
        text: What it printed; on standard error where the other is empty. It may be a sentence in place of an answer.
        reason: Why there is nothing to read.
        status: How the program ended, negative for a signal; None where it did not. It does not say whether the text
            is an answer: an empty table ends with 0.
    """

    command: tuple[str, ...]
    text: str | None
    reason: str | None
    status: int | None


def find_npu_smi(environment: Mapping[str, str] | None = None) -> str | None:
    """Return the path of the program, from PATH or from where driver packages put it; None where it is in neither."""
    path = (os.environ if environment is None else environment).get("PATH", "")
    found = (shutil.which(NPU_SMI, path=path) if path else None) or shutil.which(NPU_SMI, path=_OTHER_PLACES)
    return None if found is None else os.path.abspath(found)


def run_npu_smi(
    arguments: Sequence[str],
    *,
    program: str | None = None,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    environment: Mapping[str, str] | None = None,
) -> Answer:
    """Run the program once, reading only, and return its answer; it and all that stays in its group are gone then.

    Args:
        arguments: What to ask, one of the constants above.
        program: Path of the program; by default it is looked for.
        timeout_s: Seconds it may take.
        environment: Variables it gets, without those that preload a library and with the C locale; by default berth's.
    """
    variables = dict(os.environ if environment is None else environment)
    found = program or find_npu_smi(variables)
    command = (found or NPU_SMI, *arguments)
    if found is None:
        why = f"npu-smi is neither in PATH nor in {_OTHER_PLACES.replace(':', ', ')}"
        return Answer(command=command, text=None, reason=why, status=None)
    for name in _DROPPED:
        variables.pop(name, None)
    variables |= {"LC_ALL": "C", "LANG": "C"}
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=variables,
            cwd="/",
            start_new_session=True,
        )
    except (OSError, ValueError) as error:
        return Answer(command=command, text=None, reason=f"{command[0]} cannot be started: {error}", status=None)
    return _Call(command, process).finish(timeout_s)


class _Call:
    """One running program and what it has printed so far."""

    def __init__(self, command: tuple[str, ...], process: subprocess.Popen[bytes]) -> None:
        self._command = command
        self._process = process
        self._output = {"stdout": bytearray(), "stderr": bytearray()}

    def finish(self, timeout_s: float) -> Answer:
        process = self._process
        assert process.stdout is not None
        assert process.stderr is not None
        pidfd = -1
        try:
            pidfd = os.pidfd_open(process.pid)
            reason = self._watch(pidfd, {"stdout": process.stdout, "stderr": process.stderr}, timeout_s)
        finally:
            self._end(pidfd)
            process.stdout.close()
            process.stderr.close()
            if pidfd >= 0:
                os.close(pidfd)
        return self._answer(reason)

    def _watch(self, pidfd: int, streams: Mapping[str, IO[bytes]], timeout_s: float) -> str | None:
        """Collect output until the program ends; return why it was given up, or None."""
        deadline = time.monotonic() + timeout_s
        with selectors.DefaultSelector() as selector:
            selector.register(pidfd, selectors.EVENT_READ)
            for name, stream in streams.items():
                os.set_blocking(stream.fileno(), False)
                selector.register(stream, selectors.EVENT_READ, name)
            while (left := deadline - time.monotonic()) > 0:
                ready = {key.data: key.fileobj for key, _ in selector.select(left)}
                ended = None in ready
                for name, stream in streams.items() if ended else [(name, streams[name]) for name in ready]:
                    if not stream.closed and self._drain(name, stream, to_the_end=ended):
                        with contextlib.suppress(KeyError):  # its end was seen before
                            selector.unregister(stream)
                if any(len(output) > _OUTPUT_LIMIT for output in self._output.values()):
                    return f"it printed more than {_OUTPUT_LIMIT >> 20} MiB and was killed"
                if ended:
                    return None
        return f"it did not end within {timeout_s:g} s and was killed"

    def _drain(self, name: str, stream: IO[bytes], *, to_the_end: bool) -> bool:
        """Take what is in a pipe; return whether its other end is closed."""
        while len(self._output[name]) <= _OUTPUT_LIMIT:
            try:
                data = os.read(stream.fileno(), 1 << 16)
            except BlockingIOError:
                return False
            if not data:
                return True
            self._output[name] += data
            if not to_the_end:
                return False
        return False

    def _end(self, pidfd: int) -> None:
        """Kill what is in the session's group, then reap the program, whose pid keeps the group's number until then."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        if pidfd >= 0:
            with selectors.DefaultSelector() as selector:
                selector.register(pidfd, selectors.EVENT_READ)
                if not selector.select(_KILL_TIMEOUT_S):
                    self._process.returncode = 0  # stuck inside the driver: nobody will wait for it here
                    return
        self._process.wait()

    def _answer(self, reason: str | None) -> Answer:
        text = next(
            (text for output in self._output.values() if (text := output.decode("utf-8", "replace")).strip()), None
        )
        status = None if reason else self._process.returncode
        if reason is None and text is None:
            reason = f"it printed nothing and ended with {status}"
        if reason is not None:
            shown = " ".join(self._command)
            return Answer(command=self._command, text=None, reason=f"`{shown}`: {reason}", status=status)
        return Answer(command=self._command, text=text, reason=None, status=status)
