"""How risky an action is, and why."""

from collections.abc import Mapping
from typing import Final

from berth.binding.names import plural
from berth.binding.plan_document import Risk
from berth.binding.rules.conditions import pinning_variable
from berth.binding.view import Task, View, united
from berth.host.cpuset import CpuSet

#: Part of the resident pages that a move may leave behind before that makes it risky.
_LEFT_BEHIND: Final = 0.5
RISKS: Final[tuple[Risk, ...]] = ("info", "low", "medium", "high")


def risk_of(view: View, task: Task, threads: Mapping[int, CpuSet]) -> tuple[Risk, list[str]]:
    """Return the risk of giving threads other masks, and the reasons for more than a low one.

    Taking CPUs away from a mask that nobody chose is a low risk. A mask that is left or widened may have been asked
    for by somebody.

    Args:
        view: The host.
        task: The process.
        threads: The new mask of each thread, by tid.
    """
    changes = {(task.masks[tid], target) for tid, target in threads.items() if task.masks[tid] != target}
    left = [(mask, target) for mask, target in changes if not target <= mask]
    wider = [(mask, target) for mask, target in left if len(target) > len(mask)]
    risk, reasons = 0, []
    if wider:
        risk = 2
        mask, target = min(wider, key=lambda change: (len(change[0]), change[0].mask, change[1].mask))
        reasons.append(f"it widens a mask from {mask} to {target}, and somebody may have wanted the narrow one")
    elif left:
        risk = 2
        mask, target = min(left, key=lambda change: (change[0].mask, change[1].mask))
        reasons.append(f"it leaves the mask {mask}, which somebody may have wanted")
    if left and (variable := pinning_variable(task)):
        risk = 3
        reasons.append(f"with {variable} in its environment the OpenMP runtime may pin its own threads again")
    if not task.uniform:
        risk = max(risk, 2)
        own = sum(mask != task.mask for mask in task.masks.values())
        reasons.append(f"{plural(own, 'thread')} had another mask than the main thread, which this replaces")
    if task.real_time:
        risk = max(risk, 2)
        policies = ", ".join(sorted({thread.policy for thread in task.real_time}))
        reasons.append(f"threads with the policy {policies} may refuse, or miss their deadlines")
    if _leaves_memory(view, task, threads):
        risk = 3
        reasons.append("most of its memory stays behind on other nodes")
    return RISKS[max(1, risk)], reasons


def _leaves_memory(view: View, task: Task, threads: Mapping[int, CpuSet]) -> bool:
    """Return whether most pages are near what it has now, and not near what it gets."""
    pages = task.process.pages_by_node or {}
    target = united(set(threads.values()))
    now, then = view.nodes_of(task.union), view.nodes_of(target)
    behind = sum(number for node, number in pages.items() if node not in map(str, then))
    here = sum(number for node, number in pages.items() if node in map(str, now))
    total = sum(pages.values())
    return bool(now and then) and min(behind, here) > _LEFT_BEHIND * total
