"""Files that last: what is reported as done survives a power cut.

"Atomic" and "durable" are two promises. A rename is atomic by itself; it is durable only after the parent directory is
synced. So every change here ends with an fsync(2) of the directory that holds the name. A failed fsync is final: the
kernel may have dropped the data and would report success the next time, so it is never repeated. Where the change is
already visible the outcome is uncertain, which is an error of its own.

Out of scope: what the disk, the hypervisor or a network server does after it has acknowledged a flush.
"""

import contextlib
import errno
import os
import secrets
from collections.abc import Iterator
from typing import Final

from berth.errors import UncertainError
from berth.linux import syscalls
from berth.linux.mounts import Medium, medium_of, mount_of

_DIRECTORY: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_IN_PLACE: Final = "is in place"
_MOVED_BACK: Final = "it may be back under its old name"


def fsync_directory(path: str, *, dir_fd: int | None = None) -> None:
    """Make the names in the directory `path` durable.

    Raises:
        OSError: It cannot be opened, or fsync(2) failed; what was changed in it may or may not survive.
    """
    fd = os.open(path, _DIRECTORY, dir_fd=dir_fd)
    try:
        fsync_open_directory(fd)
    except OSError as error:
        raise OSError(error.errno, os.strerror(error.errno or 0), path) from error
    finally:
        os.close(fd)


def fsync_open_directory(fd: int) -> None:
    """Make the names in the open directory `fd` durable.

    It is asked for its status afterwards: an xfs that has shut itself down answers the fsync(2) of a directory with
    success (seen on Linux 6.18), and everything else with EIO.

    Raises:
        OSError: fsync(2) failed or was not carried out; what was changed in it may or may not survive.
    """
    os.fsync(fd)
    os.fstat(fd)


def durable_rename_noreplace(
    source: str, destination: str, *, src_dir_fd: int | None = None, dst_dir_fd: int | None = None
) -> None:
    """Rename `source` to `destination`, refusing an existing destination, and make that durable.

    One renameat2(2) with RENAME_NOREPLACE, never a check followed by a plain rename. After it the destination's
    directory is synced, then the source's where that is another one: a retirement costs exactly one fsync.

    Args:
        source: A path, or the name of an entry of `src_dir_fd`.
        destination: A path, or the name of an entry of `dst_dir_fd`.
        src_dir_fd: Open directory that `source` is a single name in.
        dst_dir_fd: Open directory that `destination` is a single name in.

    Raises:
        ValueError: A path does not end in the name of an entry.
        FileExistsError: The destination exists; both sides are as they were, nothing was synced.
        OSError: The rename was refused; EOPNOTSUPP where the kernel has no such call.
        UncertainError: The rename is visible and a directory could not be synced, or, on a network or FUSE file system,
            the request failed and may have been carried out.
    """
    source_in = _directory_of(source, src_dir_fd)
    destination_in = _directory_of(destination, dst_dir_fd)
    try:
        syscalls.renameat2(
            source,
            destination,
            syscalls.RENAME_NOREPLACE,
            src_dir_fd=syscalls.AT_FDCWD if src_dir_fd is None else src_dir_fd,
            dst_dir_fd=syscalls.AT_FDCWD if dst_dir_fd is None else dst_dir_fd,
        )
    except OSError as error:
        _doubt(error, destination, dst_dir_fd)
        raise
    _sync_renamed(source, destination, source_in, destination_in, src_dir_fd, dst_dir_fd)


def durable_replace(
    source: str, destination: str, *, src_dir_fd: int | None = None, dst_dir_fd: int | None = None
) -> None:
    """Rename `source` to `destination`, replacing it where the last writer wins, and make that durable.

    Where both are names of one file already, the kernel does nothing and both stay.

    Raises:
        ValueError: A path does not end in the name of an entry.
        OSError: The rename was refused; both sides are as they were.
        UncertainError: As `durable_rename_noreplace`.
    """
    source_in = _directory_of(source, src_dir_fd)
    destination_in = _directory_of(destination, dst_dir_fd)
    try:
        os.replace(source, destination, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd)
    except OSError as error:
        _doubt(error, destination, dst_dir_fd)
        raise
    _sync_renamed(source, destination, source_in, destination_in, src_dir_fd, dst_dir_fd)


def durable_link(
    source: str, destination: str, *, src_dir_fd: int | None = None, dst_dir_fd: int | None = None
) -> None:
    """Give the file `source` the second name `destination`, refusing an existing one, and make that durable.

    The content is the caller's to sync before: a link makes a name durable, not what stands behind it.

    Raises:
        ValueError: A path does not end in the name of an entry.
        FileExistsError: The destination exists; nothing was changed or synced. On a network file system this may also
            be the answer to a repeated request whose first one made the link: compare the content.
        OSError: The link was refused: EXDEV, EPERM or EOPNOTSUPP where there can be none.
        UncertainError: The link is visible and its directory could not be synced, or, on a network or FUSE file system,
            the request failed and may have been carried out.
    """
    _directory_of(source, src_dir_fd)
    destination_in = _directory_of(destination, dst_dir_fd)
    try:
        os.link(source, destination, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd, follow_symlinks=False)
    except OSError as error:
        _doubt(error, destination, dst_dir_fd)
        raise
    _sync(source, destination, destination_in, dst_dir_fd, seen=_IN_PLACE, doubt="that name may be gone")


def durable_unlink(path: str, *, dir_fd: int | None = None) -> None:
    """Remove the name `path` of a file and make that durable.

    Raises:
        ValueError: `path` does not end in the name of an entry.
        OSError: It was refused: ENOENT where there is no such name, EISDIR for a directory.
        UncertainError: The name is gone and its directory could not be synced, or, on a network or FUSE file system,
            the request failed and may have been carried out.
    """
    directory = _directory_of(path, dir_fd)
    try:
        os.unlink(path, dir_fd=dir_fd)
    except OSError as error:
        _doubt(error, path, dir_fd)
        raise
    _sync(path, path, directory, dir_fd, seen="is gone", doubt="it may be back")


def durable_write(path: str, data: bytes, *, mode: int = 0o600, dir_fd: int | None = None) -> None:
    """Write the file `path`, replacing an old one as a whole, and make it durable.

    The bytes go to a temporary name in the same directory, are synced, and take the name afterwards: a reader sees
    the old file or the new one, and a failure leaves the old one and no temporary.

    Args:
        path: A path, or a path relative to `dir_fd`.
        data: The whole content.
        mode: Permission bits of the new file, whatever the umask is.
        dir_fd: Open directory that `path` is relative to.

    Raises:
        OSError: Nothing was changed; ENOSPC for a full disk.
        UncertainError: The new file is visible and its directory could not be synced.
    """
    with _written_aside(path, data, mode, dir_fd) as temporary:
        try:
            os.replace(temporary, path, src_dir_fd=dir_fd, dst_dir_fd=dir_fd)
        except OSError as error:
            _doubt(error, path, dir_fd)
            raise
    doubt = "what it held before may be back"
    _sync(path, path, os.path.dirname(path) or ".", dir_fd, seen=_IN_PLACE, doubt=doubt)


def durable_create(path: str, data: bytes, *, mode: int = 0o600) -> None:
    """Make the new file `path`, whole and durable, refusing an existing one.

    Args:
        path: A path.
        data: The whole content.
        mode: Permission bits, whatever the umask is.

    Raises:
        FileExistsError: There is something of that name, which is as it was.
        OSError: Nothing was changed; ENOSPC for a full disk.
        UncertainError: The file is visible and its directory could not be synced.
    """
    with _written_aside(path, data, mode, None) as temporary:
        durable_rename_noreplace(temporary, path)


def durable_makedirs(path: str, *, mode: int = 0o700) -> None:
    """Create the directory `path` and every missing ancestor, and make each of the new names durable.

    Raises:
        OSError: An ancestor is not a directory or may not be written, or a directory could not be synced. What was
            created stays; a repetition goes on from there.
    """
    missing = []
    current = os.path.abspath(path)
    while not os.path.isdir(current):
        missing.append(current)
        current = os.path.dirname(current)
    for directory in reversed(missing):
        with contextlib.suppress(FileExistsError):
            os.mkdir(directory, mode)
        if not os.path.isdir(directory):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), directory)
        try:
            fsync_directory(os.path.dirname(directory))
        except OSError:
            with contextlib.suppress(OSError):  # a repetition would find it, and take it for durable
                os.rmdir(directory)
            raise


def list_names(dir_fd: int) -> list[str]:
    """Return the names in the open directory `dir_fd`, sorted.

    A fresh descriptor is read each time: one that was opened before may not show newer names (btrfs).

    Raises:
        OSError: The directory cannot be read.
    """
    fd = os.open(".", _DIRECTORY, dir_fd=dir_fd)
    try:
        return sorted(os.listdir(fd))
    finally:
        os.close(fd)


def _directory_of(path: str, dir_fd: int | None) -> str:
    """Return the directory that holds the name `path` ends in, relative to `dir_fd`; "." where that is it.

    Refused is what this would be the wrong directory of: a path that ends in `/`, `.` or `..`. (The kernel renames a
    directory to `new/`, whose parent is not what stands before the slash.)
    """
    directory, _, name = path.rpartition("/")
    if name in ("", ".", "..") or "\0" in path or (dir_fd is not None and name != path):
        raise ValueError(f"not the name of a directory entry: {path!r}")
    return directory or ("." if name == path else "/")


@contextlib.contextmanager
def _written_aside(path: str, data: bytes, mode: int, dir_fd: int | None) -> Iterator[str]:
    """Write and sync `data` under a temporary name beside `path`; it is removed where it was not given another one."""
    directory, name = os.path.split(path)
    shown = os.fsdecode(os.fsencode(name)[:200])  # NAME_MAX counts bytes
    temporary = os.path.join(directory, f".{shown}.{secrets.token_hex(8)}.tmp")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    fd = os.open(temporary, flags, 0o600, dir_fd=dir_fd)
    with contextlib.ExitStack() as undo:
        undo.callback(_unlink_if_there, temporary, dir_fd)
        try:
            os.fchmod(fd, mode)
            write_all(fd, data)
            os.fsync(fd)
        except OSError as error:
            raise OSError(error.errno, os.strerror(error.errno or 0), path) from error
        finally:
            os.close(fd)
        yield temporary
        undo.pop_all()


def _unlink_if_there(path: str, dir_fd: int | None) -> None:
    with contextlib.suppress(OSError):  # what went wrong before is what the caller has to know
        os.unlink(path, dir_fd=dir_fd)


def write_all(fd: int, data: bytes) -> None:
    """Write all of `data`, with one call unless the kernel takes less: the next one then says why.

    Raises:
        OSError: As write(2) says; a part may have been written.
    """
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def _doubt(error: OSError, path: str, dir_fd: int | None) -> None:
    """Raise UncertainError instead of `error`, the answer to a change of `path`, where that answer says little.

    Between a client and the server, or a FUSE daemon, the answer can be lost or belong to a repeated request, so only
    "it exists already" is taken at its word there.
    """
    if isinstance(error, FileExistsError):
        return
    medium = _medium(path, dir_fd)
    if medium in (Medium.NETWORK, Medium.FUSE):
        raise UncertainError(
            f"changing {path!r} failed ({os.strerror(error.errno or 0)}) on a {medium} file system, "
            "where it may have been carried out all the same",
            errno=error.errno or 0,
            filename=str(error.filename),
            filename2=error.filename2,
        ) from error


def _medium(path: str, dir_fd: int | None) -> Medium | None:
    """Return what kind of file system the directory of `path` lies on; None where there is no such directory."""
    try:
        fd = os.open(os.path.dirname(path) or ".", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=dir_fd)
    except OSError as error:
        definite = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EACCES, errno.ENAMETOOLONG)
        return None if error.errno in definite else Medium.NETWORK  # a server or daemon that is gone
    try:
        mount = mount_of(fd)
    finally:
        os.close(fd)
    return Medium.NETWORK if mount is None else medium_of(mount)  # not shown is not known to be local


def _sync(source: str, destination: str, directory: str, dir_fd: int | None, *, seen: str, doubt: str) -> None:
    """Sync `directory` after a change in it that is visible.

    Args:
        source: First path of the change, for the error.
        destination: Second path of the change, for the error.
        directory: The directory, relative to `dir_fd`.
        dir_fd: Open directory, or None.
        seen: What is visible now.
        doubt: What a power cut may make of it.
    """
    try:
        fsync_directory(directory, dir_fd=dir_fd)
    except OSError as error:
        raise UncertainError(
            f"{destination!r} {seen}, but its directory could not be synced ({os.strerror(error.errno or 0)}): "
            f"after a power cut {doubt}",
            errno=error.errno or 0,
            filename=source,
            filename2=destination,
        ) from error


def _sync_renamed(
    source: str, destination: str, source_in: str, destination_in: str, src_dir_fd: int | None, dst_dir_fd: int | None
) -> None:
    """Sync the destination's directory, then the source's where that is another one."""
    _sync(source, destination, destination_in, dst_dir_fd, seen=_IN_PLACE, doubt=_MOVED_BACK)
    if not _same_directory(source_in, src_dir_fd, destination_in, dst_dir_fd):
        _sync(source, destination, source_in, src_dir_fd, seen=_IN_PLACE, doubt=_MOVED_BACK)


def _same_directory(first: str, first_fd: int | None, second: str, second_fd: int | None) -> bool:
    """Say whether two directories are one; where that cannot be found out they count as two."""
    if first == second and first_fd == second_fd:
        return True
    with contextlib.suppress(OSError):
        return os.path.samestat(os.stat(first, dir_fd=first_fd), os.stat(second, dir_fd=second_fd))
    return False
