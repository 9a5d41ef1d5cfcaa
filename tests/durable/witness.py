"""What others see of the state file `s` of a directory, and what a call ended with."""

import stat
from collections.abc import Callable
from pathlib import Path

from berth.durable.state import State, StateFile
from berth.errors import BerthError

#: A user and group that is neither root nor the caller.
OTHER_ID = 65534


def contents(work: Path) -> dict[str, tuple[int, int, bytes]]:
    """Return inode, time of change and content of every file."""
    found = {}
    for path in sorted(work.iterdir()):
        status = path.lstat()
        content = path.read_bytes() if stat.S_ISREG(status.st_mode) else b""
        found[path.name] = (status.st_ino, status.st_mtime_ns, content)
    return found


def read(work: Path) -> State:
    """Return what a new opening of `s` reads."""
    with StateFile.open(str(work / "s")) as state:
        return state.read()


def raised(function: Callable[..., object], *arguments: object) -> list[object] | None:
    """Return the class, and the name or errno and path, of what a call ends with."""
    try:
        function(*arguments)
    except BerthError as error:
        return [type(error).__name__, error.name]
    except OSError as error:
        return [type(error).__name__, error.errno, error.filename]
    return None
