"""Empty directories, descriptor by descriptor: one walker, one thread, two descriptors whatever the depth.

A path could be swapped for a link between two calls, so no path is used: every directory is opened relative to the one
above it, as a directory, without following links and without crossing a mount, and every entry is removed by its
single name in it. The way back up is `..`, checked against the directory that the walker came from. What cannot be
removed is passed by and told about; what stays because of it is synced.
"""

import errno
import itertools
import os
from collections.abc import Callable, Iterator
from typing import Final, Protocol

from berth.durable.files import fsync_open_directory
from berth.durable.removal import Level, Limits, Offer, PassedBy, Way, path_of_way
from berth.errors import ForbiddenError, UncertainError
from berth.linux.below import open_below
from berth.linux.mounts import path_of

#: Names of one directory read, sorted and held at a time; 100,000 as in GNU fts, about 20 MB.
CHUNK: Final = 100_000
#: The same under a time limit, which is looked at between chunks too.
_TIMED_CHUNK: Final = 512
#: Names of sub-directories held for all levels together; beyond that, levels further up are read again later.
_MOST_PENDING: Final = 2 * CHUNK
#: Sub-directories that are worth being shared with another walker.
_LEAST_SHARED: Final = 8
#: How often a directory that was seen empty and is not empty is gone through.
_PASSES: Final = 3
#: How many removals are told about at a time.
_TELL_EVERY: Final = 1024
_DIRECTORY: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class Crew(Protocol):
    """Whom a walker may share sub-directories with."""

    def has_idle(self, nested: int) -> bool:
        """Say whether somebody waits for work and may be given some by a walker nested so deep."""

    def offer(self, walk: "Walk", pending: list[str]) -> Offer:
        """Offer the sub-directories `pending` of the directory that `walk` is in; both take from the one list."""

    def settle(self, offer: Offer) -> None:
        """Wait until whoever took part of `offer` is done with its last directory."""


class Walk:
    """Removes directories of one base directory, until they are gone or a limit is reached.

    Attributes:
        fd: The directory the walker is in.
        removed: Entries removed so far.
        nested: How many walkers wait, directly or not, for this one.
    """

    def __init__(
        self,
        base_fd: int,
        pending: list[str],
        limits: Limits,
        *,
        crew: Crew | None = None,
        way: Way = None,
        shared_base: bool = False,
        nested: int = 0,
    ) -> None:
        """Take over the descriptor `base_fd`, whose sub-directories `pending` shall go.

        Args:
            base_fd: An open directory; closed by `close`.
            pending: Names in it.
            limits: When to stop.
            crew: Whom to share work with, or None.
            way: The way down to the base directory, for what is told about.
            shared_base: Whether another walker is in the base directory too, and syncs it.
            nested: How many walkers wait, directly or not, for this one.
        """
        status = os.fstat(base_fd)
        self.fd = base_fd
        self.removed = 0
        self.limits = limits
        self._device = status.st_dev
        self._crew = crew
        self._shared_base = shared_base
        self.nested = nested
        self._told = 0
        self._waiting = len(pending)
        self._levels = [Level("", (status.st_dev, status.st_ino), way, pending, scanned=True)]

    def __enter__(self) -> "Walk":
        return self

    def __exit__(self, *_exception: object) -> None:
        os.close(self.fd)

    @property
    def kept(self) -> set[str]:
        """Names in the base directory that could not be removed."""
        return self._levels[0].kept

    @property
    def path(self) -> str:
        """Path of the directory the walker is in, relative to the directory that holds the tree."""
        return path_of_way(self.way)

    @property
    def way(self) -> Way:
        """The way down to the directory the walker is in."""
        return self._levels[-1].way

    def run(self) -> None:
        """Remove until everything is gone or passed by, or a limit is reached; then sync what stays.

        Raises:
            ForbiddenError: A directory was moved away while its content was being removed.
            UncertainError: What was removed may be back after a power cut.
            OSError: The process cannot go on: no descriptors, no memory.
        """
        while not self.over():
            level = self._levels[-1]
            if self._crew is not None and level.offer is None and len(level.pending) >= _LEAST_SHARED:
                self._share(self._crew, level)
            try:
                name = level.pending.pop()
            except IndexError:
                if not self._finish_level(level):
                    break
            else:
                if level.offer is None:
                    self._waiting -= 1
                self._enter(level, name)
        self._sync_survivors()
        self._tell(least=1)

    def over(self) -> bool:
        """Say whether a limit is reached."""
        return self.limits.are_reached(self.removed)

    def _finish_level(self, level: Level) -> bool:
        """Go on in a directory without pending sub-directories; say whether there is anything left to do."""
        if level.offer is not None:
            self._settle(level)
        elif not level.scanned:
            self._scan(level)
        elif len(self._levels) == 1:
            return False
        else:
            self._leave()
        return True

    def _share(self, crew: Crew, level: Level) -> None:
        if crew.has_idle(self.nested):
            self._waiting -= len(level.pending)
            level.offer = crew.offer(self, level.pending)

    def _settle(self, level: Level) -> None:
        if level.offer is not None:
            assert self._crew is not None
            self._crew.settle(level.offer)
            level.kept |= level.offer.kept
            level.dirty = True
            level.offer = None

    # --- one directory ----------------------------------------------------------------------------------------------

    def _scan(self, level: Level) -> None:
        """Remove what is no directory, a chunk of names at a time, and note what is one."""
        # A descriptor that was read before may hide newer names (btrfs).
        fd = os.open(".", _DIRECTORY, dir_fd=self.fd) if level.read else self.fd
        level.read = True
        try:
            with os.scandir(fd) as entries:
                while chunk := list(itertools.islice(entries, self._chunk_size())):
                    self._remove_chunk(level, chunk)
                    if self.over():
                        return
                    if len(level.pending) >= self._chunk_size():
                        level.scanned = len(level.kept) > CHUNK  # what was passed by is not to be met for ever
                        return
            level.scanned = True
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM):
                raise
            level.scanned = True
            self._pass_by(level, ".", error)
        finally:
            if fd != self.fd:
                os.close(fd)

    def _chunk_size(self) -> int:
        limits = self.limits
        size = CHUNK if limits.deadline_s is None else _TIMED_CHUNK
        return size if limits.entries is None else max(1, min(size, limits.entries - self.removed))

    def _remove_chunk(self, level: Level, chunk: "list[os.DirEntry[str]]") -> None:
        # Inodes lie in the order of their numbers, names in that of their hashes.
        chunk.sort(key=os.DirEntry.inode)
        files: list[str] = []
        directories: list[str] = []
        for entry in chunk:
            if entry.name not in level.kept:
                try:
                    (directories if entry.is_dir(follow_symlinks=False) else files).append(entry.name)
                except OSError as error:  # where readdir does not say what it is, the file system is asked
                    self._not_unlinked(level, entry.name, error)
        for start in range(0, len(files), _TELL_EVERY):
            if not self._unlink(level, files[start : start + _TELL_EVERY]):
                return
            self._tell()
        directories.reverse()
        self._hold(level, directories)

    def _unlink(self, level: Level, names: list[str]) -> bool:
        """Remove the files `names`; say whether to go on."""
        fd, unlink, limited = self.fd, os.unlink, self.limits.entries is not None or self.limits.deadline_s is not None
        before = self.removed
        for name in names:
            try:
                unlink(name, dir_fd=fd)
            except OSError as error:
                self._not_unlinked(level, name, error)
                if limited and self.limits.is_out_of_patience():
                    break
                continue
            self.removed += 1
            if limited and self.over():
                break
        level.dirty = level.dirty or self.removed > before
        return not self.over()

    def _hold(self, level: Level, directories: list[str]) -> None:
        """Note sub-directories; where that is too many names, forget those of levels further up until later."""
        level.pending.extend(directories)
        self._waiting += len(directories)
        for above in itertools.takewhile(lambda _level: self._waiting > _MOST_PENDING, self._levels[1:-1]):
            if above.offer is None and above.pending:
                self._waiting -= len(above.pending)
                above.pending, above.scanned = [], False

    def _not_unlinked(self, level: Level, name: str, error: OSError) -> None:
        if error.errno == errno.EISDIR:
            level.pending.append(name)
            self._waiting += 1
        elif error.errno != errno.ENOENT:
            self._pass_by(level, name, error)

    def _pass_by(self, level: Level, name: str, error: OSError) -> None:
        if len(level.kept) <= CHUNK:  # one is enough to know that it stays; they are not to fill the memory
            level.kept.add(name)
        self.limits.passed += 1
        if self.limits.passed <= self.limits.most_told:
            self.limits.on_passed(PassedBy(os.path.normpath(os.path.join(self.path, name)), error.errno or 0))

    # --- down and up ------------------------------------------------------------------------------------------------

    def _enter(self, level: Level, name: str) -> None:
        try:
            fd = open_below(name, dir_fd=self.fd)
        except OSError as error:
            self._not_entered(level, name, error)
            return
        try:
            status = os.stat(".", dir_fd=fd)  # needs the right to go through it, as the way back up does
        except OSError as error:
            os.close(fd)
            self._not_entered(level, name, error)
            return
        if status.st_dev != self._device:  # a btrfs subvolume is no mount
            os.close(fd)
            self._pass_by(level, name, OSError(errno.EXDEV, os.strerror(errno.EXDEV), name))
            return
        os.close(self.fd)
        self.fd = fd
        self._levels.append(Level(name, (status.st_dev, status.st_ino), (level.way, name)))

    def _not_entered(self, level: Level, name: str, error: OSError) -> None:
        if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM):
            raise error
        if error.errno == errno.ENOENT:
            return
        remove: Callable[..., None] = os.unlink if error.errno in (errno.ENOTDIR, errno.ELOOP) else os.rmdir
        try:
            if error.errno == errno.EXDEV:
                raise error
            remove(name, dir_fd=self.fd)  # a link that took its place, or an empty directory that we may not read
        except OSError:
            self._pass_by(level, name, error)
        else:
            self._count(level)

    def _leave(self) -> None:
        """Go up one level and remove the directory that was left, if it is empty now."""
        level = self._levels[-1]
        if level.kept and level.dirty:
            self._sync(level)
        self._go_up()
        above = self._levels[-1]
        if level.kept:
            above.kept.add(level.name)
            return
        try:
            os.rmdir(level.name, dir_fd=self.fd)
        except OSError as error:
            if error.errno == errno.ENOENT:  # somebody else removed it
                above.dirty = True
                return
            again = above.passes.get(level.name, 0) + 1
            if error.errno in (errno.ENOTEMPTY, errno.EEXIST) and again < _PASSES:
                above.passes[level.name] = again
                above.pending.append(level.name)
                self._waiting += 1
            else:
                self._pass_by(above, level.name, error)
        else:
            self._count(above)

    def _go_up(self) -> None:
        """Move to the directory above, which must be the one that the walker came from."""
        above = os.open("..", _DIRECTORY, dir_fd=self.fd)
        status = os.fstat(above)
        if (status.st_dev, status.st_ino) != self._levels[-2].identity:
            os.close(above)
            raise ForbiddenError(
                "tree-moved",
                f"the directory {self.path!r} was moved elsewhere while it was being removed; nothing more was removed",
                "See who changes the tree; a retired epoch is berth's alone.",
            )
        os.close(self.fd)
        self.fd = above
        self._levels.pop()

    def _count(self, level: Level) -> None:
        self.removed += 1
        level.dirty = True
        self._tell()

    def _tell(self, *, least: int = _TELL_EVERY) -> None:
        if self.removed - self._told >= least:
            self.limits.on_removed(self.removed - self._told)
            self._told = self.removed

    # --- the end ----------------------------------------------------------------------------------------------------

    def _sync_survivors(self) -> None:
        """Sync every directory that lost entries and stays, from here up."""
        for level in self._levels:
            self._settle(level)
        if self._shared_base:
            self._levels[0].dirty = False
        for level in self._dirty_upwards():
            self._sync(level)

    def _dirty_upwards(self) -> Iterator[Level]:
        highest = next((index for index, level in enumerate(self._levels) if level.dirty), None)
        while highest is not None:
            if self._levels[-1].dirty:
                yield self._levels[-1]
            if len(self._levels) - 1 == highest:
                return
            self._go_up()

    def _sync(self, level: Level) -> None:
        try:
            fsync_open_directory(self.fd)
        except OSError as error:
            raise UncertainError(
                f"entries of {self.path or path_of(self.fd)!r} were removed, but the directory could not be synced "
                f"({os.strerror(error.errno or 0)}): after a power cut they may be back",
                errno=error.errno or 0,
                filename=self.path or path_of(self.fd),
            ) from error
        level.dirty = False
