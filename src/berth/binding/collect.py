"""Look at a host and some of its processes, and write down what is seen: reading only, no rights needed, no command.

What cannot be read becomes a gap with its effect. A process that ends while it is looked at is a gap too, unless it is
one of the targets: without a target there is nothing to say.
"""

import getpass
import os
import platform
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final, TypeVar

import msgspec

from berth import __version__
from berth.binding.describe import (
    describe_cpus,
    describe_group,
    describe_nodes,
    describe_process,
    describe_system,
)
from berth.binding.sample import Sample, read_target, take_sample
from berth.binding.snapshot import (
    SCHEMA_VERSION,
    Availability,
    Cgroup,
    Collection,
    Gap,
    KeyProcesses,
    NpuTopology,
    Privilege,
    Process,
    ProcessGroup,
    RankEntry,
    Snapshot,
    Workload,
)
from berth.errors import BerthError, MalformedError
from berth.host.cgroup import EffectiveCpuset, effective_cpuset
from berth.host.discover import read_topology
from berth.host.quota import CpuQuota, read_quota
from berth.host.tasks import (
    ProcessFacts,
    list_pids,
    read_environment,
    read_pages_by_node,
    read_process,
)
from berth.host.topology import Topology
from berth.linux.process import boot_id

_Read = TypeVar("_Read")
#: An unrelated process counts as an occupant where its mask is at most this part of the host.
_NARROW: Final = 0.5
#: Bits of key_class that a key list collects.
_FIXED: Final = ("acl", "release")


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectRequest:
    """What to look at.

    Attributes:
        pids: The targets.
        sample_s: How long to watch the load; 0 for not at all.
        ranks: Which process is which rank, as the user says.
        command: How the collector was called.
        options: Fields of `Workload` that the user gives.
    """

    pids: tuple[int, ...]
    sample_s: float = 0.0
    ranks: tuple[RankEntry, ...] = ()
    command: tuple[str, ...] = ()
    options: Mapping[str, str] = field(default_factory=dict)


def collect(
    request: CollectRequest, *, accelerators: NpuTopology, gaps: Iterable[Gap] = (), root: str = "/"
) -> Snapshot:
    """Return the snapshot.

    Args:
        request: What to look at.
        accelerators: What is known of NPUs and GPUs.
        gaps: What was missing already when these were looked for.
        root: Root of the machine.

    Raises:
        MalformedError: A rank names a process that is no target, or one is named twice.
        ForbiddenError: A target is gone, hidden, or one of the kernel's own threads.
        AbilityError: The host does not say which CPUs it has.
    """
    begun, started = time.monotonic(), time.time()
    missing = list(gaps)
    _check_ranks(request)
    topology = read_topology(root, details=True)
    first = {pid: read_target(pid, root) for pid in request.pids}
    sample = take_sample(first, request.sample_s, root) if request.sample_s > 0 else None
    facts = sample.facts if sample else first
    processes = [_describe_target(one, topology, sample, root, missing) for one in facts.values()]
    processes += _describe_others(facts, topology, root)
    _link_children(processes)
    processes = [_with_rank(process, request.ranks, accelerators) for process in processes]
    groups = [_describe_limits(pid, root, missing) for pid in facts]
    versions = sorted({found.version for _, found in groups if found is not None}) or ["none"]
    return Snapshot(
        schema_version=SCHEMA_VERSION,
        collection=Collection(
            timestamp=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(started)),
            duration_seconds=round(time.monotonic() - begun, 3),
            collector_name="berth bind snapshot",
            collector_version=__version__,
            hostname=platform.node(),
            boot_id=boot_id(),
            user=_user(),
            privilege=_privilege(),
            command=list(request.command),
        ),
        workload=Workload(
            target_pids=list(request.pids),
            rank_mapping=list(request.ranks) or _ranks_of(processes),
            **request.options,
        ),
        system=describe_system(
            topology, os=_system_name(root), kernel=platform.release(), architecture=platform.machine()
        ),
        cpu_topology=describe_cpus(topology),
        numa_topology=describe_nodes(topology),
        npu_topology=accelerators,
        processes=processes,
        cgroup=Cgroup(
            version="+".join(versions),
            process_groups=[group for group, _ in groups],
        ),
        key_processes=_key_processes(processes, accelerators),
        runtime_sample=sample.summary(processes, root) if sample else None,
        availability=Availability(complete=not missing, missing=missing),
    )


# --- processes -------------------------------------------------------------------------------------------------------


def _describe_target(
    facts: ProcessFacts, topology: Topology, sample: Sample | None, root: str, missing: list[Gap]
) -> Process:
    environment = _readable(lambda: read_environment(facts.pid, root))
    if environment is None:
        missing.append(
            Gap(
                component="processes.environment",
                pid=facts.pid,
                message="it cannot be read",
                effect="ranks, visible devices and settings of thread pools are unknown",
            )
        )
    pages = _readable(lambda: read_pages_by_node(facts.pid, root))
    if pages is None:
        missing.append(
            Gap(
                component="processes.pages_by_node",
                pid=facts.pid,
                message="numa_maps cannot be read",
                effect="whether its memory lies on a far node is unknown",
            )
        )
    if not facts.settled:
        missing.append(
            Gap(
                component="processes.threads",
                pid=facts.pid,
                message="threads came and went all the time",
                effect="some of its threads may be missing",
            )
        )
    return describe_process(
        facts,
        topology,
        target=True,
        threads=True,
        environment=environment or {},
        pages=pages,
        load=sample.load[facts.pid] if sample else None,
        seen=sample.seen[facts.pid] if sample else None,
    )


def _describe_others(targets: dict[int, ProcessFacts], topology: Topology, root: str) -> list[Process]:
    """Return parents and children of the targets, and unrelated processes whose mask is narrow."""
    found = []
    parents = {facts.ppid for facts in targets.values()}
    for pid in list_pids(root):
        if pid in targets:
            continue
        try:
            facts = read_process(pid, root)
        except (BerthError, OSError):
            continue  # it ended, or it is hidden from us: not a target
        main = facts.main
        if facts.kernel_thread or main is None:
            continue
        related = facts.ppid in targets or pid in parents
        narrow = len(main.cpus_allowed) <= _NARROW * len(topology.online)
        if related or narrow:
            found.append(
                describe_process(
                    facts, topology, target=False, threads=facts.ppid in targets, environment={}, pages=None
                )
            )
    return found


def _link_children(processes: list[Process]) -> None:
    """Say of each process which of the others are its children."""
    below: dict[int, list[int]] = {}
    for process in processes:
        below.setdefault(process.ppid, []).append(process.pid)
    for index, process in enumerate(processes):
        if process.pid in below:
            processes[index] = msgspec.structs.replace(process, children=below[process.pid])


def _with_rank(process: Process, ranks: tuple[RankEntry, ...], accelerators: NpuTopology) -> Process:
    """Say which rank and NPU a process is: the user's word first, then npu-smi's, then its environment's."""
    if not process.target:
        return process
    named = next((rank for rank in ranks if rank.pid == process.pid), None)
    rank = named.rank if named else _number(process.environment.get("RANK", process.environment.get("PMI_RANK", "")))
    npu, source = (named.npu_device, "user") if named and named.npu_device is not None else (None, None)
    if npu is None:
        holding = [
            device.logical_id
            for device in accelerators.devices
            if device.logical_id is not None and set(device.host_pids) & {process.pid, *process.nspid_chain}
        ]
        if len(holding) == 1:
            npu, source = holding[0], "npu-smi"
    return msgspec.structs.replace(process, rank=rank, npu_device=npu, npu_source=source)


def _ranks_of(processes: list[Process]) -> list[RankEntry]:
    return [
        RankEntry(rank=one.rank, pid=one.pid, npu_device=one.npu_device, source="environment")
        for one in processes
        if one.target and one.rank is not None
    ]


def _check_ranks(request: CollectRequest) -> None:
    for what, values in (("rank", [r.rank for r in request.ranks]), ("process", [r.pid for r in request.ranks])):
        twice = sorted({value for value in values if values.count(value) > 1})
        if twice:
            raise MalformedError(
                "bad-rank-map",
                f"the rank map names {what} {', '.join(map(str, twice))} more than once",
                "Give every process one rank.",
            )
    strangers = sorted({rank.pid for rank in request.ranks} - set(request.pids))
    if strangers:
        raise MalformedError(
            "bad-rank-map",
            f"the rank map names processes that are no targets: {', '.join(map(str, strangers))}",
            "Name them with --pid too, or leave them out.",
        )


def _describe_limits(pid: int, root: str, missing: list[Gap]) -> tuple[ProcessGroup, EffectiveCpuset | None]:
    cpuset: EffectiveCpuset | None = _readable(lambda: effective_cpuset(pid, root))
    quota: CpuQuota | None = _readable(lambda: read_quota(pid, root))
    if cpuset is None:
        missing.append(
            Gap(
                component="cgroup.cpuset_cpus_effective",
                pid=pid,
                message="its cgroup cannot be read",
                effect="the limit of its mask is unknown, so nothing is planned for it",
            )
        )
    return describe_group(pid, cpuset, quota), cpuset


def _key_processes(processes: list[Process], accelerators: NpuTopology) -> KeyProcesses:
    def of(*classes: str) -> list[tuple[int, int]]:
        return [
            (process.pid, thread.tid)
            for process in processes
            if process.target
            for thread in process.threads
            if thread.key_class in classes
        ]

    busiest = sorted(
        ((thread.cpu_percent or 0.0, process.pid, thread.tid) for process in processes for thread in process.threads),
        reverse=True,
    )
    return KeyProcesses(
        discovery_sources=["names of threads", *accelerators.source],
        main_scheduler_pids=[process.pid for process in processes if process.target],
        sq_task_threads=of("sq"),
        npu_fixed_threads=of(*_FIXED),
        communication_threads=of("communication"),
        dataloader_threads=of("dataloader"),
        top_threads=[(pid, tid) for load, pid, tid in busiest[:10] if load > 0],
        npu_smi_host_pids=sorted({pid for device in accelerators.devices for pid in device.host_pids}),
    )


# --- the host --------------------------------------------------------------------------------------------------------


def _readable(read: Callable[[], _Read]) -> _Read | None:
    """Return what `read` reads, or None where it may not or there is nothing."""
    try:
        return read()
    except (BerthError, OSError):
        return None


def _number(text: str) -> int | None:
    return int(text) if text.isascii() and text.isdigit() and len(text) < 10 else None


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return str(os.geteuid())


def _privilege() -> Privilege:
    if os.geteuid() != 0:
        return "user"
    with open("/proc/self/status", encoding="ascii", errors="replace") as file:
        inside = any(line.startswith("NSpid:") and len(line.split()) > 2 for line in file)
    return "container-user" if inside else "root"


def _system_name(root: str) -> str:
    try:
        with open(os.path.join(root, "etc/os-release"), encoding="utf-8", errors="replace") as file:
            lines = dict(line.rstrip("\n").partition("=")[::2] for line in file)
    except OSError:
        return platform.system()
    return lines.get("PRETTY_NAME", platform.system()).strip('"')
