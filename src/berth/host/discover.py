"""Read the topology of a machine from sysfs, under any root, so that recorded machines can be read like real ones.

Formats: the kernel's Documentation/ABI/testing/sysfs-devices-system-cpu, ABI/stable/sysfs-devices-node and
admin-guide/cputopology. `online`, `present`, `possible`, `isolated` and `nodeN/cpulist` are CPU lists; `cpuN/online` is
0 or 1; `physical_package_id` is any integer, -1 where the kernel does not know. Old kernels have only the mask files
(`thread_siblings`, `cpumap`).
"""

from berth.errors import AbilityError
from berth.host import nodes, processors
from berth.host.caches import read_caches
from berth.host.cpuset import CpuSet
from berth.host.sysfs import CPU_DIRECTORY, numbered, read_list, read_list_or_mask, read_number, read_optional
from berth.host.topology import Topology, group_cores


def read_topology(root: str = "/", *, details: bool = False) -> Topology:
    """Return the topology of the machine whose file system is at `root`.

    Without `present` the CPU directories count, without `possible` what is present; without a node directory there are
    no nodes; a CPU without sibling files is a core of its own. CPUs that are offline are in no core and no node.

    Args:
        root: Root of the machine.
        details: Whether to read caches, core ids, frequencies and the model too. There are a dozen files of them per
            CPU, which takes longer than all the rest.

    Raises:
        AbilityError: `no-cpu-information` when nothing says which CPUs are online.
        MalformedError: A file does not hold what the kernel documents; the message names the file.
        OSError: A file is there and cannot be read.
    """
    online = read_online(root)
    present = read_list(root, f"{CPU_DIRECTORY}/present")
    if present is None:
        present = numbered(root, CPU_DIRECTORY, "cpu") | online
    possible = read_list(root, f"{CPU_DIRECTORY}/possible")
    isolated = read_list(root, f"{CPU_DIRECTORY}/isolated")
    found = nodes.read_nodes(root, online)
    siblings = {cpu: cpus for cpu in online if (cpus := _read_siblings(root, cpu)) is not None}
    packages = {cpu: package for cpu in online if (package := _read_package(root, cpu)) is not None}
    return Topology(
        online=online,
        present=present,
        possible=present if possible is None else possible,
        isolated=isolated,
        cores=group_cores(online=online, siblings=siblings, packages=packages, nodes=found),
        nodes=found,
        nohz_full=_read_nohz_full(root),
        distances=nodes.read_distances(root, found),
        details=processors.read_details(root, online) if details else None,
        caches=read_caches(root, online) if details else None,
        cpu_model=processors.read_model(root) if details else None,
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
    online = read_list(root, f"{CPU_DIRECTORY}/online")
    if online is not None:
        return online
    directories = numbered(root, CPU_DIRECTORY, "cpu")
    if directories:
        return CpuSet.of(cpu for cpu in directories if read_number(root, f"{CPU_DIRECTORY}/cpu{cpu}/online") != 0)
    present = read_list(root, f"{CPU_DIRECTORY}/present")
    if present is None:
        raise AbilityError(
            "no-cpu-information",
            f"{CPU_DIRECTORY} under the root {root} names no CPU, so sysfs is not mounted there or is hidden.",
            "Mount sysfs on /sys, or give the root of a recorded machine.",
        )
    return present


def _read_siblings(root: str, cpu: int) -> CpuSet | None:
    """Return the CPUs of one core; `core_cpus` is the newer name of `thread_siblings`."""
    directory = f"{CPU_DIRECTORY}/cpu{cpu}/topology"
    for name in ("core_cpus", "thread_siblings"):
        found = read_list_or_mask(root, f"{directory}/{name}_list", f"{directory}/{name}")
        if found is not None:
            return found
    return None


def _read_package(root: str, cpu: int) -> int | None:
    package = read_number(root, f"{CPU_DIRECTORY}/cpu{cpu}/topology/physical_package_id")
    return None if package == -1 else package


def _read_nohz_full(root: str) -> CpuSet | None:
    """Return the CPUs without a tick; a kernel that can do it and was not told to prints `(null)`."""
    path = f"{CPU_DIRECTORY}/nohz_full"
    text = read_optional(root, path)
    if text is None or text.strip() == "(null)":
        return None if text is None else CpuSet()
    return CpuSet.parse_list(text, source=path)
