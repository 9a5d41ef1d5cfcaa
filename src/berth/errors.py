"""What can go wrong, by whose turn it is, and the exit code of each category.

Every failure that berth can explain is a `BerthError`: a `name` that programs may match, a `message` that says what
happened and why, and a `fix` that says what to do. The category decides the exit code (design, "Exit codes"), so a new
error never needs a new number. `berth run` has its own codes, because the others belong to the command it runs.
"""

from typing import ClassVar

#: `berth epoch` and `berth campaign`: retired epochs could not be reclaimed (epoch design, the original runner's code).
RECLAIM_FAILED = 66
#: `berth epoch` and `berth campaign`: the root is not fit for work-state (epoch design, section 5).
ROOT_REFUSED = 67
#: `berth epoch` and `berth campaign`: an epoch could not be retired (epoch design, section 5).
RETIRE_FAILED = 72
#: `berth run`: the time limit ended the command (the same number as coreutils `timeout`).
RUN_TIMED_OUT = 124
#: `berth run`: berth itself failed or refused, bad options included.
RUN_FAILED = 125
#: `berth run`: the command was found and could not be executed (POSIX shell convention).
RUN_NOT_EXECUTABLE = 126
#: `berth run`: the command was not found (POSIX shell convention).
RUN_NOT_FOUND = 127
#: A process ended by signal N is reported as this plus N (POSIX shell convention).
SIGNAL_BASE = 128

#: Every code berth ends with by its own decision, and what it says. `docs/manual/exit-codes.md` is checked against it.
EXIT_CODES: dict[int, str] = {
    0: "done",
    1: "failed, or the outcome is uncertain",
    2: "malformed request, or one that can never work",
    3: "partly done",
    4: "forbidden by the present state",
    5: "an ability is missing on this host",
    RECLAIM_FAILED: "`berth epoch`: retired epochs could not be reclaimed",
    ROOT_REFUSED: "`berth epoch`: the root is not fit for work-state",
    RETIRE_FAILED: "`berth epoch`: an epoch could not be retired",
    RUN_TIMED_OUT: "`berth run`: the time limit ended the command",
    RUN_FAILED: "`berth run`: berth itself failed or refused, bad options included",
    RUN_NOT_EXECUTABLE: "`berth run`: the command could not be executed",
    RUN_NOT_FOUND: "`berth run`: the command was not found",
    129: "ended by SIGHUP",
    130: "ended by Ctrl-C (SIGINT)",
    131: "ended by SIGQUIT",
    143: "ended by SIGTERM",
}


class BerthError(Exception):
    """A failure that berth can explain.

    Args:
        name: Stable kebab-case identifier, also in records and JSON.
        message: What happened, on which object, and why.
        fix: What to do about it; empty where nothing can be done.
    """

    code: ClassVar[int] = 1
    #: Exit code of this one failure where the verb has a number of its own for it.
    exit_code: int | None = None

    def __init__(self, name: str, message: str, fix: str = "") -> None:
        super().__init__(message)
        self.name = name
        self.message = message
        self.fix = fix

    def as_dict(self, code: int | None = None) -> dict[str, object]:
        """Return the error as the value of `error` in a JSON answer; `code` replaces the category's exit code."""
        return {
            "code": self.code if code is None else code,
            "name": self.name,
            "message": self.message,
            "fix": self.fix,
        }


class FailedError(BerthError):
    """berth tried, and it did not work."""


class UncertainError(FailedError):
    """A change is visible but may not survive a power cut, or it is unknown whether it happened.

    It is never retried and never reported as success.

    Attributes:
        errno: Error number of the call whose outcome is unknown.
        filename: First path of that call.
        filename2: Second path of that call, or None.
    """

    def __init__(self, message: str, *, errno: int, filename: str, filename2: str | None = None) -> None:
        super().__init__(
            "uncertain",
            message,
            "Do not repeat the operation before looking: list the directory, check the disk and its log, then decide.",
        )
        self.errno = errno
        self.filename = filename
        self.filename2 = filename2


class MalformedError(BerthError):
    """The request is malformed or can never work here; the caller has to change it."""

    code = 2


class PartlyError(BerthError):
    """Some of it was done and some was not."""

    code = 3


class ForbiddenError(BerthError):
    """The present state forbids it; it may work later or after something is cleared."""

    code = 4


class AbilityError(BerthError):
    """This host lacks what the request needs."""

    code = 5
