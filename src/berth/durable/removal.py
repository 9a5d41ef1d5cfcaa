"""What walkers that remove a tree keep in mind and share: limits, the way down, and what is given to another one."""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class PassedBy:
    """An entry that could not be removed.

    Attributes:
        path: Its path, relative to the directory that holds the tree.
        errno: Why: EACCES, EPERM (immutable), EBUSY, EXDEV (another file system), ENOTEMPTY (a late writer), EIO.
    """

    path: str
    errno: int


@dataclass(slots=True)
class Limits:
    """When to stop. Walkers of one tree share it.

    Attributes:
        entries: Most entries to remove, or None.
        deadline_s: Monotonic time to stop at once something was removed, or None.
        cancelled: Set to stop every walker before its next removal.
        patience: Most entries to pass by, or None.
        most_told: How many of the entries that are passed by are told about.
        passed: How many were passed by so far.
        on_passed: Told about entries that are passed by, from any walker's thread.
        on_removed: Told how many entries were removed since the last time, from any walker's thread.
    """

    entries: int | None = None
    deadline_s: float | None = None
    cancelled: bool = False
    patience: int | None = None
    most_told: int = 100
    passed: int = 0
    on_passed: Callable[[PassedBy], None] = lambda _passed: None
    on_removed: Callable[[int], None] = lambda _count: None

    def are_reached(self, removed: int) -> bool:
        """Say whether a walker that removed `removed` entries has to stop."""
        if self.cancelled or self.is_out_of_patience():
            return True
        if self.entries is not None and removed >= self.entries:
            return True
        return self.deadline_s is not None and removed > 0 and time.monotonic() >= self.deadline_s

    def is_out_of_patience(self) -> bool:
        """Say whether too much was passed by."""
        return self.patience is not None and self.passed >= self.patience


#: The names on the way down to a directory, the last one first: `(way to the one above, name)`, or None at the top.
Way = tuple["Way", str] | None


def path_of_way(way: Way) -> str:
    """Return the path that `way` leads along."""
    names = []
    while way is not None:
        way, name = way
        names.append(name)
    return os.path.join("", *reversed(names))


@dataclass(slots=True, eq=False)
class Offer:
    """Sub-directories of one directory that its walker and another one take from the same list.

    Attributes:
        fd: The directory, for whoever takes the offer.
        pending: Names in it; both pop from this one list.
        way: The way down to it, for what is told about.
        nested: How many walkers wait, directly or not, for the one that takes it.
        kept: Names that the other one could not remove.
        done: Whether the other one is through with its last directory.
    """

    fd: int
    pending: list[str]
    way: Way
    nested: int
    kept: set[str] = field(default_factory=set)
    done: bool = False


@dataclass(slots=True)
class Level:
    """One directory on the way from the base to where the walker is.

    Attributes:
        name: Its name in the directory above.
        identity: (st_dev, st_ino).
        way: The way down to it.
        pending: Sub-directories seen and not yet entered.
        read: Whether its names were read through the walker's descriptor.
        scanned: Whether the last scan reached the end.
        dirty: Whether something was removed that was not synced.
        kept: Names that were passed by.
        passes: How often a sub-directory was found not empty after it had been emptied.
        offer: What is shared with another walker.
    """

    name: str
    identity: tuple[int, int]
    way: Way = None
    pending: list[str] = field(default_factory=list)
    read: bool = False
    scanned: bool = False
    dirty: bool = False
    kept: set[str] = field(default_factory=set)
    passes: dict[str, int] = field(default_factory=dict)
    offer: Offer | None = None
