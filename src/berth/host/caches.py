"""Caches and who shares them, from sysfs (the kernel's ABI/testing/sysfs-devices-system-cpu, `cache/indexN`)."""

import re

from berth.errors import MalformedError
from berth.host.cpuset import CpuSet
from berth.host.sysfs import CPU_DIRECTORY, numbered, read_list_or_mask, read_number, read_optional
from berth.host.topology import Cache

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def read_caches(root: str, online: CpuSet) -> tuple[Cache, ...]:
    """Return every cache once, by level, kind and lowest CPU; those of which no sharing is known are left out.

    Raises:
        MalformedError: A file does not hold what the kernel documents.
        OSError: A file is there and cannot be read.
    """
    found: dict[tuple[int, str, CpuSet], Cache] = {}
    covered: dict[tuple[int, str], CpuSet] = {}
    for cpu in online:
        directory = f"{CPU_DIRECTORY}/cpu{cpu}/cache"
        for index in numbered(root, directory, "index"):
            place = f"{directory}/index{index}"
            level = read_number(root, f"{place}/level")
            kind = (read_optional(root, f"{place}/type") or "").strip()
            if level is None or not kind or cpu in covered.get((level, kind), CpuSet()):
                continue
            shared = read_list_or_mask(root, f"{place}/shared_cpu_list", f"{place}/shared_cpu_map")
            if shared is None:
                continue
            cpus = (shared & online) | CpuSet.of([cpu])
            covered[level, kind] = covered.get((level, kind), CpuSet()) | cpus
            found[level, kind, cpus] = Cache(level=level, kind=kind, size_bytes=_read_size(root, place), cpus=cpus)
    return tuple(sorted(found.values(), key=lambda cache: (cache.level, cache.kind, cache.cpus.min())))


def _read_size(root: str, place: str) -> int | None:
    text = read_optional(root, f"{place}/size")
    if not text:
        return None
    match = re.fullmatch(r"([0-9]{1,15})([KMG]?)\n?", text)
    if match is None:
        raise MalformedError("bad-cache-size", f"{place}/size holds {text[:80]!a} where the kernel writes a size.")
    return int(match[1]) * _UNITS[match[2]]
