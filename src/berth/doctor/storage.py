"""Does a directory refuse to replace a name? Tried inside it, where work-state would lie."""

import os
import shlex
from typing import Final

from berth.doctor.abilities import DOES_NOT, LESS, WORKS, Ability
from berth.epoch.capability import Accepted, Capability
from berth.epoch.epoch import EpochRoot
from berth.epoch.examine import examine
from berth.errors import BerthError, FailedError, MalformedError

_FOUND: Final = "a rename with RENAME_NOREPLACE succeeded, and a second one onto the same name was refused"


def state_root(path: str, accepted: Accepted) -> Ability:
    """Probe the state root `path`; where there is none yet, the nearest directory above it. Nothing is created."""
    name = "state root"
    nearest = _nearest_existing(path)
    try:
        if nearest == path and os.path.isdir(path):
            with EpochRoot(path, accepted=accepted) as root:
                return _ability(name, root.capability, f"in {path!r} {_FOUND}")
        found = examine(os.path.realpath(nearest), accepted=accepted, as_root=False)
        if isinstance(found.refusal, FailedError):
            why = f"{path!r} does not exist yet, and {found.refusal.message}"
            make = f"install -d -m 700 -o {os.geteuid()} -g {os.getegid()} {shlex.quote(path)}"
            mend = f"Make it yours, as root: `{make}`; or choose one that you may write: `export BERTH_STATE_ROOT=DIR`."
            return Ability(name=name, level=DOES_NOT, why=why, mend=mend)
    except BerthError as error:
        return Ability(name=name, level=DOES_NOT, why=error.message, mend=error.fix)
    return _ability(name, found, f"{path!r} does not exist yet; in {nearest!r}, above it, {_FOUND}")


def check_directory(path: str) -> None:
    """Refuse a path that no file system can be tried at.

    Raises:
        MalformedError: It is not a directory.
    """
    if not os.path.isdir(path):
        what = "is not a directory" if os.path.lexists(path) else "does not exist"
        raise MalformedError(
            "bad-directory", f"{path!r} {what}", "Give an existing directory: `berth doctor --fs DIR`."
        )


def file_system(path: str, accepted: Accepted) -> Ability:
    """Probe the directory `path`."""
    name = "file system"
    try:
        found = examine(os.path.realpath(path), accepted=accepted, as_root=False)
    except BerthError as error:
        return Ability(name=name, level=DOES_NOT, why=error.message, mend=error.fix)
    return _ability(name, found, f"in {path!r} {_FOUND}")


def _ability(name: str, found: Capability, why: str) -> Ability:
    if found.refusal is not None:
        return Ability(name=name, level=DOES_NOT, why=found.refusal.message, mend=found.refusal.fix)
    if not found.durable:
        kind = found.mount.file_system if found.mount else "unknown"
        return Ability(name=name, level=LESS, why=f"{why}; you accepted that it is {found.medium} ({kind})")
    return Ability(name=name, level=WORKS, why=why)


def _nearest_existing(path: str) -> str:
    while not os.path.lexists(path):
        path = os.path.dirname(path)
    return path
