"""Facts of the host and of processes in the words of a snapshot: values in, values out."""

from collections.abc import Mapping

from berth.binding.redact import keep_environment, redact_arguments
from berth.binding.snapshot import (
    CpuEntry,
    CpuTopology,
    NumaNode,
    NumaTopology,
    PhysicalCore,
    Process,
    ProcessGroup,
    System,
    Thread,
)
from berth.binding.thread_class import role_of
from berth.host.cgroup import EffectiveCpuset
from berth.host.quota import CpuQuota
from berth.host.tasks import ProcessFacts, ThreadFacts
from berth.host.topology import Topology

_MIB = 1 << 20
#: linux/capability.h: what it takes to move the memory and the threads of others.
CAP_SYS_NICE = 23


def describe_system(topology: Topology, *, os: str, kernel: str, architecture: str) -> System:
    """Return the host as a whole."""
    packages = {core.package for core in topology.cores}
    return System(
        os=os,
        kernel=kernel,
        architecture=architecture,
        cpu_model=topology.cpu_model,
        total_logical_cpus=len(topology.online),
        total_physical_cores=len(topology.cores),
        sockets=None if None in packages else len(packages),
        smt_enabled=any(len(core.cpus) > 1 for core in topology.cores),
        online_cpus=topology.online.to_list(),
        present_cpus=topology.present.to_list(),
        possible_cpus=topology.possible.to_list(),
        isolated_cpus=None if topology.isolated is None else topology.isolated.to_list(),
        nohz_full_cpus=None if topology.nohz_full is None else topology.nohz_full.to_list(),
    )


def describe_cpus(topology: Topology) -> CpuTopology:
    """Return CPUs and cores."""
    core_ids = {cpu.number: cpu.core_id for cpu in topology.cpus}
    return CpuTopology(
        cpus=[
            CpuEntry(
                cpu=cpu.number,
                core_id=cpu.core_id,
                socket_id=cpu.package,
                numa_node=cpu.node,
                online=True,
                smt_siblings=list(cpu.siblings),
                max_mhz=cpu.max_mhz,
                current_mhz=cpu.current_mhz,
            )
            for cpu in topology.cpus
        ],
        physical_cores=[
            PhysicalCore(
                core_key=core.key,
                socket_id=core.package,
                core_id=core_ids[core.key],
                numa_node=core.node,
                logical_cpus=list(core.cpus),
            )
            for core in topology.cores
        ],
    )


def describe_nodes(topology: Topology) -> NumaTopology:
    """Return the NUMA nodes."""
    return NumaTopology(
        nodes=[
            NumaNode(
                node=node.number,
                cpus=node.cpus.to_list(),
                logical_cpu_count=len(node.cpus),
                physical_core_count=sum(core.node == node.number for core in topology.cores),
                memory_total_mb=_mib(node.memory_total_bytes),
                memory_free_mb=_mib(node.memory_free_bytes),
            )
            for node in topology.nodes
        ],
        distance_matrix=None if topology.distances is None else [list(row) for row in topology.distances],
        overlapping_cpus=topology.node_overlap.to_list(),
    )


def describe_process(
    facts: ProcessFacts,
    topology: Topology,
    *,
    target: bool,
    threads: bool,
    environment: Mapping[str, str],
    pages: Mapping[int, int] | None,
    load: Mapping[int, float] | None = None,
    seen: Mapping[int, list[int]] | None = None,
) -> Process:
    """Return one process.

    Args:
        facts: What /proc says about it.
        topology: The host.
        target: Whether it is one of those the snapshot is about.
        threads: Whether every thread is told.
        environment: Its whole environment, of which little is kept.
        pages: Its resident pages by node, or None.
        load: Percent of one CPU that each thread used during the sample, by tid, or None without one.
        seen: CPUs that each thread was seen on during the sample, by tid.
    """
    main = facts.main or facts.threads[0]
    capabilities = facts.cap_effective
    return Process(
        pid=facts.pid,
        ppid=facts.ppid,
        start_ticks=facts.start_ticks,
        uid=facts.uid,
        command=" ".join(redact_arguments(facts.arguments)) or f"[{facts.comm}]",
        comm=facts.comm,
        state=facts.state,
        target=target,
        cpus_allowed_list=main.cpus_allowed.to_list(),
        mems_allowed_list=None if main.mems_allowed is None else main.mems_allowed.to_list(),
        current_cpu=main.current_cpu,
        numa_node=_node_of(topology, main.current_cpu),
        num_threads=len(facts.threads),
        nspid_chain=list(facts.nspid_chain),
        voluntary_ctxt_switches=main.voluntary_ctxt_switches,
        nonvoluntary_ctxt_switches=main.nonvoluntary_ctxt_switches,
        cpu_percent=None if load is None else round(sum(load.values()), 2),
        cap_sys_nice=None if capabilities is None else bool(capabilities >> CAP_SYS_NICE & 1),
        in_container=len(facts.nspid_chain) > 1 if facts.nspid_chain else None,
        environment=keep_environment(environment),
        pages_by_node=None if pages is None else {str(node): count for node, count in sorted(pages.items())},
        kernel_thread=facts.kernel_thread,
        threads=[_thread(facts, one, topology, load, seen) for one in facts.threads] if threads else [],
    )


def describe_group(pid: int, cpuset: EffectiveCpuset | None, quota: CpuQuota | None) -> ProcessGroup:
    """Return the control-group limits of one process; what is None was not readable."""
    tightest = quota.tightest if quota else None
    return ProcessGroup(
        pid=pid,
        path=(cpuset.path if cpuset else quota.path if quota else "") or None,
        cpuset_cpus_effective=cpuset.cpus.to_list() if cpuset else None,
        cpuset_mems_effective=cpuset.mems.to_list() if cpuset and cpuset.mems is not None else None,
        inherited=cpuset.inherited if cpuset else False,
        cpu_max=quota.cpu_max if quota else None,
        cpu_quota_us=tightest.quota_us if tightest else None,
        cpu_period_us=tightest.period_us if tightest else None,
        cpu_weight=quota.weight if quota else None,
        nr_periods=tightest.nr_periods if tightest else None,
        nr_throttled=tightest.nr_throttled if tightest else None,
        throttled_usec=tightest.throttled_us if tightest else None,
    )


def _thread(
    facts: ProcessFacts,
    thread: ThreadFacts,
    topology: Topology,
    load: Mapping[int, float] | None,
    seen: Mapping[int, list[int]] | None,
) -> Thread:
    role = role_of(thread.name, is_main=thread.tid == facts.pid)
    return Thread(
        tid=thread.tid,
        start_ticks=thread.start_ticks,
        name=thread.name,
        state=thread.state,
        cpus_allowed_list=thread.cpus_allowed.to_list(),
        mems_allowed_list=None if thread.mems_allowed is None else thread.mems_allowed.to_list(),
        current_cpu=thread.current_cpu,
        numa_node=_node_of(topology, thread.current_cpu),
        policy=thread.policy_name,
        movable=thread.movable,
        cpu_percent=None if load is None else load.get(thread.tid),
        voluntary_ctxt_switches=thread.voluntary_ctxt_switches,
        nonvoluntary_ctxt_switches=thread.nonvoluntary_ctxt_switches,
        cpus_seen=[] if seen is None else seen.get(thread.tid, []),
        role_hint=role.hint,
        key_class=role.name,
        key_score=role.score,
    )


def _node_of(topology: Topology, cpu: int | None) -> int | None:
    node = None if cpu is None else topology.node_of(cpu)
    return None if node is None else node.number


def _mib(count: int | None) -> float | None:
    return None if count is None else round(count / _MIB, 1)
