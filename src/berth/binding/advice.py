"""What people could do beside binding. berth never does any of it: it is text, with its reason, risk and measure."""

from collections.abc import Iterator, Sequence

from berth.binding.names import joined, pids_of
from berth.binding.options import PlanOptions
from berth.binding.placing import Placement
from berth.binding.plan_document import Advice
from berth.binding.rules.conditions import npu_names, pinning_variable
from berth.binding.rules.locality import FEW_PAGES
from berth.binding.view import Task, View
from berth.host.cpuset import CpuSet


def advise(view: View, placements: Sequence[Placement], options: PlanOptions) -> list[Advice]:
    """Return the advice that fits these placements, in a fixed order of topics."""
    leaders = [placement for placement in placements if placement.task.leads]
    return [
        *_numactl(leaders, options),
        *_omp(view, leaders),
        *_dataloader(view, leaders),
        *_memory(view, placements),
        *_irq(view, leaders),
    ]


def _numactl(leaders: Sequence[Placement], options: PlanOptions) -> Iterator[Advice]:
    """Masks at the next start. numactl refuses CPUs outside the mask of its shell, unless it is told --all."""
    moved = [placement for placement in leaders if not placement.in_place]
    if not moved:
        return
    lines = [
        f"{_rank(placement.task)}: {_start_with(placement.target, options.caller_mask)} -- COMMAND"
        for placement in moved
    ]
    yield Advice(
        topic="numactl",
        pids=pids_of(placement.task for placement in moved),
        text="At the next start give each process its CPUs from the beginning. " + "; ".join(lines),
        reason="Threads and memory of a process that starts in its place never have to move.",
        risk="Plain numactl and taskset set the mask of new threads too; CPUs that the cpuset loses later are lost.",
        metric="pages on far nodes, and the time of the first steps",
    )


def _start_with(cpus: CpuSet, caller: CpuSet | None) -> str:
    if caller is not None and cpus <= caller:
        return f"numactl -C {cpus} --localalloc"
    return f"numactl --all -C {cpus} --localalloc"


def _omp(view: View, leaders: Sequence[Placement]) -> Iterator[Advice]:
    by_size: dict[int, list[Task]] = {}
    for placement in leaders:
        if "OMP_NUM_THREADS" in placement.task.process.environment or pinning_variable(placement.task):
            by_size.setdefault(_cores(view, placement.target), []).append(placement.task)
    for size, tasks in sorted(by_size.items()):
        variables = sorted({name for task in tasks if (name := pinning_variable(task))})
        unset = f" and take out {', '.join(variables)}, or set OMP_PROC_BIND=false" if variables else ""
        yield Advice(
            topic="omp",
            pids=pids_of(tasks),
            text=f"Set OMP_NUM_THREADS={size}{unset}.",
            reason=f"Each of these processes gets {size} cores; a pool of another size waits, or leaves some idle.",
            risk="Parts that run on the CPU alone may become slower with a smaller pool.",
            metric="step time, involuntary context switches",
        )


def _dataloader(view: View, leaders: Sequence[Placement]) -> Iterator[Advice]:
    loader = view.snapshot.pytorch.get("dataloader")
    workers = loader.get("workers") if isinstance(loader, dict) else None
    crowded = [
        placement for placement in leaders if isinstance(workers, int) and workers >= _cores(view, placement.target)
    ]
    if crowded:
        room = max(1, min(_cores(view, placement.target) for placement in crowded) - 1)
        yield Advice(
            topic="dataloader",
            pids=pids_of(placement.task for placement in crowded),
            text=f"Set num_workers to at most {room}, with persistent_workers=True.",
            reason=f"{workers} workers and the main process share fewer cores than that.",
            risk="Too few workers let the accelerator wait for input.",
            metric="time that a step waits for its batch",
        )


def _memory(view: View, placements: Sequence[Placement]) -> Iterator[Advice]:
    """Pages that would be far. A target node has memory; the others are those that hold pages now."""
    for placement in placements:
        task = placement.task
        memory = {node.node: node.memory_total_mb for node in view.snapshot.numa_topology.nodes}
        goals = [node for node in view.nodes_of(placement.target) if memory.get(node) != 0]
        pages = {int(node): number for node, number in (task.process.pages_by_node or {}).items() if number}
        origins = [node for node in sorted(pages) if node not in view.nodes_of(placement.target)]
        total = sum(pages.values())
        if not goals or total < FEW_PAGES or sum(pages[node] for node in origins) * 2 <= total:
            continue
        risk = "It stops the process for a while; a CPU rollback does not undo it; run it once for each process."
        if task.process.cap_sys_nice is False:
            where = "in this container it" if task.process.in_container else "it"
            risk += f" The process lacks CAP_SYS_NICE: {where} needs SYS_NICE, and set_mempolicy may be blocked."
        yield Advice(
            topic="memory",
            pids=[task.pid],
            text=f"migratepages {task.pid} {joined(origins)} {goals[0]}",
            reason=f"Most of its pages lie on the nodes {joined(origins)}, its CPUs on {joined(goals)}.",
            risk=risk,
            metric="pages by node in a new snapshot, step time",
        )


def _irq(view: View, leaders: Sequence[Placement]) -> Iterator[Advice]:
    tasks = [placement.task for placement in leaders if placement.task.devices]
    if not tasks:
        return
    balanced = view.snapshot.system.irqbalance_running
    yield Advice(
        topic="irq",
        pids=pids_of(tasks),
        text="Look where the interrupts of the NPUs arrive: /proc/interrupts and /proc/irq/N/smp_affinity_list of "
        + ", ".join(dict.fromkeys(map(npu_names, tasks)))
        + ". An administrator may put them on near CPUs that no busy thread uses, each interrupt by one owner alone.",
        reason="An interrupt on a far CPU, or on that of the thread that submits work, delays every submission.",
        risk="It changes the whole host; the kernel refuses it for interrupts that it manages."
        + (" irqbalance runs and will write its own masks again." if balanced else ""),
        metric="growth of the lines in /proc/interrupts, p99 latency",
    )


def _cores(view: View, cpus: CpuSet) -> int:
    return len({core.key for cpu in cpus for core in [view.core_of(cpu)] if core is not None})


def _rank(task: Task) -> str:
    return f"pid {task.pid}" if task.rank is None else f"rank {task.rank}"
