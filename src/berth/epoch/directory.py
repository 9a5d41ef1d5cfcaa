"""The directory of a state root: opened without following a link, or refused with what it is instead."""

import errno
import os
import pwd
import shlex
from typing import Final

from berth.errors import FailedError, MalformedError

_DIRECTORY: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
#: How another root is named, by whoever needs one.
NAME_ANOTHER: Final = (
    "Name another one: `berth run` takes it from --state-root, BERTH_STATE_ROOT or the settings, `berth epoch` as ROOT."
)


def open_root_directory(path: str) -> int:
    """Open the directory `path` and return its descriptor.

    Raises:
        MalformedError: It is empty, missing, a link or something else.
        FailedError: The caller may not open it.
    """
    if not path or "\0" in path:
        raise MalformedError("bad-state-root", f"the state root is {path!r}, which names nothing", NAME_ANOTHER)
    try:
        return os.open(os.path.abspath(path), _DIRECTORY)
    except OSError as error:
        raise cannot_open(os.path.abspath(path), error) from error


def cannot_open(path: str, error: OSError) -> FailedError | MalformedError:
    """Return the error for a root that could not be made or opened."""
    if os.path.islink(path):
        target = os.path.realpath(path)
        message = f"the state root {path!r} is a symbolic link, which could point elsewhere a moment later"
        return MalformedError("bad-state-root", message, f"Give the directory itself: {target}")
    if error.errno == errno.ENOENT:
        return MalformedError("bad-state-root", f"the state root {path!r} does not exist", NAME_ANOTHER)
    if error.errno in (errno.ENOTDIR, errno.ELOOP, errno.EEXIST):
        return MalformedError("bad-state-root", f"the state root {path!r} is not a directory", NAME_ANOTHER)
    return FailedError("state-root", f"the state root {path!r} cannot be used: {error.strerror}", NAME_ANOTHER)


def check_owner(path: str, status: os.stat_result) -> None:
    """Refuse a root in which somebody else could make, swap or remove work-state.

    Raises:
        MalformedError: It belongs to another user, or others may write it.
    """
    if status.st_uid not in (os.geteuid(), 0):
        raise MalformedError(
            "foreign-state-root",
            f"the state root {path!r} belongs to {_user(status.st_uid)}, not to you (uid {os.geteuid()})",
            f"Do it as that user. {NAME_ANOTHER}" if os.geteuid() == 0 else NAME_ANOTHER,
        )
    if status.st_mode & 0o022:
        raise MalformedError(
            "open-state-root",
            f"others than you may write to the state root {path!r}, and could replace work-state in it",
            f"Take that away: `chmod go-w {shlex.quote(path)}`. {NAME_ANOTHER}",
        )


def _user(uid: int) -> str:
    try:
        return f"{pwd.getpwuid(uid).pw_name} (uid {uid})"
    except KeyError:
        return f"uid {uid}"
