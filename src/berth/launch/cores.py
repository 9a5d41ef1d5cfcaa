"""Which cores a run gets: whole ones, free ones, on one NUMA node where they fit."""

from collections import defaultdict

from berth.errors import MalformedError
from berth.host.cpuset import CpuSet
from berth.host.topology import Core, Topology


def usable_cores(topology: Topology, allowed: CpuSet) -> list[CpuSet]:
    """Return the CPUs of every core as far as `allowed` reaches, whole cores first, then by number.

    Isolated CPUs are left out: the kernel balances nothing there, so a range of them would pile up on one.
    """
    allowed = allowed - (topology.isolated or CpuSet())
    cores = [core for core in topology.cores if core.cpus & allowed]
    return [core.cpus & allowed for core in sorted(cores, key=lambda core: (not core.cpus <= allowed, core.key))]


def check_cpus(wanted: CpuSet, *, allowed: CpuSet) -> None:
    """Refuse CPUs outside the effective cpuset.

    Raises:
        MalformedError: With both lists.
    """
    if not wanted <= allowed:
        raise MalformedError(
            "cpus-outside-cpuset",
            f"--cpus {wanted}: CPUs {wanted - allowed} are outside the effective cpuset, which is {allowed}",
            f"Choose among {allowed}, or have the cpuset of this session widened by whoever set it.",
        )


def choose_cores(topology: Topology, *, allowed: CpuSet, busy: CpuSet, count: int) -> CpuSet | None:
    """Return the CPUs of `count` free cores, or None where fewer are free.

    One node that has room is taken before several, the fullest such node first, so that room stays together.

    Args:
        topology: The machine.
        allowed: The effective cpuset.
        busy: CPUs that somebody else has claimed.
        count: Number of cores, at least 1.

    Raises:
        MalformedError: There are fewer cores than that, free or not.
    """
    usable = usable_cores(topology, allowed)
    if count > len(usable):
        raise MalformedError(
            "too-many-cores",
            f"--cores {count}: there are {len(usable)} cores (CPUs {allowed}) in the effective cpuset",
            f"Ask for at most {len(usable)}.",
        )
    free = [cpus for cpus in usable if cpus.isdisjoint(busy)]
    if count > len(free):
        return None
    by_node: dict[int | None, list[CpuSet]] = defaultdict(list)
    for cpus in free:
        by_node[_node(topology, cpus)].append(cpus)
    fitting = [cores for cores in by_node.values() if len(cores) >= count]
    if fitting:
        chosen = min(fitting, key=len)[:count]
    else:
        ordered = sorted(by_node.values(), key=len, reverse=True)
        chosen = [cpus for cores in ordered for cpus in cores][:count]
    return CpuSet.of(cpu for cpus in chosen for cpu in cpus)


def _node(topology: Topology, cpus: CpuSet) -> int | None:
    core: Core | None = topology.core_of(cpus.min())
    return core.node if core else None
