"""Remove retired epochs, within budgets, resumable by anybody at any time.

    look       at every name in the root, within the discovery budget
    check      all that is reserved for epochs: one malformed name, link or foreign directory, and nothing is removed
    choose     the retired epochs of the epoch that is being opened, then the oldest; none that is still held
    remove     what the budgets allow, at least one entry; the rest is the next step's

`.berth-reclaim.lock` in the root is held from looking to the end and never unlinked, so that steps do not overlap.
Nothing is remembered between steps: what is left of a retired epoch is a smaller retired epoch.
"""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from berth.durable.removal import PassedBy
from berth.durable.tree import BLOCKED, COMPLETE, ENTRY_BUDGET, TIME_BUDGET, Step, durable_rmtree_step
from berth.epoch.discovery import discover, holds_reserved_names
from berth.epoch.epoch import EpochRoot
from berth.epoch.lock import hold_lock
from berth.errors import FailedError, ForbiddenError, MalformedError

LOCK_NAME: Final = ".berth-reclaim.lock"
#: Why a step ended, besides what `durable.tree` says.
EMPTY: Final = "empty"
#: Nothing is left but retired epochs that processes hold.
HELD: Final = "held"
DISABLED: Final = "disabled"
ROOT_LIMIT: Final = "root-limit"
DISCOVERY_BUDGET: Final = "discovery-budget"
#: Entries that could not be removed are told about up to this many.
MOST_TOLD: Final = 100
#: Bounds of the budgets (the original runner's settings); a step beyond them is a mistake in the unit.
MOST_ROOTS: Final = 1_000_000
MOST_ENTRIES: Final = 10_000_000
LEAST_SECONDS: Final = 0.001
MOST_SECONDS: Final = 3600.0
MOST_DISCOVERY: Final = 100_000_000
_DIRECTORY: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


@dataclass(frozen=True, slots=True, kw_only=True)
class Budgets:
    """How much one step may do.

    Attributes:
        roots: Most retired epochs to touch; None for no limit.
        entries: Most names to remove; None for no limit.
        seconds: Time for removing; checked between system calls, so that one call may outlast it. None for no limit.
        discovery: Most names to read in the root; None for no limit.
        patience: Most entries that cannot be removed to pass by in one retired epoch; None for no limit.
    """

    roots: int | None = 1
    entries: int | None = 4096
    seconds: float | None = 0.05
    discovery: int | None = 65_536
    patience: int | None = None

    def __post_init__(self) -> None:
        for name, value, least, most in (
            ("roots", self.roots, 0, MOST_ROOTS),
            ("entries", self.entries, 1, MOST_ENTRIES),
            ("seconds", self.seconds, LEAST_SECONDS, MOST_SECONDS),
            ("discovery", self.discovery, 1, MOST_DISCOVERY),
        ):
            if value is not None and not least <= value <= most:  # NaN is in no range
                raise MalformedError(
                    "bad-budget",
                    f"the budget {name} is {value}, outside {least:,} to {most:,}",
                    "Give a number in that range; the defaults are 1 root, 4096 entries, 0.05 seconds, 65536 names.",
                )


#: What every start of a run does; it does not search what cannot be removed for something that can.
ONE_STEP: Final = Budgets(patience=1000)
#: As much as there is.
UNLIMITED: Final = Budgets(roots=None, entries=None, seconds=None, discovery=None)


@dataclass(slots=True, kw_only=True)
class Reclaimed:
    """What one step saw and did.

    Attributes:
        scanned: Names read in the root.
        candidates: Retired epochs that nobody holds.
        held: Retired epochs that a process still holds.
        selected: Candidates that the step could have touched.
        removed_roots: Names of the retired epochs that are gone.
        removed_entries: Names removed in them, their own included.
        partial: Name of the retired epoch that is partly removed, or None.
        blocked: Names of retired epochs that hold what cannot be removed, and why.
        passed_by: Entries that could not be removed, the first hundred.
        stop_reason: complete, empty, held, disabled, root-limit, entry-budget, time-budget, discovery-budget or
            blocked.
        backlog_roots: Retired epochs that are left, held ones included; of those that were looked at.
    """

    scanned: int = 0
    candidates: int = 0
    held: int = 0
    selected: int = 0
    removed_roots: list[str] = field(default_factory=list)
    removed_entries: int = 0
    partial: str | None = None
    blocked: dict[str, str] = field(default_factory=dict)
    passed_by: list[PassedBy] = field(default_factory=list)
    stop_reason: str = EMPTY
    backlog_roots: int = 0

    def add(self, step: "Reclaimed") -> None:
        """Add a later step: what was seen and why it ended is the later one's, what was removed is the sum."""
        removed_before = self.removed_roots
        self.scanned, self.candidates, self.held = step.scanned, step.candidates, step.held
        self.selected, self.partial, self.stop_reason = step.selected, step.partial, step.stop_reason
        self.blocked, self.passed_by, self.backlog_roots = step.blocked, step.passed_by, step.backlog_roots
        self.removed_entries += step.removed_entries
        self.removed_roots = removed_before + step.removed_roots
        if self.stop_reason == EMPTY and self.removed_roots:
            self.stop_reason = COMPLETE


def reclaim(
    root: EpochRoot,
    budgets: Budgets = ONE_STEP,
    *,
    first: str | None = None,
    wait_s: float = 0.0,
    workers: int = 1,
    on_removed: Callable[[int], None] = lambda _count: None,
) -> Reclaimed | None:
    """Make one step; None where another process is making one and does not finish in `wait_s` seconds.

    Args:
        root: The open root.
        budgets: How much to do.
        first: Epoch id whose retired epochs come first: the one that is being opened.
        wait_s: How long to wait for a step that is under way.
        workers: Threads; more than one are used where there is no entry budget.
        on_removed: Told how many entries were removed since the last time.

    Raises:
        FailedError: A reserved name in the root is malformed or no directory of ours; nothing was removed. Or a retired
            epoch could not be read or removed.
        UncertainError: Entries were removed, and may be back after a power cut.
    """
    try:
        if not _is_root(root):
            return Reclaimed()
        with hold_lock(root.fd, root.path, LOCK_NAME, wait_s=wait_s, error="reclaim-lock") as holders:
            return _step(root, budgets, first, workers, on_removed) if holders is None else None
    except OSError as error:
        raise FailedError(
            "not-reclaimed",
            f"the retired epochs of {root.path!r} could not be looked at or removed: {error}",
            "Look at the directory and its disk; nothing outside retired epochs was touched.",
        ) from error


def _is_root(root: EpochRoot) -> bool:
    """Say whether the directory was ever used as a root; no lock file is left in one that was not."""
    try:
        os.stat(LOCK_NAME, dir_fd=root.fd, follow_symlinks=False)
    except FileNotFoundError:
        return holds_reserved_names(root)
    return True


def _step(
    root: EpochRoot, budgets: Budgets, first: str | None, workers: int, on_removed: Callable[[int], None]
) -> Reclaimed:
    seen = discover(root, roots=budgets.roots, most_names=budgets.discovery, first=first)
    found = Reclaimed(scanned=seen.scanned, candidates=seen.candidates, held=seen.held)
    if not seen.whole:
        found.stop_reason, found.backlog_roots = DISCOVERY_BUDGET, found.candidates + found.held
        return found
    found.selected = len(seen.chosen) if budgets.roots is None else min(len(seen.chosen), budgets.roots)
    task = _Removal(root, budgets, found, workers, on_removed)
    found.stop_reason = task.run(seen.chosen)
    found.backlog_roots = found.candidates + found.held - len(found.removed_roots)
    return found


class _Removal:
    """Removing the chosen retired epochs, one after the other."""

    def __init__(
        self, root: EpochRoot, budgets: Budgets, found: Reclaimed, workers: int, on_removed: Callable[[int], None]
    ) -> None:
        self._root = root
        self._budgets = budgets
        self._found = found
        self._workers = workers
        self._on_removed = on_removed
        self._deadline = None if budgets.seconds is None else time.monotonic() + budgets.seconds

    def run(self, chosen: list[str]) -> str:
        """Remove until a budget is used up, and say why it ended.

        A retired epoch of which nothing can be removed counts for nothing, so that it never keeps the others waiting.
        """
        found, used = self._found, 0
        if self._budgets.roots == 0:
            return DISABLED
        for name in chosen:
            if used == self._budgets.roots:
                return ROOT_LIMIT
            left = None if self._budgets.entries is None else self._budgets.entries - found.removed_entries
            seconds = None if self._deadline is None else max(0.0, self._deadline - time.monotonic())
            if left == 0:
                return ENTRY_BUDGET
            if seconds == 0.0 and found.removed_entries:
                return TIME_BUDGET
            step = self._step(name, left, seconds)
            used += step.removed_entries > 0
            if step.stop_reason not in (COMPLETE, BLOCKED):
                found.partial = name
                return step.stop_reason
        if found.candidates > len(found.removed_roots) + len(found.blocked):
            return ROOT_LIMIT
        if found.blocked:
            return BLOCKED
        if found.held:
            return HELD
        return COMPLETE if found.removed_roots else EMPTY

    def _step(self, name: str, entries: int | None, seconds: float | None) -> Step:
        """Remove as much of one retired epoch as the budgets allow."""
        found = self._found
        passed: list[PassedBy] = []
        try:
            step = durable_rmtree_step(
                name,
                entry_limit=entries,
                time_limit=seconds,
                dir_fd=self._root.fd,
                workers=self._workers,
                patience=self._budgets.patience,
                on_passed=lambda one: passed.append(one) if len(passed) < MOST_TOLD else None,
                on_removed=self._on_removed,
            )
        except ForbiddenError as error:
            found.blocked[name] = error.message
            return Step(0, False, BLOCKED)
        except OSError as error:
            raise FailedError(
                "not-reclaimed",
                f"the retired epoch {os.path.join(self._root.path, name)!r} could not be removed: {error.strerror}",
                "Look at it; nothing outside retired epochs was touched.",
            ) from error
        found.removed_entries += step.removed_entries
        found.passed_by += passed[: MOST_TOLD - len(found.passed_by)]
        if step.complete:
            found.removed_roots.append(name)
        elif step.stop_reason == BLOCKED:
            found.blocked[name] = _why_blocked(passed)
        return step


def _why_blocked(passed: list[PassedBy]) -> str:
    if not passed:
        return "something is added to it all the time"
    first = passed[0]
    below = first.path.partition("/")[2] or "."
    return (
        f"{below!r} in it cannot be removed ({os.strerror(first.errno)}); `lsattr` and `findmnt` may show what keeps it"
    )
