"""The log of a state file: a line is written with one call, synced, and only then counts.

A last line that is not whole is left by a writer that ended, or by a power cut. It is ignored by readers, and cut off
before the next line, so that the two can never be read as one. A line in the middle that is not whole is damage.
"""

import contextlib
import errno
import os
from typing import Final

from berth.durable.files import write_all
from berth.durable.own import open_own, read_own
from berth.durable.state_format import StoredLog, decode_log
from berth.errors import ForbiddenError, UncertainError

#: Largest log, in bytes; whoever appends folds it in long before.
LOG_LIMIT: Final = 64 << 20
_CREATE: Final = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


class RecordLog:
    """The log under one name, whether it exists or not.

    Attributes:
        name: Its name in the directory.
        path: What messages and errors call it.
    """

    def __init__(self, name: str, *, dir_fd: int, path: str) -> None:
        """Know the log; nothing is opened.

        Args:
            name: Its name in `dir_fd`.
            dir_fd: Open directory, which stays the caller's.
            path: What messages and errors call it.
        """
        self.name = name
        self.path = path
        self._directory = dir_fd
        self._fd: int | None = None  # for appending
        self._size = 0  # of the whole lines, while `_fd` is open
        self._name_is_durable = False

    def close(self) -> None:
        """Stop appending."""
        if self._fd is not None:
            os.close(self._fd)
        self._fd = None
        self._name_is_durable = False

    def exists(self) -> bool:
        """Say whether anything stands under the name.

        Raises:
            OSError: It cannot be found out, with the path; ENAMETOOLONG where it could not be made either.
        """
        try:
            os.stat(self.name, dir_fd=self._directory, follow_symlinks=False)
        except FileNotFoundError:
            return False
        except OSError as error:
            raise OSError(error.errno, os.strerror(error.errno or 0), self.path) from error
        return True

    def read(self, generation: int) -> StoredLog:
        """Return what it says about the document `generation`; nothing where there is none.

        Raises:
            ForbiddenError, FailedError, OSError: See `open_own`, `read_own` and `decode_log`.
        """
        try:
            fd = open_own(self.name, os.O_RDONLY, dir_fd=self._directory, path=self.path)
        except FileNotFoundError:
            return StoredLog(records=[])
        try:
            return self._decode(fd, generation)
        finally:
            os.close(fd)

    def append(self, line: bytes, generation: int) -> None:
        """Write `line`, of the document `generation`, and make it durable.

        Raises:
            ForbiddenError: `state-changed` where somebody else wrote to it; `log-full`; or see `read`.
            FailedError: See `read`.
            OSError: It could not be written; the log is as it was.
            UncertainError: The line, or a part of it, is in the log and may or may not last.
        """
        fd = self._open(generation) if self._fd is None else self._fd
        status = os.fstat(fd)
        if status.st_size != self._size or status.st_nlink != 1:
            raise changed(self.path)
        if self._size + len(line) > LOG_LIMIT:
            message = f"the record would make {self.path!r} larger than {LOG_LIMIT} bytes, and it was not written"
            raise ForbiddenError("log-full", message, "Fold the records into the document first.")
        try:
            write_all(fd, line)
        except OSError as error:
            self._cut(fd)
            raise OSError(error.errno, os.strerror(error.errno or 0), self.path) from error
        self._sync(fd, "the last record stands in it and may not last")
        if not self._name_is_durable:  # also of a log that is there: its maker may have been killed before that
            self._sync(self._directory, "the last record stands in it, but its name may not last")
            self._name_is_durable = True
        self._size += len(line)

    def remove(self) -> None:
        """Remove it durably, where it exists.

        Raises:
            OSError: It could not be removed.
            UncertainError: It was removed, and its directory could not be synced.
        """
        self.close()
        try:
            os.unlink(self.name, dir_fd=self._directory)
        except FileNotFoundError:
            return
        except OSError as error:
            raise OSError(error.errno, os.strerror(error.errno or 0), self.path) from error
        self._sync(self._directory, "it was removed and may come back, and does not count")

    def _open(self, generation: int) -> int:
        """Open the log for appending: made where it is missing, begun anew where it is stale, cut where it is torn."""
        with contextlib.suppress(FileNotFoundError):
            fd = open_own(self.name, os.O_RDWR | os.O_APPEND, dir_fd=self._directory, path=self.path)
            try:
                stored = self._decode(fd, generation)
            except BaseException:
                os.close(fd)
                raise
            self._fd, self._size = fd, stored.size
            if not stored.stale:
                if os.fstat(fd).st_size != stored.size:
                    self._cut(fd)
                return fd
            self.remove()
        self._size = 0
        try:
            self._fd = os.open(self.name, _CREATE, 0o600, dir_fd=self._directory)
            os.fchmod(self._fd, 0o600)  # whatever the umask is
        except OSError as error:
            raise OSError(error.errno, os.strerror(error.errno or 0), self.path) from error
        return self._fd

    def _decode(self, fd: int, generation: int) -> StoredLog:
        return decode_log(read_own(fd, limit=LOG_LIMIT, path=self.path), generation=generation, path=self.path)

    def _cut(self, fd: int) -> None:
        """Cut off what follows the last whole line."""
        try:
            os.ftruncate(fd, self._size)
        except OSError as error:
            raise _uncertain(self.path, "cut", error, "a part of a record stands in it, and does not count") from error
        self._sync(fd, "a part of a record that was cut off may be back, and does not count")

    def _sync(self, fd: int, what: str) -> None:
        try:
            os.fsync(fd)
        except OSError as error:
            raise _uncertain(self.path, "synced", error, what) from error


def changed(path: str) -> ForbiddenError:
    """Return the error for the file `path`, which somebody else changed since it was opened."""
    return ForbiddenError(
        "state-changed",
        f"{path!r} is not as this process knows it: another one wrote, moved or removed it; nothing was changed",
        "Let only one process write at a time, and open the state file anew.",
    )


def _uncertain(path: str, action: str, error: OSError, what: str) -> UncertainError:
    message = f"{path!r} could not be {action} ({os.strerror(error.errno or 0)}): {what}"
    return UncertainError(message, errno=error.errno or errno.EIO, filename=path)
