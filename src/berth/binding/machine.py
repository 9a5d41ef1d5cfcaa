"""The machine of a snapshot as sets of CPUs."""

from collections.abc import Callable

from berth.binding.snapshot import Snapshot
from berth.host.cpuset import CpuSet
from berth.host.topology import Core, Node, Topology, group_cores


def topology_of(snapshot: Snapshot, parse: Callable[[str], CpuSet]) -> Topology:
    """Return the machine of a snapshot; an online CPU that the snapshot gives no core has none here either."""
    system = snapshot.system
    online = parse(system.online_cpus)
    nodes = tuple(
        Node(number=node.node, cpus=parse(node.cpus) & online)
        for node in sorted(snapshot.numa_topology.nodes, key=lambda node: node.node)
    )
    return Topology(
        online=online,
        present=parse(system.present_cpus),
        possible=parse(system.possible_cpus),
        isolated=None if system.isolated_cpus is None else parse(system.isolated_cpus),
        cores=_cores(snapshot, online, nodes),
        nodes=nodes,
    )


def split_cores(topology: Topology) -> list[Core]:
    """Return the cores whose CPUs lie in several nodes."""
    unsure = [core for core in topology.cores if core.node is None]
    return [core for core in unsure if sum(not core.cpus.isdisjoint(node.cpus) for node in topology.nodes) > 1]


def _cores(snapshot: Snapshot, online: CpuSet, nodes: tuple[Node, ...]) -> tuple[Core, ...]:
    """Return the cores, by key.

    Grouping them anew is for lists that overlap alone: it takes time that grows with the square of the machine.
    """
    groups = [CpuSet.of(core.logical_cpus) & online for core in snapshot.cpu_topology.physical_cores]
    mask = 0
    for group in groups:
        mask |= group.mask
    known = CpuSet(mask)
    if sum(map(len, groups)) > len(known):
        siblings = {cpu: group for group in groups for cpu in group}
        return group_cores(online=known, siblings=siblings, packages={}, nodes=nodes)
    return tuple(
        Core(key=cpus.min(), package=None, node=_node_around(cpus, nodes), cpus=cpus)
        for cpus in sorted(filter(None, groups), key=CpuSet.min)
    )


def _node_around(cpus: CpuSet, nodes: tuple[Node, ...]) -> int | None:
    touched = [node for node in nodes if not cpus.isdisjoint(node.cpus)]
    return touched[0].number if len(touched) == 1 and cpus <= touched[0].cpus else None
