"""What holds for every plan, whatever the machine."""

from itertools import combinations

import msgspec
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from berth.binding.look import look
from berth.binding.options import PlanOptions
from berth.binding.placing import Placement, place
from berth.binding.plan import make_plan
from berth.binding.plan_document import encode_plan
from berth.binding.thread_places import parse_thread_classes
from berth.host.cpuset import CpuSet
from binding.builder import Host, cpus, played

_FEW = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def subset(draw: st.DrawFn, universe: CpuSet, *, least: int = 0) -> CpuSet:
    numbers = sorted(universe)
    return (
        CpuSet.of(draw(st.lists(st.sampled_from(numbers), min_size=least, max_size=len(numbers))))
        if numbers
        else CpuSet()
    )


@st.composite
def cores_of_a_machine(draw: st.DrawFn) -> list[CpuSet]:
    """Cores of one, two, four or eight threads, or of one and two, numbered with gaps, siblings near or far."""
    kind = draw(st.sampled_from([1, 2, 4, 8, 0]))
    number = draw(st.integers(1, 24 if kind < 4 else 8))
    sizes = [kind or draw(st.integers(1, 2)) for _ in range(number)]
    gap, step = draw(st.integers(0, 5)), draw(st.sampled_from([1, 1, 2]))
    numbers = [gap + step * at for at in range(sum(sizes))]
    if draw(st.booleans()) and kind:
        return [CpuSet.of(numbers[core::number]) for core in range(number)]
    starts = [sum(sizes[:at]) for at in range(number)]
    return [CpuSet.of(numbers[start : start + size]) for start, size in zip(starts, sizes, strict=True)]


@st.composite
def hosts(draw: st.DrawFn) -> Host:
    cores = draw(cores_of_a_machine())
    everything = CpuSet.of(cpu for core in cores for cpu in core)
    nodes: dict[int, str] = {}
    homes = [draw(st.integers(0, 3)) for _ in cores]
    for node in range(4):
        own = CpuSet.of(cpu for core, home in zip(cores, homes, strict=True) if home == node for cpu in core)
        if draw(st.integers(0, 9)) == 0:
            own = subset(draw, everything)  # overlaps, splits cores, or leaves CPUs without a node
        nodes[node * draw(st.sampled_from([1, 2]))] = str(own)
    offline = subset(draw, everything) if draw(st.booleans()) else CpuSet()
    if offline == everything:
        offline = CpuSet()
    host = Host(
        list(map(str, cores)),
        nodes,
        offline=str(offline),
        isolated=draw(st.sampled_from([None, "", str(subset(draw, everything))])),
        empty=draw(st.sets(st.integers(0, 3))),
        optimization_goal=draw(st.sampled_from(["unknown", "latency", "throughput"])),
    )
    for number in range(draw(st.integers(0, 8))):
        near = draw(st.sampled_from([None, *(text for text in nodes.values() if text), str(subset(draw, everything))]))
        host.npu(number, near, numa_node=draw(st.sampled_from([None, 0, 1])))
    add_processes(draw, host)
    return host


def add_processes(draw: st.DrawFn, host: Host) -> None:
    limits = ["all", str(subset(draw, host.online, least=1)), str(subset(draw, host.online, least=1)), None]
    for rank in range(draw(st.one_of(st.integers(1, 6), st.integers(1, 64)))):
        limit = draw(st.sampled_from([*limits[:3], *limits]))
        allowed = host.online if limit in ("all", None) else cpus(limit or "")
        mask = draw(st.sampled_from([str(allowed), str(subset(draw, allowed, least=1))]))
        threads = [
            (draw(st.sampled_from(["worker", "acl_thread", "dev0_sq"])), draw(st.sampled_from([mask, str(allowed)])))
            for _ in range(draw(st.integers(0, 2)))
        ]
        host.process(
            1000 + 10 * rank,
            mask,
            cpuset=limit,
            rank=draw(st.sampled_from([rank, None])),
            npu=draw(st.sampled_from([None, *range(len(host.npus))])),
            parent=draw(st.sampled_from([1, 1, 1000, 1000 + 10 * max(0, rank - 1)])),
            threads=threads,
            target=draw(st.sampled_from([True, True, True, False])),
        )


@st.composite
def choices(draw: st.DrawFn) -> PlanOptions:
    return PlanOptions(
        policy=draw(st.sampled_from(["near", "spread", "exclusive"])),
        executor=draw(st.sampled_from(["taskset", "native"])),
        thread_classes=parse_thread_classes(draw(st.sampled_from(["", "", "acl=1,sq=25%"]))),
        reserve=cpus(draw(st.sampled_from(["", "0-1", "3"]))),
    )


@_FEW
@given(hosts(), choices())
def test_plans_keep_every_promise(host: Host, options: PlanOptions) -> None:
    """What is in place already counts too: it keeps its CPUs, so nobody else may get them."""
    view = look(host.snapshot())
    placements = place(view, options).placements
    forbidden = host.offline | cpus(host.isolated or "") | options.reserve
    for placement in placements:
        task, target = placement.task, placement.target
        assert task.limit is not None, "a process whose cpuset is unknown was placed"
        assert target
        assert target <= task.limit & host.online
        assert target.isdisjoint(forbidden)
        assert set(placement.threads) == {thread.tid for thread in task.process.threads}
        assert all(part and part <= target for part in placement.threads.values())
        for core in host.cores:
            if options.policy == "exclusive" and task.leads and not core.isdisjoint(target):
                assert options.thread_classes or core <= target
            if options.policy == "spread" and task.leads and "split" not in placement.why and core & target:
                assert (core & task.limit) - forbidden <= target
    split = {placement.task.pid for placement in placements if "cores are split" in placement.why}
    for one, other in combinations(placements, 2):
        if owner(one) != owner(other):
            assert one.target.isdisjoint(other.target)
            if not {owner(one), owner(other)} & split:
                assert not any(core & one.target and core & other.target for core in host.cores)


def owner(placement: Placement) -> int:
    """Return whose place it is: that of another process for one that follows it."""
    _, follows, rest = placement.why.partition("shares the place of pid ")
    return int(rest.split(",")[0]) if follows else placement.task.pid


@_FEW
@given(hosts(), choices())
def test_plans_settle_and_repeat_themselves(host: Host, options: PlanOptions) -> None:
    snapshot = host.snapshot()
    plan = make_plan(snapshot, options)
    assert encode_plan(make_plan(msgspec.json.decode(msgspec.json.encode(snapshot), type=type(snapshot)), options)) == (
        encode_plan(plan)
    )
    again = make_plan(played(snapshot, plan), options)
    assert again.apply_actions == []
    assert again.skipped == plan.skipped


@_FEW
@given(hosts(), choices())
def test_nobody_is_forgotten(host: Host, options: PlanOptions) -> None:
    """Every target is moved, in place already, or skipped with a finding that stands in the plan."""
    snapshot = host.snapshot()
    plan = make_plan(snapshot, options)
    moved = {action.pid for action in plan.apply_actions}
    skipped = {entry.pid for entry in plan.skipped}
    assert not moved & skipped
    assert {entry.finding for entry in plan.skipped} <= {finding.id for finding in plan.findings}
    order = [action.pid for action in plan.apply_actions]
    parents = {process.pid: process.ppid for process in snapshot.processes}
    for at, pid in enumerate(order):
        assert parents[pid] not in order[at + 1 :]
    ids = [finding.id for finding in plan.findings]
    assert len(ids) == len(set(ids))
