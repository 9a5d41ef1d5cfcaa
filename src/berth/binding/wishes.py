"""What each process may have: its cpuset, cut by the policy to what is near, without isolated and reserved CPUs."""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction

from berth.binding.npus import number_of
from berth.binding.options import PlanOptions
from berth.binding.plan_document import Skipped
from berth.binding.rules.conditions import locality
from berth.binding.rules.limits import unmovable
from berth.binding.shares import Claim
from berth.binding.snapshot import NpuDevice
from berth.binding.view import Task, View, united
from berth.host.cpuset import CpuSet


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """What one process may have, and why.

    Attributes:
        near_source: Where it is known from that these CPUs are near; empty where that does not matter.
    """

    task: Task
    pool: CpuSet
    why: str
    near_source: str


def wish_of(view: View, task: Task, options: PlanOptions) -> Wish | Skipped:
    """Return what a process may have, or why that cannot be said or is nothing."""
    if refused := refusal(task):
        return refused
    limit = task.limit or CpuSet()
    found = _spread(view, limit) if options.policy == "spread" else _near(view, task, limit, options)
    if isinstance(found, Skipped):
        return found
    near, why, source = found
    pool = near - view.isolated - options.reserve
    if not pool:
        return skip(task, "R021", f"all of {near} is isolated or reserved")
    return Wish(task=task, pool=pool, why=why, near_source=source)


def refusal(task: Task) -> Skipped | None:
    """Return why no policy may place a process; None where one may."""
    if reason := unmovable(task):
        return skip(task, "R022", reason)
    if task.lacks:
        return skip(task, "R010", "; ".join(task.lacks))
    return None


def skip(task: Task, finding: str, reason: str) -> Skipped:
    """Return the entry of a process that gets no action."""
    return Skipped(pid=task.pid, finding=finding, reason=reason)


def claims_of(view: View, wishes: Mapping[int, Wish], options: PlanOptions) -> list[Claim]:
    """Return the claims of all processes, and of the NPUs of the host that none of them uses.

    A process on one of two NPUs that share their CPUs gets half of them, so that a plan for the other, made apart from
    this one, gives it the other half. A process on two NPUs counts twice, two on one NPU half each.
    """
    users: Counter[int] = Counter()
    if options.policy != "spread":
        users.update(id(npu) for wish in wishes.values() for npu in wish.task.devices)
    idle = [npu for npu in view.npus.devices if users and id(npu) not in users]
    weights = {
        pid: sum((Fraction(1, users[id(npu)]) for npu in wish.task.devices if users), Fraction()) or Fraction(1)
        for pid, wish in wishes.items()
    }
    scale = math.lcm(*(weight.numerator for weight in weights.values()))
    claims = [
        (_order(wish.task), Claim(key=pid, pool=wish.pool, cost=int(scale / weights[pid]), held=wish.task.union))
        for pid, wish in wishes.items()
    ]
    for npu in idle:
        pool = (view.npus.near([npu])[0] or CpuSet()) & _allowed_to_users(view, npu) - view.isolated - options.reserve
        if pool:
            claims.append(((number_of(npu), 1), Claim(key=("NPU", number_of(npu), id(npu)), pool=pool, cost=scale)))
    return [claim for _, claim in sorted(claims, key=lambda pair: pair[0])]


def _spread(view: View, limit: CpuSet) -> tuple[CpuSet, str, str]:
    nodes = ", ".join(map(str, view.nodes_of(limit)))
    return limit, f"whole cores dealt over the nodes {nodes}" if nodes else "whole cores of its cpuset", ""


def _near(view: View, task: Task, limit: CpuSet, options: PlanOptions) -> tuple[CpuSet, str, str] | Skipped:
    """Return the near part of a cpuset; under `exclusive` all of it where nothing says what is near."""
    leader = task if task.leads else view.tasks[task.leader or task.pid]
    known, why = locality(view, leader)
    exclusive = options.policy == "exclusive"
    if known is None:
        if exclusive:
            return limit, "whole cores of its own, anywhere in its cpuset: nothing says what is near", ""
        if leader.conflict:
            return skip(task, "R019", leader.conflict)
        return skip(task, "R020", "nothing says which CPUs are near")
    if not known & limit:
        return skip(task, "R017" if task.leads else "R021", f"none of the CPUs {why} is in its cpuset {limit}")
    return known & limit, f"whole cores of its own, {why}" if exclusive else why, leader.near_source or "one node"


def _order(task: Task) -> tuple[int, ...]:
    """Return when a process is served: by NPU first, so that plans made apart serve NPUs in the same order."""
    return min(map(number_of, task.devices), default=-1), 0, int(task.rank is None), task.rank or 0, task.pid


def _allowed_to_users(view: View, npu: NpuDevice) -> CpuSet:
    """Return what the processes on an NPU may use, as far as their cpusets are known; else all online CPUs."""
    users = [task for pid in npu.host_pids if (task := view.tasks.get(pid)) is not None]
    return united(task.limit for task in users if task.limit is not None) or view.online
