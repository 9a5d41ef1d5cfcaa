"""Which retired epochs of a root may be removed: every reserved name is looked at, and one that is none refuses all."""

import errno
import heapq
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from berth.epoch import names
from berth.epoch.epoch import EpochRoot
from berth.errors import FailedError
from berth.linux.below import open_below
from berth.linux.locks import try_lock

#: Retired epochs kept in mind in place of those that turn out to be blocked.
_SPARE_ROOTS: Final = 256
_DIRECTORY: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


@dataclass(slots=True, kw_only=True)
class Discovered:
    """What the names of a root say.

    Attributes:
        scanned: Names read.
        candidates: Retired epochs that nobody holds.
        held: Retired epochs that a process still holds.
        chosen: Names of those to remove, in order.
        whole: Whether all names could be read within the budget; if not, nothing is chosen.
    """

    scanned: int = 0
    candidates: int = 0
    held: int = 0
    chosen: list[str] = field(default_factory=list)
    whole: bool = True


def discover(root: EpochRoot, *, roots: int | None, most_names: int | None, first: str | None) -> Discovered:
    """Validate every reserved name of `root` and choose what may be removed, the oldest first.

    Only as many names are held as may be removed, and some in place of those that turn out to be blocked.

    Args:
        root: The open root.
        roots: Most retired epochs that are wanted, or None.
        most_names: Most names to read, or None.
        first: Epoch id whose retired epochs come before all others, or None.

    Raises:
        FailedError: A reserved name is malformed, or no directory of ours on this file system.
        OSError: The root cannot be read.
    """
    found = Discovered()
    candidates = _candidates(root, most_names, first, found)
    try:
        ordered = sorted(candidates) if roots is None else heapq.nsmallest(roots + _SPARE_ROOTS, candidates)
    except _TooManyError:
        found.whole = False
        return found
    found.chosen = [name for _, _, name in ordered]
    return found


def holds_reserved_names(root: EpochRoot) -> bool:
    """Say whether `root` has a name that is reserved for epochs, whether it is well formed or not."""
    return next(_names(root, None, Discovered()), None) is not None


class _TooManyError(Exception):
    """The root holds more names than may be read."""


def _candidates(
    root: EpochRoot, most_names: int | None, first: str | None, found: Discovered
) -> Iterator[tuple[bool, str, str]]:
    """Yield the retired epochs that nobody holds, by what they are ordered by, counting on the way."""
    for name in _names(root, most_names, found):
        ids = names.parse_retired(name)
        held = _check(root, name)
        if ids is None:
            continue
        if held:
            found.held += 1
            continue
        found.candidates += 1
        yield ids[0] != first, ids[1], name


def _names(root: EpochRoot, most_names: int | None, found: Discovered) -> Iterator[str]:
    """Yield the reserved names of the root, counting all that are read."""
    fresh = os.open(".", _DIRECTORY, dir_fd=root.fd)
    try:
        with os.scandir(fresh) as entries:
            for entry in entries:
                if most_names is not None and found.scanned >= most_names:
                    raise _TooManyError
                found.scanned += 1
                if names.is_reserved(entry.name):
                    yield entry.name
    finally:
        os.close(fresh)


def _check(root: EpochRoot, name: str) -> bool:
    """Refuse a reserved name that is no epoch of ours; say whether it is a retired one that somebody still holds."""
    retired = names.parse_retired(name) is not None
    if not retired and names.parse_active(name) is None:
        raise _foreign(root, name, "its name is none that berth gives")
    try:
        fd = open_below(name, dir_fd=root.fd)
    except FileNotFoundError:
        return True  # retired a moment ago
    except OSError as error:
        what = "something is mounted there" if error.errno == errno.EXDEV else error.strerror
        raise _foreign(root, name, f"it cannot be opened as a directory of this file system: {what}") from error
    try:
        status = os.fstat(fd)
        if status.st_dev != os.fstat(root.fd).st_dev:
            raise _foreign(root, name, "it lies on another file system")
        if status.st_uid not in (os.geteuid(), os.fstat(root.fd).st_uid):
            raise _foreign(root, name, f"it belongs to uid {status.st_uid}")
        return retired and not try_lock(fd, shared=True)
    finally:
        os.close(fd)


def _foreign(root: EpochRoot, name: str, why: str) -> FailedError:
    return FailedError(
        "foreign-name",
        f"{os.path.join(root.path, name)!r} lies where berth keeps epochs and is none: {why}. Nothing was removed",
        "Move it out of the root once you have looked at it.",
    )
