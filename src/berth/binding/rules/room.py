"""Rules about a plan: who gets no CPUs, or few."""

from collections.abc import Mapping, Sequence
from typing import Final

from berth.binding.finding import Finding
from berth.binding.names import grouped, pids_of
from berth.binding.view import Task, View
from berth.host.cpuset import CpuSet

#: Below this number of CPUs the driver's own threads leave no room: two interrupts, acl_thread, release_thread and the
#: main process want one each (vllm-ascend refuses fewer).
_ENOUGH_CPUS: Final = 5


def no_room(view: View, crowded: Mapping[int, str]) -> Finding | None:
    """R021: no CPU is left for a process, by pid with the reason."""
    if not crowded:
        return None
    return Finding(
        id="R021",
        title="No room",
        severity="high",
        impact=["throughput", "isolation"],
        evidence=_lines(view, crowded),
        judgement="These processes get no action: any place would overlap with that of another rank, or lie on CPUs "
        "that nobody may have.",
        recommendations=["Run fewer processes there, have the cpuset widened, or reserve less."],
        risk="Left alone, they compete with their neighbours.",
        verification=["a new plan"],
        pids=sorted(crowded),
    )


def launchers_stay(view: View, launchers: Mapping[int, str]) -> Finding | None:
    """R023: processes that only start ranks stay as they are, and what follows them too."""
    if not launchers:
        return None
    return Finding(
        id="R023",
        title="Launchers stay where they are",
        severity="info",
        impact=["isolation"],
        evidence=_lines(view, launchers),
        judgement="A rank that starts later inherits the mask of its launcher, so a launcher keeps all CPUs. "
        "It gets no part of those of the ranks.",
        recommendations=["Plan again when new ranks have started."],
        risk="None.",
        verification=["a new snapshot"],
        pids=sorted(launchers),
    )


def few_cpus(view: View, targets: Sequence[tuple[Task, CpuSet]]) -> Finding | None:
    """R024: a process on an NPU gets fewer CPUs than the driver's threads want."""
    few = {task.pid: cpus for task, cpus in targets if task.devices and len(cpus) < _ENOUGH_CPUS}
    if not few:
        return None
    return Finding(
        id="R024",
        title="Few CPUs for a rank",
        severity="low",
        impact=["throughput", "latency"],
        evidence=grouped((view.tasks[pid] for pid in few), lambda task: f"{len(few[task.pid])} CPUs"),
        judgement=f"With fewer than {_ENOUGH_CPUS} CPUs the threads that submit work, release memory and take "
        "interrupts share CPUs with the main thread.",
        recommendations=["Run fewer ranks on these CPUs, or have the cpuset widened."],
        risk="None.",
        verification=["step time with fewer ranks"],
        pids=pids_of(view.tasks[pid] for pid in few),
    )


def classes_do_not_fit(view: View, problems: Mapping[int, str]) -> Finding | None:
    """R025: a share has too few cores for the thread classes that were asked for."""
    if not problems:
        return None
    return Finding(
        id="R025",
        title="Thread classes do not fit",
        severity="medium",
        impact=["latency"],
        evidence=_lines(view, problems),
        judgement="All threads of these processes share the CPUs of their process.",
        recommendations=["Ask for fewer cores in --thread-classes."],
        risk="None.",
        verification=["a new plan"],
        pids=sorted(problems),
    )


def _lines(view: View, reasons: Mapping[int, str]) -> list[str]:
    return grouped((task for pid, task in view.tasks.items() if pid in reasons), lambda task: reasons[task.pid])
