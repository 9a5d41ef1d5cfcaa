"""Make a plan from a snapshot: one action for each process that has something to gain, and how each is undone.

The same snapshot and options give the same bytes.
"""

from collections.abc import Sequence

from berth.binding.advice import advise
from berth.binding.commands import action_id, apply_command, rollback_command, rollback_mask
from berth.binding.diagnose import digest, find
from berth.binding.finding import Finding
from berth.binding.look import look
from berth.binding.names import plural
from berth.binding.options import PlanOptions
from berth.binding.placing import Placement, Placing, place
from berth.binding.plan_document import (
    SCHEMA_VERSION,
    Action,
    MaskBefore,
    MaskTarget,
    Occupant,
    Plan,
    PreviewAction,
    Recommendation,
    RollbackAction,
    StatePreview,
    ThreadTarget,
)
from berth.binding.risk import RISKS, risk_of
from berth.binding.rules import room
from berth.binding.rules.conditions import occupants
from berth.binding.snapshot import Snapshot
from berth.binding.thread_places import class_of
from berth.binding.view import View


def make_plan(
    snapshot: Snapshot,
    options: PlanOptions | None = None,
    *,
    snapshot_ref: str = "snapshot.json",
    snapshot_sha256: str | None = None,
) -> Plan:
    """Return the plan for all targets of a snapshot at once.

    Args:
        snapshot: The host as it was.
        options: What is asked for; the defaults of `PlanOptions` if left out.
        snapshot_ref: Relative name of its file.
        snapshot_sha256: Digest of its file; that of the file which berth would write, if left out.

    Raises:
        MalformedError: A CPU list in the snapshot is none.
    """
    options = options or PlanOptions()
    view = look(snapshot)
    placing = place(view, options)
    moved = [placement for placement in placing.placements if not placement.in_place]
    shared = _occupants(view, moved)
    actions = [_action(view, placement, options, shared) for placement in moved]
    findings = [*find(view), *_own_findings(view, placing)]
    return Plan(
        schema_version=SCHEMA_VERSION,
        snapshot_ref=snapshot_ref,
        snapshot_sha256=snapshot_sha256 or digest(snapshot),
        hostname=snapshot.collection.hostname,
        boot_id=snapshot.collection.boot_id,
        executor_backend=options.executor,
        policy=options.policy,
        thread_classes={name: str(share) for name, share in sorted(options.thread_classes.items())},
        reserve=str(options.reserve),
        requires_confirmation=True,
        risk_level=max((action.risk for action in actions), key=RISKS.index, default="info"),
        summary=_summary(placing, actions),
        recommendations=[
            Recommendation(source_finding=finding.id, severity=finding.severity, recommendation=text)
            for finding in findings
            for text in finding.recommendations
        ],
        apply_actions=actions,
        rollback_actions=[
            RollbackAction(
                action_id=action.action_id,
                pid=action.pid,
                cpu_list=action.rollback_cpu_list,
                rollback_command=action.rollback_command,
            )
            for action in actions
        ],
        rollback_state_preview=_state_preview(view, actions, options, snapshot_ref),
        skipped=[placing.skipped[pid] for pid in sorted(placing.skipped)],
        occupants=shared,
        advice=advise(view, placing.placements, options),
        findings=findings,
    )


def _action(view: View, placement: Placement, options: PlanOptions, shared: Sequence[Occupant]) -> Action:
    task = placement.task
    risk, reasons = risk_of(view, task, placement.threads)
    others = [f"pid {one.pid} ({one.comm})" for one in shared if task.pid in one.shared_with]
    reason = placement.why + (f"; shared with {', '.join(others)}, which is no target" if others else "")
    undo = rollback_mask(task, view.topology.possible)
    return Action(
        action_id=action_id(task.pid),
        pid=task.pid,
        start_ticks=task.process.start_ticks,
        uid=task.process.uid,
        rank=task.rank,
        npu_device=task.process.npu_device,
        threads=len(placement.threads),
        current_cpu_list=str(task.mask),
        current_uniform=task.uniform,
        effective_cpu_list=str(task.limit),
        target_cpu_list=str(placement.target),
        thread_targets=_thread_targets(placement) if placement.by_thread else [],
        executor_backend=options.executor,
        apply_command=apply_command(
            task, placement.target, options, by_thread=placement.by_thread, reason=placement.why
        ),
        rollback_command=rollback_command(task, view.topology.possible, options),
        rollback_cpu_list=None if undo is None else str(undo),
        requires_confirmation=True,
        status="preview",
        risk=risk,
        reason=". ".join([reason, *reasons]),
        rights=f"uid {task.process.uid}, or CAP_SYS_NICE",
        near_source=placement.near_source,
    )


def _thread_targets(placement: Placement) -> list[ThreadTarget]:
    return [
        ThreadTarget(
            tid=thread.tid,
            start_ticks=thread.start_ticks,
            name=thread.name,
            thread_class=class_of(placement.task, thread),
            current_cpu_list=str(placement.task.masks[thread.tid]),
            target_cpu_list=str(placement.threads[thread.tid]),
        )
        for thread in placement.task.movable
    ]


def _occupants(view: View, moved: Sequence[Placement]) -> list[Occupant]:
    """Return the processes that are no targets and stay where targets go."""
    shared: dict[int, list[int]] = {}
    for placement in moved:
        for other in occupants(view, placement.target):
            shared.setdefault(other.pid, []).append(placement.task.pid)
    return [
        Occupant(pid=pid, comm=task.process.comm, cpu_list=str(task.union), shared_with=sorted(shared[pid]))
        for pid, task in view.tasks.items()
        if pid in shared
    ]


def _own_findings(view: View, placing: Placing) -> list[Finding]:
    """Return what only a plan can find."""

    def skipped(rule: str) -> dict[int, str]:
        return {pid: entry.reason for pid, entry in placing.skipped.items() if entry.finding == rule}

    targets = [(placement.task, placement.target) for placement in placing.placements if placement.task.leads]
    found = [
        room.no_room(view, skipped("R021")),
        room.launchers_stay(view, skipped("R023")),
        room.few_cpus(view, targets),
        room.classes_do_not_fit(view, placing.unclassed),
    ]
    return [finding for finding in found if finding is not None]


def _summary(placing: Placing, actions: Sequence[Action]) -> str:
    settled = len(placing.placements) - len(actions)
    why = sorted({entry.finding for entry in placing.skipped.values()})
    left = f" {plural(len(placing.skipped), 'process')} left alone: see {', '.join(why)}." if why else ""
    if actions:
        threads = sum(action.threads for action in actions)
        text = f"{plural(len(actions), 'action')} on {plural(threads, 'thread')}."
        return text + (f" {plural(settled, 'process')} in place already." if settled else "") + left
    if settled:
        return f"Nothing to gain: {plural(settled, 'process')} in place already.{left}"
    return f"Nothing is planned.{left}" if left else "Nothing is planned: the snapshot has no target."


def _state_preview(view: View, actions: Sequence[Action], options: PlanOptions, snapshot_ref: str) -> StatePreview:
    return StatePreview(
        schema_version=SCHEMA_VERSION,
        created_at=None,
        executor_backend=options.executor,
        snapshot_ref=snapshot_ref,
        plan_ref=options.plan_ref,
        actions=[
            PreviewAction(
                action_id=action.action_id,
                pid=action.pid,
                process_start_time=action.start_ticks,
                command=view.tasks[action.pid].process.command,
                before=MaskBefore(
                    cpus_allowed_list=action.current_cpu_list,
                    mems_allowed_list=view.tasks[action.pid].process.mems_allowed_list,
                ),
                target=MaskTarget(cpus_allowed_list=action.target_cpu_list),
                after=MaskTarget(cpus_allowed_list=None),
                status="pending",
                apply_command=action.apply_command,
                rollback_command=action.rollback_command,
            )
            for action in actions
        ],
    )
