"""The keeper's forked child, from the fork to the command: it takes its place, waits at the gate, and becomes it."""

import errno
import os
import signal
from typing import Any, Final, NoReturn

from berth.linux import syscalls

#: Signals of the terminal; the keeper ignores them, and its child must not.
TERMINAL_SIGNALS: Final = (
    signal.SIGINT,
    signal.SIGQUIT,
    signal.SIGHUP,
    signal.SIGTSTP,
    signal.SIGTTIN,
    signal.SIGTTOU,
)


def become_command(spec: dict[str, Any], *, parent: int, gate: int, report: int) -> NoReturn:
    """In the forked child: take the place, wait at the gate, become the command."""
    try:
        if spec["group_mode"] == "session":
            os.setsid()
        elif spec["group_mode"] == "own":
            os.setpgid(0, 0)
        else:
            os.setpgid(0, spec["group"])
        if spec["terminal"] is not None and os.tcgetpgrp(spec["terminal"]) == spec["group"]:
            os.tcsetpgrp(spec["terminal"], os.getpid())
        if spec["cpus"] is not None:
            os.sched_setaffinity(0, spec["cpus"])
        if spec["user"] is not None:
            uid, gid, groups = spec["user"]
            os.setgroups(groups)
            os.setresgid(gid, gid, gid)
            os.setresuid(uid, uid, uid)
        syscalls.set_parent_death_signal(signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)
        if spec["directory"] is not None:
            os.fchdir(spec["directory"])
        for source, target in spec["streams"]:
            os.dup2(source, target)
        os.write(report, b"r")
        if os.read(gate, 1) != b"g":
            os._exit(1)
        _restore_signals(spec["ignored"])
        for fd in spec["fds"]:
            os.set_inheritable(fd, True)
        os.write(report, b"x")
        _execute(spec["executable"], [word.encode("latin-1") for word in spec["argv"]], spec["environment"])
    except OSError as error:
        os.write(report, str(error.errno or errno.EIO).encode("ascii"))
    finally:
        os._exit(1)  # whatever happened, this process never goes on as a second keeper


def _restore_signals(ignored: list[int]) -> None:
    """Give the command the signal dispositions that berth was started with; SIGPIPE and SIGXFSZ are Python's own."""
    for number in (*TERMINAL_SIGNALS, signal.SIGTERM, signal.SIGCHLD, signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_IGN if number in ignored else signal.SIG_DFL)


def _execute(executable: int | None, argv: list[bytes], environment: dict[str, str]) -> NoReturn:
    raw = {key.encode("latin-1"): value.encode("latin-1") for key, value in environment.items()}
    if executable is not None:
        os.execve(executable, argv, raw)
    os.execvpe(argv[0], argv, raw)
