"""The files of one run: what will be run, the keeper's lock, and the record that is published once.

    <state root>/.standalone-work-<epoch>/request.json    what will be run, before any process is made
    <state root>/.standalone-work-<epoch>/keeper.lock     locked for as long as the run's keeper lives
    <state root>/.standalone-work-<epoch>/record.json     how it ended, until it is published
    <state root>/records/<epoch>.json                     the published record, never replaced

A kill between any two steps leaves whole files: the next start publishes a record that was ready, or writes one that
says `interrupted`.
"""

import contextlib
import json
import os
from typing import Final

from berth.durable.files import fsync_open_directory
from berth.epoch.epoch import Epoch, EpochRoot
from berth.errors import BerthError, FailedError
from berth.linux.locks import open_lock_file, try_lock

RECORDS: Final = "records"
_REQUEST: Final = "request.json"
_RECORD: Final = "record.json"
_KEEPER_LOCK: Final = "keeper.lock"
_DIRECTORY: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def write_request(epoch: Epoch, document: dict[str, object]) -> None:
    """Write what will be run, durably.

    Raises:
        FailedError: It could not be written; nothing was started.
    """
    try:
        epoch.write(_REQUEST, _encode(document))
    except OSError as error:
        raise FailedError(
            "request-not-written",
            f"what will be run could not be written to {epoch.path!r} ({error.strerror}), so nothing was started",
            "Free space or repair the file system, or choose another --state-root.",
        ) from error


def read_request(epoch: Epoch) -> dict[str, object] | None:
    """Return what was to be run, or None where berth was killed before that was on disk.

    Raises:
        FailedError: The file is damaged; it is kept.
    """
    document = _decode(epoch, _REQUEST)
    if document is not None and not _names_berth(document.get("berth")):
        raise _damaged(epoch, _REQUEST, "it does not say which process of which boot wrote it")
    return document


def holds_request(epoch: Epoch) -> bool:
    """Say whether `epoch` is that of a run: what will be run is written before anything else."""
    return epoch.holds(_REQUEST)


def lock_keeper(epoch: Epoch) -> int:
    """Return a descriptor of the keeper's lock, held; it falls when this process and the keeper have closed it."""
    fd = open_lock_file(_KEEPER_LOCK, dir_fd=epoch.fd)
    if not try_lock(fd):
        os.close(fd)
        raise FailedError("keeper-lock", f"the keeper's lock of {epoch.path!r} is held by another process")
    return fd


def open_keeper_lock(epoch: Epoch) -> int:
    """Return a descriptor of the keeper's lock, not held."""
    return open_lock_file(_KEEPER_LOCK, dir_fd=epoch.fd)


def publish(root: EpochRoot, epoch: Epoch, record: dict[str, object]) -> str:
    """Write the record durably into the work-state, then publish it without replacing one; return its path.

    Raises:
        FailedError: It could not be written or published; an existing record is as it was.
        UncertainError: It is published, and its directory could not be synced.
    """
    try:
        epoch.write(_RECORD, _encode(record))
    except OSError as error:
        raise FailedError(
            "record-not-written",
            f"the record of the run could not be written to {epoch.path!r} ({error.strerror})",
            "Free space or repair the file system; the next start of berth then records the run as interrupted.",
        ) from error
    return publish_ready(root, epoch)


def publish_ready(root: EpochRoot, epoch: Epoch) -> str:
    """Publish the record that stands ready in the work-state; return its path.

    Raises:
        FailedError: There is a record of this name already, or it could not be published.
        UncertainError: It is published, and its directory could not be synced.
    """
    path = record_path(root, epoch.id)
    try:
        fd = _open_records(root)
    except OSError as error:
        raise _not_published(path, error) from error
    try:
        epoch.publish(_RECORD, dir_fd=fd, as_name=os.path.basename(path))
    except FileExistsError as error:
        raise FailedError(
            "record-exists",
            f"the record {path!r} exists already and was not replaced; the new one stays in {epoch.path!r}",
            "Look at both; berth chooses a new name for every run, so somebody else made one of them.",
        ) from error
    except OSError as error:
        raise _not_published(path, error) from error
    finally:
        os.close(fd)
    return path


def is_published(root: EpochRoot, epoch: str) -> bool:
    """Say whether there is a record of `epoch`."""
    try:
        os.stat(os.path.join(RECORDS, f"{epoch}.json"), dir_fd=root.fd, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return True


def ready_record(epoch: Epoch) -> dict[str, object] | None:
    """Return the record that stands ready in the work-state, or None.

    Raises:
        FailedError: The file is damaged; it is kept.
    """
    return _decode(epoch, _RECORD)


def record_path(root: EpochRoot, epoch: str) -> str:
    """Return the path of the published record of `epoch`."""
    return os.path.join(root.path, RECORDS, f"{epoch}.json")


def _open_records(root: EpochRoot) -> int:
    with contextlib.suppress(FileExistsError):
        os.mkdir(RECORDS, 0o700, dir_fd=root.fd)
        fsync_open_directory(root.fd)
    return os.open(RECORDS, _DIRECTORY, dir_fd=root.fd)


def _encode(document: dict[str, object]) -> bytes:
    return (json.dumps(document, indent=2, ensure_ascii=False) + "\n").encode()


def _decode(epoch: Epoch, name: str) -> dict[str, object] | None:
    data = epoch.read(name)
    if data is None:
        return None
    try:
        document = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise _damaged(epoch, name, str(error)) from error
    if not isinstance(document, dict) or document.get("epoch") != epoch.id:
        raise _damaged(epoch, name, "it does not belong to this epoch")
    return document


def _names_berth(berth: object) -> bool:
    """Say whether `berth` has the boot id and the start time by which leftovers are told from strangers."""
    if not isinstance(berth, dict):
        return False
    boot_id, start_ticks = berth.get("boot_id"), berth.get("start_ticks")
    return isinstance(boot_id, str) and type(start_ticks) is int and start_ticks >= 0


def _damaged(epoch: Epoch, name: str, why: str) -> BerthError:
    return FailedError(
        "damaged-state",
        f"{os.path.join(epoch.path, name)!r} is damaged ({why}); it is kept, and its run is left as it is",
        "Move the directory out of the state root once you have looked at it.",
    )


def _not_published(path: str, error: OSError) -> FailedError:
    return FailedError(
        "record-not-published",
        f"the record could not be published as {path!r}: {error.strerror}",
        "Repair the records directory; the next start of berth publishes the record.",
    )
