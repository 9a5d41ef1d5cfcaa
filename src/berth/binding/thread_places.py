"""Cores of a process's share for classes of its threads."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from berth.binding.snapshot import Thread
from berth.binding.thread_class import role_of
from berth.binding.view import Task, View, united
from berth.errors import MalformedError
from berth.host.cpuset import CpuSet

#: Classes that may get cores of their own, in the order in which they are served.
CLASSES: Final = ("main", "acl", "release", "sq", "communication", "dataloader", "other")

_SHARE: Final = re.compile(r"([0-9]{1,4})(%?)")


@dataclass(frozen=True, slots=True)
class ClassShare:
    """How many whole cores a class gets: `number` of them, or that percent of the share, at least one."""

    number: int
    percent: bool = False

    def cores(self, available: int) -> int:
        """Return the number of cores out of so many."""
        return max(1, available * self.number // 100) if self.percent else self.number

    def __str__(self) -> str:
        return f"{self.number}{'%' if self.percent else ''}"


@dataclass(frozen=True, slots=True)
class Places:
    """The cores of each class that has some of its own, and what is left for all other threads."""

    by_class: dict[str, CpuSet]
    rest: CpuSet

    def of(self, task: Task, thread: Thread) -> CpuSet:
        """Return the CPUs of one thread."""
        return self.by_class.get(class_of(task, thread), self.rest)


def parse_thread_classes(text: str) -> dict[str, ClassShare]:
    """Return the shares that `acl=1,release=1,dataloader=25%` names: whole cores, or percent of the cores.

    Raises:
        MalformedError: A class is unknown or named twice, or a share is no number from 1 on.
    """
    found: dict[str, ClassShare] = {}
    for part in filter(None, text.split(",")):
        name, _, value = part.strip().partition("=")
        share = _SHARE.fullmatch(value)
        known = name in CLASSES and name not in found
        if not known or share is None or int(share[1]) == 0 or (share[2] and int(share[1]) > 99):
            raise MalformedError(
                "bad-thread-classes",
                f"--thread-classes: {part!r} is not CLASS=CORES or CLASS=PERCENT%, with each class once",
                f"Write acl=1,release=1,dataloader=25% with classes among {', '.join(CLASSES)}.",
            )
        found[name] = ClassShare(int(share[1]), percent=bool(share[2]))
    return found


def class_of(task: Task, thread: Thread) -> str:
    """Return the class of a thread; a worker process that shares its parent's place is what its own name says."""
    if not task.leads:
        own = role_of(task.process.comm, is_main=False).name
        if own == "dataloader" or thread.key_class == "main":
            return own if own in CLASSES else "other"
    return thread.key_class if thread.key_class in CLASSES else "other"


def place_classes(
    view: View, family: Iterable[Task], share: CpuSet, wanted: Mapping[str, ClassShare]
) -> tuple[Places | None, str]:
    """Return the cores of each class, or None and why there are none.

    Classes without a thread get nothing. The last cores of the share go to the classes, and the first stay for the
    threads of no such class.

    Args:
        view: The machine.
        family: The processes that use the share.
        share: CPUs of the process.
        wanted: What each class gets.
    """
    present = {class_of(task, thread) for task in family for thread in task.movable}
    named = [name for name in CLASSES if name in wanted and name in present]
    cores = _cores(view, share)
    need = {name: wanted[name].cores(len(cores)) for name in named}
    others = bool(present - set(named))
    if not named:
        return None, ""
    if sum(need.values()) + others > len(cores):
        asked = ", ".join(f"{name} {number}" for name, number in need.items())
        return None, f"{len(cores)} cores are not enough for {asked}" + (" and one for the rest" if others else "")
    by_class: dict[str, CpuSet] = {}
    end = len(cores)
    for name in reversed(named):
        begin = end - need[name]
        by_class[name] = united(cores[begin:end])
        end = begin
    rest = united(cores[:end])
    return Places(by_class, rest or share), ""


def _cores(view: View, share: CpuSet) -> list[CpuSet]:
    """Return the parts of cores that lie in a share, by CPU number."""
    keys = {core.key: core for cpu in share for core in [view.core_of(cpu)] if core is not None}
    return [keys[key].cpus & share for key in sorted(keys)]
