"""How much CPU time the cgroups of a process grant: quotas, weight and how often they were short.

Sources: the kernel's admin-guide/cgroup-v2 (`cpu.max`, `cpu.weight`, `cpu.stat`), scheduler/sched-bwc (v1). A quota
counts whatever the affinity mask allows, and every cgroup above the process may set one: the tightest decides.
"""

import re
from dataclasses import dataclass
from typing import Literal

from berth.errors import MalformedError
from berth.host.cgroup_tree import Place, find_places
from berth.host.sysfs import read_number, read_optional

_NS_PER_US = 1000
#: Highest cpu.weight, linux/cgroup.h.
_MAX_WEIGHT = 10000
#: Default of cpu.weight and cpu.shares, between which the kernel converts (linux/cgroup.h, sched_weight_to_cgroup).
_DEFAULT_WEIGHT, _DEFAULT_SHARES = 100, 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class QuotaLevel:
    """One cgroup that grants a quota.

    Attributes:
        directory: The cgroup's directory, on the machine it describes.
        inherited: Whether it is not the process's own cgroup.
        quota_us: CPU time in each period, of all CPUs together.
        period_us: Length of the period.
        nr_periods: Periods in which anything ran; None where the kernel does not say.
        nr_throttled: Periods that the quota did not last; None where the kernel does not say.
        throttled_us: Time for which it was stopped; None where the kernel does not say.
    """

    directory: str
    inherited: bool
    quota_us: int
    period_us: int
    nr_periods: int | None
    nr_throttled: int | None
    throttled_us: int | None

    @property
    def cpus(self) -> float:
        """How many CPUs it can keep busy."""
        return self.quota_us / self.period_us


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuQuota:
    """What one process is granted.

    Attributes:
        version: Kind of hierarchy; `none` when no cgroup with CPU limits is seen, so nothing is known.
        path: The cgroup of the process as `/proc/PID/cgroup` names it; empty when that names none.
        cpu_max: `QUOTA PERIOD` of its own cgroup in the form of `cpu.max`, where QUOTA may be `max`; None when that
            cgroup has no such file.
        weight: Share of its own cgroup beside its neighbours, 100 by default; `cpu.shares` of v1 is converted as the
            kernel does; None when that cgroup has no such file.
        levels: Every cgroup with a quota, its own first, those above after it.
        complete: Whether all cgroups up to the root of the hierarchy were seen; if not, a tighter quota may be
            hidden, as from inside a container.
    """

    version: Literal["v1", "v2", "none"]
    path: str
    cpu_max: str | None
    weight: int | None
    levels: tuple[QuotaLevel, ...]
    complete: bool

    @property
    def tightest(self) -> QuotaLevel | None:
        """The quota that is used up first, the nearest of equal ones; None when there is none."""
        return min(self.levels, key=lambda level: level.cpus, default=None)


def read_quota(pid: int | None = None, root: str = "/") -> CpuQuota:
    """Return the CPU quotas of a process.

    Args:
        pid: Process or thread number in the PID namespace of `/proc`; None is the calling process.
        root: Root of the machine; for a recorded machine, None is the process that recorded it.

    Raises:
        ProcessLookupError: No such process is visible.
        MalformedError: A file does not hold what the kernel documents; the message names the file.
        OSError: A file is there and cannot be read.
    """
    found = find_places(pid, root, "cpu")
    path = found.memberships[0].path if found.memberships else ""
    for place in found.places:
        limits = [(directory, _read_max(root, place, directory)) for directory in place.directories]
        if all(limit is None for _, limit in limits) and not _has_cpu_files(root, place):
            continue
        own = place.directories[0] if place.shown else None
        return CpuQuota(
            version=place.version,
            path=place.path,
            cpu_max=_text(limits[0][1]) if own else None,
            weight=_read_weight(root, place, own) if own else None,
            levels=tuple(
                _level(root, directory, quota_us=limit[0], period_us=limit[1], inherited=directory != own)
                for directory, limit in limits
                if limit is not None and limit[0] is not None
            ),
            complete=place.shown and _is_hierarchy_root(root, place),
        )
    return CpuQuota(version="none", path=path, cpu_max=None, weight=None, levels=(), complete=False)


def _has_cpu_files(root: str, place: Place) -> bool:
    """Say whether the controller is there; the root cgroup has no quota and, in v2, no weight either."""
    name = "cpu.shares" if place.version == "v1" else "cpu.weight"
    if any(read_optional(root, f"{directory}/{name}") is not None for directory in place.directories):
        return True
    controllers = read_optional(root, f"{place.directories[-1]}/cgroup.controllers") or ""
    return place.version == "v2" and "cpu" in controllers.split()


def _is_hierarchy_root(root: str, place: Place) -> bool:
    """Say whether the topmost directory is the root cgroup, the only one without the files that limit it.

    In v2 the root has no `cgroup.type`; in v1 it alone has `cgroup.sane_behavior` (cgroups(7)).
    """
    top = place.directories[-1]
    if place.version == "v1":
        return read_optional(root, f"{top}/cgroup.sane_behavior") is not None
    return read_optional(root, f"{top}/cgroup.type") is None


def _read_max(root: str, place: Place, directory: str) -> tuple[int | None, int] | None:
    """Return quota and period of one cgroup, in µs, the quota None for no limit; None when it has no such file."""
    if place.version == "v2":
        source = f"{directory}/cpu.max"
        text = read_optional(root, source)
        if text is None:
            return None
        match = re.fullmatch(r"(max|[0-9]{1,18}) ([1-9][0-9]{0,17})\n?", text)
        if match is None:
            raise _bad(source, text)
        return None if match[1] == "max" else int(match[1]), int(match[2])
    source = f"{directory}/cpu.cfs_quota_us"
    quota, period = read_number(root, source), read_number(root, f"{directory}/cpu.cfs_period_us")
    if quota is None or period is None:
        return None
    if period <= 0:
        raise _bad(f"{directory}/cpu.cfs_period_us", str(period))
    return None if quota < 0 else quota, period


def _text(limit: tuple[int | None, int] | None) -> str | None:
    return None if limit is None else f"{'max' if limit[0] is None else limit[0]} {limit[1]}"


def _read_weight(root: str, place: Place, own: str) -> int | None:
    if place.version == "v2":
        return read_number(root, f"{own}/cpu.weight")
    shares = read_number(root, f"{own}/cpu.shares")
    if shares is None:
        return None
    return min(max((shares * _DEFAULT_WEIGHT + _DEFAULT_SHARES // 2) // _DEFAULT_SHARES, 1), _MAX_WEIGHT)


def _level(root: str, directory: str, *, quota_us: int, period_us: int, inherited: bool) -> QuotaLevel:
    source = f"{directory}/cpu.stat"
    text = read_optional(root, source) or ""
    if not re.fullmatch(r"([a-z_.]+ [0-9]+\n?)*", text):
        raise _bad(source, text)
    counts = {name: int(value) for name, value in (line.split(" ") for line in text.split("\n") if line)}
    throttled = counts.get("throttled_usec")
    if throttled is None and "throttled_time" in counts:  # The v1 name, in nanoseconds.
        throttled = counts["throttled_time"] // _NS_PER_US
    return QuotaLevel(
        directory=directory,
        inherited=inherited,
        quota_us=quota_us,
        period_us=period_us,
        nr_periods=counts.get("nr_periods"),
        nr_throttled=counts.get("nr_throttled"),
        throttled_us=throttled,
    )


def _bad(source: str, text: str) -> MalformedError:
    return MalformedError("bad-cgroup-file", f"{source} holds {text[:80]!a}, which is not what the kernel writes.")
