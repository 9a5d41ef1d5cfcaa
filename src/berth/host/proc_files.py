"""The files of one process below /proc: read through one descriptor, and what to say when they cannot be.

Text is decoded as UTF-8 with what is not UTF-8 written as `\\xNN`, because all of it goes into JSON.
"""

import contextlib
import os
import re
from collections.abc import Iterator
from typing import Final

from berth.errors import ForbiddenError, MalformedError
from berth.host.sysfs import read_optional
from berth.linux.mounts import parse_mounts
from berth.linux.process import StatLine, parse_stat

#: Values of the option of the proc mount; words since Linux 5.8, numbers before (proc(5)).
HIDEPID: Final = {"off": 0, "noaccess": 1, "invisible": 2, "ptraceable": 4}
#: What the kernel answers about a process or a thread that has ended.
GONE: Final = (FileNotFoundError, ProcessLookupError)
#: Field of the stat file (proc_pid_stat(5)) that every kernel since 2.5.19 has.
_POLICY: Final = 41
_CHUNK: Final = 1 << 16
_AS_OWNER: Final = "Run this as the owner of the process or as root."

_PAGE_KIB = 4
_PAGES = re.compile(r" N([0-9]+)=([0-9]+)(?= |$)")
_PAGE_SIZE = re.compile(r" kernelpagesize_kB=([0-9]+)(?= |$)")


def hidepid(root: str = "/") -> int:
    """Return how /proc hides the processes of other users: 0 not, 1 their files, 2 and 4 altogether (proc(5)).

    Of mounts stacked on /proc the last counts. Where no mount table can be read it is 0.

    Raises:
        MalformedError: The mount table or the option is not in the kernel's format.
    """
    text = read_optional(root, "/proc/self/mountinfo") or ""
    mounts = [mount for mount in parse_mounts(os.fsencode(text)) if mount.mount_point == "/proc"]
    options = mounts[-1].super_options if mounts and mounts[-1].file_system == "proc" else ()
    value = next((option.removeprefix("hidepid=") for option in options if option.startswith("hidepid=")), "off")
    if value in HIDEPID:
        return HIDEPID[value]
    if not re.fullmatch("[0-9]", value):
        raise MalformedError("bad-mount-table", f"/proc is mounted with the unknown option hidepid={value[:80]!a}.")
    return int(value)


def read_pages_by_node(pid: int, root: str = "/") -> dict[int, int] | None:
    """Return how many pages of 4 KiB the process has in memory on each NUMA node; shared pages count in full.

    The kernel walks all page tables of the process for this, which takes a while for a large one.

    Returns:
        Pages by node number, empty without memory; None where it may not be read, or a kernel before 3.14 counts pages
        of unnamed sizes.
    """
    try:
        text = read_optional(root, f"/proc/{pid}/numa_maps")
    except (PermissionError, ProcessLookupError):
        return None
    if text is None:
        return None
    kib: dict[int, int] = {}
    for line in text.split("\n"):
        counts = _PAGES.findall(line)
        size = _PAGE_SIZE.search(line)
        if counts and size is None:
            return None
        for node, pages in counts:
            kib[int(node)] = kib.get(int(node), 0) + int(pages) * int(size[1] if size else 0)
    return {node: kib[node] // _PAGE_KIB for node in sorted(kib)}


@contextlib.contextmanager
def open_directory(path: str, parent: int | None = None) -> Iterator[int]:
    """Hold a directory open, given by its path, relative to `parent` if that is given.

    Raises:
        OSError: It cannot be opened.
    """
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=parent)
    try:
        yield fd
    finally:
        os.close(fd)


def read_at(directory: int, name: str) -> bytes:
    """Return the content of one file in an open directory.

    Raises:
        OSError: It cannot be read; one of `GONE` where the process or thread of the directory has ended.
    """
    fd = os.open(name, os.O_RDONLY | os.O_CLOEXEC, dir_fd=directory)
    try:
        return b"".join(iter(lambda: os.read(fd, _CHUNK), b""))  # A file object takes twice as long.
    finally:
        os.close(fd)


def stat_at(directory: int, source: str) -> StatLine:
    """Return the stat line in an open directory of a process or thread; `source` is its name for the error.

    Raises:
        MalformedError: It is not a whole stat line.
        OSError: See `read_at`.
    """
    text = read_at(directory, "stat")
    with naming(source):
        line = parse_stat(text)
        line.number(_POLICY)  # All that is read from the line stands before this field, or far behind it.
    return line


@contextlib.contextmanager
def naming(source: str) -> Iterator[None]:
    """Turn what a missing or malformed field raises into the error that names the file."""
    try:
        yield
    except (ValueError, KeyError, IndexError) as error:
        raise MalformedError("bad-process-file", f"{source} is not as the kernel writes it: {error!r}.") from error


def decode(data: bytes) -> str:
    """Return bytes of the kernel as text that JSON can hold."""
    return data.decode("utf-8", "backslashreplace")


def gone(pid: int, hiding: int) -> ForbiddenError:
    """Return the error for a process that is not shown, where /proc hides as `hidepid` says."""
    if hiding < HIDEPID["invisible"]:
        return _no_such(f"There is no process {pid}: it has ended, or the number is wrong.", "List the processes anew.")
    why = f"There is no process {pid} that this user can see: it has ended, or the option hidepid={hiding} of the mount"
    return _no_such(f"{why} of /proc hides it, as it hides those of other users.", _AS_OWNER)


def hidden(pid: int, hiding: int) -> ForbiddenError:
    """Return the error for a process that is shown and may not be read, where /proc hides as `hidepid` says."""
    why = f"The process {pid} is there, but this user may not read about it"
    return _no_such(f"{why}: /proc is mounted with hidepid={hiding}." if hiding else f"{why}.", _AS_OWNER)


def is_thread(tid: int, process: int) -> ForbiddenError:
    """Return the error for a number that is a thread of a process."""
    return _no_such(f"{tid} is a thread of the process {process}, not a process.", f"Name {process} instead.")


def _no_such(message: str, fix: str) -> ForbiddenError:
    return ForbiddenError("no-such-process", message, fix)
