"""Read a snapshot into a view: families of processes, their masks, limits and NPUs."""

from collections.abc import Iterator

from berth.binding.machine import split_cores, topology_of
from berth.binding.npus import Npus
from berth.binding.snapshot import PLAN_NEEDS, Process, Snapshot
from berth.binding.view import Task, View, united
from berth.host.cpuset import CpuSet


def look(snapshot: Snapshot) -> View:
    """Return the snapshot as sets.

    Raises:
        MalformedError: A CPU list in it is none.
    """
    return _Reader(snapshot).view()


class _Reader:
    """Keeps each list that it has parsed, because thousands of threads share a few masks."""

    def __init__(self, snapshot: Snapshot) -> None:
        self.snapshot = snapshot
        self.parsed: dict[str, CpuSet] = {}
        self.processes = {process.pid: process for process in snapshot.processes}
        self.groups = {group.pid: group for group in snapshot.cgroup.process_groups}
        self.targets = {p.pid for p in snapshot.processes if p.target} | set(snapshot.workload.target_pids)
        self.topology = topology_of(snapshot, self.cpus)
        self.split_cores = split_cores(self.topology)
        overlap = self.topology.node_overlap | self.cpus(snapshot.numa_topology.overlapping_cpus)
        known = snapshot.availability
        unread = any(gap.component.startswith("numa_topology") for gap in [*known.missing, *known.errors])
        self.trusted = not self.split_cores and not overlap and not unread
        self.nodes = {node.number: node.cpus for node in self.topology.nodes if node.cpus} if self.trusted else {}
        self.npus = Npus(snapshot, self.nodes, self.cpus)

    def cpus(self, text: str) -> CpuSet:
        """Return the set that a list names."""
        if text not in self.parsed:
            self.parsed[text] = CpuSet.parse_list(text, source="the snapshot")
        return self.parsed[text]

    def view(self) -> View:
        """Return the view."""
        order = list(self._family_order())
        leaders: dict[int, int] = {}
        for process in order:
            above = leaders.get(process.ppid)
            if above is None and process.pid in self.targets:
                leaders[process.pid] = process.pid
            elif above is not None:
                leaders[process.pid] = process.pid if self._has_own_place(process, above) else above
        launchers = self._launchers(leaders)
        return View(
            snapshot=self.snapshot,
            topology=self.topology,
            nodes=self.nodes,
            trusted=self.trusted,
            split_cores=self.split_cores,
            isolated=self.topology.isolated or CpuSet(),
            tasks={p.pid: self._task(p, leaders.get(p.pid), launcher=p.pid in launchers) for p in order},
            npus=self.npus,
            absent=sorted(self.targets - set(self.processes)),
            core_at={cpu: core for core in self.topology.cores for cpu in core.cpus},
        )

    def _place(self, process: Process) -> tuple[int | None, frozenset[int]]:
        """Return which rank it is and which NPUs it uses."""
        return self._rank(process), frozenset(map(id, self.npus.of(process)[0]))

    def _has_own_place(self, process: Process, leader: int) -> bool:
        """Return whether a child has another place than its leader; it inherits variables such as RANK."""
        (rank, npus), (its_rank, its_npus) = self._place(process), self._place(self.processes[leader])
        return rank not in (None, its_rank) or (bool(npus) and npus != its_npus)

    def _family_order(self) -> Iterator[Process]:
        """Yield every process, parents before their children, siblings by rank and pid."""
        children: dict[int, list[Process]] = {}
        for process in sorted(self.processes.values(), key=self._sibling_key):
            known = process.ppid in self.processes and process.ppid != process.pid
            children.setdefault(process.ppid if known else -1, []).append(process)
        waiting = list(reversed(children.pop(-1, [])))
        while waiting or children:
            if not waiting:  # a circle of parents, which no kernel shows
                waiting = list(reversed(children.pop(min(children))))
            process = waiting.pop()
            yield process
            waiting.extend(reversed(children.pop(process.pid, [])))

    def _sibling_key(self, process: Process) -> tuple[bool, int, int]:
        rank = self._rank(process)
        return rank is None, rank or 0, process.pid

    def _rank(self, process: Process) -> int | None:
        return next((entry.rank for entry in self.npus.mapped(process.pid)), process.rank)

    def _launchers(self, leaders: dict[int, int]) -> set[int]:
        """Return the leaders without a place of their own that have started one with a place."""
        found: set[int] = set()
        for pid, leader in leaders.items():
            if pid != leader or self._place(self.processes[pid]) == (None, frozenset()):
                continue
            seen = {pid}
            above = self.processes[pid].ppid
            while above in leaders and above not in seen:
                seen.add(above)
                if self._place(self.processes[above]) == (None, frozenset()) and leaders[above] == above:
                    found.add(above)
                above = self.processes[above].ppid
        return found

    def _task(self, process: Process, leader: int | None, *, launcher: bool) -> Task:
        group = self.groups.get(process.pid)
        limit = None if group is None or group.cpuset_cpus_effective is None else self.cpus(group.cpuset_cpus_effective)
        masks = {thread.tid: self.cpus(thread.cpus_allowed_list) for thread in process.threads if thread.movable}
        mask = self.cpus(process.cpus_allowed_list)
        devices, conflict = self.npus.of(process)
        near, near_source = self.npus.near(devices)
        return Task(
            process=process,
            group=group,
            rank=self._rank(process),
            leader=leader,
            launcher=launcher,
            mask=mask,
            masks=masks,
            union=united([mask, *set(masks.values())]),
            limit=None if limit is None else limit & self.topology.online,
            devices=devices,
            conflict=conflict,
            near=near,
            near_source=near_source,
            lacks=tuple(self._lacks(process, limit)),
        )

    def _lacks(self, process: Process, limit: CpuSet | None) -> Iterator[str]:
        """Yield what a plan for this process would need and the snapshot does not have."""
        known = self.snapshot.availability
        partly = [gap for gap in known.partial if gap.component == "processes.threads"]
        for gap in [*known.missing, *known.errors, *partly]:
            if gap.pid in (None, process.pid) and gap.component in PLAN_NEEDS:
                yield f"{gap.component}: {gap.message}"
        if limit is None:
            yield "its effective cpuset is unknown"
        if not process.threads:
            yield "none of its threads could be read"
        if not self.topology.cores:
            yield "the cores of the host are unknown"
