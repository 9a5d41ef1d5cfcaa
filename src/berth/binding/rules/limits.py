"""Rules about what limits a process from outside: its cgroup, what cannot be moved, what is not known."""

from collections.abc import Iterable
from itertools import chain

from berth.binding.finding import Finding
from berth.binding.names import grouped, joined, pids_of
from berth.binding.snapshot import Gap
from berth.binding.view import Task, View


def information_missing(view: View) -> Finding | None:
    """R010: something could not be read, with what that means; nothing is planned for processes that lack too much."""
    known = view.snapshot.availability
    lacking = [task for task in view.involved if task.lacks]
    evidence = [
        *_gap_lines(chain(known.missing, known.errors, known.partial)),
        *grouped(lacking, lambda task: f"nothing is planned: {'; '.join(task.lacks)}"),
        *([f"not in the snapshot: pids {joined(view.absent)}"] if view.absent else []),
    ]
    if not evidence:
        return None
    return Finding(
        id="R010",
        title="Information missing",
        severity="low",
        impact=["stability"],
        evidence=evidence,
        judgement="What could not be read is not guessed. Rules that need it stay silent, and a process whose limit, "
        "masks or cores are unknown gets no action.",
        recommendations=["Take the snapshot again with the rights or tools that the lines above name."],
        risk="None: reading changes nothing.",
        verification=["`availability` of the new snapshot"],
        pids=sorted({*pids_of(lacking), *view.absent}),
    )


def cgroup_conflict(view: View) -> Finding | None:
    """R007: masks reach outside the cpuset, or the CPU quota is being hit."""
    outside = [task for task in view.placed if _outside(view, task)]
    throttled = [task for task in view.placed if _throttled(task)]
    if not outside and not throttled:
        return None
    judgement, advice = [], []
    if outside:
        judgement.append(
            "The kernel keeps masks inside the cpuset, so the cpuset was changed while the snapshot was taken, or it "
            "is that of another cgroup."
        )
        advice.append("Take a new snapshot and compare; do not use a plan made from this one.")
    if throttled:
        judgement.append("The quota stops these processes in every period, whatever their masks are.")
        advice.append("Have cpu.max raised, or size the thread pools to the quota.")
    return Finding(
        id="R007",
        title="Conflict with the cgroup",
        severity="medium",
        impact=["throughput", "latency", "stability"],
        evidence=[*grouped(outside, lambda t: _outside(view, t)), *grouped(throttled, _throttle_text)],
        judgement=" ".join(judgement),
        recommendations=advice,
        risk="Limits belong to whoever runs the container; berth changes no cgroup.",
        verification=["the cpuset and the masks in a new snapshot" if outside else "nr_throttled stops growing"],
        pids=pids_of([*outside, *throttled]),
    )


def quota_below_cpus(view: View) -> Finding | None:
    """R011: the quota gives less CPU time than the mask has CPUs."""
    found = [task for task in view.placed if not _throttled(task) and _quota_is_less(task)]
    if not found:
        return None
    return Finding(
        id="R011",
        title="CPU quota below the number of CPUs",
        severity="low",
        impact=["throughput", "latency"],
        evidence=grouped(found, _quota_text),
        judgement="Pools that are sized by the number of CPUs use the quota up early in each period and then stand "
        "still until the next one.",
        recommendations=["Size thread pools by the quota, or have cpu.max raised."],
        risk="Limits belong to whoever runs the container; berth changes no cgroup.",
        verification=["growth of nr_throttled during a sample"],
        pids=pids_of(found),
    )


def not_movable(view: View) -> Finding | None:
    """R022: a target that nobody can move: a kernel thread, a dead process, threads with a fixed mask."""
    found = [task for task in view.involved if unmovable(task)]
    if not found:
        return None
    return Finding(
        id="R022",
        title="Target that cannot be moved",
        severity="medium",
        impact=["isolation"],
        evidence=grouped(found, unmovable),
        judgement="The kernel refuses other masks for these, or they have ended; they get no action.",
        recommendations=["Leave them out of the targets."],
        risk="None.",
        verification=["the list of targets in a new snapshot"],
        pids=pids_of(found),
    )


def unmovable(task: Task) -> str:
    """Return why no thread of a process can be moved; empty where one can, or where its threads are unknown."""
    if task.process.kernel_thread:
        return "a thread of the kernel"
    if task.process.state[:1] in ("Z", "X"):
        return "it has ended and waits for its parent"
    if task.process.threads and not task.movable:
        return "the kernel fixes the masks of all its threads (PF_NO_SETAFFINITY)"
    return ""


def _gap_lines(gaps: Iterable[Gap]) -> list[str]:
    """Return one line for each gap, with every process that has it."""
    pids: dict[tuple[str, str], list[int]] = {}
    for gap in gaps:
        what = gap.message + (f"; {gap.effect}" if gap.effect else "")
        pids.setdefault((gap.component, what), []).extend([] if gap.pid is None else [gap.pid])
    return [f"{name}{f' (pid {joined(who)})' if who else ''}: {what}" for (name, what), who in pids.items()]


def _outside(view: View, task: Task) -> str:
    """Return how its mask and its cpuset contradict each other; offline CPUs in a mask mean nothing."""
    beyond = task.union & view.online
    if task.limit is None or beyond <= task.limit:
        return ""
    return f"{task.mask_text}, cpuset {task.limit}, outside {beyond - task.limit}"


def _throttled(task: Task) -> bool:
    return task.group is not None and (task.group.nr_throttled_growth or 0) > 0


def _throttle_text(task: Task) -> str:
    growth = task.group.nr_throttled_growth if task.group else None
    return f"throttled {growth} more times during the sample; {_quota_text(task)}"


def quota_cpus(task: Task) -> float | None:
    """Return the CPU quota in CPUs; None where there is none, or none is known."""
    group = task.group
    if group is None or not group.cpu_quota_us or not group.cpu_period_us:
        return None
    return group.cpu_quota_us / group.cpu_period_us


def _quota_is_less(task: Task) -> bool:
    quota = quota_cpus(task)
    return quota is not None and quota < len(task.union)


def _quota_text(task: Task) -> str:
    quota = quota_cpus(task)
    return f"quota {'unknown' if quota is None else f'{quota:g}'} CPUs, mask of {len(task.union)} CPUs"
