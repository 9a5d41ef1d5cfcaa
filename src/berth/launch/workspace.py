"""The directory a command works in: opened once, and refused where a sandbox must not write.

On the host the workspace is just the working directory. A sandbox makes it writable for code nobody has read, so there
it must be a directory reached without any link, and neither hold nor be held by what that code must never change.
"""

import contextlib
import errno
import os
import pwd
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from berth.errors import MalformedError

#: The system that every other command relies on: no workspace is one of these, holds one, or lies in one.
_SYSTEM: Final = ("/bin", "/boot", "/dev", "/etc", "/lib", "/proc", "/sbin", "/sys", "/usr", "/var/spool")
#: Directories of many: no workspace is one of these or holds one, but it may lie in one.
_SHARED: Final = (
    "/",
    "/home",
    "/media",
    "/mnt",
    "/opt",
    "/root",
    "/run",
    "/srv",
    "/tmp",
    "/var",
    "/var/lib",
    "/var/tmp",
)
_REACH_TIMEOUT_S: Final = 10.0
_STEP: Final = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


@dataclass(frozen=True, slots=True)
class Workspace:
    """An open workspace.

    Attributes:
        path: Absolute path.
        fd: The directory, open for reading on the host and as O_PATH for a sandbox.
        owner: Its user id.
        group: Its group id.
    """

    path: str
    fd: int
    owner: int
    group: int


def open_host_workspace(path: str) -> Workspace:
    """Open the working directory of a command on the host.

    Raises:
        MalformedError: It is not a directory that the caller may enter.
    """
    try:
        fd = os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        if not os.access(f"/proc/self/fd/{fd}", os.X_OK):
            os.close(fd)
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
    except OSError as error:
        raise _cannot_open(path, error) from error
    return _opened(os.path.abspath(path), fd)


def open_sandbox_workspace(path: str, *, state_root: str, settings: Sequence[str] = ()) -> Workspace:
    """Open the directory that becomes /workspace in a sandbox, following no link on the way.

    Args:
        path: The directory.
        state_root: The state root.
        settings: Directories of berth's settings.

    Raises:
        MalformedError: It is not a directory that the caller may enter and read, is reached through a link, or a
            sandbox must not write there.
    """
    absolute = os.path.abspath(path)
    fd = _open_without_links(absolute)
    with contextlib.ExitStack() as opened:
        opened.callback(os.close, fd)
        _refuse_unsafe(absolute, fd, [os.path.abspath(state_root), os.path.realpath(state_root), *settings])
        if not os.access(f"/proc/self/fd/{fd}", os.R_OK | os.X_OK):
            raise _cannot_open(path, PermissionError(errno.EACCES, os.strerror(errno.EACCES)))
        opened.pop_all()
    return _opened(absolute, fd)


def check_reachable(workspace: Workspace, user: tuple[int, int, tuple[int, ...]]) -> None:
    """Refuse a workspace that the user a sandbox of root becomes cannot enter by its path.

    bubblewrap resolves the path again as that user, so an open descriptor is not enough. It is tried, not computed:
    access control lists and mount options count too.

    Raises:
        MalformedError: A directory above it, or the workspace itself, is closed to them.
    """
    uid, gid, groups = user
    words = ["/bin/sh", "-c", 'cd -- "$0"', workspace.path]
    try:
        tried = subprocess.run(
            words,
            user=uid,
            group=gid,
            extra_groups=groups,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # that user must not reach the caller's terminal
            timeout=_REACH_TIMEOUT_S,
        )
        reached = tried.returncode == 0
    except subprocess.TimeoutExpired:
        reached = False
    if not reached:
        raise MalformedError(
            "workspace-unreachable",
            f"the sandbox of root runs as uid {uid} here, and that user cannot enter the workspace {workspace.path!r}",
            "Open the directories above it to that user (chmod o+x), or give another with --workspace DIR.",
        )


def _opened(path: str, fd: int) -> Workspace:
    status = os.fstat(fd)
    return Workspace(path, fd, status.st_uid, status.st_gid)


def _open_without_links(path: str) -> int:
    """Walk down from / one name at a time, so that no component can be a link, now or a moment later."""
    fd = os.open("/", _STEP)
    walked = "/"
    for name in filter(None, path.split("/")):
        walked = os.path.join(walked, name)
        try:
            below = os.open(name, _STEP, dir_fd=fd)
        except OSError as error:
            if os.path.islink(walked):
                raise MalformedError(
                    "workspace-link",
                    f"the workspace {path!r} is reached through the symbolic link {walked!r}, "
                    "which could point elsewhere a moment later",
                    f"Give the real path: {os.path.realpath(path)}",
                ) from error
            raise _cannot_open(path, error) from error
        finally:
            os.close(fd)
        fd = below
    return fd


def _refuse_unsafe(path: str, fd: int, own: Sequence[str]) -> None:
    """Refuse a workspace that is, holds or lies in what code nobody has read must not change.

    Args:
        path: Its absolute path.
        fd: The open directory, which may have other names.
        own: Directories of berth's own state and settings.
    """
    owner = os.fstat(fd).st_uid
    homes = [home for home in (os.environ.get("HOME", ""), _home_of(os.getuid()), _home_of(owner)) if home]
    programs = [os.path.realpath(sys.prefix), os.path.dirname(os.path.dirname(os.path.abspath(__file__)))]
    outer = [*_SYSTEM, *own]
    if path in map(os.path.abspath, homes):
        raise _unsafe(path, "it is a home directory")
    for protected in [*_SHARED, *outer, *map(os.path.abspath, homes), *programs]:
        if path == protected or _inside(protected, path):
            what = "berth's own program" if protected in programs else protected
            raise _unsafe(path, f"it {'is' if path == protected else 'holds'} {what}")
        if protected in outer and _inside(path, protected):
            raise _unsafe(path, f"it lies inside {protected}")
        with contextlib.suppress(OSError):
            if os.path.samestat(os.stat(protected), os.fstat(fd)):
                raise _unsafe(path, f"it is {protected} under another name")


def _home_of(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_dir
    except KeyError:
        return ""


def _inside(path: str, directory: str) -> bool:
    return path != directory and path.startswith(directory.rstrip("/") + "/")


def _unsafe(path: str, why: str) -> MalformedError:
    return MalformedError(
        "unsafe-workspace",
        f"{path!r} cannot be the writable workspace of a sandbox: {why}",
        "Make a directory for the work and give it with --workspace DIR.",
    )


def _cannot_open(path: str, error: OSError) -> MalformedError:
    return MalformedError(
        "bad-workspace",
        f"the workspace {path!r} cannot be used: {error.strerror}",
        "It must be an existing directory that you may enter and read; give another with --workspace DIR.",
    )
