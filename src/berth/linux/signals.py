"""Signals as messages: a signal that arrives becomes something to read, and interrupts nothing.

with SignalInbox() as inbox:
    select.select([inbox, ...], [], [])
    for number in inbox.take(): ...
"""

import contextlib
import os
import signal
from types import FrameType
from typing import Final

#: Signals that ask a run to end, SIGTSTP, which asks it to stop, and SIGCONT, which says that it was stopped.
_RECEIVED: Final = (
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGTSTP,
    signal.SIGCONT,
)


class SignalInbox:
    """Collects the signals that ask to end, stop or go on, from `__enter__` to `__exit__`; main thread only.

    A signal that this process was started with ignored (nohup, background jobs of a plain shell) stays ignored.
    """

    def __init__(self) -> None:
        self._read, self._write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._numbers: list[int] = []

    def __enter__(self) -> "SignalInbox":
        self._wakeup_before = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        self._before = {s: signal.signal(s, self._received) for s in _RECEIVED if signal.getsignal(s) != signal.SIG_IGN}
        return self

    def __exit__(self, *_exception: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._wakeup_before)
        os.close(self._read)
        os.close(self._write)

    def fileno(self) -> int:
        """Return the descriptor that is readable while signals wait."""
        return self._read

    def take(self) -> list[int]:
        """Return the numbers of the signals that have arrived since the last call, in order."""
        with contextlib.suppress(BlockingIOError):
            while os.read(self._read, 4096):
                pass
        taken, self._numbers = self._numbers, []
        return taken

    def _received(self, number: int, _frame: FrameType | None) -> None:
        self._numbers.append(number)
