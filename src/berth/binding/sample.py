"""Watch the targets for a while: what their threads use, and on which CPUs they run."""

import os
import time
from dataclasses import dataclass
from typing import Final

from berth.binding.snapshot import Process, RuntimeSample
from berth.errors import ForbiddenError
from berth.host.tasks import ProcessFacts, ThreadFacts, clock_ticks_per_second, read_process

#: How often threads are looked at during a sample.
_LOOKS: Final = 5


def read_target(pid: int, root: str) -> ProcessFacts:
    """Return what /proc says about a target.

    Raises:
        ForbiddenError: It is gone, hidden, or one of the kernel's own threads.
    """
    facts = read_process(pid, root)
    if facts.kernel_thread:
        raise ForbiddenError(
            "kernel-thread",
            f"the process {pid} ({facts.comm}) is one of the kernel's own, whose place berth does not change",
            "Name processes of your own.",
        )
    return facts


@dataclass(slots=True)
class Sample:
    """What was seen of the targets over some time.

    Attributes:
        seconds: How long it was.
        facts: Each target at the end.
        load: Percent of one CPU by pid and tid.
        seen: CPUs each thread was seen on, by pid and tid.
    """

    seconds: float
    facts: dict[int, ProcessFacts]
    load: dict[int, dict[int, float]]
    seen: dict[int, dict[int, list[int]]]

    def summary(self, processes: list[Process], root: str) -> RuntimeSample:
        """Return the sample as the snapshot tells it."""
        by_pid = {pid: round(sum(load.values()), 2) for pid, load in self.load.items()}
        by_node: dict[str, float] = {}
        for thread in (thread for process in processes for thread in process.threads):
            if thread.numa_node is not None and thread.cpu_percent:
                key = str(thread.numa_node)
                by_node[key] = round(by_node.get(key, 0.0) + thread.cpu_percent, 2)
        return RuntimeSample(
            sample_seconds=round(self.seconds, 3),
            process_cpu_percent_total=round(sum(by_pid.values()), 2),
            process_cpu_percent_by_pid={str(pid): load for pid, load in by_pid.items()},
            system_loadavg=_load_average(root),
            cpu_usage_by_numa=by_node,
            cpu_migration_observed=any(len(cpus) > 1 for seen in self.seen.values() for cpus in seen.values()),
        )


def take_sample(first: dict[int, ProcessFacts], seconds: float, root: str) -> Sample:
    """Look at the targets a few times over `seconds`; a thread that appears meanwhile counts from its start.

    Raises:
        ForbiddenError: A target ended meanwhile; a new process of its number is not taken for it.
    """
    begun = time.monotonic()
    started = {pid: {thread.tid: _ticks(thread) for thread in one.threads} for pid, one in first.items()}
    seen: dict[int, dict[int, set[int]]] = {pid: {} for pid in first}
    last = dict(first)
    for look in range(_LOOKS + 1):
        if look:
            time.sleep(max(0.0, begun + seconds * look / _LOOKS - time.monotonic()))
            last = {pid: _read_again(one, root) for pid, one in first.items()}
        for pid, one in last.items():
            for thread in one.threads:
                if thread.current_cpu is not None:
                    seen[pid].setdefault(thread.tid, set()).add(thread.current_cpu)
    took = time.monotonic() - begun
    hertz = clock_ticks_per_second()
    load = {
        pid: {
            thread.tid: round(100 * (_ticks(thread) - started[pid].get(thread.tid, 0)) / hertz / took, 2)
            for thread in one.threads
        }
        for pid, one in last.items()
    }
    cpus = {pid: {tid: sorted(found) for tid, found in threads.items()} for pid, threads in seen.items()}
    return Sample(took, last, load, cpus)


def _read_again(before: ProcessFacts, root: str) -> ProcessFacts:
    facts = read_target(before.pid, root)
    if facts.start_ticks != before.start_ticks:
        raise ForbiddenError(
            "no-such-process", f"the process {before.pid} ended while it was watched", "List the processes anew."
        )
    return facts


def _ticks(thread: ThreadFacts) -> int:
    return thread.user_ticks + thread.system_ticks


def _load_average(root: str) -> list[float]:
    try:
        with open(os.path.join(root, "proc/loadavg"), encoding="ascii") as file:
            return [float(word) for word in file.read().split()[:3]]
    except (OSError, ValueError):
        return []
