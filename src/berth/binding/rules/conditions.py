"""Conditions that several rules share, so that one cause is found by one rule alone."""

from typing import Final

from berth.binding.npus import number_of
from berth.binding.view import Task, View, united
from berth.host.cpuset import CpuSet

#: From this part of what it could have on, a mask counts as not chosen (rule R001 and R004 of the binding design).
WIDE: Final = 0.8
#: A mask of at most this part of the cpuset is narrow enough to ask where it comes from.
NARROW: Final = 0.25
#: Percent of one CPU from which on a process that is no target counts as using its CPUs, whatever its mask.
BUSY_PERCENT: Final = 50.0

#: Variables that make a library pin threads when it is loaded, and values that turn that off: OpenMP 5.2 section 21.2,
#: the manuals of libgomp and of the LLVM and Intel runtimes, torch_npu's CPU_AFFINITY_CONF.
_PINNING: Final = {
    "OMP_PROC_BIND": ("", "false"),
    "OMP_PLACES": ("",),
    "GOMP_CPU_AFFINITY": ("",),
    "KMP_AFFINITY": ("", "none", "disabled"),
    "CPU_AFFINITY_CONF": ("", "0", "mode:0"),
}


def accelerated(view: View, task: Task) -> bool:
    """Return whether the process, or the one whose place it shares, is part of a job on accelerators."""
    leader = view.tasks.get(task.leader or 0, task)
    workload = view.snapshot.workload
    return (
        bool(leader.devices)
        or leader.rank is not None
        or leader.process.npu_device is not None
        or workload.framework == "pytorch"
        or workload.device_type == "npu"
        or view.snapshot.pytorch.get("detected") is True
    )


def spread_unbound(view: View) -> list[Task]:
    """Return the parts of accelerator jobs that may run almost anywhere, on more than one node."""
    return [task for task in view.placed if _wide(view, task) and accelerated(view, task) and _over_nodes(view, task)]


def too_wide(view: View) -> list[Task]:
    """Return the other processes that may run almost anywhere, where less would be nearer; no overlapping ranks."""
    others = {task.pid for task in spread_unbound(view)}
    others |= {task.pid for group in overlaps(view) for task in group}
    return [
        task
        for task in view.placed
        if task.pid not in others and task.leader not in others and _wide(view, task) and _could_be_nearer(view, task)
    ]


def _wide(view: View, task: Task) -> bool:
    most = task.limit - view.isolated if task.limit else view.online - view.isolated
    return len(task.union & most) >= WIDE * max(1, len(most))


def _over_nodes(view: View, task: Task) -> bool:
    return len(view.nodes_of(task.union & view.online)) > 1


def _could_be_nearer(view: View, task: Task) -> bool:
    if len(task.union) < WIDE * len(view.online):
        return False
    near = near_within(view, task)
    return _over_nodes(view, task) if near is None else len(near) < len(task.union)


def near_within(view: View, task: Task) -> CpuSet | None:
    """Return the near CPUs that its cpuset allows, those of its leader for one that shares its place; None: unknown."""
    near = near_of(view, task)
    return None if near is None or task.limit is None else near & task.limit


def near_of(view: View, task: Task) -> CpuSet | None:
    """Return the near CPUs of a process or of its leader, whatever its cpuset; None: unknown."""
    leader = view.tasks.get(task.leader or 0, task)
    return leader.near if task.near is None else task.near


def locality(view: View, task: Task) -> tuple[CpuSet | None, str]:
    """Return the CPUs that a leader belongs to within its cpuset, and why these.

    Where the whole cpuset lies in one node every CPU of it is as near as any other, and that is no guess. None means
    that nothing says, or that the sources contradict each other.
    """
    if task.limit is None or task.conflict:
        return None, ""
    if task.near is not None:
        return task.near & task.limit, f"near {npu_names(task)} ({task.near_source})"
    if view.trusted and (len(view.nodes) < 2 or any(task.limit <= cpus for cpus in view.nodes.values())):
        return task.limit, "its cpuset, which lies in one node"
    return None, ""


def npu_names(task: Task) -> str:
    """Return `NPU 3`, or `NPUs 3, 4`."""
    numbers = sorted(map(number_of, task.devices))
    return f"NPU{'' if len(numbers) == 1 else 's'} {', '.join(map(str, numbers))}"


def one_core(view: View, cpus: CpuSet) -> bool:
    """Return whether these CPUs, at least one, are of one core."""
    core = view.core_of(cpus.min()) if cpus else None
    return len(cpus) == 1 or (core is not None and cpus <= core.cpus)


def pinning_variable(task: Task) -> str:
    """Return the variable of its environment that makes a library pin threads, as NAME=VALUE; empty for none."""
    for name, harmless in _PINNING.items():
        value = task.process.environment.get(name)
        if value is not None and value.strip().lower() not in harmless:
            return f"{name}={value}"
    return ""


def pinned_families(view: View) -> list[list[Task]]:
    """Return the parents that sit on one core, each with the children that inherited that; parents first."""
    children: dict[int, list[Task]] = {}
    for task in view.involved:
        children.setdefault(task.process.ppid, []).append(task)
    families = []
    for parent in view.involved:
        alike = [task for task in children.get(parent.pid, []) if task.union == parent.union]
        if alike and _kept_small(view, parent):
            families.append([parent, *alike])
    return families


def _kept_small(view: View, task: Task) -> bool:
    """Return whether it sits on one core of a cpuset that has more."""
    return (
        task.limit is not None
        and one_core(view, task.union)
        and not task.limit <= task.union
        and not one_core(view, task.limit)
    )


def narrowed(view: View) -> dict[int, str]:
    """Return the processes whose mask nobody seems to have chosen, by pid, each with where it may come from."""
    covered = {task.pid for family in pinned_families(view) for task in family}
    deliberate = _partition(view)
    found = {}
    for task in view.placed:
        if task.pid not in covered and task.limit is not None and not view.unbound(task):
            source = _narrowed_by(view, task, deliberate=task.pid in deliberate)
            if source:
                found[task.pid] = source
    return found


def _narrowed_by(view: View, task: Task, *, deliberate: bool) -> str:
    variable = pinning_variable(task)
    many = task.process.num_threads > 1
    if _kept_small(view, task) and variable:
        return f"{variable} in its environment: a library pins threads when it is loaded"
    if deliberate:
        return ""
    if _kept_small(view, task) and many:
        return _inherited_from(view, task) or "nothing in the snapshot tells who did that"
    near = near_within(view, task)
    placed_well = near is not None and task.union <= near
    if task.limit and len(task.union) <= NARROW * len(task.limit) and not placed_well:
        return _inherited_from(view, task)
    return ""


def _inherited_from(view: View, task: Task) -> str:
    parent = view.tasks.get(task.process.ppid)
    if parent is not None and parent.union == task.union:
        return f"inherited: its parent, pid {parent.pid} ({parent.process.comm}), has the same"
    if task.process.in_container:
        return "in a container: inherited from its runtime, or from CPUAffinity of a systemd unit"
    return ""


def _partition(view: View) -> set[int]:
    """Return the leaders among which CPUs are dealt already: two or more, none with a CPU of another."""
    bound = [task for task in view.leaders if not view.unbound(task)]
    if len(bound) > 1 and sum(len(task.union) for task in bound) == len(united(task.union for task in bound)):
        return {task.pid for task in bound}
    return set()


def overlaps(view: View) -> list[list[Task]]:
    """Return the groups of ranks or instances that share a CPU; by goal also those that share a core."""
    if view.snapshot.workload.process_model == "single-process":
        return []
    widen = view.snapshot.workload.optimization_goal in ("latency", "stability", "isolation")
    groups: list[tuple[CpuSet, list[Task]]] = []
    for task in view.leaders:
        reach = with_siblings(view, task.union) if widen else task.union
        members = [task]
        apart = []
        for cpus, others in groups:
            if cpus.isdisjoint(reach):
                apart.append((cpus, others))
            else:
                reach |= cpus
                members = others + members
        groups = [*apart, (reach, members)]
    return [members for _, members in groups if len(members) > 1]


def with_siblings(view: View, cpus: CpuSet) -> CpuSet:
    """Return these CPUs and the other CPUs of their cores."""
    mask = cpus.mask
    found = mask
    for core in view.topology.cores:
        if core.cpus.mask & mask:
            found |= core.cpus.mask
    return CpuSet(found)


def occupants(view: View, cpus: CpuSet) -> list[Task]:
    """Return the processes that are no targets and hold or use some of these CPUs.

    A mask as wide as the cpuset says nothing: everything that nobody bound has one. With it only a busy one counts.
    """
    return [
        task
        for task in view.strangers
        if not task.union.isdisjoint(cpus)
        and (_is_bound(view, task) or (task.process.cpu_percent or 0.0) >= BUSY_PERCENT)
    ]


def _is_bound(view: View, task: Task) -> bool:
    return not view.unbound(task) if task.limit else not view.online - view.isolated <= task.union
