"""bubblewrap on this host: where it is, what it may show, and which of its options work, by trying them."""

import contextlib
import functools
import os
import stat
import subprocess
from typing import Final

from berth.errors import AbilityError
from berth.sandbox import policy
from berth.sandbox.fixes import user_namespace_fix
from berth.sandbox.policy import Abilities, Channels, SystemLayout

#: How long bubblewrap may take to set a sandbox up, in seconds.
SET_UP_TIMEOUT_S: Final = 10.0
#: Where administrators install programs, the distribution's own place first (NixOS has the last).
_TRUSTED: Final = ("/usr/bin", "/bin", "/usr/local/bin", "/run/current-system/sw/bin")
#: Top-level names that are links into /usr on merged systems and directories on others.
_TOP_LEVEL: Final = ("/bin", "/lib", "/lib32", "/lib64", "/libx32", "/sbin")
#: What links below /usr point to and the dynamic loader reads.
_ETC: Final = ("/etc/alternatives", "/etc/ld.so.cache", "/etc/ld.so.conf", "/etc/ld.so.conf.d")

User = tuple[int, int, tuple[int, ...]]


def find_bubblewrap() -> str:
    """Return the path of bwrap: one that only an administrator can have put there, never one found by PATH.

    A directory of PATH may lie in a workspace, and what an earlier sandbox wrote there would be executed on the host.

    Raises:
        AbilityError: There is none, or it is set-user-ID, which the sandbox design excludes (CVE-2026-41163).
    """
    found = [path for path in (os.path.join(directory, "bwrap") for directory in _TRUSTED) if os.path.exists(path)]
    trusted = [path for path in found if _is_administrators(path)]
    if not trusted:
        why = f"{found[0]} can be changed by others than root" if found else f"it is in none of {', '.join(_TRUSTED)}"
        raise AbilityError(
            "no-bubblewrap",
            f"there is no bubblewrap to trust ({why}), and a command meant for a sandbox never runs without one",
            "Install it: `apt-get install bubblewrap` or `dnf install bubblewrap`, then see `berth doctor`.",
        )
    if os.stat(trusted[0]).st_mode & stat.S_ISUID:
        raise AbilityError(
            "setuid-bubblewrap",
            f"{trusted[0]} is set-user-ID root, which berth refuses: it would have more rights than its caller",
            f"Take the bit away with `chmod u-s {trusted[0]}`; bubblewrap then uses user namespaces.",
        )
    return trusted[0]


def _is_administrators(path: str) -> bool:
    """Say whether root alone can change the program: it, and the directory it stands in."""
    real = os.path.realpath(path)
    administrators = {0, _unmapped_uid()}
    return all(
        status.st_uid in administrators and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
        for status in (os.stat(real), os.stat(os.path.dirname(real)))
    )


def _unmapped_uid() -> int:
    """Return the uid that stands for the host's root where this user namespace has no number for it, else 0."""
    try:
        with open("/proc/self/uid_map", encoding="ascii") as table:
            whole_host = table.read().split() == ["0", "0", "4294967295"]
        with open("/proc/sys/kernel/overflowuid", encoding="ascii") as file:
            return 0 if whole_host else int(file.read())
    except OSError:
        return 0


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
    """Run `true` in a sandbox with every option of a real one; return None where it worked, or what bubblewrap said."""
    with contextlib.ExitStack() as opened:

        def keep(fd: int) -> int:
            opened.callback(os.close, fd)
            return fd

        etc = {path: keep(memory_file(content)) for path, content in policy.ETC_FILES.items()}
        gate, gate_write = map(keep, os.pipe2(os.O_CLOEXEC))
        os.write(gate_write, b"g")
        _, status = map(keep, os.pipe2(os.O_CLOEXEC))
        workspace = keep(os.open("/usr", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC))
        channels = Channels(workspace=workspace, etc=etc, gate=gate, status=status)
        listed = policy.operations(system_layout(), abilities, channels, {})
        try:
            tried = subprocess.run(
                [bwrap, *policy.arguments(listed, ["/bin/sh", "-c", ":"])],
                pass_fds=(workspace, gate, status, *etc.values()),
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="backslashreplace",
                cwd="/",
                timeout=SET_UP_TIMEOUT_S,
                start_new_session=True,  # whoever it becomes must not reach the caller's terminal
                user=None if user is None else user[0],
                group=None if user is None else user[1],
                extra_groups=None if user is None else user[2],
            )
        except subprocess.TimeoutExpired as error:
            raise AbilityError(
                "no-sandbox",
                f"bubblewrap cannot set up a sandbox here: it had not ended after {SET_UP_TIMEOUT_S:.0f} s",
                "Try `bwrap --ro-bind / / true` by hand, and see `berth doctor`.",
            ) from error
        except OSError as error:
            return str(error)
    return None if tried.returncode == 0 else (tried.stderr.strip() or f"exit code {tried.returncode}")


def memory_file(content: str) -> int:
    """Return a descriptor of a file in memory with `content`, at its beginning."""
    fd = os.memfd_create("berth")
    os.write(fd, content.encode())
    os.lseek(fd, 0, os.SEEK_SET)
    return fd
