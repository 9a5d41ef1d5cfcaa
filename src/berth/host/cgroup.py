"""The CPUs and memory nodes that the cpuset of a process allows.

Sources: cpuset(7) and the kernel's admin-guide/cgroup-v2 and cgroup-v1/cpusets. Affinity masks are another matter: a
mask may be narrower than this limit and is never wider.
"""

from dataclasses import dataclass
from typing import Literal

from berth.host.cgroup_tree import Place, Places, Version, find_places
from berth.host.cpuset import CpuSet
from berth.host.discover import read_online
from berth.host.sysfs import CPU_DIRECTORY, NODE_DIRECTORY, numbered, read_optional

#: Files that name the limit, best first. The names without prefix are those of `noprefix` mounts and of the older
#: `cpuset` file system. In v1 `cpuset.cpus` may still list CPUs that went offline.
LIMIT_FILES: dict[Version, tuple[str, ...]] = {
    "v1": ("cpuset.effective_cpus", "cpuset.cpus", "effective_cpus", "cpus"),
    "v2": ("cpuset.cpus.effective",),
}
#: The same for memory nodes.
MEMORY_FILES: dict[Version, tuple[str, ...]] = {
    "v1": ("cpuset.effective_mems", "cpuset.mems", "effective_mems", "mems"),
    "v2": ("cpuset.mems.effective",),
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
        mems: Allowed memory nodes that are there, of the same cgroup; None when no limit was found.
    """

    cpus: CpuSet
    version: Literal["v1", "v2", "none"]
    path: str
    source: str
    inherited: bool
    reason: str
    mems: CpuSet | None = None


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
    found = find_places(pid, root, "cpuset")
    for place in found.places:
        limit = _limit(root, place, online)
        if limit is not None:
            return limit
    return EffectiveCpuset(
        cpus=online,
        version="none",
        path=found.memberships[0].path if found.memberships else "",
        source=f"{CPU_DIRECTORY}/online",
        inherited=False,
        reason=_why_none(found),
    )


def _limit(root: str, place: Place, online: CpuSet) -> EffectiveCpuset | None:
    """Return the limit at the cgroup of the process, else at the nearest one above it in this mount."""
    for directory in place.directories:
        named = _first(root, directory, LIMIT_FILES[place.version])
        if named is None:
            continue
        source, allowed = named
        memory = _first(root, directory, MEMORY_FILES[place.version])
        own = place.shown and directory == place.directories[0]
        return EffectiveCpuset(
            cpus=allowed & online,
            version=place.version,
            path=place.path,
            source=source,
            inherited=not own,
            reason=_why(place, directory, allowed - online, own=own),
            mems=None if memory is None else _existing(root, memory[1]),
        )
    return None


def _first(root: str, directory: str, names: tuple[str, ...]) -> tuple[str, CpuSet] | None:
    """Return the first of these files that is there, and the set it names."""
    for name in names:
        source = f"{directory}/{name}"
        text = read_optional(root, source)
        if text is not None:
            return source, CpuSet.parse_list(text, source=source)
    return None


def _existing(root: str, mems: CpuSet) -> CpuSet:
    """Cut to the nodes that are there; a kernel without NUMA shows none, and all memory is node 0."""
    nodes = numbered(root, NODE_DIRECTORY, "node")
    return mems & nodes if nodes else mems


def _why(place: Place, directory: str, offline: CpuSet, *, own: bool) -> str:
    path = place.path
    if own:
        text = f"The cgroup {path} sets this limit"
    elif place.shown:
        text = f"The cgroup {path} has no cpuset files of its own; {directory} is the nearest one above it that has"
    else:
        text = f"The cgroup {path} is outside of what is mounted at {place.point}, whose limit is given instead"
    return f"{text}; CPUs {offline} of it are offline." if offline else f"{text}."


def _why_none(found: Places) -> str:
    if not found.memberships:
        return "The kernel names no cgroup with a cpuset for this process, so all online CPUs are allowed."
    path = found.memberships[0].path
    if not found.points:
        return f"The cgroup {path} is in a hierarchy that is not mounted here, so no limit can be read."
    return f"No cpuset file is at or above the cgroup {path} in {', '.join(found.points)}: no limit is known."
