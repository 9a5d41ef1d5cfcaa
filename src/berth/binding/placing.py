"""Decide which CPUs each process gets, for all of them at once; those that get none get a reason."""

from collections.abc import Hashable
from dataclasses import dataclass, field

from berth.binding.options import PlanOptions
from berth.binding.plan_document import Skipped
from berth.binding.shares import Claim, Share, deal
from berth.binding.thread_places import Places, place_classes
from berth.binding.view import Task, View, united
from berth.binding.wishes import Wish, claims_of, refusal, skip, wish_of
from berth.host.cpuset import CpuSet


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Where one process goes, whether or not it is there already.

    Attributes:
        target: Its CPUs.
        threads: The CPUs of each thread that can be moved, by tid.
        by_thread: Whether these differ.
        why: Why these CPUs.
        near_source: Where it is known from that they are near; empty where that did not matter.
    """

    task: Task
    target: CpuSet
    threads: dict[int, CpuSet]
    by_thread: bool
    why: str
    near_source: str

    @property
    def in_place(self) -> bool:
        """Whether every thread has what it would get."""
        return all(self.task.masks[tid] == cpus for tid, cpus in self.threads.items())


@dataclass(slots=True)
class Placing:
    """All decisions.

    Attributes:
        placements: Parents before their children.
        skipped: Processes that get no CPUs, by pid.
        unclassed: Why thread classes got no cores of their own, by the pid of the leader.
    """

    placements: list[Placement] = field(default_factory=list)
    skipped: dict[int, Skipped] = field(default_factory=dict)
    unclassed: dict[int, str] = field(default_factory=dict)


def place(view: View, options: PlanOptions) -> Placing:
    """Return where every process that this is about goes."""
    found = Placing()
    for pid in view.absent:
        found.skipped[pid] = Skipped(pid=pid, finding="R010", reason="it is not in the snapshot")
    wishes: dict[int, Wish] = {}
    for task in view.involved:
        if task.launcher:
            found.skipped[task.pid] = skip(task, "R023", "it only starts the processes below it")
        elif task.leads or _wants_its_own(view, task, options):
            wish = wish_of(view, task, options)
            if isinstance(wish, Wish):
                wishes[task.pid] = wish
            else:
                found.skipped[task.pid] = wish
    claims = claims_of(view, wishes, options)
    exclusive = options.policy == "exclusive"
    shares = deal(view.topology.cores, claims, spread=options.policy == "spread", whole_only=exclusive)
    for pid, wish in wishes.items():
        if pid not in shares:
            kind = "whole cores" if exclusive else "CPUs"
            reason = f"there are fewer {kind} in {wish.pool} than processes that need one"
            found.skipped[pid] = skip(wish.task, "R021", reason)
    _place_families(view, options, wishes, shares, claims, found)
    return found


def _wants_its_own(view: View, task: Task, options: PlanOptions) -> bool:
    """Return whether a process that follows another gets cores of its own: a target does, under `exclusive`."""
    leader = view.tasks[task.leader or task.pid]
    return options.policy == "exclusive" and leader.leads and task.process.target


def _place_families(
    view: View,
    options: PlanOptions,
    wishes: dict[int, Wish],
    shares: dict[Hashable, Share],
    claims: list[Claim],
    found: Placing,
) -> None:
    """Turn shares into placements; those without a share of their own use that of the process they follow."""
    families: dict[int, list[Task]] = {}
    for task in view.involved:
        owner = task.pid if task.pid in wishes else task.leader or task.pid
        if task.pid in found.skipped:
            continue
        if owner in shares:
            families.setdefault(owner, []).append(task)
        else:
            reason = f"pid {owner}, which it follows, gets no place"
            found.skipped[task.pid] = skip(task, found.skipped[owner].finding, reason)
    placements: dict[int, Placement] = {}
    for owner, family in families.items():
        share, wish = shares[owner].cpus, wishes[owner]
        places, problem = place_classes(view, family, share, options.thread_classes)
        if problem:
            found.unclassed[owner] = problem
        why = wish.why + _remark(wish, shares[owner], claims)
        for task in family:
            text = why if task.pid == owner else f"shares the place of pid {owner}, which it follows"
            placement = _placement(task, share, places, why=text, near_source=wish.near_source)
            if isinstance(placement, Placement):
                placements[task.pid] = placement
            else:
                found.skipped[task.pid] = placement
    found.placements = [placements[pid] for pid in view.tasks if pid in placements]


def _remark(wish: Wish, share: Share, claims: list[Claim]) -> str:
    """Return what limits a share of a pool that others have a part in."""
    text = "" if share.cpus == wish.pool else f"; {len(share.cpus)} of the CPUs {wish.pool}"
    if share.splits_cores:
        return f"{text}; cores are split: there are fewer of them than processes"
    idle = [claim for claim in claims if claim.held is None and not claim.pool.isdisjoint(wish.pool)]
    if idle and text:
        numbers = ", ".join(str(claim.key[1]) for claim in idle if isinstance(claim.key, tuple))
        text += f"; a part stays free for NPU {numbers}, which no target uses"
    return text


def _placement(task: Task, share: CpuSet, places: Places | None, *, why: str, near_source: str) -> Placement | Skipped:
    """Return the placement of one process of a family, or why it cannot be moved there."""
    if refused := refusal(task):
        return refused
    limit = task.limit or CpuSet()
    target = share & limit
    if not target:
        return skip(task, "R021", f"its cpuset {limit} has none of the CPUs {share} of the process that it follows")
    threads = {
        thread.tid: (target & places.of(task, thread) or target) if places else target for thread in task.movable
    }
    distinct = set(threads.values())
    return Placement(
        task=task,
        target=united(distinct),
        threads=threads,
        by_thread=len(distinct) > 1,
        why=why,
        near_source=near_source,
    )
