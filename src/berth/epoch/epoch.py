"""Epochs: the durable work-state of one run, from opening to retirement.

    <root>/                                              the state root
        .berth.lock                                      held while names of epochs are being made or adopted
        .berth-reclaim.lock                              held while retired epochs are being removed
        .standalone-work-<64 hex>/                       an active epoch, held by a flock on the directory itself
        .retired-standalone-work-<64 hex>-<32 hex>/      a retired epoch; never resumed, reclaimed later

The flock is what says that a run is alive: it follows the directory through the rename and falls with its holder. An
active epoch whose lock is free belongs to a run that was killed, and whoever gets the lock next may finish it. Between
`mkdir` and `flock` a new epoch would look just like that, so both sides take `.berth.lock` first.
"""

import contextlib
import errno
import os
import secrets
import time
from typing import Final

from berth.durable.files import (
    durable_makedirs,
    durable_rename_noreplace,
    durable_write,
    fsync_open_directory,
    list_names,
)
from berth.epoch import names
from berth.epoch.capability import NOTHING_ACCEPTED, Accepted
from berth.epoch.directory import cannot_open, check_owner, open_root_directory
from berth.epoch.lock import hold_root_lock
from berth.epoch.probe import judge, probe
from berth.errors import ForbiddenError
from berth.linux.locks import lock_holders, try_lock

#: Most bytes of one file of work-state that are read, far above what berth writes.
_MOST_READ: Final = 64 << 20
_DIRECTORY: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class Epoch:
    """One epoch that this process holds; a context manager that lets go of it.

    Attributes:
        id: 64 lower-case hexadecimal digits.
        fd: The open and locked directory.
    """

    def __init__(self, root: "EpochRoot", epoch: str, fd: int) -> None:
        self.id = epoch
        self.fd = fd
        self._root = root

    def __enter__(self) -> "Epoch":
        return self

    def __exit__(self, *_exception: object) -> None:
        os.close(self.fd)

    @property
    def path(self) -> str:
        """Path of the active epoch, for messages."""
        return os.path.join(self._root.path, names.active_name(self.id))

    def write(self, name: str, data: bytes) -> None:
        """Write the file `name` of the work-state durably.

        Raises:
            OSError: Nothing was changed.
            UncertainError: See `durable_write`.
        """
        durable_write(name, data, dir_fd=self.fd)

    def read(self, name: str) -> bytes | None:
        """Return the content of the file `name` of the work-state, or None where there is none.

        Raises:
            OSError: It cannot be read; EFBIG where it is larger than berth ever writes one.
        """
        try:
            fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, dir_fd=self.fd)
        except FileNotFoundError:
            return None
        with os.fdopen(fd, "rb") as file:
            data = file.read(_MOST_READ + 1)
        if len(data) > _MOST_READ:
            raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), os.path.join(self.path, name))
        return data

    def holds(self, name: str) -> bool:
        """Say whether the work-state has an entry `name`."""
        try:
            os.stat(name, dir_fd=self.fd, follow_symlinks=False)
        except FileNotFoundError:
            return False
        return True

    def publish(self, name: str, *, dir_fd: int, as_name: str) -> None:
        """Move the file `name` out of the work-state to `as_name` in the directory `dir_fd`, never replacing one.

        Raises:
            FileExistsError: `as_name` exists; it and the work-state are as they were.
            OSError: The rename was refused.
            UncertainError: It is visible and may not be durable.
        """
        durable_rename_noreplace(name, as_name, src_dir_fd=self.fd, dst_dir_fd=dir_fd)

    def retire(self, retirement: str | None = None) -> str:
        """End the epoch: one no-replace rename inside the root and one fsync of the root. Return the new name.

        Args:
            retirement: 32 hexadecimal digits; made from the time and chance where it is left out.

        Raises:
            FileExistsError: The retired name exists; both trees are as they were.
            ForbiddenError: The active name is not this epoch's directory any more.
            OSError: The rename was refused.
            UncertainError: See `durable_rename_noreplace`.
        """
        if retirement is None:
            retirement = names.retirement_id(time.time_ns() // 1_000_000, secrets.randbits(80))
        active, retired = names.active_name(self.id), names.retired_name(self.id, retirement)
        if not self._root.shows(active, self.fd):
            raise ForbiddenError(
                "epoch-moved",
                f"the work-state {self.path!r} was renamed or replaced by somebody else and cannot be retired",
                "Look at the state root: nothing was changed there.",
            )
        durable_rename_noreplace(active, retired, src_dir_fd=self._root.fd, dst_dir_fd=self._root.fd)
        return retired


class EpochRoot:
    """A state root, opened once: every name below it is used relative to that one descriptor.

    Attributes:
        path: Absolute path, for messages.
        fd: The open directory.
        capability: What the probe of it found.
    """

    def __init__(
        self, path: str, *, accepted: Accepted = NOTHING_ACCEPTED, create: bool = True, trials: bool = True
    ) -> None:
        """Open the root `path`, creating it where it is missing, and prove that it protects existing names.

        Args:
            path: The directory.
            accepted: What the operator accepts of its file system.
            create: Whether to make a root that is missing.
            trials: Whether to try what work-state relies on; who only removes does without, on a full disk too.

        Raises:
            MalformedError: `path` is not a directory of ours.
            AbilityError: Its file system does not refuse to replace names, or is of a kind that was not accepted.
            FailedError: It cannot be created, opened, locked or probed.
        """
        self.path = os.path.abspath(path)
        if create and path:
            try:
                durable_makedirs(self.path)
            except OSError as error:
                raise cannot_open(self.path, error) from error
        self.fd = open_root_directory(path)
        with contextlib.ExitStack() as opened:
            opened.callback(os.close, self.fd)
            check_owner(self.path, os.fstat(self.fd))
            self.capability = judge(self.fd, self.path, accepted=accepted)
            if trials and self.capability.refusal is None:
                with self.locked():
                    self.capability = probe(self.fd, self.path, accepted=accepted)
            if self.capability.refusal is not None:
                raise self.capability.refusal
            opened.pop_all()

    def __enter__(self) -> "EpochRoot":
        return self

    def __exit__(self, *_exception: object) -> None:
        os.close(self.fd)

    def locked(self) -> contextlib.AbstractContextManager[None]:
        """Hold the root's lock: short, while names of epochs are made, adopted or probed.

        Raises:
            FailedError: The lock file is unusable, or somebody holds it for too long.
        """
        return hold_root_lock(self.fd, self.path)

    def open_epoch(self, epoch: str, *, again: bool = False) -> Epoch:
        """Make the new epoch `epoch`, durable and held by this process.

        Args:
            epoch: Epoch id.
            again: Whether to go on with the active epoch of this id where there is one.

        Raises:
            ValueError: `epoch` is not an epoch id.
            FileExistsError: There is an active epoch of this id, and `again` is not set.
            ForbiddenError: Another process holds the epoch of this id.
            OSError: It could not be made or opened.
        """
        name = names.active_name(epoch)
        with contextlib.ExitStack() as opened:
            with self.locked():
                try:
                    os.mkdir(name, 0o700, dir_fd=self.fd)
                except FileExistsError:
                    if not again:
                        raise
                fd = os.open(name, _DIRECTORY, dir_fd=self.fd)
                opened.callback(os.close, fd)
                # Who held it may have retired it after it was opened here: a retired epoch is never gone on with.
                if not try_lock(fd) or not self.shows(name, fd):
                    raise ForbiddenError(
                        "epoch-held",
                        f"the work-state {os.path.join(self.path, name)!r} is in use by another process",
                        "Wait for that run to end; a lock of a killed run falls with its last process.",
                    )
            fsync_open_directory(self.fd)
            opened.pop_all()
        return Epoch(self, epoch, fd)

    def active(self) -> list[str]:
        """Return the ids of the active epochs, held or left behind, sorted."""
        return [epoch for epoch in map(names.parse_active, list_names(self.fd)) if epoch is not None]

    def retired(self) -> list[tuple[str, str]]:
        """Return (epoch id, retirement id) of every retired epoch, sorted by name."""
        return [ids for ids in map(names.parse_retired, list_names(self.fd)) if ids is not None]

    def holders(self, name: str) -> tuple[int, ...]:
        """Return the pids that hold the epoch directory `name`, active or retired; none where it is gone.

        Raises:
            OSError: It cannot be opened as a directory.
        """
        try:
            fd = os.open(name, _DIRECTORY, dir_fd=self.fd)
        except FileNotFoundError:
            return ()
        try:
            return lock_holders(fd)
        finally:
            os.close(fd)

    def adopt(self, epoch: str) -> Epoch | None:
        """Take over the active epoch `epoch` where nobody holds it any more; None where somebody does, or it is gone.

        Raises:
            OSError: It cannot be opened; a link or a file in its place is never followed.
        """
        name = names.active_name(epoch)
        with self.locked():
            try:
                fd = os.open(name, _DIRECTORY, dir_fd=self.fd)
            except FileNotFoundError:
                return None
            if try_lock(fd) and self.shows(name, fd):
                return Epoch(self, epoch, fd)
            os.close(fd)
            return None

    def shows(self, name: str, fd: int) -> bool:
        """Say whether the entry `name` of the root is the directory open as `fd`."""
        try:
            seen = os.stat(name, dir_fd=self.fd, follow_symlinks=False)
        except FileNotFoundError:
            return False
        return os.path.samestat(seen, os.fstat(fd))
