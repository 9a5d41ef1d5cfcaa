"""Remove trees: whole, or a bounded step at a time, to be gone on with by anybody later.

A step leaves nothing but a smaller tree: there is no cursor file, the next step reads what is there. A tree that a file
system is mounted in, or on, is not touched at all.

Out of scope: a process that moves a directory of the tree elsewhere while it is being emptied. Its entries are lost
where it was moved to; the walker notices on the way up and stops.
"""

import errno
import math
import os
import time
from collections.abc import Callable
from typing import Final, NamedTuple

from berth.durable.crew import remove_together
from berth.durable.removal import Limits, PassedBy
from berth.durable.walk import Walk
from berth.errors import ForbiddenError
from berth.linux import syscalls
from berth.linux.below import open_below
from berth.linux.mounts import mounts_within, path_of, read_mounts

#: Why a step ended (the words of the epoch design's reclaim step).
COMPLETE: Final = "complete"
ENTRY_BUDGET: Final = "entry-budget"
TIME_BUDGET: Final = "time-budget"
#: Everything that could be removed is gone; what was passed by keeps the rest.
BLOCKED: Final = "blocked"
_DIRECTORY: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


class Step(NamedTuple):
    """What one step did.

    Attributes:
        removed_entries: Names removed, the tree's own included.
        complete: Whether the tree is gone, durably.
        stop_reason: COMPLETE, ENTRY_BUDGET, TIME_BUDGET or BLOCKED.
    """

    removed_entries: int
    complete: bool
    stop_reason: str


def durable_rmtree_step(
    path: str,
    *,
    entry_limit: int | None = None,
    time_limit: float | None = None,
    dir_fd: int | None = None,
    workers: int = 1,
    patience: int | None = None,
    on_passed: Callable[[PassedBy], None] = lambda _passed: None,
    on_removed: Callable[[int], None] = lambda _count: None,
) -> Step:
    """Remove at most `entry_limit` entries of the directory tree `path` and make that durable.

    At least one entry is removed if any can be. Time is looked at between system calls: the step may outlast its limit
    by the one call that is under way, and by the fsync of the directories that it changed and leaves.

    Args:
        path: The directory, or its name in `dir_fd`.
        entry_limit: Most names to remove, 1 or more; None for no limit.
        time_limit: Seconds, finite and not negative; None for no limit.
        dir_fd: Open directory that holds it.
        workers: Threads; more than one work only on different directories, and not under an entry limit.
        patience: Most entries to pass by before the step ends as blocked; None for no limit, which it takes to remove
            something behind any number of entries that cannot be removed.
        on_passed: Told about entries that cannot be removed and are passed by, the first hundred of them.
        on_removed: Told how many entries were removed since the last time.

    Raises:
        ValueError: A limit is out of range, or `path` does not end in the name of an entry.
        FileNotFoundError: There is no such entry.
        NotADirectoryError: It is something else; links are not followed.
        ForbiddenError: Something is mounted on or below it, or it was moved meanwhile.
        UncertainError: Entries were removed, and may be back after a power cut.
        OSError: It cannot be opened.
    """
    limits = _limits(entry_limit, time_limit, on_passed, on_removed)
    limits.patience = patience
    directory, name = (os.path.split(path)) if dir_fd is None else ("", path)
    syscalls.check_name(name)
    base = os.open(directory or ".", _DIRECTORY, dir_fd=dir_fd)
    try:
        _refuse_mounts(base, name)
        _check_root(base, name, path)
        if workers > 1 and entry_limit is None:
            removed, kept = remove_together(os.dup(base), name, limits, workers=workers)
        else:
            with Walk(os.dup(base), [name], limits) as walk:
                walk.run()
                removed, kept = walk.removed, bool(walk.kept)
        return Step(removed, *_outcome(limits, removed, kept, _is_there(name, base)))
    finally:
        os.close(base)


def durable_rmtree(path: str, *, dir_fd: int | None = None, workers: int = 2) -> int:
    """Remove the directory tree `path` durably and return how many names that were, its own included.

    Raises:
        OSError: Something in it cannot be removed: the errno and path of the first such entry; the rest is gone.
        ValueError, ForbiddenError, UncertainError: As `durable_rmtree_step`.
    """
    passed: list[PassedBy] = []
    step = durable_rmtree_step(
        path, dir_fd=dir_fd, workers=workers, on_passed=lambda one: passed.append(one) if not passed else None
    )
    if not step.complete:
        why = passed[0] if passed else PassedBy(path, errno.ENOTEMPTY)
        raise OSError(why.errno, os.strerror(why.errno), os.path.join(os.path.dirname(path), why.path))
    return step.removed_entries


def _limits(
    entry_limit: int | None,
    time_limit: float | None,
    on_passed: Callable[[PassedBy], None],
    on_removed: Callable[[int], None],
) -> Limits:
    if entry_limit is not None and entry_limit < 1:
        raise ValueError(f"entry_limit is {entry_limit}, not a positive number")
    if time_limit is not None and not (math.isfinite(time_limit) and time_limit >= 0):
        raise ValueError(f"time_limit is {time_limit}, not a number of seconds")
    deadline = None if time_limit is None else time.monotonic() + time_limit
    return Limits(entries=entry_limit, deadline_s=deadline, on_passed=on_passed, on_removed=on_removed)


def _outcome(limits: Limits, removed: int, kept: bool, there: bool) -> tuple[bool, str]:
    if not there:
        return True, COMPLETE
    if limits.entries is not None and removed >= limits.entries:
        return False, ENTRY_BUDGET
    if limits.is_out_of_patience():
        return False, BLOCKED
    if not kept and limits.deadline_s is not None:
        return False, TIME_BUDGET
    return False, BLOCKED


def _is_there(name: str, dir_fd: int) -> bool:
    try:
        os.stat(name, dir_fd=dir_fd, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return True


def _refuse_mounts(base_fd: int, name: str) -> None:
    """Refuse a tree with a mount on or below it, which removing names would empty."""
    where = os.path.join(path_of(base_fd), name)
    if not where.startswith("/"):  # in a mount that was detached: none of its mounts are shown, and none are entered
        return
    mounted = mounts_within(where, read_mounts())
    if mounted:
        raise ForbiddenError(
            "mounted-tree",
            f"{mounted[0].mount_point!r} is a mount ({mounted[0].file_system}), on or below {where!r}, and what is "
            "mounted there is never removed",
            f"Unmount it first: umount {mounted[0].mount_point!r}",
        )


def _check_root(base_fd: int, name: str, path: str) -> None:
    """Refuse what is no directory of this file system: a link to one, a subvolume, a mount hidden from the table."""
    try:
        fd = open_below(name, dir_fd=base_fd)
    except OSError as error:
        code = errno.ENOTDIR if error.errno == errno.ELOOP else error.errno or 0
        raise OSError(code, os.strerror(code), path) from error
    try:
        if os.fstat(fd).st_dev != os.fstat(base_fd).st_dev:
            raise OSError(errno.EXDEV, os.strerror(errno.EXDEV), path)
    finally:
        os.close(fd)
