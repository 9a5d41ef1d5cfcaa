import re
from pathlib import Path

import msgspec
import pytest

from berth.binding.diagnose import RULES, diagnose
from berth.binding.finding import Finding
from berth.binding.rules import room
from berth.binding.snapshot import RankEntry
from binding.builder import ONE_GIB_OF_PAGES, Host, regular


def found(host: Host) -> dict[str, Finding]:
    """Return the findings by rule."""
    return {finding.id: finding for finding in diagnose(host.snapshot()).findings}


def text(finding: Finding) -> str:
    return "\n".join(finding.evidence)


def two_nodes(**options: object) -> Host:
    """Return two nodes, 0-7,16-23 and 8-15,24-31, with an NPU on each."""
    host = regular(nodes=2, cores=8, **options)
    host.npu(0, "0-7,16-23")
    host.npu(1, "8-15,24-31")
    return host


def test_well_placed_process_has_no_finding() -> None:
    host = two_nodes()
    host.process(100, "0-7,16-23", npu=0, threads=8)
    host.process(200, "8-15,24-31", npu=1, threads=8)
    assert found(host) == {}


def test_unbound_ranks_are_one_finding() -> None:
    host = two_nodes()
    for rank in range(16):
        host.process(100 + rank, npu=rank % 2, rank=rank)
    unbound = found(host)["R001"]
    assert unbound.severity == "high"
    assert unbound.pids == list(range(100, 116))
    assert "ranks 0-15 (pids 100-115): mask 0-31, cpuset 0-31" in unbound.evidence


def test_sixteen_overlapping_ranks_are_one_finding_that_names_groups() -> None:
    host = two_nodes()
    for rank in range(16):
        host.process(100 + rank, "0-7,16-23" if rank < 8 else "8-15,24-31", npu=rank // 8, rank=rank)
    findings = diagnose(host.snapshot()).findings
    assert [finding.id for finding in findings] == ["R008"]
    assert "ranks 0-7 (pids 100-107): mask 0-7,16-23" in text(findings[0])
    assert "ranks 8-15 (pids 108-115): mask 8-15,24-31" in text(findings[0])
    assert "8 processes share CPUs 0-7,16-23" in findings[0].evidence


def test_unbound_means_as_wide_as_the_cpuset_without_isolated_cpus() -> None:
    host = two_nodes(isolated="6-7,14-15")
    host.process(100, "0-5,8-13,16-31", npu=0)
    assert "R001" in found(host)
    inside = two_nodes()
    inside.process(100, "0-7,16-23", cpuset="0-7,16-23", npu=0)
    assert "R001" not in found(inside)


def test_main_thread_alone_does_not_bind_a_process() -> None:
    host = two_nodes()
    host.process(100, "0-7,16-23", threads=[("worker", "0-31")], npu=0)
    assert "mask 0-7,16-23, all of its threads together 0-31" in text(found(host)["R001"])


def test_wide_range_of_a_process_without_accelerator_is_another_rule() -> None:
    host = regular()
    host.process(100)
    findings = found(host)
    assert "R001" not in findings
    assert findings["R004"].pids == [100]


def test_nothing_narrower_is_better_on_one_node() -> None:
    host = regular(nodes=1)
    host.process(100)
    assert found(host) == {}


def test_mask_on_the_wrong_side() -> None:
    host = two_nodes()
    host.process(100, "8-15,24-31", npu=0, rank=0)
    wrong = found(host)["R003"]
    assert "nodes 1; NPU 0 has 0-7,16-23 near it in the cpuset (sysfs)" in text(wrong)


def with_cpus_of_threads(host: Host, pid: int, seen: list[tuple[int, float | None]]) -> None:
    at = next(at for at, process in enumerate(host.processes) if process.pid == pid)
    threads = [
        msgspec.structs.replace(thread, current_cpu=cpu, cpu_percent=percent)
        for thread, (cpu, percent) in zip(host.processes[at].threads, seen, strict=True)
    ]
    host.processes[at] = msgspec.structs.replace(host.processes[at], threads=threads)


def test_threads_on_two_nodes_count_where_they_run() -> None:
    host = two_nodes()
    host.process(100, "0-15", threads=2, npu=0)
    with_cpus_of_threads(host, 100, [(1, None), (9, None)])
    assert "nodes 0, 1" in text(found(host)["R002"])
    with_cpus_of_threads(host, 100, [(1, 80.0), (9, 0.0)])
    assert "R002" not in found(host)


@pytest.mark.parametrize(("percent", "fires"), [(190.0, True), (100.0, False), (None, False)])
def test_too_narrow_needs_cpus_that_are_busy(percent: float | None, fires: bool) -> None:
    host = two_nodes()
    host.process(100, "0-1", threads=8, npu=0, cpu_percent=percent)
    assert ("R005" in found(host)) == fires


def test_pools_are_compared_not_all_threads() -> None:
    host = two_nodes()
    host.process(100, "0-7,16-23", threads=40, npu=0)
    assert "R006" not in found(host)
    host.process(200, "8-15,24-31", npu=1, environment={"OMP_NUM_THREADS": "64,2"})
    large = found(host)["R006"]
    assert large.pids == [200]
    assert "OMP_NUM_THREADS 64; 16 CPUs" in text(large)
    host.pytorch = {"dataloader": {"workers": 16}, "threading": {"torch_num_threads": 4}}
    assert found(host)["R006"].pids == [100, 200]


@pytest.mark.parametrize(
    ("group", "fires"),
    [
        ({"nr_throttled": 9}, []),
        ({"nr_throttled": 9, "nr_throttled_growth": 3}, ["R007"]),
        ({"cpu_quota_us": 350_000, "cpu_period_us": 100_000}, ["R011"]),
        ({"cpu_quota_us": 350_000, "cpu_period_us": 100_000, "nr_throttled_growth": 1}, ["R007"]),
        ({"cpu_quota_us": 3_200_000, "cpu_period_us": 100_000}, []),
    ],
)
def test_throttling_counts_when_it_grows(group: dict[str, int], fires: list[str]) -> None:
    host = two_nodes()
    host.process(100, "0-7,16-23", npu=0, group=group)
    findings = found(host)
    assert list(findings) == fires
    for finding in findings.values():
        if "cpu_quota_us" in group:
            assert "quota 3.5 CPUs, mask of 16 CPUs" in text(finding)


def test_mask_outside_the_cpuset_means_that_the_cpuset_changed() -> None:
    host = two_nodes(offline="15")
    host.process(100, "0-7", cpuset="0-3", npu=0)
    host.process(200, "8-15", cpuset="8-14", npu=1)
    conflict = found(host)["R007"]
    assert conflict.pids == [100]
    assert "outside 4-7" in text(conflict)
    assert "the cpuset was changed" in conflict.judgement


def test_split_cores_depend_on_the_goal() -> None:
    for goal, fires in {"unknown": True, "throughput": False, "latency": False}.items():
        host = two_nodes(optimization_goal=goal)
        host.process(100, "0-7", npu=0)
        assert ("R009" in found(host)) == fires, goal
    host = two_nodes(optimization_goal="latency")
    host.process(100, "0-7", npu=0)
    host.process(300, "16-23", target=False)
    assert "core 0,16, core 1,17, core 2,18 and 5 more" in text(found(host)["R009"])


def test_core_that_the_cpuset_cuts_is_not_split_by_the_mask() -> None:
    host = two_nodes()
    host.process(100, "0-7", cpuset="0-7", npu=0)
    assert "R009" not in found(host)


def test_goal_latency_makes_siblings_an_overlap() -> None:
    for goal, fires in {"latency": True, "throughput": False}.items():
        host = two_nodes(optimization_goal=goal)
        host.process(100, "0-7", npu=0, rank=0)
        host.process(101, "16-23", npu=0, rank=1)
        assert ("R008" in found(host)) == fires, goal


def test_openmp_at_import_is_named_with_its_variable() -> None:
    host = regular(nodes=1, cores=8, smt=1)
    host.npu(0, "4-7")
    host.process(100, "0", threads=9, npu=0, environment={"OMP_PROC_BIND": "TRUE", "OMP_NUM_THREADS": "8"})
    findings = found(host)
    assert list(findings) == ["R012"]
    assert findings["R012"].severity == "high"
    assert "mask 0, cpuset 0-7; OMP_PROC_BIND=TRUE in its environment" in text(findings["R012"])


@pytest.mark.parametrize("environment", [{}, {"OMP_PROC_BIND": "false"}, {"KMP_AFFINITY": "disabled"}])
def test_variables_that_pin_nothing_are_not_blamed(environment: dict[str, str]) -> None:
    host = regular(nodes=1)
    host.process(100, "0", threads=4, environment=environment)
    assert "nothing in the snapshot tells who did that" in text(found(host)["R012"])


def test_mask_that_a_container_inherited() -> None:
    host = two_nodes()
    host.process(100, "0-1,16-17", npu=1, threads=4, in_container=True)
    assert "in a container: inherited from its runtime" in text(found(host)["R012"])


def test_small_mask_near_the_accelerator_and_single_thread_on_a_core_look_chosen() -> None:
    host = two_nodes()
    host.process(100, "0-1,16-17", npu=0, threads=4, in_container=True)
    assert found(host) == {}
    alone = regular(nodes=1)
    alone.process(100, "0,8")
    assert found(alone) == {}


def test_mask_that_a_library_left_is_one_finding_whatever_else_it_causes() -> None:
    host = regular(nodes=1)
    host.process(100, "0", threads=9, cpu_percent=100.0, environment={"OMP_PROC_BIND": "TRUE"})
    assert list(found(host)) == ["R012"]


def test_mask_that_a_parent_left() -> None:
    host = two_nodes()
    host.process(50, "8-9,24-25", target=False, comm="systemd-run")
    host.process(200, "8-9,24-25", npu=0, threads=4, parent=50)
    assert "its parent, pid 50 (systemd-run), has the same" in text(found(host)["R012"])


def test_ranks_that_have_each_a_core_were_bound_on_purpose() -> None:
    host = two_nodes()
    for rank in range(4):
        host.process(100 + rank, f"{rank},{rank + 16}", npu=0, rank=rank, threads=9)
    assert found(host) == {}


def test_children_on_the_core_of_their_parent_are_one_finding() -> None:
    host = regular(nodes=1, cores=8, smt=1)
    host.process(100, "1", environment={"OMP_PROC_BIND": "close"})
    for child in range(101, 105):
        host.process(child, "1", parent=100, target=False)
    findings = found(host)
    assert list(findings) == ["R013"]
    assert findings["R013"].pids == [100, 101, 102, 103, 104]
    assert "pid 100 (python) and its children 101, 102, 103, 104: mask 1, cpuset 0-7" in findings["R013"].evidence
    assert "OMP_PROC_BIND=close" in text(findings["R013"])


@pytest.mark.parametrize(
    ("mask", "threads", "fires"),
    [("6-7", 1, True), ("6", 1, False), ("6", 3, True), ("0-5", 3, False), ("5-6", 1, True)],
)
def test_isolated_cpus_balance_nothing(mask: str, threads: int, fires: bool) -> None:
    host = regular(nodes=1, cores=8, smt=1, isolated="6-7")
    host.process(100, mask, threads=threads)
    assert ("R014" in found(host)) == fires


def test_real_time_thread_may_have_isolated_cpus() -> None:
    host = regular(nodes=1, cores=8, smt=1, isolated="6-7")
    host.process(100, "0-5", threads=[("poll", "6-7")])
    assert "isolated 6-7" in text(found(host)["R014"])
    main, poll = host.processes[0].threads
    poll = msgspec.structs.replace(poll, policy="SCHED_FIFO")
    host.processes[0] = msgspec.structs.replace(host.processes[0], threads=[main, poll])
    assert "R014" not in found(host)


def test_strangers_count_when_they_are_bound_or_busy() -> None:
    host = two_nodes()
    host.process(100, "0-7,16-23", npu=0)
    host.process(300, target=False, comm="sshd")
    assert "R015" not in found(host)
    host.process(301, target=False, comm="burn", cpu_percent=90.0)
    host.process(302, "3", target=False, comm="agent")
    shared = found(host)["R015"]
    assert shared.pids == [100, 301, 302]
    assert "pid 302 (agent), mask 3: shares with pid 100 (python)" in shared.evidence


def test_stranger_that_keeps_off_isolated_cpus_is_not_bound() -> None:
    host = two_nodes(isolated="15,31")
    host.process(100, "0-7,16-23", npu=0)
    host.process(300, "0-14,16-30", target=False)
    assert "R015" not in found(host)


def test_nodes_that_cannot_be_trusted() -> None:
    overlapping = Host(["0,1", "2,3"], {0: "0-3", 1: "2-3"})
    overlapping.process(100)
    assert "CPUs 2-3" in text(found(overlapping)["R016"])
    apart = Host(["0,2", "1,3"], {0: "0-1", 1: "2-3"})
    apart.process(100)
    assert "CPUs 0,2" in text(found(apart)["R016"])
    assert "R004" not in found(apart)


def test_accelerator_outside_the_cpuset() -> None:
    host = two_nodes()
    host.process(100, cpuset="8-15,24-31", npu=0)
    outside = found(host)["R017"]
    assert "NPU 0 has 0-7,16-23 near it (sysfs), cpuset 8-15,24-31" in text(outside)
    assert "R003" not in found(host)


@pytest.mark.parametrize(
    ("pages", "fires"),
    [
        ({"0": ONE_GIB_OF_PAGES, "1": 10}, False),
        ({"0": 10, "1": ONE_GIB_OF_PAGES}, True),
        ({"0": 10, "1": 100}, False),
        (None, False),
    ],
)
def test_memory_on_the_far_node(pages: dict[str, int] | None, fires: bool) -> None:
    host = two_nodes()
    host.process(100, "0-7,16-23", npu=0, pages_by_node=pages)
    assert ("R018" in found(host)) == fires


def test_memory_cannot_be_near_where_the_near_node_has_none() -> None:
    host = regular(nodes=2, empty=[0])
    host.npu(0, "0-7,16-23")
    host.process(100, "0-7,16-23", npu=0, pages_by_node={"1": ONE_GIB_OF_PAGES})
    assert "R018" not in found(host)


def test_sources_that_contradict_each_other() -> None:
    host = two_nodes()
    host.npus[1] = msgspec.structs.replace(host.npus[1], host_pids=[100])
    host.process(100, npu=0)
    assert "said to use NPU 0, and npu-smi shows it on NPU 1" in text(found(host)["R019"])
    twice = two_nodes()
    twice.process(100)
    twice.ranks = [RankEntry(rank=0, pid=100, npu_device=0), RankEntry(rank=1, pid=100, npu_device=0)]
    assert "the rank map gives it the ranks 0, 1" in text(found(twice)["R019"])


def test_contexts_on_other_npus_do_not_contradict() -> None:
    host = two_nodes()
    host.npus = [msgspec.structs.replace(npu, host_pids=[100]) for npu in host.npus]
    host.process(100, "0-7,16-23", npu=0)
    assert found(host) == {}


def test_nothing_near_is_known() -> None:
    host = regular()
    host.npu(0)
    host.process(100, npu=0, rank=0)
    assert "NPU 0 has no CPUs or node that are known; cpuset 0-31" in text(found(host)["R020"])


def test_gaps_and_what_they_prevent() -> None:
    host = two_nodes()
    host.process(100, "0-7,16-23", npu=0, cpuset=None)
    host.gap("npu_topology", "npu-smi is not installed", effect="occupancy of NPUs is unknown")
    for pid in (100, 101, 105):
        host.gap("processes.pages_by_node", "numa_maps cannot be read", pid=pid)
    missing = found(host)["R010"]
    assert missing.severity == "low"
    assert missing.pids == [100]
    assert "npu_topology: npu-smi is not installed; occupancy of NPUs is unknown" in missing.evidence
    assert "processes.pages_by_node (pid 100-101,105): numa_maps cannot be read" in missing.evidence
    assert "pid 100 (python): nothing is planned: its effective cpuset is unknown" in missing.evidence


def test_target_that_is_gone() -> None:
    host = two_nodes()
    host.process(100, "0-7,16-23", npu=0)
    snapshot = host.snapshot()
    workload = msgspec.structs.replace(snapshot.workload, target_pids=[100, 999])
    findings = diagnose(msgspec.structs.replace(snapshot, workload=workload)).findings
    assert [(finding.id, finding.pids) for finding in findings] == [("R010", [999])]


def test_what_nobody_can_move() -> None:
    host = two_nodes()
    host.process(100, kernel_thread=True, comm="kworker/0:1")
    host.process(101, state="Z")
    assert {100, 101} <= set(found(host)["R022"].pids)


def test_order_of_reading_and_length_of_judgements() -> None:
    """R010 and R007 come first because they limit what the others can say."""
    host = two_nodes()
    host.gap("npu_topology")
    for rank in range(4):
        host.process(
            100 + rank,
            rank=rank,
            npu=rank % 2,
            threads=2,
            environment={"OMP_NUM_THREADS": "99"},
            group={"nr_throttled_growth": 1},
        )
        with_cpus_of_threads(host, 100 + rank, [(1, None), (9, None)])
    findings = diagnose(host.snapshot()).findings
    assert [finding.id for finding in findings] == ["R010", "R007", "R001", "R002", "R006", "R008"]
    assert len(RULES) == 21
    for finding in findings:
        assert finding.judgement.count(". ") < 3
        assert finding.evidence
        assert finding.recommendations
        assert finding.verification


def test_manual_lists_the_rules_in_their_order() -> None:
    rules = [*RULES, room.no_room, room.launchers_stay, room.few_cpus, room.classes_do_not_fit]
    page = Path(__file__).resolve().parents[2] / "docs" / "manual" / "bind-rules.md"
    assert re.findall(r"^\| (R\d{3}) \|", page.read_text(), re.MULTILINE) == [
        (rule.__doc__ or "").split(":")[0] for rule in rules
    ]


def test_digest_is_that_of_the_file() -> None:
    host = two_nodes()
    assert diagnose(host.snapshot(), snapshot_sha256="ab").snapshot_sha256 == "ab"
    first, second = diagnose(host.snapshot()), diagnose(two_nodes(isolated="3").snapshot())
    assert len(first.snapshot_sha256) == 64
    assert first.snapshot_sha256 != second.snapshot_sha256
