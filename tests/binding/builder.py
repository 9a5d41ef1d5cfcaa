"""Builds snapshots of machines of any shape, and plays plans on them."""

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from berth.binding import snapshot as s
from berth.binding.plan_document import Plan
from berth.binding.thread_class import role_of
from berth.host.cpuset import CpuSet

ONE_GIB_OF_PAGES = 262_144


def cpus(text: str) -> CpuSet:
    return CpuSet.parse_list(text)


class Host:
    """One machine and its processes, told step by step.

    Args:
        cores: The CPUs of each core, as lists; offline CPUs are left out of them.
        nodes: The CPUs of each NUMA node, as lists; a node may have none, and two may overlap.
        isolated: CPUs without load balancing.
        offline: CPUs that are present and not online.
        empty: Nodes without memory.
    """

    def __init__(
        self,
        cores: Sequence[str],
        nodes: dict[int, str],
        *,
        isolated: str | None = "",
        offline: str = "",
        empty: Iterable[int] = (),
        **workload: Any,
    ) -> None:
        self.offline = cpus(offline)
        self.online = CpuSet.of(cpu for core in cores for cpu in cpus(core)) - self.offline
        self.cores = [kept for core in cores if (kept := cpus(core) - self.offline)]
        self.nodes = {number: cpus(text) for number, text in nodes.items()}
        self.isolated = isolated
        self.empty = set(empty)
        self.workload = workload
        self.system: dict[str, Any] = {}
        self.pytorch: dict[str, object] = {}
        self.npus: list[s.NpuDevice] = []
        self.processes: list[s.Process] = []
        self.groups: list[s.ProcessGroup] = []
        self.ranks: list[s.RankEntry] = []
        self.gaps: dict[str, list[s.Gap]] = {"missing": [], "partial": [], "errors": []}

    def npu(self, number: int | None, near: str | None = None, **fields: Any) -> None:
        """Add an NPU; without `near` nothing says what is near it."""
        values: dict[str, Any] = {"device_id": 0 if number is None else number, "logical_id": number}
        source = None if near is None else "sysfs"
        self.npus.append(s.NpuDevice(**{**values, "local_cpus": near, "local_source": source, **fields}))

    def process(
        self,
        pid: int,
        mask: str | None = None,
        *,
        cpuset: str | None = "all",
        threads: int | Sequence[tuple[str, str]] = 1,
        npu: int | None = None,
        parent: int = 1,
        group: dict[str, Any] | None = None,
        **fields: Any,
    ) -> None:
        """Add a process; by default a target with one thread that may run on every CPU.

        Args:
            pid: Its pid.
            mask: The mask of its main thread, the cpuset if left out.
            cpuset: Its effective cpuset; None where it could not be read.
            threads: How many it has, all with that mask, or the name and the mask of each thread after the first.
            npu: The NPU that it uses.
            parent: Pid of its parent.
            group: More fields of its control group.
            fields: More fields of the process.
        """
        limit = str(self.online) if cpuset == "all" else cpuset
        mask = (limit or str(self.online)) if mask is None else mask
        comm = fields.get("comm", "python")
        pairs = [("worker", mask)] * (threads - 1) if isinstance(threads, int) else list(threads)
        known = [_thread(pid + at, name, text, main=at == 0) for at, (name, text) in enumerate([(comm, mask), *pairs])]
        values: dict[str, Any] = {
            "pid": pid,
            "ppid": parent,
            "start_ticks": 1000 + pid,
            "uid": 1000,
            "command": f"{comm} train.py",
            "comm": comm,
            "state": "S",
            "target": True,
            "cpus_allowed_list": mask,
            "mems_allowed_list": "0",
            "current_cpu": None,
            "numa_node": None,
            "num_threads": len(known),
            "nspid_chain": [pid],
            "npu_device": npu,
            "threads": known,
        }
        self.processes.append(s.Process(**{**values, **fields}))
        self.groups.append(s.ProcessGroup(pid=pid, path="/job", cpuset_cpus_effective=limit, **(group or {})))

    def gap(self, component: str, message: str = "could not be read", *, kind: str = "missing", **fields: Any) -> None:
        """Add a gap."""
        self.gaps[kind].append(s.Gap(component=component, message=message, **fields))

    def snapshot(self) -> s.Snapshot:
        """Return the snapshot."""
        present = self.online | self.offline
        return s.Snapshot(
            schema_version=s.SCHEMA_VERSION,
            collection=s.Collection(
                timestamp="2026-01-01T00:00:00Z",
                duration_seconds=0.0,
                boot_id="boot",
                hostname="host",
                user="root",
                privilege="root",
                collector_name="test",
                collector_version="0",
                command=[],
            ),
            workload=s.Workload(
                target_pids=[process.pid for process in self.processes if process.target],
                rank_mapping=self.ranks,
                **self.workload,
            ),
            system=s.System(
                **{
                    "os": "Linux",
                    "kernel": "6.18",
                    "architecture": "aarch64",
                    "cpu_model": None,
                    "total_logical_cpus": len(self.online),
                    "total_physical_cores": len(self.cores),
                    "sockets": None,
                    "smt_enabled": any(len(core) > 1 for core in self.cores),
                    "online_cpus": str(self.online),
                    "present_cpus": str(present),
                    "possible_cpus": str(present),
                    "isolated_cpus": self.isolated,
                    "nohz_full_cpus": None,
                    **self.system,
                }
            ),
            cpu_topology=s.CpuTopology(cpus=[], physical_cores=[self._core(core) for core in self.cores]),
            numa_topology=s.NumaTopology(
                nodes=[
                    s.NumaNode(
                        node=number,
                        cpus=str(own),
                        logical_cpu_count=len(own),
                        physical_core_count=0,
                        memory_total_mb=0.0 if number in self.empty else 1024.0,
                        memory_free_mb=None,
                    )
                    for number, own in self.nodes.items()
                ],
                distance_matrix=None,
            ),
            npu_topology=s.NpuTopology(vendor=None, source=[], devices=self.npus),
            processes=self.processes,
            cgroup=s.Cgroup(version="v2", process_groups=self.groups),
            key_processes=s.KeyProcesses(),
            availability=s.Availability(complete=not any(self.gaps.values()), **self.gaps),
            pytorch=self.pytorch,
        )

    def _core(self, core: CpuSet) -> s.PhysicalCore:
        nodes = [number for number, own in self.nodes.items() if core <= own]
        node = nodes[0] if len(nodes) == 1 else None
        return s.PhysicalCore(
            core_key=core.min(), socket_id=None, core_id=None, numa_node=node, logical_cpus=list(core)
        )


def regular(*, nodes: int = 2, cores: int = 8, smt: int = 2, neighbours: bool = False, **options: Any) -> Host:
    """Return a machine with as many cores on each node; siblings are N and N + all cores, or else neighbours."""
    total = nodes * cores
    lists = [
        ",".join(str(core * smt + thread if neighbours else core + thread * total) for thread in range(smt))
        for core in range(total)
    ]
    homes = {
        node: str(CpuSet.of(cpu for text in lists[node * cores : (node + 1) * cores] for cpu in cpus(text)))
        for node in range(nodes)
    }
    return Host(lists, homes, **options)


def played(snapshot: s.Snapshot, plan: Plan) -> s.Snapshot:
    """Return the snapshot that would be taken after a plan was applied."""
    actions = {action.pid: action for action in plan.apply_actions}
    return msgspec.structs.replace(
        snapshot, processes=[_moved(process, actions.get(process.pid)) for process in snapshot.processes]
    )


def _moved(process: s.Process, action: Any) -> s.Process:
    if action is None:
        return process
    own = {target.tid: target.target_cpu_list for target in action.thread_targets}
    threads = [
        msgspec.structs.replace(thread, cpus_allowed_list=own.get(thread.tid, action.target_cpu_list))
        if thread.movable
        else thread
        for thread in process.threads
    ]
    return msgspec.structs.replace(process, threads=threads, cpus_allowed_list=threads[0].cpus_allowed_list)


def _thread(tid: int, name: str, mask: str, *, main: bool) -> s.Thread:
    role = role_of(name, is_main=main)
    return s.Thread(
        tid=tid,
        start_ticks=1000 + tid,
        name=name,
        state="S",
        cpus_allowed_list=mask,
        mems_allowed_list="0",
        current_cpu=None,
        numa_node=None,
        policy="SCHED_OTHER",
        key_class=role.name,
        key_score=role.score,
    )
