"""`snapshot.json`: one host and some of its processes as they were at one moment, as values.

Everything that later steps decide is decided from this file alone, so it says where each fact came from and what is
missing. The names of blocks and fields are the interface of the binding design. A field that could not be read is null,
and `availability` says so with the effect; nothing is ever filled in by a guess.

CPU sets are in the kernel's list form (`0-3,8`), times in the unit of the field's name, addresses of PCI devices as the
kernel writes them (`0000:c1:00.0`).
"""

from typing import Final, Literal

import msgspec

from berth.errors import MalformedError

#: Version that is written. While the major is 0 a newer minor is refused (design, "Ground").
SCHEMA_VERSION: Final = "0.2.0"

#: Components without which nothing is planned for a process: where its limit, its masks and its cores stand.
PLAN_NEEDS: Final = frozenset(
    {
        "cgroup",
        "cgroup.cpuset_cpus_effective",
        "cpu_topology",
        "processes",
        "processes.cpus_allowed_list",
        "processes.threads",
    }
)

ThreadClass = Literal[
    "main", "acl", "release", "sq", "communication", "dataloader", "tokenizer", "engine", "openmp", "blas", "other"
]
Privilege = Literal["root", "user", "container-user"]


class Collection(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Who looked, when and how.

    Attributes:
        timestamp: ISO 8601, UTC.
        duration_seconds: How long looking took, sampling included.
        boot_id: Id of the boot: pids and start times mean nothing in another one.
        privilege: With whose rights.
        command: How the collector was called.
        warnings: What the reader should know.
    """

    timestamp: str
    duration_seconds: float
    collector_name: str
    collector_version: str
    hostname: str
    boot_id: str
    user: str
    privilege: Privilege
    command: list[str]
    warnings: list[str] = []


class RankEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Which process is which rank on which NPU, as the user or the processes themselves say."""

    rank: int
    pid: int
    npu_device: int | None = None
    source: Literal["user", "environment", "npu-smi"] = "user"


class Workload(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What the user says is running.

    Attributes:
        target_pids: The processes this is about.
        optimization_goal: throughput, latency, stability, isolation or unknown.
    """

    target_pids: list[int]
    rank_mapping: list[RankEntry] = []
    scenario: str = "unknown"
    framework: str = "unknown"
    device_type: str = "unknown"
    optimization_goal: str = "unknown"
    process_model: str = "unknown"
    deployment: str = "unknown"
    container_pid_mode: str = "auto"


class System(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The host as a whole. CPU sets as lists; None where the kernel does not say."""

    os: str
    kernel: str
    architecture: str
    cpu_model: str | None
    total_logical_cpus: int
    total_physical_cores: int
    sockets: int | None
    smt_enabled: bool
    online_cpus: str
    present_cpus: str
    possible_cpus: str
    isolated_cpus: str | None
    nohz_full_cpus: str | None
    autogroup_enabled: bool | None = None
    numa_balancing: int | None = None
    irqbalance_running: bool | None = None


class CpuEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One online CPU. Frequencies in MHz."""

    cpu: int
    core_id: int | None
    socket_id: int | None
    numa_node: int | None
    online: bool
    smt_siblings: list[int]
    max_mhz: float | None = None
    current_mhz: float | None = None


class PhysicalCore(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One core; `core_key` is its lowest CPU."""

    core_key: int
    socket_id: int | None
    core_id: int | None
    numa_node: int | None
    logical_cpus: list[int]


class CpuTopology(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """CPUs and cores."""

    cpus: list[CpuEntry]
    physical_cores: list[PhysicalCore]


class NumaNode(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One node; without CPUs it is memory alone. Memory in MiB."""

    node: int
    cpus: str
    logical_cpu_count: int
    physical_core_count: int
    memory_total_mb: float | None
    memory_free_mb: float | None


class NumaTopology(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Nodes.

    Attributes:
        distance_matrix: Row per node in the order of `nodes`, or None where the kernel gives none.
        overlapping_cpus: CPUs that two nodes claim: where there are any, the nodes of this host are not to be trusted.
    """

    nodes: list[NumaNode]
    distance_matrix: list[list[int]] | None
    overlapping_cpus: str = ""


class NpuLink(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How two devices are joined."""

    target: int
    type: str
    status: str | None = None


class NpuDevice(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One chip, with every id that is known.

    Attributes:
        device_id: Card id ("NPU ID" of npu-smi).
        chip_id: Chip on the card.
        logical_id: Chip logic id, the one callers name; None where no source says it.
        physical_id: Number of its device node, /dev/davinciN.
        local_cpus: CPUs near it, unrestricted; None where nothing says.
        local_source: `sysfs`, `npu-smi topo`, `user`, or None.
        numa_node: Its node; None where unknown.
        numa_source: `pci`, `topo_affinity`, `user_map`, or None.
        host_pids: Pids that npu-smi names as its users.
    """

    device_id: int
    chip_id: int | None = None
    logical_id: int | None = None
    physical_id: int | None = None
    pci_bus_id: str | None = None
    model: str | None = None
    health: str | None = None
    numa_node: int | None = None
    numa_source: str | None = None
    local_cpus: str | None = None
    local_source: str | None = None
    links: list[NpuLink] = []
    host_pids: list[int] = []


class GpuDevice(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One GPU or other accelerator, by its PCI address."""

    pci_bus_id: str
    vendor: str
    device: str
    numa_node: int | None = None
    local_cpus: str | None = None


class NpuTopology(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Accelerators."""

    vendor: str | None
    source: list[str]
    devices: list[NpuDevice] = []
    gpus: list[GpuDevice] = []
    processes_by_device: dict[str, list[int]] = {}


class Thread(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One thread.

    Attributes:
        start_ticks: Clock ticks since boot (stat field 22): with the tid and the boot id, who it is.
        policy: SCHED_OTHER, SCHED_FIFO, SCHED_RR, SCHED_BATCH, SCHED_IDLE, SCHED_DEADLINE or its number.
        movable: False where the kernel refuses to change its mask (PF_NO_SETAFFINITY).
        cpu_percent: Of one CPU, over the sample; None without one.
        cpus_seen: CPUs it was seen on during the sample.
        key_class: What its name says it is.
        key_score: How sure that is, 0 to 100.
    """

    tid: int
    start_ticks: int
    name: str
    state: str
    cpus_allowed_list: str
    mems_allowed_list: str | None
    current_cpu: int | None
    numa_node: int | None
    policy: str
    movable: bool = True
    cpu_percent: float | None = None
    voluntary_ctxt_switches: int | None = None
    nonvoluntary_ctxt_switches: int | None = None
    cpus_seen: list[int] = []
    role_hint: str = ""
    key_class: ThreadClass = "other"
    key_score: int = 0


class Process(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One process and every thread of it.

    Attributes:
        target: Whether it is one of those this is about, rather than a parent, child or occupant.
        start_ticks: As of its main thread.
        uid: Its real user id; affinity may be set by that user or root.
        npu_device: Chip logic id of its NPU; its card id where no source says a logic id.
        nspid_chain: Its pid in each pid namespace, outermost first.
        environment: Variables of the allow-list alone, secrets replaced.
        pages_by_node: Resident pages by NUMA node, counted in pages of 4 KiB, or None where they cannot be read.
        kernel_thread: Whether it is one of the kernel's own.
        children: Pids of its children that are in the snapshot.
    """

    pid: int
    ppid: int
    start_ticks: int
    uid: int
    command: str
    comm: str
    state: str
    target: bool
    cpus_allowed_list: str
    mems_allowed_list: str | None
    current_cpu: int | None
    numa_node: int | None
    num_threads: int
    nspid_chain: list[int]
    rank: int | None = None
    npu_device: int | None = None
    npu_source: str | None = None
    voluntary_ctxt_switches: int | None = None
    nonvoluntary_ctxt_switches: int | None = None
    cpu_percent: float | None = None
    cap_sys_nice: bool | None = None
    in_container: bool | None = None
    environment: dict[str, str] = {}
    pages_by_node: dict[str, int] | None = None
    kernel_thread: bool = False
    threads: list[Thread] = []
    children: list[int] = []


class ProcessGroup(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The cgroup limits of one process. Times in microseconds.

    Attributes:
        cpuset_cpus_effective: The limit of its masks; None where unknown.
        inherited: Whether the limit was read from an ancestor.
        cpu_quota_us: Quota per period of the tightest ancestor; None for none.
    """

    pid: int
    path: str | None
    cpuset_cpus_effective: str | None
    cpuset_mems_effective: str | None = None
    inherited: bool = False
    cpu_max: str | None = None
    cpu_quota_us: int | None = None
    cpu_period_us: int | None = None
    cpu_weight: int | None = None
    nr_periods: int | None = None
    nr_throttled: int | None = None
    throttled_usec: int | None = None
    nr_throttled_growth: int | None = None


class Cgroup(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Control groups."""

    version: str
    process_groups: list[ProcessGroup]


class KeyProcesses(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What the names of threads say, each as (pid, tid) pairs."""

    discovery_sources: list[str] = []
    main_scheduler_pids: list[int] = []
    sq_task_threads: list[tuple[int, int]] = []
    npu_fixed_threads: list[tuple[int, int]] = []
    communication_threads: list[tuple[int, int]] = []
    dataloader_threads: list[tuple[int, int]] = []
    top_threads: list[tuple[int, int]] = []
    npu_smi_host_pids: list[int] = []
    user_extra_matches: list[tuple[int, int]] = []


class RuntimeSample(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What was seen while sampling. Percent of one CPU."""

    sample_seconds: float
    process_cpu_percent_total: float
    process_cpu_percent_by_pid: dict[str, float]
    system_loadavg: list[float]
    cpu_usage_by_numa: dict[str, float] = {}
    cpu_migration_observed: bool = False


class Gap(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Something that could not be read, and what that means.

    Attributes:
        component: The block or field of this document that it would have filled, such as `npu_topology` or
            `cgroup.cpuset_cpus_effective`. Planning stops for a process that lacks one of `PLAN_NEEDS`.
        pid: The one process it concerns; None for the whole host.
    """

    component: str
    message: str
    effect: str = ""
    pid: int | None = None


class Availability(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What is missing."""

    complete: bool
    missing: list[Gap] = []
    partial: list[Gap] = []
    errors: list[Gap] = []


class Snapshot(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The whole document."""

    schema_version: str
    collection: Collection
    workload: Workload
    system: System
    cpu_topology: CpuTopology
    numa_topology: NumaTopology
    npu_topology: NpuTopology
    processes: list[Process]
    cgroup: Cgroup
    key_processes: KeyProcesses
    availability: Availability
    runtime_sample: RuntimeSample | None = None
    pytorch: dict[str, object] = {}
    baseline_metrics: dict[str, float] = {}
    raw_refs: dict[str, str] = {}

    def process(self, pid: int) -> Process | None:
        """Return the process `pid`, or None."""
        return next((process for process in self.processes if process.pid == pid), None)

    def group(self, pid: int) -> ProcessGroup | None:
        """Return the control-group limits of the process `pid`, or None."""
        return next((group for group in self.cgroup.process_groups if group.pid == pid), None)


def encode_snapshot(snapshot: Snapshot) -> bytes:
    """Return the file's content."""
    return msgspec.json.format(msgspec.json.encode(snapshot), indent=1) + b"\n"


def decode_snapshot(data: bytes, *, source: str) -> Snapshot:
    """Return the snapshot in `data`.

    Args:
        data: Content of the file.
        source: Its name, for messages.

    Raises:
        MalformedError: It is empty, truncated, not a snapshot, or of a version that is not read.
    """
    if not data.strip():
        raise _bad(source, "it is empty")
    try:
        version = msgspec.json.decode(data, type=_Versioned).schema_version
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise _bad(source, str(error)) from error
    if version is None or version.split(".")[:2] != SCHEMA_VERSION.split(".")[:2]:
        raise MalformedError(
            "unknown-snapshot-version",
            f"{source!r} has schema_version {version!r}, and this version of berth reads {SCHEMA_VERSION}",
            "Take a new snapshot with `berth bind snapshot`.",
        )
    try:
        return msgspec.json.decode(data, type=Snapshot)
    except msgspec.DecodeError as error:
        raise _bad(source, str(error)) from error


class _Versioned(msgspec.Struct):
    schema_version: str | None = None


def _bad(source: str, why: str) -> MalformedError:
    return MalformedError(
        "bad-snapshot",
        f"{source!r} is no whole snapshot: {why}",
        "Take a new one with `berth bind snapshot`; nothing is planned from half of one.",
    )
