"""The CPUs that the cpuset of a process allows: cgroup v1, v2, both at once, and seen from inside a container.

Sources: cpuset(7), cgroups(7), cgroup_namespaces(7), proc_pid_cgroup(5), proc_pid_mountinfo(5) and the kernel's
admin-guide/cgroup-v2 and cgroup-v1/cpusets. Affinity masks are another matter: a mask may be narrower than this limit
and is never wider.

The directories are opened through the mounts of the reader, and the kernel writes both `/proc/PID/cgroup` and the root
field of mountinfo relative to the cgroup namespace of the reader, so the two always fit together, whatever namespace
the process itself is in.
"""

import errno
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from berth.errors import MalformedError
from berth.host.cpuset import CpuSet
from berth.host.discover import read_online
from berth.host.sysfs import CPU_DIRECTORY, read_optional

Version = Literal["v1", "v2"]

#: Files that name the limit, best first. The names without prefix are those of `noprefix` mounts and of the older
#: `cpuset` file system. In v1 `cpuset.cpus` may still list CPUs that went offline.
LIMIT_FILES: dict[Version, tuple[str, ...]] = {
    "v1": ("cpuset.effective_cpus", "cpuset.cpus", "effective_cpus", "cpus"),
    "v2": ("cpuset.cpus.effective",),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class EffectiveCpuset:
    """The cpuset limit of one process.

    Attributes:
        cpus: Allowed CPUs that are online; empty means that the cgroup allows none, not that it allows all.
        version: Kind of hierarchy the limit comes from; `none` when no cpuset limit was found.
        path: The cgroup of the process as `/proc/PID/cgroup` names it; empty when that names none.
        source: Path of the file that gave the answer, on the machine it describes.
        inherited: Whether that file belongs to another cgroup than the process's own, as a rule to an ancestor; the
            process's own limit is then the same or, where its cgroup cannot be seen, possibly narrower.
        reason: One sentence on how the answer was found.
    """

    cpus: CpuSet
    version: Literal["v1", "v2", "none"]
    path: str
    source: str
    inherited: bool
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Mount:
    version: Version
    root: str
    point: str


def effective_cpuset(pid: int | None = None, root: str = "/") -> EffectiveCpuset:
    """Return the cpuset limit of a process, always cut to the online CPUs.

    Args:
        pid: Process or thread number in the PID namespace of `/proc`; None is the calling process.
        root: Root of the machine; for a recorded machine, None is the process that recorded it.

    Raises:
        ProcessLookupError: No such process is visible.
        AbilityError: `no-cpu-information` when nothing says which CPUs are online.
        MalformedError: A file does not hold what the kernel documents.
        OSError: A file is there and cannot be read.
    """
    online = read_online(root)
    memberships = _memberships(root, "self" if pid is None else str(pid))
    mounts = _cpuset_mounts(root)
    for version, path in memberships:
        candidates = [mount for mount in mounts if mount.version == version]
        for mount in sorted(candidates, key=lambda mount: (_inside(path, mount.root) is None, len(mount.root))):
            found = _limit(root, mount, path, online)
            if found is not None:
                return found
    return EffectiveCpuset(
        cpus=online,
        version="none",
        path=memberships[0][1] if memberships else "",
        source=f"{CPU_DIRECTORY}/online",
        inherited=False,
        reason=_why_none(memberships, mounts),
    )


def _memberships(root: str, process: str) -> list[tuple[Version, str]]:
    """Return the cgroups that may limit the process: the `N:cpuset:` line wins, else the `0::` line counts.

    A machine recorded without `/proc/PID/cgroup` may have `/proc/PID/cpuset`, which names no version.
    """
    text = read_optional(root, f"/proc/{process}/cgroup")
    if text is None:
        if process != "self" and not Path(root, "proc", process).exists():
            why = "no such process is visible (a hidepid mount of /proc hides those of others)"
            raise ProcessLookupError(errno.ESRCH, why, f"/proc/{process}")
        path = read_optional(root, f"/proc/{process}/cpuset")
        return [] if path is None else [("v1", path.removesuffix("\n")), ("v2", path.removesuffix("\n"))]
    unified: list[tuple[Version, str]] = []
    for line in text.split("\n"):
        hierarchy, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if "cpuset" in controllers.split(","):
            return [("v1", path)]
        if hierarchy == "0" and not controllers:
            unified = [("v2", path)]
    return unified


def _cpuset_mounts(root: str) -> list[_Mount]:
    """Return the mounts that may show cpusets; of mounts stacked on one point only the last can be seen.

    A recorded machine may have only /proc/mounts, which does not tell the root field; it is `/` there.
    """
    source = "/proc/self/mountinfo"
    text = read_optional(root, source)
    parse = _parse_mountinfo_line
    if text is None:
        source, parse = "/proc/mounts", _parse_mounts_line
        text = read_optional(root, source) or ""
    visible: dict[str, _Mount | None] = {}
    for line in filter(None, text.split("\n")):
        try:
            mount_root, point, kind, options = parse(line)
        except ValueError:
            message = f"{source} has a line that is no mount: {line[:200]!a}."
            raise MalformedError("bad-mount-table", message) from None
        version = _cpuset_version(kind, options)
        point = _unescape(point)
        visible[point] = version and _Mount(version=version, root=_unescape(mount_root), point=point)
    return [mount for mount in visible.values() if mount is not None]


def _parse_mountinfo_line(line: str) -> tuple[str, str, str, str]:
    """Return root, mount point, type and super options; the number of fields before ` - ` varies."""
    before, _, after = line.partition(" - ")
    _identifier, _parent, _device, mount_root, point, *_rest = before.split(" ")
    kind, _source, options = after.split(" ", 2)
    return mount_root, point, kind, options


def _parse_mounts_line(line: str) -> tuple[str, str, str, str]:
    _source, point, kind, options, *_rest = line.split(" ")
    return "/", point, kind, options


def _cpuset_version(kind: str, options: str) -> Version | None:
    if kind == "cpuset" or (kind == "cgroup" and "cpuset" in options.split(",")):
        return "v1"
    return "v2" if kind == "cgroup2" else None


def _unescape(text: str) -> str:
    """Undo the octal escapes of proc_pid_mountinfo(5): space, tab, newline and backslash."""
    return os.fsdecode(re.sub(rb"\\([0-3][0-7]{2})", lambda found: bytes([int(found[1], 8)]), os.fsencode(text)))


def _inside(path: str, mount_root: str) -> list[str] | None:
    """Return the names that lead from the root of a mount to a cgroup; None when the mount does not show it.

    A path that climbs (`/..`) leaves the cgroup namespace of the reader: names above it are hidden.
    """
    prefix = mount_root.rstrip("/") + "/"
    if path != mount_root and not path.startswith(prefix):
        return None
    names = [name for name in path[len(prefix) :].split("/") if name]
    return None if ".." in names else names


def _limit(root: str, mount: _Mount, path: str, online: CpuSet) -> EffectiveCpuset | None:
    """Return the limit at the cgroup of the process, else at the nearest one above it in this mount."""
    names = _inside(path, mount.root)
    for depth, directory in _upwards(mount.point, names or []):
        for file in LIMIT_FILES[mount.version]:
            source = f"{directory}/{file}"
            text = read_optional(root, source)
            if text is None:
                continue
            allowed = CpuSet.parse_list(text, source=source)
            own = names is not None and depth == len(names)
            return EffectiveCpuset(
                cpus=allowed & online,
                version=mount.version,
                path=path,
                source=source,
                inherited=not own,
                reason=_why(mount, path, directory, allowed - online, own=own, shown=names is not None),
            )
    return None


def _upwards(point: str, names: list[str]) -> Iterator[tuple[int, str]]:
    for depth in range(len(names), -1, -1):
        yield depth, "/".join([point.rstrip("/"), *names[:depth]])


def _why(mount: _Mount, path: str, directory: str, offline: CpuSet, *, own: bool, shown: bool) -> str:
    if own:
        text = f"The cgroup {path} sets this limit"
    elif shown:
        text = f"The cgroup {path} has no cpuset files of its own; {directory} is the nearest one above it that has"
    else:
        text = f"The cgroup {path} is outside of what is mounted at {mount.point}, whose limit is given instead"
    return f"{text}; CPUs {offline} of it are offline." if offline else f"{text}."


def _why_none(memberships: list[tuple[Version, str]], mounts: list[_Mount]) -> str:
    if not memberships:
        return "The kernel names no cgroup with a cpuset for this process, so all online CPUs are allowed."
    versions = {version for version, _path in memberships}
    points = [mount.point for mount in mounts if mount.version in versions]
    if not points:
        return f"The cgroup {memberships[0][1]} is in a hierarchy that is not mounted here, so no limit can be read."
    return f"No cpuset file is at or above the cgroup {memberships[0][1]} in {', '.join(points)}: no limit is known."
