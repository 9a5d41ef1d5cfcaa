"""Rules about the masks of single processes: not bound, too wide, too narrow, not chosen by anybody."""

from berth.binding.finding import Finding
from berth.binding.names import grouped, pids_of
from berth.binding.rules.conditions import (
    narrowed,
    pinned_families,
    pinning_variable,
    spread_unbound,
    too_wide,
)
from berth.binding.view import Task, View

#: From this part of the CPU time that its mask could give, a process wants more (rule R005: "near 100 %").
_BUSY = 0.9


def not_bound(view: View) -> Finding | None:
    """R001: a part of an accelerator job may run on nearly all CPUs of several NUMA nodes."""
    found = spread_unbound(view)
    if not found:
        return None
    return Finding(
        id="R001",
        title="Process not bound",
        severity="high",
        impact=["throughput", "latency", "stability"],
        evidence=[f"the host has {len(view.nodes)} nodes with CPUs", *grouped(found, _mask_and_cpuset)],
        judgement="Nothing but the cpuset keeps these processes in a place. The scheduler may move them away from "
        "their accelerator and from their memory at any time.",
        recommendations=["Bind each process to CPUs near its accelerator: `berth bind plan`."],
        risk="A mask that is too narrow costs throughput: compare the step time before and after.",
        verification=["`berth bind verify`", "step time, and CPU migrations of the busy threads, before and after"],
        pids=pids_of(found),
    )


def range_too_wide(view: View) -> Finding | None:
    """R004: a process may run on nearly all CPUs, although fewer of them would be nearer."""
    found = too_wide(view)
    if not found:
        return None
    return Finding(
        id="R004",
        title="CPU range too wide",
        severity="medium",
        impact=["latency", "stability"],
        evidence=[f"online CPUs {view.online}", *grouped(found, _mask_and_cpuset)],
        judgement="These processes may run nearly everywhere, and fewer CPUs would lie nearer to what they use.",
        recommendations=["Bind them to the CPUs of one node, or deal whole cores: `berth bind plan --policy spread`."],
        risk="A narrower mask leaves less room for bursts.",
        verification=["`berth bind verify`", "step time before and after"],
        pids=pids_of(found),
    )


def range_too_narrow(view: View) -> Finding | None:
    """R005: fewer CPUs than half the threads, and these CPUs are busy all the time."""
    explained = set(narrowed(view)) | {task.pid for family in pinned_families(view) for task in family}
    found = [task for task in view.placed if task.pid not in explained and _starved(task)]
    if not found:
        return None
    return Finding(
        id="R005",
        title="CPU range too narrow",
        severity="medium",
        impact=["throughput", "latency"],
        evidence=grouped(
            found,
            lambda task: (
                f"{task.mask_text}, {len(task.union)} CPUs for {task.process.num_threads} threads, "
                f"which used {task.process.cpu_percent:.0f} % of one CPU"
            ),
        ),
        judgement="The threads want more CPU time than their mask can give.",
        recommendations=["Give them more near CPUs, or make their thread pools smaller."],
        risk="More CPUs may overlap with those of other ranks.",
        verification=["CPU use of the process after the change", "step time before and after"],
        pids=pids_of(found),
    )


def mask_not_chosen(view: View) -> Finding | None:
    """R012: the mask is much narrower than the cpuset: inherited, or set by a library when it was loaded."""
    sources = narrowed(view)
    found = [view.tasks[pid] for pid in sources]
    if not found:
        return None
    pinned = any(pinning_variable(task) for task in found)
    advice = ["Plan a wider mask: `berth bind plan`."]
    if pinned:
        advice.append("Take the variable out of the start script, or set OMP_PROC_BIND=false, before the next start.")
    return Finding(
        id="R012",
        title="Mask narrower than the cpuset",
        severity="high" if any(len(task.union) <= 1 for task in found) else "medium",
        impact=["throughput", "latency"],
        evidence=grouped(found, lambda task: f"{_mask_and_cpuset(task)}; {sources[task.pid]}"),
        judgement="The cpuset allows much more than these masks do, and nothing shows that somebody chose them for "
        "this job. Tools that take the mask for the limit find no CPU near the accelerator.",
        recommendations=advice,
        risk="A library that pinned its threads once may do so again.",
        verification=["`berth bind verify`, and again after the next import or after a minute"],
        pids=pids_of(found),
    )


def children_pinned(view: View) -> Finding | None:
    """R013: children sit on the one core of their parent."""
    families = pinned_families(view)
    if not families:
        return None
    variables = sorted({name for family in families if (name := pinning_variable(family[0]))})
    return Finding(
        id="R013",
        title="Children pinned with their parent",
        severity="high",
        impact=["throughput", "latency"],
        evidence=[_family(family) for family in families]
        + [f"{name} in the environment: a library pins threads when it is loaded" for name in variables],
        judgement="A new process inherits the mask of its parent, so all of them take turns on one core. Children "
        "that start later will do the same until the parent is moved.",
        recommendations=["Move the parent first, then its children: `berth bind plan` keeps that order."],
        risk="A library that pinned the parent once may do so again.",
        verification=["`berth bind verify`, with children that were started after the change"],
        pids=pids_of(task for family in families for task in family),
    )


def on_isolated_cpus(view: View) -> Finding | None:
    """R014: several threads may use isolated CPUs, where the kernel balances nothing."""
    found = [task for task in view.placed if _piles_up(view, task)]
    if not found:
        return None
    return Finding(
        id="R014",
        title="Target on isolated CPUs",
        severity="medium",
        impact=["throughput", "latency"],
        evidence=[f"isolated CPUs {view.isolated}", *grouped(found, lambda task: _isolated_part(view, task))],
        judgement="The scheduler moves no thread between isolated CPUs: threads with several of them in their mask "
        "pile up on one while the others idle.",
        recommendations=["Use CPUs that are not isolated, or one isolated CPU for each thread that needs one."],
        risk="Threads with a real-time policy of their own may have been placed there on purpose.",
        verification=["the CPUs that the threads are seen on, and their CPU use"],
        pids=pids_of(found),
    )


def _starved(task: Task) -> bool:
    used, cpus = task.process.cpu_percent, len(task.union)
    return used is not None and cpus < task.process.num_threads / 2 and used >= _BUSY * 100 * cpus


def _piles_up(view: View, task: Task) -> bool:
    """Return whether two threads, or one with a choice, rely on balance among isolated CPUs."""
    shared = {thread.tid for thread in task.real_time}
    masks = [mask for tid, mask in task.masks.items() if tid not in shared and not mask.isdisjoint(view.isolated)]
    return any(len(mask) > 1 for mask in masks) or len(set(masks)) < len(masks)


def _isolated_part(view: View, task: Task) -> str:
    inside = task.union & view.isolated
    kind = "also CPUs that are not" if task.union - view.isolated else "nothing else"
    return f"{task.mask_text}: isolated {inside}, {kind}"


def _family(family: list[Task]) -> str:
    parent, *children = family
    limit = parent.limit
    names = ", ".join(str(task.pid) for task in children)
    return f"pid {parent.pid} ({parent.process.comm}) and its children {names}: mask {parent.union}, cpuset {limit}"


def _mask_and_cpuset(task: Task) -> str:
    return f"{task.mask_text}, cpuset {'unknown' if task.limit is None else task.limit}"
