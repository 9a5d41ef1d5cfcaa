"""What a state root holds, looked at without changing, locking or probing anything."""

import os
from dataclasses import dataclass
from typing import Final

from berth.durable.files import list_names
from berth.epoch import names
from berth.epoch.directory import open_root_directory
from berth.errors import FailedError
from berth.linux.locks import lock_holders
from berth.linux.mounts import read_mounts

_DIRECTORY: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


@dataclass(frozen=True, slots=True, kw_only=True)
class Listed:
    """One epoch of a root.

    Attributes:
        name: Its directory.
        state: `active` (a process holds it), `left` (active, and its processes are gone), `retired`, or `foreign`: the
            name is reserved and none that berth gives, or is no directory.
        epoch: Epoch id; None where foreign.
        retired_at_ms: When it was retired, in milliseconds since 1970-01-01 UTC, or None.
        holders: Pids that hold it.
    """

    name: str
    state: str
    epoch: str | None = None
    retired_at_ms: int | None = None
    holders: tuple[int, ...] = ()


def list_epochs(root: str) -> list[Listed]:
    """Return the epochs in the directory `root`, active ones first, retired ones from the oldest on.

    Raises:
        MalformedError: It is not a directory.
        FailedError: It cannot be read.
    """
    fd = open_root_directory(root)
    try:
        looked = [_look(fd, name) for name in list_names(fd) if names.is_reserved(name)]
    except OSError as error:
        raise _unreadable(root, error) from error
    finally:
        os.close(fd)
    found = [one for one in looked if one is not None]
    return sorted(found, key=lambda one: (one.state in ("retired", "foreign"), one.retired_at_ms or 0, one.name))


def count_entries(root: str, entries: list[str], *, most: int) -> tuple[int, bool]:
    """Count the names in the directories `entries` of `root`, their own included; follow no link and enter no mount.

    Args:
        root: Their directory.
        entries: Names.
        most: Where to stop.

    Returns:
        How many there are, and whether that is all: a directory that cannot be read is not counted further.
    """
    base = os.path.realpath(root)
    mounted = {mount.mount_point for mount in read_mounts()}
    waiting = [os.path.join(base, name) for name in entries]
    count, whole = len(waiting), True
    while waiting:
        try:
            with os.scandir(waiting.pop()) as below:
                for entry in below:
                    count += 1
                    if entry.path in mounted:
                        whole = False
                    elif entry.is_dir(follow_symlinks=False):
                        waiting.append(entry.path)
        except OSError:
            whole = False
        if count >= most:
            return count, False
    return count, whole


def _look(root_fd: int, name: str) -> Listed | None:
    """Return what the entry `name` is; None where it is gone meanwhile."""
    retired = names.parse_retired(name)
    epoch = retired[0] if retired else names.parse_active(name)
    if epoch is None:
        return Listed(name=name, state="foreign")
    try:
        fd = os.open(name, _DIRECTORY, dir_fd=root_fd)
    except FileNotFoundError:
        return None
    except NotADirectoryError:
        return Listed(name=name, state="foreign", epoch=epoch)
    try:
        holders = lock_holders(fd)
    finally:
        os.close(fd)
    if retired:
        at = names.retired_at_ms(retired[1])
        return Listed(name=name, state="retired", epoch=epoch, retired_at_ms=at, holders=holders)
    return Listed(name=name, state="active" if holders else "left", epoch=epoch, holders=holders)


def _unreadable(root: str, error: OSError) -> FailedError:
    return FailedError(
        "state-root", f"the state root {root!r} cannot be read: {error.strerror}", "Ask its owner, or become that user."
    )
