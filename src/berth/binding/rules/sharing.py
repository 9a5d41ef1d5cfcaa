"""Rules about CPUs that several threads, ranks or processes want at once."""

from typing import Final

from berth.binding.finding import Finding
from berth.binding.names import grouped, name_tasks, pids_of
from berth.binding.rules.conditions import narrowed, occupants, overlaps, pinned_families, with_siblings
from berth.binding.view import Task, View, united
from berth.host.cpuset import CpuSet

_POOL_VARIABLES: Final = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "GOTO_NUM_THREADS",
    "NUMEXPR_NUM_THREADS",
)
_SHOWN_CORES: Final = 3


def pools_too_large(view: View) -> Finding | None:
    """R006: a thread pool is configured for more CPUs than the process has."""
    found = [task for task in view.leaders if _too_large(view, task)]
    if not found:
        return None
    return Finding(
        id="R006",
        title="Thread pools too large",
        severity="medium",
        impact=["throughput", "latency"],
        evidence=grouped(found, lambda task: f"{_pools_text(view, task)}; {_effective(view, task)} CPUs"),
        judgement="Threads of one pool wait for each other at the end of each parallel part, so more threads than CPUs "
        "make every part as slow as the thread that ran last.",
        recommendations=["Make each pool as large as the number of cores that the process has."],
        risk="A smaller pool may lengthen what runs on the CPU alone.",
        verification=["step time before and after", "involuntary context switches"],
        pids=pids_of(found),
    )


def ranks_overlap(view: View) -> Finding | None:
    """R008: ranks or instances may run on the same CPUs."""
    groups = overlaps(view)
    if not groups:
        return None
    goal = view.snapshot.workload.optimization_goal
    cores = goal in ("latency", "stability", "isolation")
    return Finding(
        id="R008",
        title="Ranks or instances overlap",
        severity="medium",
        impact=["throughput", "latency", "isolation"],
        evidence=[line for group in groups for line in _overlap_lines(view, group, cores=cores)],
        judgement="These processes take CPU time from each other whenever they are busy at the same moment."
        + (f" The goal {goal} asks for cores of their own, siblings included." if cores else ""),
        recommendations=["Plan all of them at once: `berth bind plan` deals whole cores without overlap."],
        risk="Fewer CPUs for each: compare the step time.",
        verification=["`berth bind verify`", "spread of the step times between ranks"],
        pids=pids_of(task for group in groups for task in group),
    )


def splits_cores(view: View) -> Finding | None:
    """R009: a mask has some CPUs of a core, and others could have the rest; a throughput goal does not mind."""
    goal = view.snapshot.workload.optimization_goal
    if goal == "throughput":
        return None
    explained = set(narrowed(view)) | {task.pid for family in pinned_families(view) for task in family}
    taken = goal != "unknown"
    found = {
        task.pid: cores
        for task in view.leaders
        if task.pid not in explained and (cores := _split_cores(view, task, taken=taken))
    }
    if not found:
        return None
    return Finding(
        id="R009",
        title="Mask splits cores",
        severity="low",
        impact=["latency", "isolation"],
        evidence=grouped(
            (view.tasks[pid] for pid in found), lambda task: f"{task.mask_text}: has a part of {found[task.pid]}"
        ),
        judgement="The CPUs of a core share its units: whoever runs on the other one slows these processes down.",
        recommendations=["Give whole cores to one process: `berth bind plan` does."],
        risk="None known.",
        verification=["`berth bind verify`", "p99 latency before and after"],
        pids=sorted(found),
    )


def shared_with_strangers(view: View) -> Finding | None:
    """R015: a process that is no target holds or uses CPUs of a bound target."""
    found: dict[int, list[Task]] = {}
    for task in view.leaders:
        if not view.unbound(task):
            for other in occupants(view, task.union):
                found.setdefault(other.pid, []).append(task)
    if not found:
        return None
    return Finding(
        id="R015",
        title="CPUs shared with a process that is no target",
        severity="medium",
        impact=["latency", "isolation"],
        evidence=[
            f"pid {pid} ({view.tasks[pid].process.comm}), {view.tasks[pid].mask_text}: shares with {name_tasks(tasks)}"
            for pid, tasks in sorted(found.items())
        ],
        judgement="The targets were given a place, and others use it too.",
        recommendations=["Make it a target as well, so that all are planned together, or move it with --reserve."],
        risk="Whoever runs the other process may rely on its mask.",
        verification=["a new snapshot"],
        pids=sorted({*found, *(task.pid for tasks in found.values() for task in tasks)}),
    )


def _effective(view: View, task: Task) -> int:
    """Return how many CPUs a process has: those of its mask; of its cpuset, where nobody chose the mask."""
    by_chance = task.pid in narrowed(view) or any(task in family for family in pinned_families(view))
    return len(task.limit if by_chance and task.limit is not None else task.union)


def _pools(view: View, task: Task) -> dict[str, int]:
    """Return the configured pools of a process, by what configures them."""
    found = {
        name: int(value.split(",")[0])
        for name in _POOL_VARIABLES
        if (value := task.process.environment.get(name, "")).split(",")[0].isdecimal()
    }
    for block, key in (("threading", "torch_num_threads"), ("dataloader", "workers")):
        values = view.snapshot.pytorch.get(block)
        number = values.get(key) if isinstance(values, dict) else None
        if isinstance(number, int):
            found[f"{block}.{key}"] = number + (block == "dataloader")
    return found


def _too_large(view: View, task: Task) -> bool:
    pools = _pools(view, task)
    return bool(pools) and max(pools.values()) > _effective(view, task)


def _pools_text(view: View, task: Task) -> str:
    return ", ".join(f"{name} {number}" for name, number in _pools(view, task).items())


def _overlap_lines(view: View, group: list[Task], *, cores: bool) -> list[str]:
    """Return one line for each set of CPUs that processes of a group hold alike, and what they share."""
    reach = {task.pid: with_siblings(view, task.union) if cores else task.union for task in group}
    once, twice = CpuSet(), CpuSet()
    for cpus in reach.values():
        twice |= once & cpus
        once |= cpus
    lines = grouped(group, lambda task: f"{task.mask_text}, shared CPUs {reach[task.pid] & twice}")
    return [f"{len(group)} processes share CPUs {twice}", *lines]


def _split_cores(view: View, task: Task, *, taken: bool) -> str:
    """Return the first cores that a mask splits.

    Args:
        view: The view.
        task: The process.
        taken: Count only cores whose other CPUs are in the mask of another process.
    """
    if task.limit is None:
        return ""
    beyond = task.limit - task.union - view.isolated
    if taken:
        others = [other for other in view.tasks.values() if other.leader != task.leader]
        beyond = beyond & united(other.union for other in others if not other.process.kernel_thread)
    if not beyond:
        return ""
    mask = task.union.mask
    split = [core.cpus for core in view.topology.cores if core.cpus.mask & mask and core.cpus.mask & beyond.mask]
    shown = ", ".join(f"core {cpus}" for cpus in split[:_SHOWN_CORES])
    return shown + (f" and {len(split) - _SHOWN_CORES} more" if len(split) > _SHOWN_CORES else "")
