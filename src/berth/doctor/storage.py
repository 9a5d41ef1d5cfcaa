"""Does a directory refuse to replace a name? Tried inside it, where work-state would lie.

A state root that exists is probed as every run does it. Everywhere else the probe gets a directory of its own,
`.berth-doctor-<random>`, removed afterwards: it needs no lock that way, and leaves no lock file in a directory that is
not berth's.
"""

import contextlib
import os
import shlex
import tempfile
from collections.abc import Iterator
from typing import Final

from berth.doctor.abilities import DOES_NOT, WORKS, Ability
from berth.epoch.capability import probe_noreplace
from berth.epoch.epoch import EpochRoot
from berth.errors import BerthError, MalformedError

PREFIX: Final = ".berth-doctor-"
_FOUND: Final = "a rename with RENAME_NOREPLACE succeeded, and a second one onto the same name was refused"
_DIRECTORY: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def state_root(path: str) -> Ability:
    """Probe the state root `path`; where there is none yet, the nearest directory above it. Nothing is created."""
    name = "state root"
    nearest = _nearest_existing(path)
    try:
        if nearest == path and os.path.isdir(path):
            with EpochRoot(path):
                return Ability(name=name, level=WORKS, why=f"in {path!r} {_FOUND}")
        _probe(nearest)
    except BerthError as error:
        return Ability(name=name, level=DOES_NOT, why=error.message, mend=error.fix)
    except OSError as error:
        why = f"{path!r} does not exist yet, and nothing can be made in {nearest!r}: {error.strerror}"
        if nearest == path:
            why = f"nothing can be made in {path!r}: {error.strerror}"
        make = f"install -d -m 700 -o {os.geteuid()} -g {os.getegid()} {shlex.quote(path)}"
        mend = f"Make it yours, as root: `{make}`; or choose one that you may write: `export BERTH_STATE_ROOT=DIR`."
        return Ability(name=name, level=DOES_NOT, why=why, mend=mend)
    return Ability(name=name, level=WORKS, why=f"{path!r} does not exist yet; in {nearest!r}, above it, {_FOUND}")


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


def file_system(path: str) -> Ability:
    """Probe the directory `path`."""
    name = "file system"
    try:
        _probe(path)
    except BerthError as error:
        return Ability(name=name, level=DOES_NOT, why=error.message, mend=error.fix)
    except OSError as error:
        why = f"nothing can be made in {path!r}: {error.strerror}"
        mend = "Choose a directory that you may write, on a disk that is mounted for writing and not full."
        return Ability(name=name, level=DOES_NOT, why=why, mend=mend)
    return Ability(name=name, level=WORKS, why=f"in {path!r} {_FOUND}")


def _probe(path: str) -> None:
    with _private_directory(path) as fd:
        probe_noreplace(fd, path)


@contextlib.contextmanager
def _private_directory(parent: str) -> Iterator[int]:
    path = tempfile.mkdtemp(prefix=PREFIX, dir=parent)
    try:
        fd = os.open(path, _DIRECTORY)
        try:
            yield fd
        finally:
            os.close(fd)
    finally:
        os.rmdir(path)


def _nearest_existing(path: str) -> str:
    while not os.path.lexists(path):
        path = os.path.dirname(path)
    return path
