"""Where the cgroups of a process lie: v1, v2, both at once, and seen from inside a container.

Sources: cgroups(7), cgroup_namespaces(7), proc_pid_cgroup(5), proc_pid_mountinfo(5).

The directories are opened through the mounts of the reader, and the kernel writes both `/proc/PID/cgroup` and the root
field of mountinfo relative to the cgroup namespace of the reader, so the two always fit together, whatever namespace
the process itself is in.
"""

import errno
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from berth.errors import MalformedError
from berth.host.sysfs import read_optional
from berth.linux.mounts import Mount, parse_mounts

Version = Literal["v1", "v2"]
Controller = Literal["cpuset", "cpu"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Membership:
    """One cgroup of a process; `path` is as `/proc/PID/cgroup` names it."""

    version: Version
    path: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A cgroup of a process as one mount shows it.

    Attributes:
        version: Kind of hierarchy.
        path: The cgroup as `/proc/PID/cgroup` names it.
        point: Mount point of the hierarchy.
        directories: The directory of the cgroup and those above it, up to the mount point; paths on the machine.
        shown: Whether the first directory is the cgroup itself; if not, the cgroup is outside of what is mounted, and
            the mount point is the only directory.
    """

    version: Version
    path: str
    point: str
    directories: tuple[str, ...]
    shown: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """Where one controller limits a process.

    Attributes:
        memberships: The cgroups that may limit it; empty when the kernel names none.
        points: Mount points of their hierarchies.
        places: What the mounts show of them, best first.
    """

    memberships: tuple[Membership, ...]
    points: tuple[str, ...]
    places: tuple[Place, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Hierarchy:
    version: Version
    root: str
    point: str


def find_places(pid: int | None, root: str, controller: Controller) -> Places:
    """Return where one controller limits a process.

    Args:
        pid: Process or thread number in the PID namespace of `/proc`; None is the calling process.
        root: Root of the machine; for a recorded machine, None is the process that recorded it.
        controller: Which one.

    Raises:
        ProcessLookupError: No such process is visible.
        MalformedError: The mount table is not in the kernel's format.
        OSError: A file is there and cannot be read.
    """
    memberships = _memberships(root, "self" if pid is None else str(pid), controller)
    mounted = _hierarchies(root, controller)
    versions = {membership.version for membership in memberships}
    places = []
    for membership in memberships:
        fitting = [_place(membership, hierarchy) for hierarchy in mounted if hierarchy.version == membership.version]
        # One that shows the cgroup is better, and of those one that shows more of what is above it.
        places += sorted(fitting, key=lambda place: (not place.shown, -len(place.directories)))
    return Places(
        memberships=tuple(memberships),
        points=tuple(hierarchy.point for hierarchy in mounted if hierarchy.version in versions),
        places=tuple(places),
    )


def _memberships(root: str, process: str, controller: Controller) -> list[Membership]:
    """Return the cgroups that may limit the process: the v1 line of the controller wins, else the `0::` line counts.

    A machine recorded without `/proc/PID/cgroup` may have `/proc/PID/cpuset`, which names no version.
    """
    text = read_optional(root, f"/proc/{process}/cgroup")
    if text is None:
        if process != "self" and not Path(root, "proc", process).exists():
            why = "no such process is visible (a hidepid mount of /proc hides those of others)"
            raise ProcessLookupError(errno.ESRCH, why, f"/proc/{process}")
        path = read_optional(root, f"/proc/{process}/cpuset")
        if path is None:
            return []
        return [Membership(version=version, path=path.removesuffix("\n")) for version in ("v1", "v2")]
    unified: list[Membership] = []
    for line in text.split("\n"):
        hierarchy, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controller in controllers.split(","):
            return [Membership(version="v1", path=path)]
        if hierarchy == "0" and not controllers:
            unified = [Membership(version="v2", path=path)]
    return unified


def _hierarchies(root: str, controller: Controller) -> list[_Hierarchy]:
    """Return the mounts that may show the controller; of mounts stacked on one point only the last can be seen.

    A recorded machine may have only /proc/mounts, which does not tell the root field; it is `/` there.
    """
    text = read_optional(root, "/proc/self/mountinfo")
    if text is None:
        text = _as_mountinfo(read_optional(root, "/proc/mounts") or "")
    visible: dict[str, _Hierarchy | None] = {}
    for mount in parse_mounts(os.fsencode(text)):
        version = _version(mount, controller)
        point = mount.mount_point
        visible[point] = _Hierarchy(version=version, root=mount.root, point=point) if version else None
    return [hierarchy for hierarchy in visible.values() if hierarchy is not None]


def _as_mountinfo(mounts: str) -> str:
    """Return the lines of /proc/mounts (proc_pid_mounts(5)) as lines of mountinfo; both escape names alike."""
    lines = []
    for line in filter(None, mounts.split("\n")):
        fields = line.split(" ")
        if len(fields) < 4:
            raise MalformedError("bad-mount-table", f"/proc/mounts has a line that is no mount: {line[:200]!a}.")
        source, point, kind, options = fields[:4]
        lines.append(f"0 0 0:0 / {point} {options} - {kind} {source} {options}\n")
    return "".join(lines)


def _version(mount: Mount, controller: Controller) -> Version | None:
    if mount.file_system == "cgroup2":
        return "v2"
    named = mount.file_system == "cgroup" and controller in mount.super_options
    return "v1" if named or mount.file_system == controller == "cpuset" else None


def _place(membership: Membership, hierarchy: _Hierarchy) -> Place:
    names = _inside(membership.path, hierarchy.root)
    top = hierarchy.point.rstrip("/")
    return Place(
        version=membership.version,
        path=membership.path,
        point=hierarchy.point,
        directories=tuple("/".join([top, *(names or [])[:depth]]) for depth in range(len(names or []), -1, -1)),
        shown=names is not None,
    )


def _inside(path: str, mount_root: str) -> list[str] | None:
    """Return the names that lead from the root of a mount to a cgroup; None when the mount does not show it.

    A path that climbs (`/..`) leaves the cgroup namespace of the reader: names above it are hidden.
    """
    prefix = mount_root.rstrip("/") + "/"
    if path != mount_root and not path.startswith(prefix):
        return None
    names = [name for name in path[len(prefix) :].split("/") if name]
    return None if ".." in names else names
