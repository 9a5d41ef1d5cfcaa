"""The CPUs, cores and NUMA nodes of one machine, as values.

A core is a set of CPUs that the kernel calls siblings; it is never computed from CPU numbers, because siblings may be
(0,1), (0,40) or (0,16,32,48), and hybrid machines mix cores of one and two CPUs. What the kernel does not say stays
None: no field here is a guess.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from berth.host.cpuset import CpuSet


@dataclass(frozen=True, slots=True, kw_only=True)
class Cpu:
    """One online CPU (a hardware thread).

    Attributes:
        number: The kernel's CPU number.
        package: The kernel's `physical_package_id`, any integer; None when the kernel does not know.
        core_key: `Core.key` of its core.
        node: Number of its NUMA node; None when no node, or more than one, claims it.
        siblings: Online CPUs of its core, itself included.
        core_id: The kernel's `core_id`, which repeats between packages; None when not read or unknown.
        max_mhz: Highest frequency of the hardware; None when not read or unknown.
        current_mhz: Frequency when it was read; None when not read or unknown.
    """

    number: int
    package: int | None
    core_key: int
    node: int | None
    siblings: CpuSet
    core_id: int | None = None
    max_mhz: float | None = None
    current_mhz: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuDetails:
    """What is known about one CPU beside its place; the fields are those of `Cpu`."""

    number: int
    core_id: int | None = None
    max_mhz: float | None = None
    current_mhz: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Cache:
    """One cache.

    Attributes:
        level: 1 is nearest to the core.
        kind: `Data`, `Instruction` or `Unified`, as the kernel says.
        size_bytes: None when the kernel does not say.
        cpus: Online CPUs that share it, at least one.
    """

    level: int
    kind: str
    size_bytes: int | None
    cpus: CpuSet


@dataclass(frozen=True, slots=True, kw_only=True)
class Core:
    """One physical core.

    Attributes:
        key: Its lowest online CPU number, unique on the machine; not the kernel's `core_id`, which repeats.
        package: The package of its CPUs; None when unknown or when they disagree.
        node: The NUMA node of its CPUs; None when unknown or when they disagree.
        cpus: Its online CPUs, at least one.
    """

    key: int
    package: int | None
    node: int | None
    cpus: CpuSet


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One NUMA node; memory-only nodes have no CPUs.

    Attributes:
        number: The kernel's node number; numbers may have gaps.
        cpus: Its online CPUs.
        memory_total_bytes: Its memory; None when the kernel does not say.
        memory_free_bytes: Free memory when it was read; None when the kernel does not say.
    """

    number: int
    cpus: CpuSet
    memory_total_bytes: int | None = None
    memory_free_bytes: int | None = None

    @property
    def cpu_less(self) -> bool:
        """Whether no CPU of it is online: memory alone, of a GPU or an expander, and never a target for CPUs."""
        return not self.cpus

    @property
    def memory_less(self) -> bool:
        """Whether it is known to have no memory: never a target for memory."""
        return self.memory_total_bytes == 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """What one machine is made of.

    Attributes:
        online: CPUs the scheduler can use now.
        present: CPUs plugged in, online or not.
        possible: CPUs that could ever be plugged in; sizes the kernel's masks.
        isolated: CPUs without load balancing (kernel parameter `isolcpus`); None when the kernel does not say.
        cores: All cores with an online CPU, by key.
        nodes: All NUMA nodes, by number; empty on a machine that reports none.
        nohz_full: CPUs without a scheduler tick (kernel parameter `nohz_full`); None when the kernel does not say.
        distances: A row per node in the order of `nodes`, 10 is local; None when the kernel does not give all.
        details: Per online CPU, ascending; None when they were not read.
        caches: By level, kind and lowest CPU; None when they were not read.
        cpu_model: Model of the CPUs; None when it was not read or the kernel does not say.
    """

    online: CpuSet
    present: CpuSet
    possible: CpuSet
    isolated: CpuSet | None
    cores: tuple[Core, ...]
    nodes: tuple[Node, ...]
    nohz_full: CpuSet | None = None
    distances: tuple[tuple[int, ...], ...] | None = None
    details: tuple[CpuDetails, ...] | None = None
    caches: tuple[Cache, ...] | None = None
    cpu_model: str | None = None

    def core_of(self, cpu: int) -> Core | None:
        """Return the core that holds this CPU number; None when it is not online."""
        return next((core for core in self.cores if cpu in core.cpus), None)

    def node_of(self, cpu: int) -> Node | None:
        """Return the one node that claims this CPU number; None when it is not online or no single node does."""
        return single_node(self.nodes, cpu)

    def distance(self, first: int, second: int) -> int | None:
        """Return the distance from one node number to another; None when the kernel does not give it."""
        numbers = [node.number for node in self.nodes]
        if self.distances is None or first not in numbers or second not in numbers:
            return None
        return self.distances[numbers.index(first)][numbers.index(second)]

    def cpu(self, number: int) -> Cpu | None:
        """Return what is known about one CPU number; None when it is not online."""
        core = self.core_of(number)
        if core is None:
            return None
        details = next((details for details in self.details or () if details.number == number), None)
        return self._cpu(number, core, details)

    def _cpu(self, number: int, core: Core, details: CpuDetails | None) -> Cpu:
        node = self.node_of(number)
        return Cpu(
            number=number,
            package=core.package,
            core_key=core.key,
            node=None if node is None else node.number,
            siblings=core.cpus,
            core_id=details.core_id if details else None,
            max_mhz=details.max_mhz if details else None,
            current_mhz=details.current_mhz if details else None,
        )

    @property
    def cpus(self) -> tuple[Cpu, ...]:
        """All online CPUs, ascending."""
        details = {details.number: details for details in self.details or ()}
        every = (self._cpu(number, core, details.get(number)) for core in self.cores for number in core.cpus)
        return tuple(sorted(every, key=lambda cpu: cpu.number))

    @property
    def node_overlap(self) -> CpuSet:
        """CPUs that two nodes claim; when there are any, the NUMA facts of this machine cannot be trusted."""
        seen, twice = CpuSet(), CpuSet()
        for node in self.nodes:
            twice |= seen & node.cpus
            seen |= node.cpus
        return twice


def single_node(nodes: Iterable[Node], cpu: int) -> Node | None:
    """Return the only node that claims this CPU number; None when none does, or more than one."""
    claims = [node for node in nodes if cpu in node.cpus]
    return claims[0] if len(claims) == 1 else None


def group_cores(
    *,
    online: CpuSet,
    siblings: Mapping[int, CpuSet],
    packages: Mapping[int, int],
    nodes: tuple[Node, ...],
) -> tuple[Core, ...]:
    """Return the cores of a machine, by key.

    Args:
        online: The CPUs to group; each ends in exactly one core.
        siblings: Per CPU number the set its sibling file names; a CPU missing here is a core of its own. Sets that
            overlap without being equal become one core, so that no CPU is ever handed out twice.
        packages: Per CPU number its package; missing means unknown.
        nodes: The NUMA nodes.
    """
    return tuple(
        Core(
            key=cpus.min(),
            package=_common(packages.get(cpu) for cpu in cpus),
            node=_common_node(nodes, cpus),
            cpus=cpus,
        )
        for cpus in _merged(online, siblings)
    )


def _merged(online: CpuSet, siblings: Mapping[int, CpuSet]) -> list[CpuSet]:
    groups: list[CpuSet] = []
    grouped = CpuSet()
    for cpu in online:
        own = CpuSet.of([cpu])
        group = (siblings.get(cpu, own) & online) | own
        if not group.isdisjoint(grouped):
            if any(group <= other for other in groups):
                continue
            for other in [other for other in groups if not other.isdisjoint(group)]:
                groups.remove(other)
                group |= other
        groups.append(group)
        grouped |= group
    return sorted(groups, key=CpuSet.min)


def _common(values: Iterable[int | None]) -> int | None:
    distinct = set(values)
    return distinct.pop() if len(distinct) == 1 else None


def _common_node(nodes: tuple[Node, ...], cpus: CpuSet) -> int | None:
    found = (single_node(nodes, cpu) for cpu in cpus)
    return _common(None if node is None else node.number for node in found)
