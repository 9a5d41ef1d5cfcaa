"""The exact commands that do and undo one action, for people to read and to copy."""

import shlex

from berth.binding.options import PlanOptions
from berth.binding.view import Task
from berth.host.cpuset import CpuSet


def apply_command(task: Task, target: CpuSet, options: PlanOptions, *, by_thread: bool, reason: str) -> str:
    """Return the command that gives a process its target.

    taskset(1) gives all threads one mask, and stops half way at a thread that cannot be moved; what it cannot do is
    left to berth itself.
    """
    if options.executor == "internal-script" and not by_thread:
        words = [options.script, "--apply", "--pid", str(task.pid), "--cpu-list", str(target), "--reason", reason]
        return shlex.join(words)
    if options.executor == "taskset" and not by_thread and _taskset_fits(task):
        return _taskset(task, target)
    return shlex.join(["berth", "bind", "apply", options.plan_ref, "--action", action_id(task.pid)])


def rollback_mask(task: Task, possible: CpuSet) -> CpuSet | None:
    """Return the mask that undoes an action; None where each thread has its own.

    Setting a mask is a request that outlives changes of the cpuset. A process without one is given all possible CPUs:
    the kernel cuts them to the cpuset, now and whenever that grows.
    """
    if not task.uniform:
        return None
    return possible if task.limit == task.mask and task.mask <= possible else task.mask


def rollback_command(task: Task, possible: CpuSet, options: PlanOptions) -> str:
    """Return the command that gives a process back what it had."""
    mask = rollback_mask(task, possible)
    if mask is not None and options.executor == "internal-script":
        words = [options.script, "--rollback", "--pid", str(task.pid), "--cpu-list", str(mask)]
        return shlex.join([*words, "--state", options.state_ref])
    if mask is not None and options.executor == "taskset" and _taskset_fits(task):
        return _taskset(task, mask)
    return shlex.join(["berth", "bind", "rollback", options.state_ref, "--action", action_id(task.pid)])


def action_id(pid: int) -> str:
    """Return the id of the action on a process."""
    return f"bind-pid-{pid}"


def _taskset_fits(task: Task) -> bool:
    return len(task.movable) == len(task.process.threads)


def _taskset(task: Task, cpus: CpuSet) -> str:
    return f"taskset {'-cp' if len(task.process.threads) == 1 else '-acp'} {cpus} {task.pid}"
