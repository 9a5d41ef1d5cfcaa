"""What a caller may ask of a plan."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from berth.binding.plan_document import Executor, Policy
from berth.binding.thread_places import ClassShare
from berth.errors import MalformedError
from berth.host.cpuset import CpuSet


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions:
    """How to plan.

    Attributes:
        executor: What will set the masks.
        policy: `near`: all CPUs near the accelerator, dealt among those that share them. `spread`: whole cores of the
            cpuset, as many from each node. `exclusive`: whole cores of its own for each process, near ones where it is
            known which are.
        thread_classes: Cores of a process's share for classes of its threads.
        reserve: CPUs that nobody gets.
        plan_ref: Name that the plan's file will have, for its commands.
        state_ref: Name that the rollback state will have, for its commands.
        script: The internal script, for its commands.
        caller_mask: CPUs of the shell that will run commands from the advice; None where unknown.

    Raises:
        MalformedError: Thread classes are asked of the internal script, whose interface knows processes alone.
    """

    executor: Executor = "taskset"
    policy: Policy = "near"
    thread_classes: Mapping[str, ClassShare] = field(default_factory=dict)
    reserve: CpuSet = field(default_factory=CpuSet)
    plan_ref: str = "plan.json"
    state_ref: str = "rollback-state.json"
    script: str = "internal-bind"
    caller_mask: CpuSet | None = None

    def __post_init__(self) -> None:
        if self.thread_classes and self.executor == "internal-script":
            raise MalformedError(
                "thread-classes-need-threads",
                "--thread-classes with --executor internal-script: the script binds processes, not threads",
                "Use --executor native or taskset, or leave the thread classes out.",
            )
