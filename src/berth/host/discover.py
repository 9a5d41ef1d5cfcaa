"""Read the topology of a machine from sysfs, under any root, so that recorded machines can be read like real ones.

Formats: the kernel's Documentation/ABI/testing/sysfs-devices-system-cpu, ABI/stable/sysfs-devices-node and
admin-guide/cputopology. `online`, `present`, `possible`, `isolated` and `nodeN/cpulist` are CPU lists; `cpuN/online` is
0 or 1; `physical_package_id` is any integer, -1 where the kernel does not know. Old kernels have only the mask files
(`thread_siblings`, `cpumap`).
"""

import errno
import os
import re
from pathlib import Path

from berth.errors import AbilityError, MalformedError
from berth.host.cpuset import CpuSet
from berth.host.topology import Node, Topology, group_cores

CPU_DIRECTORY = "/sys/devices/system/cpu"
NODE_DIRECTORY = "/sys/devices/system/node"

# A file that is not there: older kernel, CPU just taken offline (ENODEV: its sysfs node went while it was open).
_ABSENT = (errno.ENOENT, errno.ENOTDIR, errno.ENODEV)


def read_topology(root: str = "/") -> Topology:
    """Return the topology of the machine whose file system is at `root`.

    Without `present` the CPU directories count, without `possible` what is present; without a node directory there are
    no nodes; a CPU without sibling files is a core of its own. CPUs that are offline are in no core and no node.

    Raises:
        AbilityError: `no-cpu-information` when nothing says which CPUs are online.
        MalformedError: A file does not hold what the kernel documents; the message names the file.
        OSError: A file is there and cannot be read.
    """
    online = read_online(root)
    present = _read_list(root, f"{CPU_DIRECTORY}/present")
    if present is None:
        present = _numbered(root, CPU_DIRECTORY, "cpu") | online
    possible = _read_list(root, f"{CPU_DIRECTORY}/possible")
    isolated = _read_list(root, f"{CPU_DIRECTORY}/isolated")
    nodes = _read_nodes(root, online)
    siblings = {cpu: cpus for cpu in online if (cpus := _read_siblings(root, cpu)) is not None}
    packages = {cpu: package for cpu in online if (package := _read_package(root, cpu)) is not None}
    return Topology(
        online=online,
        present=present,
        possible=present if possible is None else possible,
        isolated=isolated,
        cores=group_cores(online=online, siblings=siblings, packages=packages, nodes=nodes),
        nodes=nodes,
    )


def read_online(root: str = "/") -> CpuSet:
    """Return the CPUs that are online on the machine whose file system is at `root`.

    Where the kernel has no `online` list, each CPU directory counts unless its own `online` file says 0 (a CPU that
    cannot be taken offline has no such file); without CPU directories, `present` counts.

    Raises:
        AbilityError: `no-cpu-information` when none of the three is there.
        MalformedError: A file does not hold what the kernel documents.
        OSError: A file is there and cannot be read.
    """
    online = _read_list(root, f"{CPU_DIRECTORY}/online")
    if online is not None:
        return online
    directories = _numbered(root, CPU_DIRECTORY, "cpu")
    if directories:
        return CpuSet.of(cpu for cpu in directories if _read_number(root, f"{CPU_DIRECTORY}/cpu{cpu}/online") != 0)
    present = _read_list(root, f"{CPU_DIRECTORY}/present")
    if present is None:
        raise AbilityError(
            "no-cpu-information",
            f"{CPU_DIRECTORY} under the root {root} names no CPU, so sysfs is not mounted there or is hidden.",
            "Mount sysfs on /sys, or give the root of a recorded machine.",
        )
    return present


def read_optional(root: str, path: str) -> str | None:
    """Return the text of one small file, or None when it is not there.

    NULs at the end are left out: some kernels counted the one that ends the string when they printed a CPU list.

    Args:
        root: Root of the machine.
        path: Absolute path on that machine.

    Raises:
        OSError: The file is there and cannot be read.
    """
    try:
        return os.fsdecode(Path(root, path.lstrip("/")).read_bytes().rstrip(b"\0"))
    except OSError as error:
        if error.errno in _ABSENT:
            return None
        raise


def _read_list(root: str, path: str) -> CpuSet | None:
    text = read_optional(root, path)
    return None if text is None else CpuSet.parse_list(text, source=path)


def _read_mask(root: str, path: str) -> CpuSet | None:
    text = read_optional(root, path)
    return None if text is None else CpuSet.parse_mask(text, source=path)


def _read_number(root: str, path: str) -> int | None:
    text = read_optional(root, path)
    if not text:  # A recorder that was not allowed to read a file leaves an empty one.
        return None
    if not re.fullmatch(r"-?[0-9]{1,20}\n?", text):
        raise MalformedError("bad-sysfs-number", f"{path} holds {text[:80]!a} where the kernel writes a number.")
    return int(text)


def _read_siblings(root: str, cpu: int) -> CpuSet | None:
    """Return the CPUs of one core; `core_cpus` is the newer name of `thread_siblings`."""
    directory = f"{CPU_DIRECTORY}/cpu{cpu}/topology"
    for name in ("core_cpus", "thread_siblings"):
        found = _read_list(root, f"{directory}/{name}_list")
        if found is None:
            found = _read_mask(root, f"{directory}/{name}")
        if found is not None:
            return found
    return None


def _read_package(root: str, cpu: int) -> int | None:
    package = _read_number(root, f"{CPU_DIRECTORY}/cpu{cpu}/topology/physical_package_id")
    return None if package == -1 else package


def _read_nodes(root: str, online: CpuSet) -> tuple[Node, ...]:
    nodes = []
    for number in _numbered(root, NODE_DIRECTORY, "node"):
        cpus = _read_list(root, f"{NODE_DIRECTORY}/node{number}/cpulist")
        if cpus is None:
            cpus = _read_mask(root, f"{NODE_DIRECTORY}/node{number}/cpumap")
        nodes.append(Node(number=number, cpus=CpuSet() if cpus is None else cpus & online))
    return tuple(nodes)


def _numbered(root: str, directory: str, prefix: str) -> CpuSet:
    """Return the N of all entries PREFIXN; node numbers are held to the same limit as CPU numbers."""
    try:
        names = os.listdir(Path(root, directory.lstrip("/")))
    except OSError as error:
        if error.errno in _ABSENT:
            return CpuSet()
        raise
    matches = (re.fullmatch(rf"{prefix}(0|[1-9][0-9]{{0,8}})", name) for name in names)
    return CpuSet.of(int(match[1]) for match in matches if match)
