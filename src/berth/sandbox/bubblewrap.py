"""bubblewrap on this host: where it is, what it may show, and which of its options work, by trying them."""

import contextlib
import functools
import os
import shutil
import stat
import subprocess
from typing import Final

from berth.errors import AbilityError
from berth.sandbox import policy
from berth.sandbox.fixes import user_namespace_fix
from berth.sandbox.policy import Abilities, Channels, SystemLayout

#: How long bubblewrap may take to set a sandbox up, in seconds.
SET_UP_TIMEOUT_S: Final = 20.0
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
        etc = {path: memory_file(content) for path, content in policy.ETC_FILES.items()}
        for fd in etc.values():
            stack.callback(os.close, fd)
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


def memory_file(content: str) -> int:
    """Return a descriptor of a file in memory with `content`, at its beginning."""
    fd = os.memfd_create("berth")
    os.write(fd, content.encode())
    os.lseek(fd, 0, os.SEEK_SET)
    return fd
