"""The standard streams of a sandboxed command: files are relayed, so that inside there is only a pipe.

A process can open /proc/self/fd/N again with any access that the file's permissions allow its user: an input could be
written, an output truncated, outside every mount of the sandbox. A pipe has no such other side. Terminals, pipes and
devices are passed as they are.
"""

import contextlib
import os
import stat
import threading
from dataclasses import dataclass, field
from typing import Final

from berth.errors import MalformedError

_CHUNK: Final = 1 << 16


@dataclass(slots=True)
class Streams:
    """The streams that are relayed.

    Attributes:
        pairs: (descriptor, standard stream it becomes) for the command.
    """

    pairs: list[tuple[int, int]] = field(default_factory=list)
    _outputs: list[threading.Thread] = field(default_factory=list)
    _passed: list[int] = field(default_factory=list)

    def close_passed(self) -> None:
        """Close the command's ends, once the command has them."""
        for fd in self._passed:
            os.close(fd)
        self._passed.clear()

    def finish(self) -> None:
        """Close what is open and wait until everything that the command wrote has arrived."""
        self.close_passed()
        for thread in self._outputs:
            thread.join()


def relay_files(*, output_to_stderr: bool) -> Streams:
    """Put a pipe and a relay in the place of each standard stream that is a file.

    Raises:
        MalformedError: A standard stream is a directory, which would be a way out of the sandbox.
    """
    streams = Streams()
    by_file: dict[tuple[int, int], int] = {}
    for number in (0, 1, 2):
        source = 2 if number == 1 and output_to_stderr else number
        status = os.fstat(source)
        if stat.S_ISDIR(status.st_mode):
            raise MalformedError(
                "directory-stream",
                f"standard stream {number} is a directory, and a sandboxed command could leave through it",
                "Redirect it to a file, a pipe or /dev/null.",
            )
        if not (stat.S_ISREG(status.st_mode) or stat.S_ISBLK(status.st_mode)):
            if source != number:
                streams.pairs.append((source, number))
        elif number == 0:
            streams.pairs.append((_relay_input(streams), 0))
        else:
            key = (status.st_dev, status.st_ino)
            if key not in by_file:
                by_file[key] = _relay_output(streams, source)
            streams.pairs.append((by_file[key], number))
    return streams


def _relay_input(streams: Streams) -> int:
    read, write = os.pipe2(os.O_CLOEXEC)
    streams._passed.append(read)
    threading.Thread(target=_copy, args=(0, write, write), daemon=True).start()
    return read


def _relay_output(streams: Streams, target: int) -> int:
    read, write = os.pipe2(os.O_CLOEXEC)
    streams._passed.append(write)
    thread = threading.Thread(target=_copy, args=(read, target, read), daemon=True)
    thread.start()
    streams._outputs.append(thread)
    return write


def _copy(source: int, target: int, owned: int) -> None:
    """Copy until the end; where the target takes no more (a full disk, no reader), the writer gets SIGPIPE."""
    with contextlib.suppress(OSError):
        while data := os.read(source, _CHUNK):
            view = memoryview(data)
            while view:
                view = view[os.write(target, view) :]
    os.close(owned)
