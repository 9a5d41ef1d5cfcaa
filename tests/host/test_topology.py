from dataclasses import FrozenInstanceError

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from berth.host.cpuset import CpuSet
from berth.host.topology import Core, Cpu, Node, Topology, group_cores, single_node


def cpus(text: str) -> CpuSet:
    return CpuSet.parse_list(text)


def machine(*, online: str, siblings: dict[int, str], packages: dict[int, int], nodes: dict[int, str]) -> Topology:
    found = tuple(Node(number=number, cpus=cpus(text)) for number, text in nodes.items())
    return Topology(
        online=cpus(online),
        present=cpus(online),
        possible=cpus(online),
        isolated=None,
        cores=group_cores(
            online=cpus(online),
            siblings={cpu: cpus(text) for cpu, text in siblings.items()},
            packages=packages,
            nodes=found,
        ),
        nodes=found,
    )


HYBRID = machine(
    online="0-4",
    siblings={0: "0,2", 2: "0,2", 1: "1,3", 3: "1,3", 4: "4"},
    packages={0: 36, 1: 36, 2: 36, 3: 36, 4: 36},
    nodes={0: "0-3", 5: "", 7: "4"},
)


def test_cores_are_the_sibling_sets() -> None:
    assert HYBRID.cores == (
        Core(key=0, package=36, node=0, cpus=cpus("0,2")),
        Core(key=1, package=36, node=0, cpus=cpus("1,3")),
        Core(key=4, package=36, node=7, cpus=cpus("4")),
    )


def test_answers_about_one_cpu() -> None:
    assert HYBRID.cpu(2) == Cpu(number=2, package=36, core_key=0, node=0, siblings=cpus("0,2"))
    assert HYBRID.core_of(3) == HYBRID.cores[1]
    assert HYBRID.node_of(4) == Node(number=7, cpus=cpus("4"))
    assert [cpu.number for cpu in HYBRID.cpus] == [0, 1, 2, 3, 4]


def test_a_cpu_that_is_not_online_is_nowhere() -> None:
    assert HYBRID.cpu(5) is None
    assert HYBRID.core_of(5) is None
    assert HYBRID.node_of(5) is None


def test_without_sibling_files_each_cpu_is_a_core() -> None:
    topology = machine(online="3,9", siblings={}, packages={}, nodes={})
    assert topology.cores == (
        Core(key=3, package=None, node=None, cpus=cpus("3")),
        Core(key=9, package=None, node=None, cpus=cpus("9")),
    )


def test_offline_siblings_are_not_part_of_a_core() -> None:
    topology = machine(online="1-2", siblings={1: "0-1", 2: "2-3"}, packages={}, nodes={})
    assert [(core.key, str(core.cpus)) for core in topology.cores] == [(1, "1"), (2, "2")]


def test_sibling_sets_that_overlap_become_one_core() -> None:
    topology = machine(online="0-5", siblings={0: "0", 1: "0-1", 2: "2-3", 4: "1,4", 5: "5"}, packages={}, nodes={})
    assert [str(core.cpus) for core in topology.cores] == ["0-1,4", "2-3", "5"]


def test_a_cpu_in_two_nodes_is_in_none() -> None:
    topology = machine(online="0-3", siblings={}, packages={}, nodes={0: "0-2", 1: "2-3"})
    assert topology.node_overlap == cpus("2")
    assert topology.node_of(2) is None
    assert [core.node for core in topology.cores] == [0, 0, None, 1]
    assert HYBRID.node_overlap == CpuSet()


def test_a_core_whose_cpus_disagree_claims_nothing() -> None:
    topology = machine(online="0-1", siblings={0: "0-1"}, packages={0: 0, 1: 1}, nodes={0: "0", 1: "1"})
    assert topology.cores == (Core(key=0, package=None, node=None, cpus=cpus("0-1")),)
    cpu = topology.cpu(1)
    assert cpu is not None
    assert cpu.node == 1


def test_single_node_needs_exactly_one_claim() -> None:
    nodes = (Node(number=3, cpus=cpus("0-1")), Node(number=4, cpus=cpus("1-2")))
    assert single_node(nodes, 0) == nodes[0]
    assert single_node(nodes, 1) is None
    assert single_node(nodes, 9) is None


@settings(deadline=None)
@given(
    st.frozensets(st.integers(0, 40)),
    st.dictionaries(st.integers(0, 40), st.frozensets(st.integers(0, 45), max_size=6)),
)
def test_every_online_cpu_is_in_exactly_one_core(online: frozenset[int], siblings: dict[int, frozenset[int]]) -> None:
    cores = group_cores(
        online=CpuSet.of(online),
        siblings={cpu: CpuSet.of(members) for cpu, members in siblings.items()},
        packages={},
        nodes=(),
    )
    assert sorted(cpu for core in cores for cpu in core.cpus) == sorted(online)
    assert [core.key for core in cores] == sorted(core.cpus.min() for core in cores)
    for cpu in online:
        core = next(core for core in cores if cpu in core.cpus)
        assert siblings.get(cpu, frozenset()) & online <= set(core.cpus)


def test_facts_cannot_be_changed() -> None:
    with pytest.raises(FrozenInstanceError):
        HYBRID.cores[0].key = 1  # type: ignore[misc]
