from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from berth.errors import MalformedError
from berth.host.cpuset import CpuSet
from berth.host.topology import Node, Topology, group_cores
from berth.launch.cores import check_cpus, choose_cores, usable_cores


def cpus(text: str) -> CpuSet:
    return CpuSet.parse_list(text)


def machine(*nodes: list[str], isolated: str | None = "") -> Topology:
    """Return a machine of these nodes, each a list of the CPU lists of its cores."""
    found = tuple(
        Node(number=number, cpus=CpuSet.of(cpu for core in cores for cpu in cpus(core)))
        for number, cores in enumerate(nodes)
    )
    cores = [cpus(core) for node in nodes for core in node]
    online = CpuSet.of(cpu for core in cores for cpu in core)
    return Topology(
        online=online,
        present=online,
        possible=online,
        isolated=None if isolated is None else cpus(isolated),
        cores=group_cores(
            online=online, siblings={cpu: core for core in cores for cpu in core}, packages={}, nodes=found
        ),
        nodes=found,
    )


#: Two nodes of four cores of two threads each, numbered as Linux does: 0 and 8 are one core.
TWO_NODES = machine(["0,8", "1,9", "2,10", "3,11"], ["4,12", "5,13", "6,14", "7,15"])
ALL = TWO_NODES.online


def choose(count: int, *, allowed: str = "0-15", busy: str = "", topology: Topology = TWO_NODES) -> str | None:
    chosen = choose_cores(topology, allowed=cpus(allowed), busy=cpus(busy), count=count)
    return None if chosen is None else str(chosen)


@pytest.mark.parametrize(
    ("count", "busy", "chosen"),
    [
        (1, "", "0,8"),
        (4, "", "0-3,8-11"),
        (5, "", "0-4,8-12"),
        (8, "", "0-15"),
        (1, "0", "1,9"),  # One busy thread makes its core busy, and the fuller node is used first.
        (1, "8", "1,9"),
        (1, "4", "5,13"),
        (4, "0", "4-7,12-15"),
        (3, "0-1,4", "5-7,13-15"),
        (2, "0-2,4-5", "6-7,14-15"),
        (3, "0-2,4-5", "3,6-7,11,14-15"),
        (6, "0-1", "2-7,10-15"),
        (7, "0-1", None),
        (1, "0-15", None),
    ],
)
def test_choice(count: int, busy: str, chosen: str | None) -> None:
    assert choose(count, busy=busy) == chosen


def test_whole_cores_come_before_halves() -> None:
    """A cpuset may cut cores: what is left of one is used last."""
    assert choose(1, allowed="0-1,9") == "1,9"
    assert choose(2, allowed="0-1,9") == "0-1,9"
    assert [str(core) for core in usable_cores(TWO_NODES, cpus("0-2,10,12"))] == ["2,10", "0", "1", "12"]


def test_isolated_cpus_are_never_chosen() -> None:
    topology = machine(["0,4", "1,5"], ["2,6", "3,7"], isolated="1,5,6")
    assert [str(core) for core in usable_cores(topology, topology.online)] == ["0,4", "3,7", "2"]
    assert choose(3, allowed="0-7", topology=topology) == "0,2-4,7"
    with pytest.raises(MalformedError):
        choose(4, allowed="0-7", topology=topology)


def test_isolation_that_is_not_known_hides_nothing() -> None:
    assert choose(2, allowed="0-1", topology=machine(["0", "1"], isolated=None)) == "0-1"


def test_machine_without_nodes() -> None:
    assert choose(2, allowed="0-3", busy="0", topology=machine(["0", "1", "2", "3"])) == "1-2"


def test_more_cores_than_there_are() -> None:
    with pytest.raises(MalformedError) as caught:
        choose(5, allowed="0-3,8-11", busy="0-15")
    assert caught.value.name == "too-many-cores"
    assert "there are 4 cores" in caught.value.message
    assert "0-3,8-11" in caught.value.message
    assert "at most 4" in caught.value.fix


def test_cpus_outside_the_cpuset_are_named_with_it() -> None:
    check_cpus(cpus("0-1"), allowed=cpus("0-3"))
    check_cpus(cpus("0-3"), allowed=cpus("0-3"))
    with pytest.raises(MalformedError) as caught:
        check_cpus(cpus("2-5"), allowed=cpus("0-3"))
    assert caught.value.name == "cpus-outside-cpuset"
    for text in ("2-5", "4-5", "0-3"):
        assert text in caught.value.message


@st.composite
def machines(draw: st.DrawFn) -> Topology:
    """Machines of up to three nodes with up to four cores of up to two threads, numbered in any order."""
    shape = draw(st.lists(st.lists(st.integers(1, 2), min_size=1, max_size=4), min_size=1, max_size=3))
    numbers = iter(draw(st.permutations(range(sum(map(sum, shape))))))
    return machine(
        *([",".join(str(n) for n in sorted(next(numbers) for _ in range(size))) for size in node] for node in shape)
    )


@given(machines(), st.data())
def test_every_choice_keeps_the_rules(topology: Topology, data: st.DataObject) -> None:
    some = st.sets(st.sampled_from(list(topology.online))).map(CpuSet.of)
    allowed, busy = data.draw(some, "allowed"), data.draw(some, "busy")
    parts = {core.key: core.cpus & allowed for core in topology.cores if core.cpus & allowed}
    free = {key: part for key, part in parts.items() if part.isdisjoint(busy)}
    count = data.draw(st.integers(1, 12), "count")
    if count > len(parts):
        with pytest.raises(MalformedError):
            choose_cores(topology, allowed=allowed, busy=busy, count=count)
        return
    chosen = choose_cores(topology, allowed=allowed, busy=busy, count=count)
    assert (chosen is None) == (count > len(free))
    if chosen is None:
        return
    taken = [key for key, part in free.items() if not part.isdisjoint(chosen)]
    assert len(taken) == count
    assert CpuSet.of(cpu for key in taken for cpu in free[key]) == chosen
    nodes = {core.key: core.node for core in topology.cores}
    one_node_is_enough = any(len({nodes[key] for key in some_cores}) == 1 for some_cores in combinations(free, count))
    assert (len({nodes[key] for key in taken}) == 1) == one_node_is_enough
