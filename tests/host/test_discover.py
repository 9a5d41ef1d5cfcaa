import os
import shutil
import subprocess
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import pytest

from berth.errors import AbilityError, MalformedError
from berth.host.cpuset import CpuSet
from berth.host.discover import read_online, read_topology
from berth.host.sysfs import read_optional
from berth.host.topology import Core, Cpu, Node, Topology

CPU = "/sys/devices/system/cpu"
NODE = "/sys/devices/system/node"


def cpus(text: str) -> CpuSet:
    return CpuSet.parse_list(text)


# --- recorded machines -----------------------------------------------------------------------------------------------


def test_recorded_machine(machine) -> None:
    expected = machine.expected
    topology = read_topology(machine.root)
    assert str(topology.online) == expected["online_cpus"]
    assert str(topology.present) == expected["present_cpus"]
    assert str(topology.possible) == (expected["possible_cpus"] or expected["present_cpus"])
    assert str(topology.present - topology.online) == expected["offline_present_cpus"]
    assert [(node.number, str(node.cpus)) for node in topology.nodes] == [
        (node["id"], node["cpus"]) for node in expected["numa_nodes"]
    ]
    assert bool(topology.node_overlap) == expected["numa_overlap"]
    nowhere = CpuSet.of(cpu.number for cpu in topology.cpus if cpu.node is None)
    assert str(nowhere - topology.node_overlap) == expected["cpus_without_node"]


def test_cores_of_recorded_machine(machine) -> None:
    expected = machine.expected
    topology = read_topology(machine.root)
    assert len(topology.cores) == expected["cores"]
    sizes = [len(core.cpus) for core in topology.cores]
    assert {"min": min(sizes), "max": max(sizes)} == expected["threads_per_core"]
    packages = {core.package for core in topology.cores} - {None}
    assert len(packages) == (expected["packages"] or 0)
    for number, siblings in expected["smt_siblings"].items():
        cpu = topology.cpu(int(number))
        assert cpu is not None
        assert str(cpu.siblings) == siblings
    assert [cpu.number for cpu in topology.cpus] == list(topology.online)


# --- this machine, beside independent tools --------------------------------------------------------------------------


def lscpu(column: str) -> dict[int, str]:
    """Return one column of lscpu(1) per online CPU; empty where lscpu does not know."""
    command = ["lscpu", f"-p=CPU,{column}"]
    done = subprocess.run(command, check=True, capture_output=True, text=True, env={**os.environ, "LC_ALL": "C"})
    rows = [line.split(",") for line in done.stdout.splitlines() if not line.startswith("#")]
    return {int(cpu): value for cpu, value in rows}


def partition(values: dict[int, str]) -> set[frozenset[int]]:
    groups: defaultdict[str, set[int]] = defaultdict(set)
    for cpu, value in values.items():
        groups[value].add(cpu)
    return {frozenset(group) for group in groups.values()}


def of_topology(topology: Topology, value: Callable[[Cpu], int | None]) -> dict[int, str]:
    values = {cpu.number: value(cpu) for cpu in topology.cpus}
    return {number: "" if found is None else str(found) for number, found in values.items()}


@pytest.mark.skipif(shutil.which("lscpu") is None, reason="lscpu (util-linux) is not installed")
def test_this_machine_agrees_with_lscpu() -> None:
    topology = read_topology()
    assert set(topology.online) == set(lscpu("CORE"))
    assert partition(of_topology(topology, lambda cpu: cpu.core_key)) == partition(lscpu("CORE"))
    assert partition(of_topology(topology, lambda cpu: cpu.package)) == partition(lscpu("SOCKET"))
    if topology.nodes:
        assert of_topology(topology, lambda cpu: cpu.node) == lscpu("NODE")


def test_this_machine_agrees_with_the_scheduler() -> None:
    topology = read_topology()
    assert CpuSet.of(os.sched_getaffinity(0)) <= topology.online
    assert topology.online <= topology.present <= topology.possible


def test_this_kernel_prints_masks_as_we_do() -> None:
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    mask, listed = status["Cpus_allowed"].strip(), status["Cpus_allowed_list"].strip()
    assert CpuSet.parse_mask(mask) == CpuSet.parse_list(listed)
    assert CpuSet.parse_list(listed).to_list() == listed
    assert CpuSet.parse_list(listed).to_mask(len(mask.replace(",", "")) * 4) == mask


# --- made-up machines ------------------------------------------------------------------------------------------------


def test_reads_a_whole_small_machine(tree) -> None:
    tree.write(
        {
            f"{CPU}/online": "0-2\n",
            f"{CPU}/present": "0-3\n",
            f"{CPU}/possible": "0-7\n",
            f"{CPU}/isolated": "2\n",
            f"{CPU}/cpu0/topology/core_cpus_list": "0,2\n",
            f"{CPU}/cpu2/topology/core_cpus_list": "0,2\n",
            f"{CPU}/cpu1/topology/core_cpus_list": "1,3\n",
            f"{CPU}/cpu0/topology/physical_package_id": "8442\n",
            f"{CPU}/cpu2/topology/physical_package_id": "8442\n",
            f"{CPU}/cpu1/topology/physical_package_id": "-1\n",
            f"{NODE}/node0/cpulist": "0,2\n",
            f"{NODE}/node4/cpulist": "3\n",
            f"{NODE}/node9/cpulist": "\n",
            f"{NODE}/online": "0,4,9\n",
        }
    )
    assert read_topology(tree.root) == Topology(
        online=cpus("0-2"),
        present=cpus("0-3"),
        possible=cpus("0-7"),
        isolated=cpus("2"),
        cores=(
            Core(key=0, package=8442, node=0, cpus=cpus("0,2")),
            Core(key=1, package=None, node=None, cpus=cpus("1")),
        ),
        nodes=(Node(number=0, cpus=cpus("0,2")), Node(number=4, cpus=cpus("")), Node(number=9, cpus=cpus(""))),
    )


def test_old_kernels_have_only_masks(tree) -> None:
    tree.write(
        {
            f"{CPU}/online": "0-3\n",
            f"{CPU}/cpu0/topology/thread_siblings": "00000000,00000005\n",
            f"{CPU}/cpu1/topology/thread_siblings": "00000000,0000000a\n",
            f"{CPU}/cpu2/topology/core_cpus": "5\n",
            f"{CPU}/cpu3/topology/thread_siblings_list": "1,3\n",
            f"{NODE}/node1/cpumap": "00000000,0000ffff\n",
        }
    )
    topology = read_topology(tree.root)
    assert [str(core.cpus) for core in topology.cores] == ["0,2", "1,3"]
    assert topology.nodes == (Node(number=1, cpus=cpus("0-3")),)


def test_what_is_missing_is_derived_or_unknown(tree) -> None:
    tree.write({f"{CPU}/online": "4-5\n", f"{CPU}/cpu7/online": "0\n"})
    topology = read_topology(tree.root)
    assert topology.present == topology.possible == cpus("4-5,7")
    assert topology.isolated is None
    assert topology.nodes == ()
    assert topology.cores == (
        Core(key=4, package=None, node=None, cpus=cpus("4")),
        Core(key=5, package=None, node=None, cpus=cpus("5")),
    )


def test_online_comes_from_the_cpu_directories_where_there_is_no_list(tree) -> None:
    tree.write(
        {
            f"{CPU}/cpu0/topology/core_id": "0\n",
            f"{CPU}/cpu1/online": "0\n",
            f"{CPU}/cpu2/online": "1\n",
            f"{CPU}/cpufreq/boost": "1\n",
            f"{CPU}/present": "0-2\n",
        }
    )
    assert read_online(tree.root) == cpus("0,2")


def test_a_number_that_could_not_be_recorded_is_unknown(tree) -> None:
    tree.write({f"{CPU}/cpu0/online": "", f"{CPU}/cpu0/topology/physical_package_id": ""})
    assert read_topology(tree.root).cores == (Core(key=0, package=None, node=None, cpus=cpus("0")),)


def test_a_nul_after_a_list_is_not_part_of_it(tree) -> None:
    tree.write({f"{CPU}/online": "0-1\n", f"{NODE}/node0/cpulist": "0-1\n\0"})
    assert read_topology(tree.root).nodes == (Node(number=0, cpus=cpus("0-1")),)


def test_online_comes_from_present_where_there_is_nothing_else(tree) -> None:
    tree.write({f"{CPU}/present": "0-2\n"})
    assert read_online(tree.root) == cpus("0-2")


def test_a_machine_without_cpus_is_an_error(tree) -> None:
    with pytest.raises(AbilityError) as caught:
        read_topology(tree.root)
    assert caught.value.name == "no-cpu-information"
    assert tree.root in caught.value.message


@pytest.mark.parametrize("name", ["online", "present", "possible", "isolated", "cpu0/topology/core_cpus_list"])
def test_a_malformed_list_names_its_file(tree, name: str) -> None:
    tree.write({f"{CPU}/online": "0\n", f"{CPU}/{name}": "0-\n"})
    with pytest.raises(MalformedError, match=f"{CPU}/{name}"):
        read_topology(tree.root)


@pytest.mark.parametrize("text", ["x", "1 2", "0x10", "٣", "9" * 5000])
def test_a_malformed_number_names_its_file(tree, text: str) -> None:
    tree.write({f"{CPU}/online": "0\n", f"{CPU}/cpu0/topology/physical_package_id": text})
    with pytest.raises(MalformedError, match="physical_package_id holds"):
        read_topology(tree.root)


def test_only_a_missing_file_is_taken_as_missing(tree) -> None:
    tree.write({"/a/file": "x"})
    assert read_optional(tree.root, "/a/file") == "x"
    assert read_optional(tree.root, "/a/other") is None
    assert read_optional(tree.root, "/a/file/below") is None
    with pytest.raises(IsADirectoryError):
        read_optional(tree.root, "/a")
