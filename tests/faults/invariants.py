"""What has to hold after any fault, on the disk and in the order of system calls.

Work is a sequence of steps, each of which is acknowledged when it is done. `states` are the trees before the first step
and after each one. Whatever goes wrong, the disk shows the state after the last acknowledged step or the state after
the next one. That one sentence holds it all: what was acknowledged is there in full, a retirement is active or retired
and never half, both or neither, a name holds its old bytes or its new ones.
"""

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from berth.epoch.epoch import EpochRoot
from berth.epoch.names import is_probe, parse_active, parse_retired

#: What lies below a directory: path relative to it → content, or None for a directory.
Tree = Mapping[str, bytes | None]

#: The lock file of a state root: it holds nothing and may come and go with a power cut.
_LOCKS: Final = (".berth.lock", ".berth-reclaim.lock")
#: The name that `durable_write` gives its temporary for a file NAME: .NAME.<16 hex>.tmp
_TEMPORARY: Final = re.compile(r"\..+\.[0-9a-f]{16}\.tmp")
_SHOWN_BYTES: Final = 24


class ViolationError(AssertionError):
    """An invariant does not hold."""


def read_tree(directory: Path) -> dict[str, bytes | None]:
    """Read everything below `directory`, without lock files; a symbolic link counts by its target."""
    tree: dict[str, bytes | None] = {}
    for path in sorted(directory.rglob("*")):
        name = str(path.relative_to(directory))
        if path.name in _LOCKS:
            continue
        if path.is_symlink():
            tree[name] = b"-> " + os.fsencode(path.readlink())
        else:
            tree[name] = None if path.is_dir() else path.read_bytes()
    return tree


def is_temporary(path: str) -> bool:
    """Say whether `path` can be told to be a temporary of `durable_write` that a kill left behind."""
    return _TEMPORARY.fullmatch(os.path.basename(path)) is not None


def _may_be_left(path: str) -> bool:
    return is_temporary(path) or is_probe(path.partition("/")[0])


def check_tree(tree: Tree, allowed: Sequence[Tree], *, temporaries: bool = False) -> None:
    """Check that `tree` is one of the `allowed` ones.

    With `temporaries`, left-over temporary files and directories of probes do not count; the next start removes these.

    Raises:
        ViolationError: It is none of them.
    """
    seen = {path: data for path, data in tree.items() if not (temporaries and _may_be_left(path))}
    if any(seen == state for state in allowed):
        return
    told = " or ".join(_difference(seen, state) for state in allowed)
    raise ViolationError(f"the disk shows none of the {len(allowed)} states it may show: {told}")


def check_progress(tree: Tree, states: Sequence[Tree], acknowledged: int, *, between: Sequence[Tree] = ()) -> None:
    """Check `tree` after a kill or a power cut, when `acknowledged` steps were reported as done.

    Args:
        tree: What is on the disk.
        states: The trees before the first step and after each one.
        acknowledged: How many steps were done.
        between: Further states that the step after them may be caught in.

    Raises:
        ViolationError: It is neither the state after the acknowledged steps nor the state after one more.
    """
    check_tree(tree, [*states[acknowledged : acknowledged + 2], *between], temporaries=True)


def check_next_start(root: Path) -> None:
    """Open the state root, take over every epoch that is left and retire it; nothing that was there may get lost.

    Raises:
        ViolationError: Something is left over, or has changed.
        OSError, BerthError: It did not work.
    """
    before = _contents(root)
    with EpochRoot(str(root)) as opened:
        for epoch in opened.active():
            adopted = opened.adopt(epoch)
            if adopted is None:
                raise ViolationError(f"the epoch of a dead process cannot be taken over: {epoch}")
            with adopted:
                adopted.retire()
        left = [name for name in os.listdir(root) if is_probe(name) or parse_active(name)]
    if left:
        raise ViolationError(f"the next start leaves {left}")
    if _contents(root) != before:
        raise ViolationError(f"the next start made {_contents(root)} of {before}")


def _contents(root: Path) -> list[tuple[str, str, bytes | None]]:
    """Return everything in the root, with the ids of the epochs in place of their names, active or retired."""
    found = []
    for path, data in read_tree(root).items():
        top, _, rest = path.partition("/")
        epoch = parse_active(top) or (parse_retired(top) or [top])[0]
        if not is_probe(top):
            found.append((epoch, rest, data))
    return sorted(found, key=lambda item: item[:2])


def _difference(seen: Tree, wanted: Tree) -> str:
    lacking = sorted(set(wanted) - set(seen))
    surplus = sorted(set(seen) - set(wanted))
    changed = [
        f"{path!r} holds {_short(seen[path])} instead of {_short(wanted[path])}"
        for path in sorted(set(seen) & set(wanted))
        if seen[path] != wanted[path]
    ]
    return f"(without {lacking}, with {surplus}, {changed})"


def _short(data: bytes | None) -> str:
    if data is None:
        return "a directory"
    return f"{len(data)} bytes {data[:_SHOWN_BYTES]!r}"


@dataclass(frozen=True)
class Call:
    """One system call as strace prints it with -y: every descriptor followed by its path in angle brackets.

    Attributes:
        name: Name of the call.
        text: The whole line.
    """

    name: str
    text: str

    @property
    def succeeded(self) -> bool:
        """Whether the kernel carried it out and reported success."""
        match = re.search(r"\) += (-?\d+)", self.text)
        return match is not None and not match[1].startswith("-") and "(INJECTED)" not in self.text

    @property
    def descriptor(self) -> tuple[int, str] | None:
        """Number and path of the descriptor that is its first argument, if it is one."""
        match = re.match(r"\w+\((\d+)<([^>]*)>", self.text)
        return (int(match[1]), match[2]) if match else None

    def paths(self) -> list[str]:
        """Return the absolute paths it names, in order."""
        named = re.findall(r'(?:(?:AT_FDCWD|\d+)<([^>]*)>, )?"((?:[^"\\]|\\.)*)"', self.text)
        return [os.path.join(directory, name) for directory, name in named]


#: Calls that add, move or remove a name, whose directories have to be synced.
_MOVING: Final = frozenset({"rename", "renameat", "renameat2"})
_ADDING: Final = frozenset({"link", "linkat", "symlink", "symlinkat", "mkdir", "mkdirat", "openat"})
_REMOVING: Final = frozenset({"unlink", "unlinkat", "rmdir"})
_SYNCING: Final = frozenset({"fsync", "fdatasync"})
_WRITING: Final = frozenset({"write", "pwrite64", "writev", "ftruncate"})


def check_synced(calls: Iterable[Call]) -> None:
    """Check that at each acknowledgement, a write to standard output, all that was written and named is synced.

    Files count once something was written to them, directories once a name was added, moved or removed in them. What a
    probe does in its private directory is not meant to last. What failed to be synced once never counts as synced: the
    kernel may have dropped it and answers the next fsync(2) with success.

    Raises:
        ViolationError: Something was acknowledged before it was durable.
    """
    unsynced: dict[str, Call] = {}
    lost: dict[str, Call] = {}
    for call in calls:
        number, path = call.descriptor or (None, "")
        if call.name == "write" and number == 1:
            for path, reason in {**unsynced, **lost}.items():
                if '"error ' not in call.text:
                    raise ViolationError(f"{call.text!r} although {path} is not durable since {reason.text!r}")
        elif call.name in _SYNCING and call.succeeded:
            unsynced.pop(path, None)
        elif call.name in _SYNCING:
            lost[path] = call
        elif call.succeeded:
            for gone in call.paths() if call.name in _REMOVING else []:
                unsynced = {path: why for path, why in unsynced.items() if not f"{path}/".startswith(f"{gone}/")}
            unsynced.update((path, call) for path in _dirtied(call) if not any(map(is_probe, path.split("/"))))


def _dirtied(call: Call) -> list[str]:
    """Return the files and directories that are less durable after the call."""
    if call.name in _WRITING and call.descriptor is not None:
        return [call.descriptor[1]]
    if call.name in _MOVING:
        changed = call.paths()
    elif call.name in _REMOVING or (call.name in _ADDING and (call.name != "openat" or "O_EXCL" in call.text)):
        changed = call.paths()[-1:]
    else:
        changed = []
    return [os.path.dirname(path) for path in changed if not is_probe(os.path.basename(path))]
