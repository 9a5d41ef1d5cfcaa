"""The terminal a command may take over: whose foreground it is, and how a stopped command stops berth too."""

import contextlib
import os
import signal


def foreground_terminal() -> int | None:
    """Return a descriptor of the controlling terminal where this process is in its foreground or waits behind it.

    None where there is no controlling terminal: pipes, cron, services.
    """
    try:
        fd = os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC)
    except OSError:
        return None
    with contextlib.suppress(OSError):
        os.tcgetpgrp(fd)
        return fd
    os.close(fd)
    return None


def stop_with_command() -> None:
    """Stop this process's group the way its command was stopped, and return when it is continued.

    The shell then sees a stopped job, as it would without berth between. In a group that no shell can continue the
    kernel ignores the signal, and this returns at once.
    """
    before = signal.signal(signal.SIGTSTP, signal.SIG_DFL)
    try:
        os.kill(0, signal.SIGTSTP)
    finally:
        signal.signal(signal.SIGTSTP, before)
