"""What a sandbox shows and what it leaves out, as a list of bubblewrap arguments that each say why they are there.

bubblewrap carries operations out in order, so the order of the list is part of the policy. Sources: bwrap(1); the
attacks behind the choices are in docs/manual/sandbox.md.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

#: User and group id inside, for every caller, root included (design, section 6).
INSIDE_ID: Final = 1000
#: Where the workspace is inside.
INSIDE_WORKSPACE: Final = "/workspace"
_PATH: Final = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_PASSWD: Final = f"root:x:0:0:root:/root:/bin/sh\nberth:x:{INSIDE_ID}:{INSIDE_ID}:berth:{INSIDE_WORKSPACE}:/bin/sh\n"
_GROUP: Final = f"root:x:0:\nberth:x:{INSIDE_ID}:\n"
_HOSTS: Final = "127.0.0.1 localhost\n::1 localhost\n"

#: Files of /etc that programs need to find their account and themselves; written anew, never the host's.
ETC_FILES: Final = {"/etc/passwd": _PASSWD, "/etc/group": _GROUP, "/etc/hosts": _HOSTS}


@dataclass(frozen=True, slots=True)
class Operation:
    """One bubblewrap option with its values, and the reason for it."""

    arguments: tuple[str, ...]
    reason: str

    def describe(self) -> str:
        """Return the option and the reason on one line."""
        return f"{' '.join(self.arguments)}: {self.reason}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Abilities:
    """Which options work on this host, as tried.

    Attributes:
        disable_userns: Further user namespaces can be forbidden inside.
        fresh_proc: A new /proc can be mounted; otherwise the host's is bound read-only.
        downgrades: One sentence for each that does not work.
    """

    disable_userns: bool = True
    fresh_proc: bool = True
    downgrades: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SystemLayout:
    """The read-only system of this host.

    Attributes:
        directories: Directories that are bound read-only at their own path.
        links: Symbolic links to recreate, path to target.
        files: Files that are bound read-only at their own path.
    """

    directories: tuple[str, ...]
    links: Mapping[str, str] = field(default_factory=dict)
    files: tuple[str, ...] = ()

    @property
    def read_only(self) -> tuple[str, ...]:
        """Every host path that the sandbox can read."""
        return (*self.directories, *self.files)


@dataclass(frozen=True, slots=True, kw_only=True)
class Channels:
    """Descriptors that are handed to bubblewrap, all closed before the command begins.

    Attributes:
        workspace: The workspace, opened without following a link.
        etc: A descriptor with the content for each path of `ETC_FILES`.
        gate: bubblewrap waits here after the set-up; None to begin at once.
        status: bubblewrap writes its JSON status here; None for none.
    """

    workspace: int | None
    etc: Mapping[str, int]
    gate: int | None = None
    status: int | None = None


def environment(mark: Mapping[str, str], *, terminal: str | None) -> dict[str, str]:
    """Return the whole environment inside: nothing of the caller's but the kind of terminal."""
    inside = {
        "HOME": INSIDE_WORKSPACE,
        "LANG": "C.UTF-8",
        "LOGNAME": "berth",
        "PATH": _PATH,
        "PWD": INSIDE_WORKSPACE,
        "SHELL": "/bin/sh",
        "TMPDIR": "/tmp",
        "USER": "berth",
    }
    if terminal:
        inside["TERM"] = terminal
    return {**inside, **mark}


def operations(
    layout: SystemLayout, abilities: Abilities, channels: Channels, variables: Mapping[str, str]
) -> list[Operation]:
    """Return the bubblewrap options of one sandbox, in the order in which they are carried out."""
    return [
        *_namespaces(abilities),
        *_system(layout, abilities, channels),
        *_workspace(channels),
        Operation(("--remount-ro", "/"), "nothing can be written beside the workspace and /tmp"),
        Operation(("--clearenv",), "nothing of the caller's environment is visible"),
        *(Operation(("--setenv", key, value), "rebuilt environment") for key, value in sorted(variables.items())),
        *_control(channels),
    ]


def arguments(listed: Sequence[Operation], command: Sequence[str]) -> list[str]:
    """Return the argument list after the program name: options, `--`, command.

    The `--` keeps a command that begins with `-` from being read as an option (CVE-2024-32462).
    """
    return [*(word for operation in listed for word in operation.arguments), "--", *command]


def _namespaces(abilities: Abilities) -> list[Operation]:
    inside = str(INSIDE_ID)
    found = [
        Operation(("--unshare-user",), "own user namespace: no privilege reaches the host"),
        Operation(("--unshare-pid",), "own process ids: nothing outside can be seen or signalled"),
        Operation(("--unshare-net",), "own network: loopback only, no abstract sockets of the host"),
        Operation(("--unshare-ipc",), "own System V and POSIX message queues"),
        Operation(("--unshare-uts",), "own host name"),
        Operation(("--unshare-cgroup-try",), "the host's cgroup paths are hidden where the kernel can"),
        Operation(("--uid", inside, "--gid", inside), "the same identity inside for every caller"),
        Operation(("--hostname", "berth"), "the host's name is not shown"),
        Operation(("--cap-drop", "ALL"), "no capability inside, not even over its own namespaces"),
        Operation(("--new-session",), "no input can be pushed into the caller's terminal (CVE-2017-5226)"),
        Operation(("--die-with-parent",), "the kernel kills everything inside when berth's keeper is gone"),
    ]
    if abilities.disable_userns:
        found.append(Operation(("--disable-userns",), "no further user namespaces, the usual way to kernel bugs"))
    return found


def _system(layout: SystemLayout, abilities: Abilities, channels: Channels) -> list[Operation]:
    proc = ("--proc", "/proc") if abilities.fresh_proc else ("--ro-bind", "/proc", "/proc")
    return [
        *(Operation(("--ro-bind", path, path), "the system, read-only") for path in layout.directories),
        *(Operation(("--symlink", target, path), "a link as on the host") for path, target in layout.links.items()),
        Operation(("--perms", "0755", "--dir", "/etc"), "readable as everywhere"),
        *(Operation(("--ro-bind", path, path), "what links and the loader need") for path in layout.files),
        *(
            Operation(("--perms", "0444", "--ro-bind-data", str(fd), path), "written anew")
            for path, fd in channels.etc.items()
        ),
        Operation(
            proc, "processes of this sandbox only" if abilities.fresh_proc else "the host's processes, read-only"
        ),
        Operation(
            ("--remount-ro", "/proc"),
            "no kernel setting can be written: /proc/sys asks for the user outside, who may be root",
        ),
        Operation(("--dev", "/dev"), "private device nodes: null, zero, full, random, urandom, tty, pts, shm"),
        Operation(("--perms", "1777", "--tmpfs", "/dev/shm"), "shared memory of its own"),
        Operation(("--remount-ro", "/dev"), "nothing can be stored beside the device nodes"),
        Operation(("--tmpfs", "/tmp"), "private temporary files, gone with the sandbox"),
    ]


def _workspace(channels: Channels) -> list[Operation]:
    if channels.workspace is None:
        return []
    return [
        Operation(
            ("--bind-fd", str(channels.workspace), INSIDE_WORKSPACE),
            "the workspace, by descriptor: a link swapped in later is not followed",
        ),
        Operation(("--chdir", INSIDE_WORKSPACE), "the command begins there"),
    ]


def _control(channels: Channels) -> list[Operation]:
    found = []
    if channels.gate is not None:
        found.append(
            Operation(("--block-fd", str(channels.gate)), "waits after the set-up until it has been looked at")
        )
    if channels.status is not None:
        found.append(Operation(("--json-status-fd", str(channels.status)), "says whether the command began"))
    return found
