"""A snapshot as sets of CPUs: who the targets are, what limits them, and what is near them.

Everything that a rule or the planner compares is worked out here once. Nothing is filled in: where the snapshot does
not say, the set is None and the reason is kept.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from berth.binding.npus import Npus
from berth.binding.snapshot import NpuDevice, Process, ProcessGroup, Snapshot, Thread
from berth.host.cpuset import CpuSet
from berth.host.topology import Core, Topology

_NOT_OTHERS: Final = frozenset({"SCHED_FIFO", "SCHED_RR", "SCHED_DEADLINE"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One process of the snapshot.

    Attributes:
        leader: Pid of the process whose place it shares: its own, that of the target it descends from, or None for a
            process that this is not about.
        launcher: Whether it only starts processes that have a place of their own.
        mask: Mask of its main thread.
        masks: Mask of each thread that can be moved, by tid.
        union: CPUs that any of these may use.
        limit: Its effective cpuset, cut to the online CPUs; None where unknown.
        devices: The NPUs it uses, as far as the sources agree.
        conflict: How they disagree; empty where they do not.
        near: CPUs near its NPUs, whatever its limit; None where unknown.
        near_source: Where that comes from.
        lacks: What a plan would need and the snapshot lacks, each as one clause.
    """

    process: Process
    group: ProcessGroup | None
    rank: int | None
    leader: int | None
    launcher: bool
    mask: CpuSet
    masks: dict[int, CpuSet]
    union: CpuSet
    limit: CpuSet | None
    devices: tuple[NpuDevice, ...]
    conflict: str
    near: CpuSet | None
    near_source: str
    lacks: tuple[str, ...]

    @property
    def pid(self) -> int:
        """Its process id."""
        return self.process.pid

    @property
    def uniform(self) -> bool:
        """Whether all of its threads have the mask of the main thread."""
        return all(mask == self.mask for mask in self.masks.values())

    @property
    def mask_text(self) -> str:
        """Its mask as a list; where its threads differ, that of the main thread and that of all together."""
        return f"mask {self.mask}" if self.uniform else f"mask {self.mask}, all of its threads together {self.union}"

    @property
    def leads(self) -> bool:
        """Whether it has a place of its own, rather than its parent's."""
        return self.leader == self.pid and not self.launcher

    @property
    def movable(self) -> list[Thread]:
        """The threads whose mask the kernel lets anybody change, by tid."""
        return sorted((thread for thread in self.process.threads if thread.movable), key=lambda thread: thread.tid)

    @property
    def real_time(self) -> list[Thread]:
        """Its threads with a real-time or deadline policy."""
        return [thread for thread in self.process.threads if thread.policy in _NOT_OTHERS]


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """The whole snapshot.

    Attributes:
        nodes: CPUs of each NUMA node that has any online; empty where the nodes are not to be trusted.
        trusted: Whether the nodes can be: they could be read, no CPU belongs to two, no core to several.
        split_cores: Cores whose CPUs lie in different nodes.
        isolated: CPUs without load balancing; empty where unknown.
        tasks: Every process, parents before their children, ranks in their order.
        npus: The NPUs of the host.
        absent: Targets that are not in the snapshot.
        core_at: The core of each CPU.
    """

    snapshot: Snapshot
    topology: Topology
    nodes: dict[int, CpuSet]
    trusted: bool
    split_cores: list[Core]
    isolated: CpuSet
    tasks: dict[int, Task]
    npus: Npus
    absent: list[int]
    core_at: dict[int, Core]

    @property
    def involved(self) -> list[Task]:
        """The processes that this is about: targets and what descends from them."""
        return [task for task in self.tasks.values() if task.leader is not None]

    @property
    def leaders(self) -> list[Task]:
        """Those of them that have a place of their own."""
        return [task for task in self.tasks.values() if task.leads]

    @property
    def placed(self) -> list[Task]:
        """The processes that have a place or share their leader's: those involved without launchers' own families."""
        return [task for task in self.involved if task.leader is not None and self.tasks[task.leader].leads]

    @property
    def strangers(self) -> list[Task]:
        """Other processes of the snapshot, without the kernel's own and the ancestors of the targets."""
        ancestors = self._ancestors()
        return [
            task
            for task in self.tasks.values()
            if task.leader is None and not task.process.kernel_thread and task.pid not in ancestors
        ]

    @property
    def online(self) -> CpuSet:
        """CPUs that the scheduler can use."""
        return self.topology.online

    def core_of(self, cpu: int) -> Core | None:
        """Return the core of a CPU; None where it is offline or its core is unknown."""
        return self.core_at.get(cpu)

    def nodes_of(self, cpus: CpuSet) -> list[int]:
        """Return the nodes that have a CPU in `cpus`, ascending; empty where nodes are not to be trusted."""
        return [number for number, own in self.nodes.items() if not own.isdisjoint(cpus)]

    def unbound(self, task: Task) -> bool:
        """Return whether nothing but its cpuset limits the process.

        The kernel gives a task that nobody bound all CPUs but the isolated ones.
        """
        return task.limit is not None and task.union >= task.limit - self.isolated

    def _ancestors(self) -> set[int]:
        found: set[int] = set()
        for task in self.involved:
            parent = self.tasks.get(task.process.ppid)
            while parent is not None and parent.pid not in found:
                found.add(parent.pid)
                parent = self.tasks.get(parent.process.ppid)
        return found


def united(sets: Iterable[CpuSet]) -> CpuSet:
    """Return the CPUs that are in any of these sets."""
    mask = 0
    for cpus in sets:
        mask |= cpus.mask
    return CpuSet(mask)
