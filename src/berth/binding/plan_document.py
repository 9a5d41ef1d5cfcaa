"""`plan.json`: what would change, with every command that does it and undoes it, as values.

The names of the fields are the interface of the binding design. Commands are text for people: nothing here is ever
executed from the file.
"""

from typing import Final, Literal

import msgspec

from berth.binding.finding import Finding, Severity
from berth.errors import MalformedError

#: Version that is written. While the major is 0 a newer minor is refused (design, "Ground").
SCHEMA_VERSION: Final = "0.2.0"

Executor = Literal["taskset", "internal-script", "native"]
Policy = Literal["near", "spread", "exclusive"]
Risk = Literal["info", "low", "medium", "high"]


class ThreadTarget(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One thread that gets CPUs of its class, rather than all of its process."""

    tid: int
    start_ticks: int
    name: str
    thread_class: str
    current_cpu_list: str
    target_cpu_list: str


class Action(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One change to one process, all of its threads included.

    Attributes:
        start_ticks: Clock ticks since boot: with pid and boot id, who it is.
        threads: How many threads it has that can be moved.
        current_cpu_list: Mask of its main thread.
        current_uniform: Whether every thread has that mask.
        effective_cpu_list: Its cpuset.
        target_cpu_list: CPUs that it gets; where `thread_targets` stand, all of theirs together.
        thread_targets: Every thread, where thread classes get their own cores; else empty.
        apply_command: The exact command with this effect.
        rollback_command: The exact command that undoes it.
        rollback_cpu_list: The mask that undoes it: all possible CPUs for a process that nothing bound, so that it
            goes on following its cpuset. Null where its threads differ, and the saved state has one mask for each.
        rights: Who may do it.
        near_source: Where it is known from that these CPUs are near; empty where that does not matter.
    """

    action_id: str
    pid: int
    start_ticks: int
    uid: int
    rank: int | None
    npu_device: int | None
    threads: int
    current_cpu_list: str
    current_uniform: bool
    effective_cpu_list: str
    target_cpu_list: str
    thread_targets: list[ThreadTarget]
    executor_backend: Executor
    apply_command: str
    rollback_command: str
    rollback_cpu_list: str | None
    requires_confirmation: bool
    status: Literal["preview"]
    risk: Risk
    reason: str
    rights: str
    near_source: str


class RollbackAction(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How one action is undone; `cpu_list` is null where each thread has a mask of its own."""

    action_id: str
    pid: int
    cpu_list: str | None
    rollback_command: str


class MaskBefore(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What a process had."""

    cpus_allowed_list: str
    mems_allowed_list: str | None


class MaskTarget(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What a process gets, or got: null before it was read back."""

    cpus_allowed_list: str | None


class PreviewAction(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One entry of the rollback state before anything is done."""

    action_id: str
    pid: int
    process_start_time: int
    command: str
    before: MaskBefore
    target: MaskTarget
    after: MaskTarget
    status: Literal["pending"]
    apply_command: str
    rollback_command: str


class StatePreview(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What `rollback-state.json` will say; masks of single threads are saved when the plan is applied."""

    schema_version: str
    created_at: None
    executor_backend: Executor
    snapshot_ref: str
    plan_ref: str
    actions: list[PreviewAction]


class Recommendation(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What a finding advises."""

    source_finding: str
    severity: Severity
    recommendation: str


class Advice(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Something that berth does not do, for people to consider.

    Attributes:
        topic: numactl, omp, dataloader, memory or irq.
        text: What could be done, commands included.
        reason: Why it may help here.
        risk: What it may cost or break, and the rights it needs.
        metric: What shows whether it helped.
    """

    topic: Literal["numactl", "omp", "dataloader", "memory", "irq"]
    pids: list[int]
    text: str
    reason: str
    risk: str
    metric: str


class Skipped(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A process that this is about and that gets no action; `finding` says why at length."""

    pid: int
    finding: str
    reason: str


class Occupant(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A process that is no target and stays on CPUs that targets get."""

    pid: int
    comm: str
    cpu_list: str
    shared_with: list[int]


class Plan(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The whole document; `apply_actions` is the order in which they are done, parents before children."""

    schema_version: str
    snapshot_ref: str
    snapshot_sha256: str
    hostname: str
    boot_id: str
    executor_backend: Executor
    policy: Policy
    thread_classes: dict[str, str]
    reserve: str
    requires_confirmation: bool
    risk_level: Risk
    summary: str
    recommendations: list[Recommendation]
    apply_actions: list[Action]
    rollback_actions: list[RollbackAction]
    rollback_state_preview: StatePreview
    skipped: list[Skipped]
    occupants: list[Occupant]
    advice: list[Advice]
    findings: list[Finding]


def encode_plan(plan: Plan) -> bytes:
    """Return the file's content."""
    return msgspec.json.format(msgspec.json.encode(plan), indent=1) + b"\n"


def decode_plan(data: bytes, *, source: str) -> Plan:
    """Return the plan in `data`.

    Args:
        data: Content of the file.
        source: Its name, for messages.

    Raises:
        MalformedError: It is empty, truncated, not a plan, or of a version that is not read.
    """
    try:
        version = msgspec.json.decode(data, type=_Versioned).schema_version
        if version is not None and version.split(".")[:2] == SCHEMA_VERSION.split(".")[:2]:
            return msgspec.json.decode(data, type=Plan)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise MalformedError(
            "bad-plan",
            f"{source!r} is no whole plan: {error}",
            "Make a new one with `berth bind plan`; nothing is applied from half of one.",
        ) from error
    raise MalformedError(
        "unknown-plan-version",
        f"{source!r} has schema_version {version!r}, and this version of berth reads {SCHEMA_VERSION}",
        "Make a new plan with `berth bind plan`.",
    )


class _Versioned(msgspec.Struct):
    schema_version: str | None = None
