import os
import re
import shutil
import subprocess
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from berth.errors import AbilityError, MalformedError
from berth.host.cpuset import CpuSet
from berth.host.discover import read_online, read_topology
from berth.host.sysfs import read_optional
from berth.host.topology import Cache, Core, Cpu, Node, Topology

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
    for node, known in zip(topology.nodes, expected["numa_nodes"], strict=True):
        assert node.memory_total_bytes == known["memory_bytes"]
        assert node.cpu_less == known.get("cpu_less", False)
        assert node.memory_less == known.get("memory_less", False)
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


@dataclass(frozen=True, kw_only=True)
class Details:
    """What is known of one machine by reading its files by hand.

    Attributes:
        distances: First row.
        caches: Level, kind, KiB and sharers of the highest cache of the last CPU; how many caches there are.
        clock: Highest and current MHz of CPU 0.
    """

    model: str | None
    distances: str | None
    caches: tuple[str, int] | None
    nohz_full: str | None = None
    clock: tuple[float | None, float | None] = (None, None)


DETAILS = {
    "128arm-2pa2n8cluster4co": Details(
        model="implementer 0x48 part 0xd01", distances="10 16 32 33", caches=("L3 Unified 32768K 96-127", 388)
    ),
    "128ia64-17n4s2c": Details(
        model="Dual-Core Intel(R) Itanium(R) Processor 9140N",
        distances="10 17 17 17 20 20 20 20 20 20 20 20 20 20 20 20 14",
        caches=None,
        clock=(1598.0, 1406.0),
    ),
    "256ppc-8n8s4t": Details(
        model="POWER7 (architected), altivec supported",
        distances="10 20 40 40 40 40 40 40",
        caches=("L3 Unified 4096K 252-255", 256),
    ),
    "16em64t-4s2c2t-offlines": Details(
        model="Intel(R) Xeon(TM) CPU 2.60GHz",
        distances="10",
        caches=("L3 Unified 4096K 6,10", 18),
        clock=(None, 2593.498),
    ),
    "nvidia-dgx-gb10": Details(
        model="implementer 0x41 part 0xd87, implementer 0x41 part 0xd85",
        distances="10",
        caches=("L3 Unified 16384K 10-19", 62),
        nohz_full="",
    ),
    "nvidiagpunumanodes": Details(
        model="POWER9, altivec supported",
        distances="10 40 80 80 80 80 80 80",
        caches=("L3 Unified 10240K 96-103", 24),
        nohz_full="",
    ),
    "64intel64-fakeKNL-SNC4-hybrid": Details(
        model="06/57",
        distances="10 21 21 21 41 41 41 31",
        caches=("L2 Unified 4096K 14-15,30-31,46-47,62-63", 40),
        clock=(None, 1200.187),
    ),
    "synthetic-640cpu-8n-smt2": Details(model=None, distances="10 20 32 32 32 32 32 32", caches=None),
}


def test_details_of_recorded_machine(machine) -> None:
    topology = read_topology(machine.root, details=True)
    assert topology.distances is not None
    assert [topology.distance(node.number, node.number) for node in topology.nodes] == [10] * len(topology.nodes)
    assert topology.caches is not None
    for level, kind in {(cache.level, cache.kind) for cache in topology.caches}:
        alike = [cache.cpus for cache in topology.caches if (cache.level, cache.kind) == (level, kind)]
        assert sum(map(len, alike)) == len(CpuSet.of(cpu for cpus in alike for cpu in cpus)), "a CPU has two of them"
    known = DETAILS.get(machine.expected["file"].removesuffix(".tar.bz2"))
    if known is None:
        return
    assert topology.cpu_model == known.model
    assert " ".join(map(str, topology.distances[0])) == known.distances
    assert (None if topology.nohz_full is None else str(topology.nohz_full)) == known.nohz_full
    first = topology.cpus[0]
    assert (first.max_mhz, first.current_mhz) == known.clock
    last = topology.caches[-1:]
    shown = [f"L{cache.level} {cache.kind} {(cache.size_bytes or 0) >> 10}K {cache.cpus}" for cache in last]
    assert (shown, len(topology.caches)) == (([known.caches[0]], known.caches[1]) if known.caches else ([], 0))


# --- this machine, beside independent tools --------------------------------------------------------------------------


def lscpu(column: str) -> dict[int, str]:
    """Return one column of lscpu(1) per online CPU; empty where lscpu does not know."""
    command = ["lscpu", f"-p=CPU,{column}"]
    done = subprocess.run(command, check=True, capture_output=True, text=True, env={**os.environ, "LC_ALL": "C"})
    rows = [line.split(",", 1) for line in done.stdout.splitlines() if not line.startswith("#")]
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


@pytest.mark.skipif(shutil.which("lscpu") is None, reason="lscpu (util-linux) is not installed")
def test_caches_of_this_machine_agree_with_lscpu() -> None:
    caches = read_topology(details=True).caches
    assert caches is not None
    columns = [[(cpu, shared) for shared in row.strip(",").split(",")] for cpu, row in lscpu("CACHE").items()]
    printed = [partition(dict(column)) for column in zip(*columns, strict=True)] if caches else []
    alike: defaultdict[tuple[int, str], set[frozenset[int]]] = defaultdict(set)
    for cache in caches:
        alike[cache.level, cache.kind].add(frozenset(cache.cpus))
    assert [alike[key] for key in sorted(alike)] == printed
    command = ["lscpu", "-B", "-C=ONE-SIZE,LEVEL,TYPE"]
    done = subprocess.run(command, check=True, capture_output=True, text=True, env={**os.environ, "LC_ALL": "C"})
    sizes = {tuple(line.split()) for line in done.stdout.splitlines()[1:]}
    assert {(str(cache.size_bytes), str(cache.level), cache.kind) for cache in caches} == sizes


@pytest.mark.skipif(shutil.which("lscpu") is None, reason="lscpu (util-linux) is not installed")
def test_model_and_core_ids_of_this_machine_agree_with_lscpu_and_sysfs() -> None:
    topology = read_topology(details=True)
    done = subprocess.run(["lscpu"], check=True, capture_output=True, text=True, env={**os.environ, "LC_ALL": "C"})
    shown = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in done.stdout.splitlines())}
    if topology.cpu_model is not None and not topology.cpu_model.startswith("implementer"):
        assert topology.cpu_model == shown["Model name"]
    for cpu in topology.cpus:
        assert cpu.core_id == int(Path(f"{CPU}/cpu{cpu.number}/topology/core_id").read_text())


@pytest.mark.skipif(shutil.which("numactl") is None, reason="numactl is not installed")
def test_nodes_of_this_machine_agree_with_numactl() -> None:
    topology = read_topology()
    command = ["numactl", "-H"]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "LC_ALL": "C"})
    if "No NUMA" in done.stdout + done.stderr:
        pytest.skip("this kernel has no NUMA support")
    shown = dict(re.findall(r"^node (\d+) cpus: ?(.*)$", done.stdout, re.MULTILINE))
    assert {str(node.number): " ".join(map(str, node.cpus)) for node in topology.nodes} == shown
    sizes = dict(re.findall(r"^node (\d+) size: (\d+) MB$", done.stdout, re.MULTILINE))
    assert {str(node.number): str((node.memory_total_bytes or 0) >> 20) for node in topology.nodes} == sizes
    rows = re.findall(r"^ +\d+: +(.*)$", done.stdout, re.MULTILINE)
    assert [list(map(int, row.split())) for row in rows] == [list(row) for row in topology.distances or ()]


def test_memory_of_this_machine_is_within_what_it_has() -> None:
    nodes = read_topology().nodes
    if not nodes:
        pytest.skip("this kernel has no NUMA nodes")
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert 0 < sum(node.memory_total_bytes or 0 for node in nodes) <= total
    for node in nodes:
        assert (node.memory_free_bytes or 0) <= (node.memory_total_bytes or 0)


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


@pytest.fixture
def pinned(children) -> Callable[[CpuSet], dict[str, str]]:
    """Return a function that gives a process a mask and returns how the kernel prints it."""
    child = children.start("sys.stdin.read()")

    def pin(cpus: CpuSet) -> dict[str, str]:
        os.sched_setaffinity(child.pid, cpus)
        lines = Path(f"/proc/{child.pid}/status").read_text().splitlines()
        return {key: value.strip() for key, value in (line.split(":", 1) for line in lines)}

    return pin


def test_every_mask_is_printed_as_the_kernel_prints_it(pinned: Callable[[CpuSet], dict[str, str]]) -> None:
    allowed = sorted(os.sched_getaffinity(0))

    @settings(deadline=None, max_examples=60)
    @given(st.frozensets(st.sampled_from(allowed), min_size=1))
    def check(members: frozenset[int]) -> None:
        status = pinned(CpuSet.of(members))
        wanted = CpuSet.of(members)
        width = len(status["Cpus_allowed"].replace(",", "")) * 4
        assert (wanted.to_list(), wanted.to_mask(width)) == (status["Cpus_allowed_list"], status["Cpus_allowed"])
        assert CpuSet.parse_list(status["Cpus_allowed_list"]) == wanted
        assert CpuSet.parse_mask(status["Cpus_allowed"]) == wanted

    check()


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


# --- made-up machines: memory, distances, caches, frequencies --------------------------------------------------------


def numa(rows: dict[int, str]) -> dict[str, str]:
    files = {f"{CPU}/online": "0-3\n"}
    return files | {f"{NODE}/node{number}/distance": f"{row}\n" for number, row in rows.items()}


def test_distances_follow_the_nodes_and_not_their_numbers(tree) -> None:
    tree.write(numa({0: "10 40 80", 8: "40 10 81", 250: "80 82 10"}))
    topology = read_topology(tree.root)
    assert topology.distances == ((10, 40, 80), (40, 10, 81), (80, 82, 10))
    assert (topology.distance(8, 250), topology.distance(250, 8), topology.distance(0, 0)) == (81, 82, 10)
    assert topology.distance(0, 1) is None


@pytest.mark.parametrize("rows", [{}, {0: "10 20", 1: "20"}, {0: "10 20", 1: ""}, {0: "10 20 30", 1: "20 10 30"}])
def test_distances_that_are_not_whole_are_unknown(tree, rows: dict[int, str]) -> None:
    tree.write(numa(rows))
    topology = read_topology(tree.root)
    assert topology.distances is None
    assert topology.distance(0, 1) is None


def test_malformed_distances_name_their_file(tree) -> None:
    tree.write(numa({0: "10 x"}))
    with pytest.raises(MalformedError, match=f"{NODE}/node0/distance holds"):
        read_topology(tree.root)


def test_memory_of_nodes_without_cpus_and_of_cpus_without_memory(tree) -> None:
    lines = "\nNode {0} MemTotal:       {1} kB\nNode {0} MemFree:        {2} kB\nNode {0} MemUsed:         5 kB\n"
    tree.write(
        {
            f"{CPU}/online": "0-3\n",
            f"{NODE}/node0/cpulist": "0-3\n",
            f"{NODE}/node0/meminfo": lines.format(0, 0, 0),
            f"{NODE}/node1/cpulist": "\n",
            f"{NODE}/node1/meminfo": lines.format(1, 2048, 1024),
            f"{NODE}/node2/cpulist": "7\n",
        }
    )
    first, second, third = read_topology(tree.root).nodes
    assert (first.memory_total_bytes, first.memory_less, first.cpu_less) == (0, True, False)
    assert (second.memory_total_bytes, second.memory_free_bytes) == (2 << 20, 1 << 20)
    assert (second.memory_less, second.cpu_less) == (False, True)
    assert (third.memory_total_bytes, third.memory_free_bytes) == (None, None)
    assert (third.memory_less, third.cpu_less) == (False, True)


@pytest.mark.parametrize(
    ("text", "cpus_without_tick"), [("1-3\n", "1-3"), ("\n", ""), ("(null)\n", ""), ("              (null)\n", "")]
)
def test_cpus_without_tick(tree, text: str, cpus_without_tick: str) -> None:
    tree.write({f"{CPU}/online": "0-3\n"})
    assert read_topology(tree.root).nohz_full is None
    tree.write({f"{CPU}/nohz_full": text})
    assert str(read_topology(tree.root).nohz_full) == cpus_without_tick


def cache(cpu: int, index: int, level: int, kind: str, **files: str) -> dict[str, str]:
    place = f"{CPU}/cpu{cpu}/cache/index{index}"
    return {f"{place}/level": f"{level}\n", f"{place}/type": f"{kind}\n"} | {
        f"{place}/{name}": text for name, text in files.items()
    }


def test_each_cache_is_there_once_whatever_its_index(tree) -> None:
    """A core without an instruction cache numbers the rest differently, and offline CPUs share nothing."""
    tree.write(
        {f"{CPU}/online": "0-2\n"}
        | cache(0, 0, 1, "Data", size="48K\n", shared_cpu_list="0,3\n")
        | cache(0, 1, 1, "Instruction", size="32K\n", shared_cpu_list="0,3\n")
        | cache(0, 2, 3, "Unified", size="16M\n", shared_cpu_list="0-3\n")
        | cache(1, 0, 1, "Data", size="48K\n", shared_cpu_map="0000,00000006\n\n")
        | cache(1, 1, 3, "Unified", size="16M\n", shared_cpu_list="0-3\n")
        | cache(2, 0, 1, "Data", shared_cpu_list="1-2\n")
        | cache(2, 1, 2, "Unified", size="1G\n", shared_cpu_list="2\n")
        | cache(2, 2, 9, "Unified", size="1K\n")
    )
    assert read_topology(tree.root, details=True).caches == (
        Cache(level=1, kind="Data", size_bytes=48 << 10, cpus=cpus("0")),
        Cache(level=1, kind="Data", size_bytes=48 << 10, cpus=cpus("1-2")),
        Cache(level=1, kind="Instruction", size_bytes=32 << 10, cpus=cpus("0")),
        Cache(level=2, kind="Unified", size_bytes=1 << 30, cpus=cpus("2")),
        Cache(level=3, kind="Unified", size_bytes=16 << 20, cpus=cpus("0-2")),
    )


def test_a_malformed_cache_size_names_its_file(tree) -> None:
    tree.write({f"{CPU}/online": "0\n"} | cache(0, 0, 1, "Data", size="big\n", shared_cpu_list="0\n"))
    with pytest.raises(MalformedError, match="index0/size holds 'big"):
        read_topology(tree.root, details=True)


def test_details_are_read_on_request_alone(tree) -> None:
    tree.write({f"{CPU}/online": "0\n"} | cache(0, 0, 1, "Data", size="big\n", shared_cpu_list="0\n"))
    topology = read_topology(tree.root)
    assert (topology.caches, topology.details, topology.cpu_model) == (None, None, None)


def test_frequencies_and_core_ids(tree) -> None:
    tree.write(
        {
            f"{CPU}/online": "0-3\n",
            f"{CPU}/cpu0/topology/core_id": "7\n",
            f"{CPU}/cpu0/cpufreq/cpuinfo_max_freq": "2600000\n",
            f"{CPU}/cpu0/cpufreq/scaling_cur_freq": "1234567\n",
            f"{CPU}/cpu1/topology/core_id": "-1\n",
            f"{CPU}/cpu1/cpufreq/scaling_cur_freq": "<unknown>\n",
            f"{CPU}/cpu2/topology/core_id": "7\n",
            f"{CPU}/cpu2/cpufreq/scaling_cur_freq": "0\n",
            "/proc/cpuinfo": "processor\t: 0\ncpu MHz\t\t: 9.0\n\nprocessor\t: 1\ncpu MHz\t\t: 2100.500\n\n",
        }
    )
    topology = read_topology(tree.root, details=True)
    assert [(cpu.core_id, cpu.max_mhz, cpu.current_mhz) for cpu in topology.cpus] == [
        (7, 2600.0, 1234.567),
        (None, None, 2100.5),
        (7, None, None),
        (None, None, None),
    ]
    assert topology.cpu(0) == topology.cpus[0]
    assert [details.number for details in topology.details or ()] == [0, 1, 2]


@pytest.mark.parametrize(
    ("cpuinfo", "model"),
    [
        ("processor\t: 0\nmodel\t\t: 6\nmodel name\t:   Intel(R)  Xeon(TM) CPU\n", "Intel(R) Xeon(TM) CPU"),
        ("processor\t: 0\nCPU implementer\t: 0x48\nCPU part\t: 0xd01\n" * 2, "implementer 0x48 part 0xd01"),
        (
            "processor\t: 0\nCPU implementer\t: 0x41\nCPU part\t: 0xd87\n\n"
            "processor\t: 1\nCPU implementer\t: 0x41\nCPU part\t: 0xd85\n\n",
            "implementer 0x41 part 0xd87, implementer 0x41 part 0xd85",
        ),
        ("processor\t: 0\ncpu\t\t: POWER9, altivec supported\nclock\t\t: 1MHz\n\n", "POWER9, altivec supported"),
        ("processor\t: 0\nhart\t: 1\nCPU implementer\t: 0x48\n\n", None),
        ("", None),
    ],
)
def test_model(tree, cpuinfo: str, model: str | None) -> None:
    tree.write({f"{CPU}/online": "0\n", "/proc/cpuinfo": cpuinfo})
    assert read_topology(tree.root, details=True).cpu_model == model
