"""Is this root fit for work-state? Tried on the real file system, never derived from a version, and written down.

Everything is tried inside a private directory below the root (`trials`). What cannot be tried is read: a probe does
not see whether a sync reaches the disk, nor what another client of a network file system does, so the type of the mount
decides what an operator has to accept by name. Accepting adds to the trials and replaces none.
"""

import contextlib
import errno
import os
import secrets
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Final

from berth.durable.files import fsync_open_directory, list_names
from berth.durable.tree import durable_rmtree
from berth.epoch import names, trials
from berth.epoch.capability import NOTHING_ACCEPTED, Accepted, Capability, Operation
from berth.epoch.directory import NAME_ANOTHER
from berth.epoch.trials import TrialError
from berth.errors import AbilityError, BerthError, FailedError, UncertainError
from berth.linux.locks import try_lock
from berth.linux.mounts import Medium, mount_id_of, mount_of

#: Younger directories of probes may not be locked yet; they are moments from it.
FRESH_S: Final = 60.0
_DIRECTORY: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_ELSEWHERE: Final = "Choose a directory on a local file system such as ext4, xfs or btrfs"
#: What every start of a run tries.
_QUICK: Final[dict[str, Callable[[int], None]]] = {
    "rename-noreplace-file": trials.rename_file,
    "rename-noreplace-directory": trials.rename_directory,
    "examine-flags": trials.examine_flags,
    "sync-directory": trials.sync_directory,
    "lock": trials.lock,
}
#: What a probe on demand tries as well.
_THOROUGH: Final[dict[str, Callable[[int], None]]] = {
    "replace": trials.replace,
    "link": trials.link,
    "sync-file": trials.sync_file,
    "lock-between-processes": trials.lock_between_processes,
}


def probe(
    root_fd: int,
    root: str,
    *,
    accepted: Accepted = NOTHING_ACCEPTED,
    thorough: bool = False,
    publication: tuple[int, str] | None = None,
) -> Capability:
    """Try what work-state in `root` relies on, and return what was found; a refusal is part of that, not raised.

    Leftovers of probes that were killed are removed on the way. The caller holds the root's lock, so that no other
    start takes a probe that is just being made for a leftover.

    Args:
        root_fd: The directory, open.
        root: Its path, for messages.
        accepted: What the operator accepts.
        thorough: Whether to try what only some commands need, with processes of their own.
        publication: Descriptor and path of the directory that results are renamed into, or None.
    """
    found = Capability(root, None, accepted, time.time(), publication_root=publication[1] if publication else None)
    tried = {**_QUICK, **(_THOROUGH if thorough else {})}
    found.operations = dict.fromkeys(
        ["remove-leftovers", "create-and-sync", *tried, *(["publish"] if publication else []), "remove-and-sync"],
        Operation(),
    )
    try:
        found.mount = mount_of(root_fd)
        _try(found, "remove-leftovers", partial(remove_leftovers, root_fd))
        with _private_directory(root_fd, found) as fd:
            for name, trial in tried.items():
                _try(found, name, partial(trial, fd))
            if publication is not None:
                _try_publication(found, fd, publication)
    except _RefusedError:
        pass
    except (OSError, BerthError) as error:  # /proc is not there
        found.refusal = _not_tried(found, error)
    found.refusal = found.refusal or _refuse_medium(found)
    return found


def judge(root_fd: int, root: str, *, accepted: Accepted) -> Capability:
    """Say what is known of `root` without trying anything: whether its kind of file system is accepted."""
    found = Capability(root, None, accepted, time.time())
    try:
        found.mount = mount_of(root_fd)
    except (OSError, BerthError) as error:  # /proc is not there
        found.refusal = _not_tried(found, error)
    found.refusal = found.refusal or _refuse_medium(found)
    return found


class _RefusedError(Exception):
    """The probe is over: the reason stands in the record."""


@contextlib.contextmanager
def _private_directory(root_fd: int, found: Capability) -> Iterator[int]:
    """A new directory below the root, locked while in use and removed afterwards."""
    name = f"{names.PROBE_PREFIX}{os.getpid()}-{time.monotonic_ns()}-{secrets.token_hex(16)}"
    opened: list[int] = []

    def create() -> None:
        os.mkdir(name, 0o700, dir_fd=root_fd)
        opened.append(os.open(name, _DIRECTORY, dir_fd=root_fd))
        try_lock(opened[0])
        fsync_open_directory(root_fd)

    try:
        _try(found, "create-and-sync", create)
        yield opened[0]
    finally:
        if opened:
            try:
                _try(found, "remove-and-sync", partial(_remove, root_fd, name))
            finally:
                os.close(opened[0])


def _remove(root_fd: int, name: str) -> None:
    """Remove a probe's directory durably; what a failed trial left in it too."""
    try:
        os.rmdir(name, dir_fd=root_fd)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        durable_rmtree(name, dir_fd=root_fd, workers=1)
        return
    try:
        fsync_open_directory(root_fd)
    except OSError as error:
        raise UncertainError(
            f"the probe's directory {name!r} was removed, but the root could not be synced "
            f"({os.strerror(error.errno or 0)}): after a power cut it may be back",
            errno=error.errno or 0,
            filename=name,
        ) from error


def _try(found: Capability, name: str, trial: Callable[[], object]) -> None:
    """Carry out one trial and note what came of it; the first that fails ends the probe."""
    begun = time.perf_counter()
    result, why, code = "works", "", None
    try:
        trial()
    except TrialError as error:
        result, why, code = "does not", error.why, error.errno
        found.refusal = found.refusal or _cannot(found, error)
    except (OSError, BerthError) as error:
        result, why, code = "failed", str(error), getattr(error, "errno", None)
        found.refusal = found.refusal or _not_tried(found, error)
    seconds = time.perf_counter() - begun
    found.operations[name] = Operation(result, why, errno.errorcode.get(code or 0), seconds)
    if result != "works":
        raise _RefusedError


def _try_publication(found: Capability, fd: int, publication: tuple[int, str]) -> None:
    """Rename out of the root into a private directory of the publication root."""
    publication_fd, path = publication
    there = Capability(path, mount_of(publication_fd), found.accepted, found.probed_at)
    try:
        _try(there, "remove-leftovers", partial(remove_leftovers, publication_fd, least_age_s=FRESH_S))
        with _private_directory(publication_fd, there) as private:
            _try(found, "publish", partial(_publish, fd, private, path))
    except _RefusedError:
        found.refusal = found.refusal or there.refusal
        if found.operations["publish"].result == "not tried" and there.refusal is not None:
            found.operations["publish"] = Operation("failed", there.refusal.message)
        raise


def _publish(fd: int, private: int, path: str) -> None:
    try:
        trials.publish(fd, private)
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        same = os.fstat(fd).st_dev == os.fstat(private).st_dev and mount_id_of(fd) != mount_id_of(private)
        what = "another mount of the same file system" if same else "another file system"
        raise TrialError(f"the publication root {path!r} lies on {what}", errno=errno.EXDEV) from error


def _cannot(found: Capability, error: TrialError) -> BerthError:
    where = f"{found.root!r} ({found.mount.file_system if found.mount else 'not in the mount table'})"
    if error.errno == errno.EXDEV and found.publication_root:
        return AbilityError(
            "publication-elsewhere",
            f"{error.why} than the root {where}, and nothing can be renamed across",
            "Give two directories of one file system, reached through one mount.",
        )
    answer = f" ({errno.errorcode.get(error.errno, error.errno)})" if error.errno else ""
    fix = f"{_ELSEWHERE}. {NAME_ANOTHER}"
    if error.replaces:
        message = f"the file system of {where} does not protect existing work-state: {error.why}{answer}"
        return AbilityError("no-noreplace", message, fix)
    return AbilityError("unfit-root", f"the file system of {where} is not fit for work-state: {error.why}{answer}", fix)


def _not_tried(found: Capability, error: OSError | BerthError) -> BerthError:
    if isinstance(error, BerthError):
        return error
    return FailedError(
        "probe-failed",
        f"the file system of {found.root!r} could not be probed: {error}",
        f"Check that the directory is writable and its disk is not full. {NAME_ANOTHER}",
    )


def _refuse_medium(found: Capability) -> BerthError | None:
    kind = found.mount.file_system if found.mount else "not in the mount table"
    if found.medium in (Medium.NETWORK, Medium.FUSE) and not found.accepted.network:
        return AbilityError(
            "network-root",
            f"{found.root!r} lies on a file system that is not known to be local ({kind}): no probe can show what "
            "other clients of it do to the same names, and after a lost answer nobody knows what happened",
            f"{_ELSEWHERE}. If this host is the only one that uses the directory, say so with --trust-network.",
        )
    if found.medium is Medium.VOLATILE and not found.accepted.volatile:
        return AbilityError(
            "volatile-root",
            f"{found.root!r} lies on a file system that keeps nothing ({kind}): work-state would be gone after a "
            "restart or a power cut",
            f"{_ELSEWHERE}. If the work may be lost, say so with --allow-volatile.",
        )
    return None


def remove_leftovers(
    root_fd: int, *, is_ours: Callable[[str], bool] = names.is_probe, least_age_s: float = 0.0
) -> None:
    """Remove the directories of killed probes: exactly a probe's name, a real directory, and its lock is free.

    Args:
        root_fd: The open directory that holds them.
        is_ours: Which names they have.
        least_age_s: How old they are at least. A directory that is just being made is not locked yet, so whoever does
            not hold a lock that makers hold too leaves fresh ones alone, see `FRESH_S`.

    Raises:
        OSError: One cannot be removed, or holds what no probe makes.
    """
    for name in filter(is_ours, list_names(root_fd)):
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):  # another start is quicker, or no probe's
            if os.stat(name, dir_fd=root_fd, follow_symlinks=False).st_uid != os.geteuid():
                continue  # in a directory of many it may be anybody's
            fd = os.open(name, _DIRECTORY, dir_fd=root_fd)
            try:
                if time.time() - os.fstat(fd).st_mtime >= least_age_s and try_lock(fd):
                    _check_content(fd, name)
                    durable_rmtree(name, dir_fd=root_fd, workers=1)
            finally:
                os.close(fd)


def _check_content(fd: int, name: str) -> None:
    """Refuse a directory that holds more than the one-letter names that trials make, and directories of probes."""
    for below in list_names(fd):
        if len(below) > 1 and not names.is_probe(below):
            raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), os.path.join(name, below))
