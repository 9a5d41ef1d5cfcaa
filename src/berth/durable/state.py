"""State files: one JSON document that lasts, and a log for the steps in between.

A document is replaced as a whole. Where many steps must be on disk before they are taken, each is one synced line of
the log; in the end the document takes them in. `state_format` has what stands in both, `own` what is refused unread.

Out of scope: keeping writers apart. One process writes at a time, by a lock of the caller; readers need none.
"""

import contextlib
import errno
import os
import secrets
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from berth.durable.files import durable_rename_noreplace, durable_replace, write_all
from berth.durable.own import open_own, oversized, read_own
from berth.durable.record_log import RecordLog, changed
from berth.durable.state_format import StoredLog, StoredState, decode_state, encode_line, encode_state
from berth.errors import BerthError, ForbiddenError, PartlyError, UncertainError
from berth.linux import syscalls

#: Largest state file, in bytes: some hundred times the undo information of a host with 10,000 threads.
STATE_LIMIT: Final = 64 << 20
_DIRECTORY: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_CREATE: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
#: How often a reader begins anew because a writer replaced the document meanwhile.
_READ_TRIES: Final = 16


@dataclass(frozen=True, slots=True)
class State:
    """What a state file says.

    Attributes:
        document: The document as it was created or folded.
        records: What was appended since, oldest first.
    """

    document: dict[str, Any]
    records: list[Any]


class StateFile:
    """A document and its log, opened; a context manager that closes it.

        <directory>/
            <file>                    the document, of generation N; replaced as a whole
            <file>.log                records of generation N, or of N-1 after a crash; absent before the first append
            .<file>.<16 hex>.tmp      a document that was being written

    What a crash leaves, by the step it interrupts:

    - create or fold, before the rename: the old document or none, and a `.tmp` that nobody reads.
    - fold, after the rename: the document N, and a log whose lines say N-1. They do not count, for the document has
      taken them in, and are removed before the next append.
    - append, while it writes: a last line that is not whole. It does not count and is cut off before the next append.
    - append, before its fsync: the record is there or not. What a reader has seen, the next append or fold makes last.

    Both files are checked whenever they are opened and refused by name, never repaired: see `open`. An fsync that
    failed, and any other end that leaves open what is on the disk, ends writing through this object for good. Another
    one may be opened; whether to is for whoever has looked at the disk.

    Attributes:
        path: The path that was given, for messages.
    """

    def __init__(self, path: str, *, dir_fd: int | None = None) -> None:
        """Open the directory alone; `create` and `open` do the rest."""
        directory, self._name = os.path.split(path)
        syscalls.check_name(self._name)
        self.path = path
        self._generation = 0  # of the document that is known; 0 where its version has no log
        self._known: int | None = None  # that document, held open so that its inode number is not reused
        self._ended_by: str | None = None
        self._directory = os.open(directory or ".", _DIRECTORY, dir_fd=dir_fd)
        self._log = RecordLog(f"{self._name}.log", dir_fd=self._directory, path=f"{path}.log")

    def __enter__(self) -> "StateFile":
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the files and the directory, once; nothing is written."""
        self._log.close()
        self._know(None)
        if self._directory >= 0:
            os.close(self._directory)
        self._directory = -1

    @classmethod
    def create(cls, path: str, document: Mapping[str, object], *, dir_fd: int | None = None) -> "StateFile":
        """Make the state file `path`, which must not exist, durably, and open it.

        Args:
            path: A path, or a path relative to `dir_fd`.
            document: Its fields, see `encode_state`.
            dir_fd: Open directory that `path` is relative to; it may be closed afterwards.

        Raises:
            ValueError: `path` does not end in the name of an entry.
            FileExistsError: The name exists, or that of its log; nothing was changed.
            MalformedError: `state-not-json`; nothing was changed.
            FailedError: `oversized-file`; nothing was changed.
            OSError: Nothing was changed; EOPNOTSUPP where the kernel cannot refuse to replace a name.
            UncertainError: The file is visible and its directory could not be synced.
        """
        with contextlib.ExitStack() as undo:
            state = cls(path, dir_fd=dir_fd)
            undo.callback(state.close)
            data = state._encode(document)
            state._refuse_any_log()
            state._put(data, durable_rename_noreplace)
            undo.pop_all()
        return state

    @classmethod
    def open(cls, path: str, *, dir_fd: int | None = None) -> "StateFile":
        """Open the state file `path`, and read it and its log once to know that they can be read.

        Args:
            path, dir_fd: See `create`.

        Raises:
            ValueError: See `create`.
            ForbiddenError: `linked-file`, `special-file`, `foreign-file` or `writable-file`.
            FailedError: `damaged-state`, `oversized-file` or `unknown-state-version`.
            OSError: There is no such file, or it cannot be read.
        """
        with contextlib.ExitStack() as undo:
            state = cls(path, dir_fd=dir_fd)
            undo.callback(state.close)
            state._know(state._open())
            state._generation = state._load()[0].generation
            undo.pop_all()
        return state

    def read(self) -> State:
        """Return the document and its records as they are now, whoever wrote them.

        Raises:
            ForbiddenError, FailedError, OSError: See `open`.
        """
        stored, log = self._load()
        return State(stored.document, log.records)

    def append(self, record: object) -> None:
        """Write one record to the log; it is on the disk when this returns.

        Args:
            record: Any value of JSON.

        Raises:
            MalformedError: `state-not-json`; nothing was changed.
            ForbiddenError: `state-changed` where another process wrote; `state-ended` after an uncertain change;
                `state-without-log` for a version that has none; `log-full`. Or the log is refused, see `open`.
            FailedError: The log is refused, see `open`.
            OSError: It could not be written; the log is as it was.
            UncertainError: The record is visible and may not last.
        """
        line = encode_line(record, generation=self._generation, path=self._log.path)
        with self._change():
            if self._generation == 0:
                message = f"the version of {self.path!r} has no log, so nothing can be appended"
                fix = "Fold the document once: that writes it in the present version."
                raise ForbiddenError("state-without-log", message, fix)
            self._log.append(line, self._generation)

    def fold(self, document: Mapping[str, object]) -> None:
        """Replace the document by `document`, which has taken in the records, and remove the log, both durably.

        Args:
            document: Its fields, see `encode_state`.

        Raises:
            MalformedError: `state-not-json`; nothing was changed.
            ForbiddenError: `state-changed` or `state-ended`; or the log is refused, see `open`. Nothing was changed.
            FailedError: `oversized-file`, or the log is refused, see `open`. Nothing was changed.
            FileExistsError: The version has no log, and something stands under the name; nothing was changed.
            OSError: Nothing was changed.
            PartlyError: `log-not-removed`: the new document is on the disk, and the log counts no more but is there.
            UncertainError: The new document is visible and may not last, or the log may come back, without counting.
        """
        data = self._encode(document)
        with self._change():
            if self._generation == 0:
                self._refuse_any_log()
            else:
                self._log.read(self._generation)  # what is not understood is not removed
            self._put(data, durable_replace)
            try:
                self._log.remove()
            except OSError as error:
                message = f"{self.path!r} is written, but {self._log.path!r} could not be removed: {error.strerror}"
                fix = "Nothing is lost: its records count no more, and the next append removes it."
                raise PartlyError("log-not-removed", message, fix) from error

    # --- reading -----------------------------------------------------------------------------------------------------

    def _open(self) -> int:
        return open_own(self._name, os.O_RDONLY, dir_fd=self._directory, path=self.path)

    def _load(self) -> tuple[StoredState, StoredLog]:
        """Return both files as of one moment: a fold in between leaves another file under the name."""
        for _ in range(_READ_TRIES):
            fd = self._open()
            try:
                data = read_own(fd, limit=STATE_LIMIT, path=self.path)
                stored = decode_state(data, log=self._log.name, path=self.path)
                try:
                    log = self._log.read(stored.generation) if stored.generation else StoredLog(records=[])
                except BerthError:
                    if self._shows(fd):
                        raise
                    continue
                if self._shows(fd):
                    return stored, log
            finally:
                os.close(fd)
        raise changed(self.path)

    def _shows(self, fd: int) -> bool:
        """Say whether the name shows the open file `fd`."""
        try:
            shown = os.stat(self._name, dir_fd=self._directory, follow_symlinks=False)
        except FileNotFoundError:
            return False
        return os.path.samestat(shown, os.fstat(fd))

    def _know(self, fd: int | None) -> None:
        if self._known is not None:
            os.close(self._known)
        self._known = fd

    def _check_known(self) -> None:
        if self._known is None or not self._shows(self._known):
            raise changed(self.path)

    # --- writing -----------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _change(self) -> Iterator[None]:
        """Guard one change: unless it succeeds, or an error says what is on the disk, it is the last."""
        if self._ended_by is not None:
            raise ForbiddenError(
                "state-ended",
                f"nothing more is written to {self.path!r} through this object: {self._ended_by}",
                "Look at the disk and its log, then open the state file anew, or put back a copy.",
            )
        self._check_known()
        self._ended_by = "a change was interrupted"
        try:
            yield
        except UncertainError as error:
            self._ended_by = f"a change is uncertain ({error.message})"
            raise
        except (BerthError, OSError):
            self._ended_by = None
            raise
        self._ended_by = None

    def _encode(self, document: Mapping[str, object]) -> bytes:
        data = encode_state(document, generation=self._generation + 1, log=self._log.name, path=self.path)
        if len(data) > STATE_LIMIT:
            raise oversized(self.path, STATE_LIMIT)
        return data

    def _refuse_any_log(self) -> None:
        """Refuse to begin beside a log: its records would count for a document they never belonged to."""
        if self._log.exists():
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), self._log.path)

    def _put(self, data: bytes, rename: Callable[..., None]) -> None:
        """Write a new file with `data`, let `rename` give it the name, and know it from now on."""
        temporary = f".{self._name[:50]}.{secrets.token_hex(8)}.tmp"
        with contextlib.ExitStack() as undo:
            try:
                fd = os.open(temporary, _CREATE, 0o600, dir_fd=self._directory)
                undo.callback(self._drop, fd, temporary)
                os.fchmod(fd, 0o600)  # whatever the umask is
                write_all(fd, data)
                os.fsync(fd)
                rename(temporary, self._name, src_dir_fd=self._directory, dst_dir_fd=self._directory)
            except OSError as error:
                raise OSError(error.errno, os.strerror(error.errno or 0), self.path) from error
            except UncertainError as error:
                message = f"{self.path!r} is in place, but its directory could not be synced: it may be as before again"
                raise UncertainError(message, errno=error.errno, filename=self.path) from error
            undo.pop_all()
        self._know(fd)
        self._generation += 1

    def _drop(self, fd: int, temporary: str) -> None:
        os.close(fd)
        with contextlib.suppress(OSError):  # what went wrong before is what the caller has to know
            os.unlink(temporary, dir_fd=self._directory)
