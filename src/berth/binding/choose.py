"""Find the processes that are meant: by number, by a pattern, or because they hold an accelerator."""

import os
import re
from collections.abc import Iterable
from typing import Final

from berth.binding.snapshot import RankEntry
from berth.errors import MalformedError
from berth.host.tasks import list_pids
from berth.linux.process import read_status

#: Device nodes whose holders use an accelerator: Ascend (driver, one node a chip), NVIDIA, AMD.
_DEVICES: Final = re.compile(r"/dev/(davinci[0-9]+|nvidia[0-9]+|dri/renderD[0-9]+|kfd)")
_RANK: Final = re.compile(r"(?:rank)?([0-9]{1,6})=([0-9]{1,10})(?::(?:npu)?([0-9]{1,4}))?", re.IGNORECASE)
_MOST_BYTES: Final = 1 << 20


def matching(patterns: Iterable[str]) -> list[int]:
    """Return the pids whose command line one of the regular expressions is found in; never this process or a parent.

    Raises:
        MalformedError: A pattern is none, or none matches anything.
    """
    compiled = []
    for pattern in patterns:
        try:
            compiled.append(re.compile(pattern))
        except re.error as error:
            raise MalformedError("bad-pattern", f"--match {pattern!r} is no regular expression: {error}") from error
    own = _ancestors()
    found = [pid for pid in list_pids() if pid not in own and any(one.search(full_command(pid)) for one in compiled)]
    if not found:
        shown = " or ".join(repr(pattern.pattern) for pattern in compiled)
        raise MalformedError(
            "no-match",
            f"no process that you can see has a command line with {shown} in it",
            "See what runs with `ps -ef`; the pattern is a regular expression.",
        )
    return found


def holding_accelerators() -> list[int]:
    """Return the pids that have a device of an accelerator open; those of other users are seen by root alone."""
    return [pid for pid in list_pids() if any(_DEVICES.fullmatch(name) for name in _open_files(pid))]


def parse_ranks(text: str) -> tuple[RankEntry, ...]:
    """Return the ranks in `text`, a list or the content of a file: `rank0=123:npu0,rank1=124:npu1` or one a line.

    Raises:
        MalformedError: An entry is not of that form.
    """
    entries = []
    for part in filter(None, (part.strip() for part in re.split(r"[,\n]", re.sub(r"#.*", "", text)))):
        match = _RANK.fullmatch(part)
        if match is None:
            raise MalformedError(
                "bad-rank-map",
                f"{part!r} is no entry of a rank map",
                "Write RANK=PID or RANK=PID:NPU, such as rank0=4711:npu0, with commas or one a line.",
            )
        npu = None if match[3] is None else int(match[3])
        entries.append(RankEntry(rank=int(match[1]), pid=int(match[2]), npu_device=npu))
    return tuple(entries)


def read_ranks(spec: str) -> tuple[RankEntry, ...]:
    """Return the ranks that `--rank-map` names: a file, or the list itself.

    Raises:
        MalformedError: It is neither.
    """
    if not os.path.exists(spec):
        return parse_ranks(spec)
    try:
        with open(spec, "rb") as file:
            data = file.read(_MOST_BYTES)
        return parse_ranks(data.decode())
    except (OSError, UnicodeDecodeError) as error:
        raise MalformedError("bad-rank-map", f"the rank map {spec!r} cannot be read: {error}") from error


def full_command(pid: int) -> str:
    """Return the whole command line of `pid`, its words joined by blanks; empty where it has none or is gone."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            words = file.read().rstrip(b"\0").split(b"\0")
    except OSError:
        return ""
    return b" ".join(words).decode("utf-8", "backslashreplace")


def _ancestors() -> set[int]:
    found = set()
    pid = os.getpid()
    while pid > 0 and pid not in found:
        found.add(pid)
        pid = int(read_status(pid).get("PPid", "0"))
    return found


def _open_files(pid: int) -> list[str]:
    directory = f"/proc/{pid}/fd"
    names = []
    try:
        for name in os.listdir(directory):
            try:
                names.append(os.readlink(f"{directory}/{name}"))
            except OSError:
                continue  # closed meanwhile
    except OSError:
        return []
    return names
