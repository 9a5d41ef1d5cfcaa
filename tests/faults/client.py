"""What one of the two clients of `cross_client` does: publish or look, lock or try, race, in step with the other."""

import errno
import fcntl
import multiprocessing
import os
import signal
import threading
import time
from dataclasses import dataclass
from multiprocessing.synchronize import Barrier
from typing import Any, Final

from berth.durable.files import list_names
from berth.linux import syscalls
from berth.linux.locks import open_lock_file, try_lock

#: Publications and locks are no races: more than this says nothing new.
_MOST_TURNS: Final = 50
#: How long one client waits for the other, in seconds; a server that restarts needs its time.
_BARRIER_TIMEOUT_S: Final = 300.0
_POLL_S: Final = 0.01
_GAVE_UP: Final = "the other client gave up"
_FORK = multiprocessing.get_context("fork")


@dataclass(frozen=True)
class Report:
    """What one client saw.

    Attributes:
        told: What the kernel said to the rename of each race: `won`, or the name of an error.
        seen_after_s: How long it took to see what the other published, by turn; None for never, 0 where it published.
        refused_and_stuck: By turn, whether the lock was refused while the other held it, and also after that.
        directory_refused: Whether the same was refused for a lock on the directory.
    """

    told: list[str]
    seen_after_s: list[float | None]
    refused_and_stuck: list[tuple[bool, bool]]
    directory_refused: bool


@dataclass(frozen=True)
class Client:
    """One of the two processes.

    Attributes:
        number: 0 or 1.
        fd: The private directory, opened through this client's root.
        barrier: Where the two wait for each other.
        patience_s: How long to wait until something is seen.
    """

    number: int
    fd: int
    barrier: Barrier
    patience_s: float

    def race(self, round_: int) -> str:
        """Rename an entry of this client's own to the name of the round; return what the kernel said."""
        make(self.fd, source_name(round_, self.number), directory=is_directory(round_))
        self._meet()
        try:
            syscalls.renameat2(
                source_name(round_, self.number),
                target_name(round_),
                syscalls.RENAME_NOREPLACE,
                src_dir_fd=self.fd,
                dst_dir_fd=self.fd,
            )
        except OSError as error:
            return errno.errorcode.get(error.errno or 0, str(error.errno))
        return "won"

    def publish_or_look(self, turn: int, patience_s: float) -> float | None:
        """Publish a file, or look for that of the other client; return how long it took to appear, None for never."""
        name = f"published-{turn}"
        publishes = turn % 2 == self.number
        if publishes:
            make(self.fd, f"new-{name}", content=name)
        else:
            self._shows(name)  # now it believes that there is none
        self._meet()
        if publishes:
            os.rename(f"new-{name}", name, src_dir_fd=self.fd, dst_dir_fd=self.fd)
        self._meet()
        begun = time.monotonic()
        while not publishes and not self._shows(name):
            if time.monotonic() - begun > patience_s:
                return None
            time.sleep(_POLL_S)
        return 0.0 if publishes else time.monotonic() - begun

    def lock_or_try(self, turn: int, fd: int) -> tuple[bool, bool]:
        """Hold a lock, or try it while it is held and again when it is not; return whether each try was refused."""
        holds = turn % 2 == self.number
        stuck = holds and not self._locks_in_time(fd)
        self._meet()
        refused = holds or not try_lock(fd)
        self._meet()
        if holds:
            fcntl.flock(fd, fcntl.LOCK_UN)
        self._meet()
        stuck = stuck or (not holds and not self._locks_in_time(fd))
        fcntl.flock(fd, fcntl.LOCK_UN)
        self._meet()
        return refused, stuck

    def _meet(self) -> None:
        self.barrier.wait(_BARRIER_TIMEOUT_S)

    def _shows(self, name: str) -> bool:
        return name in list_names(self.fd) and read(self.fd, name) == name

    def _locks_in_time(self, fd: int) -> bool:
        deadline = time.monotonic() + self.patience_s
        while not try_lock(fd):
            if time.monotonic() > deadline:
                return False
            time.sleep(_POLL_S)
        return True


def run_both(fds: tuple[int, int], *, rounds: int, patience_s: float) -> list[Report]:
    """Let two processes, each on its own descriptor of one directory, race `rounds` times and do the rest.

    Raises:
        OSError: One of them met an error that is no answer to what was tried.
    """
    barrier = _FORK.Barrier(2)
    pipes = [_FORK.Pipe(duplex=False) for _ in fds]
    clients = [Client(number, fd, barrier, patience_s) for number, fd in enumerate(fds)]
    processes = [
        _FORK.Process(target=_run, args=(client, rounds, os.getpid(), writer))
        for client, (_, writer) in zip(clients, pipes, strict=True)
    ]
    try:
        for process in processes:
            process.start()
        for _, writer in pipes:
            writer.close()
        answers = [reader.recv() for reader, _ in pipes]
    except EOFError as error:
        raise OSError("a client was killed") from error
    finally:
        for process in processes:
            if process.pid is not None:
                process.kill()
                process.join()
    failures = [answer for answer in answers if isinstance(answer, str)]
    if failures:
        raise OSError(min(failures, key=lambda failure: failure == _GAVE_UP))
    return answers


def _run(client: Client, rounds: int, parent: int, writer: Any) -> None:
    """Be one of the two processes, and send its report, or what it failed of."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends both
    syscalls.set_parent_death_signal(signal.SIGKILL)
    if os.getppid() != parent:
        return
    turns = min(rounds, _MOST_TURNS)
    try:
        seen: list[float | None] = []
        for turn in range(turns):  # whoever waited in vain once does not wait again
            seen.append(client.publish_or_look(turn, 0 if None in seen else client.patience_s))
        lock = open_lock_file("lock", dir_fd=client.fd)
        locks = [client.lock_or_try(turn, lock) for turn in range(turns)]
        directory = [client.lock_or_try(turn, client.fd)[0] for turn in (0, 1)]
        told = [client.race(round_) for round_ in range(rounds)]
        writer.send(Report(told, seen, locks, all(directory)))
    except threading.BrokenBarrierError:
        writer.send(_GAVE_UP)
    except OSError as error:
        client.barrier.abort()
        writer.send(f"client {client.number + 1}: {error}")


# --- entries ---------------------------------------------------------------------------------------------------------


def source_name(round_: int, number: int) -> str:
    """Return what the client `number` renames in a race."""
    return f"source-{round_}-{number}"


def target_name(round_: int) -> str:
    """Return what both rename to."""
    return f"target-{round_}"


def is_directory(round_: int) -> bool:
    """Say whether directories race; empty ones, which a plain rename replaces without a word."""
    return round_ % 2 == 1


def make(fd: int, name: str, *, directory: bool = False, content: str | None = None) -> None:
    """Make an empty directory, or a file that holds `content` or else its own name.

    Raises:
        OSError: It exists, or cannot be made.
    """
    if directory:
        os.mkdir(name, 0o700, dir_fd=fd)
        return
    file = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=fd)
    with os.fdopen(file, "w") as opened:
        opened.write(name if content is None else content)
        opened.flush()
        os.fsync(file)


def is_there(fd: int, name: str) -> bool:
    """Say whether there is an entry of this name.

    Raises:
        OSError: Nobody knows.
    """
    try:
        os.stat(name, dir_fd=fd, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return True


def read(fd: int, name: str) -> str | None:
    """Return the content of a file, or None where there is none.

    Raises:
        OSError: It is no file, or cannot be read.
    """
    try:
        with open(os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=fd)) as file:
            return file.read()
    except FileNotFoundError:
        return None
