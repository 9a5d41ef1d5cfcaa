"""What work-state relies on, each tried for real inside one private directory of the file system in question.

Every trial makes its own files in the directory, checks by content and by what readdir shows rather than by the answer
of the call, and removes them when all is well. A trial that fails says so with `TrialError`, and leaves the clean-up
to whoever made the directory; any other OSError means that it could not be carried out.
"""

import errno
import os
import subprocess
import sys
from typing import Final

from berth.durable.files import fsync_open_directory, list_names
from berth.linux import syscalls
from berth.linux.locks import open_lock_file, try_lock

_DIRECTORY: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FIRST: Final = b"first"
_SECOND: Final = b"second"
#: How the kernel or a file system refuses a flag it does not know: EINVAL by a file system, EOPNOTSUPP for no such
#: call, EPERM under a filter, ENOTTY by a few drivers.
UNSUPPORTED: Final = (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM, errno.ENOTTY)
_CHILD_TIMEOUT_S: Final = 30.0
#: Opens the file argv[1] and tries to lock it: 0 when it got the lock, 3 when somebody else holds it.
_TRY_LOCK: Final = """
import fcntl, os, sys
fd = os.open(sys.argv[1], os.O_RDWR)
try: fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
except BlockingIOError: sys.exit(3)
"""


class TrialError(Exception):
    """An operation does not do what work-state needs.

    Attributes:
        why: What was seen, for people.
        errno: The kernel's answer where that was the reason, else None.
        replaces: Whether existing names are not protected, rather than something else missing.
    """

    def __init__(self, why: str, *, errno: int | None = None, replaces: bool = False) -> None:
        super().__init__(why)
        self.why = why
        self.errno = errno
        self.replaces = replaces


def rename_file(fd: int) -> None:
    """A file takes a free name, and then a second one is refused that name, both untouched.

    The success half comes first: a file system that refuses the flag altogether still answers EEXIST for an existing
    target (the kernel looks before it asks the file system), and would look like one that supports it.
    """
    _create(fd, "a", _FIRST)
    _must_move(fd, "a", "b")
    _create(fd, "a", _SECOND)
    _must_refuse(fd, "a", "b")
    if (_read(fd, "a"), _read(fd, "b")) != (_SECOND, _FIRST):
        raise TrialError("a refused rename of a file changed it all the same", replaces=True)
    _remove(fd, "a", "b")


def rename_directory(fd: int) -> None:
    """The same with directories, which a plain rename would replace where they are empty."""
    os.mkdir("c", 0o700, dir_fd=fd)
    first = os.stat("c", dir_fd=fd, follow_symlinks=False).st_ino
    _must_move(fd, "c", "d")
    os.mkdir("c", 0o700, dir_fd=fd)
    second = os.stat("c", dir_fd=fd, follow_symlinks=False).st_ino
    _must_refuse(fd, "c", "d")
    seen = [os.stat(name, dir_fd=fd, follow_symlinks=False).st_ino for name in ("c", "d")]
    if seen != [second, first]:
        raise TrialError("a refused rename of a directory changed it all the same", replaces=True)
    os.rmdir("c", dir_fd=fd)
    os.rmdir("d", dir_fd=fd)


def examine_flags(fd: int) -> None:
    """A swap of two names is done or refused; a file system that reports success and does not swap drops the flags.

    Nothing above the file system masks this, unlike an existing target, so it tells what `rename_file` cannot see.
    """
    _create(fd, "e", _FIRST)
    _create(fd, "f", _SECOND)
    swapped = True
    try:
        syscalls.renameat2("e", "f", syscalls.RENAME_EXCHANGE, src_dir_fd=fd, dst_dir_fd=fd)
    except OSError as error:
        if error.errno not in UNSUPPORTED:
            raise
        swapped = False
    present = [name for name in list_names(fd) if name in ("e", "f")]
    found = [_read(fd, name) for name in present]
    if (present, found) != (["e", "f"], [_SECOND, _FIRST] if swapped else [_FIRST, _SECOND]):
        raise TrialError(
            "it drops the flags of a rename: a swap of two names was reported as done and was not", replaces=True
        )
    _remove(fd, "e", "f")


def replace(fd: int) -> None:
    """A rename over an existing file replaces it, in one directory and from another."""
    os.mkdir("g", 0o700, dir_fd=fd)
    below = os.open("g", _DIRECTORY, dir_fd=fd)
    try:
        for source_fd in (fd, below):
            _create(source_fd, "h", _SECOND)
            _create_or_empty(fd, "i", _FIRST)
            os.replace("h", "i", src_dir_fd=source_fd, dst_dir_fd=fd)
            if _read(fd, "i") != _SECOND or "h" in list_names(source_fd):
                raise TrialError("a rename over an existing file did not replace it")
        _remove(fd, "i")
        os.rmdir("g", dir_fd=fd)
    finally:
        os.close(below)


def link(fd: int) -> None:
    """A second name is given to a file, and refused where the name exists; removing one name leaves the other."""
    _create(fd, "j", _FIRST)
    try:
        os.link("j", "k", src_dir_fd=fd, dst_dir_fd=fd, follow_symlinks=False)
    except OSError as error:
        if error.errno not in (*UNSUPPORTED, errno.EMLINK, errno.EXDEV):
            raise
        raise TrialError("files cannot have a second name (link)", errno=error.errno) from error
    _create(fd, "l", _SECOND)
    try:
        os.link("l", "k", src_dir_fd=fd, dst_dir_fd=fd, follow_symlinks=False)
    except FileExistsError:
        os.unlink("j", dir_fd=fd)
    else:
        raise TrialError("a link replaced an existing name")
    if _read(fd, "k") != _FIRST or "j" in list_names(fd):
        raise TrialError("removing one of two names of a file did something else")
    _remove(fd, "k", "l")


def sync_file(fd: int) -> None:
    """A file can be synced."""
    _create(fd, "m", _FIRST, sync=True)
    _remove(fd, "m")


def sync_directory(fd: int) -> None:
    """A directory can be synced. That it lasts cannot be tried; the type of the mount says what is known about that."""
    fsync_open_directory(fd)


def lock(fd: int) -> None:
    """A flock excludes another opening of the same file, and of the same directory, which is how epochs are held."""
    os.mkdir("r", 0o700, dir_fd=fd)
    first, second = (os.open("r", _DIRECTORY, dir_fd=fd) for _ in range(2))
    try:
        if not try_lock(first) or try_lock(second):
            raise TrialError("a directory cannot be locked, or two hold the same exclusive lock (flock)")
        os.rmdir("r", dir_fd=fd)
    finally:
        os.close(first)
        os.close(second)
    held, other = open_lock_file("n", dir_fd=fd), open_lock_file("n", dir_fd=fd)
    try:
        if not try_lock(held):
            raise TrialError("a new file cannot be locked (flock)")
        if try_lock(other):
            raise TrialError("two open files hold the same exclusive lock (flock)")
        _remove(fd, "n")
    finally:
        os.close(held)
        os.close(other)


def lock_between_processes(fd: int) -> None:
    """A flock excludes a second process, and a third one gets it after its release."""
    held = open_lock_file("o", dir_fd=fd)
    try:
        if not try_lock(held):
            raise TrialError("a new file cannot be locked (flock)")
        if _locks_in_child(fd, "o"):
            raise TrialError("two processes hold the same exclusive lock (flock)")
    finally:
        os.close(held)
    if not _locks_in_child(fd, "o"):
        raise TrialError("a lock (flock) that was released cannot be had")
    _remove(fd, "o")


def publish(fd: int, publication_fd: int) -> None:
    """A file moves into another root without replacing anything there.

    Raises:
        OSError: EXDEV where that is another file system or another mount of this one.
    """
    _create(fd, "p", _FIRST)
    _rename(fd, "p", publication_fd, "q")
    _create(fd, "p", _SECOND)
    try:
        _rename(fd, "p", publication_fd, "q")
    except FileExistsError:
        pass
    else:
        raise TrialError("a rename onto an existing name of the publication root succeeded", replaces=True)
    if (_read(fd, "p"), _read(publication_fd, "q")) != (_SECOND, _FIRST):
        raise TrialError("a refused publication changed a file all the same", replaces=True)
    _remove(fd, "p")
    _remove(publication_fd, "q")


def _locks_in_child(fd: int, name: str) -> bool:
    words = [sys.executable, "-I", "-S", "-c", _TRY_LOCK, f"/proc/self/fd/{fd}/{name}"]
    try:
        done = subprocess.run(
            words,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            pass_fds=[fd],
            timeout=_CHILD_TIMEOUT_S,
        )
    except subprocess.TimeoutExpired as error:
        raise TrialError(f"a second process that tried the lock did not end in {_CHILD_TIMEOUT_S:.0f} s") from error
    if done.returncode not in (0, 3):
        last = done.stderr.decode(errors="replace").strip().splitlines()[-1:]
        raise TrialError(f"a second process cannot use the lock: {' '.join(last)}")
    return done.returncode == 0


def _must_move(fd: int, source: str, destination: str) -> None:
    _rename(fd, source, fd, destination)
    present = list_names(fd)
    if source in present or destination not in present:
        raise TrialError("a rename reported success and moved nothing", replaces=True)


def _must_refuse(fd: int, source: str, destination: str) -> None:
    try:
        _rename(fd, source, fd, destination)
    except FileExistsError:
        return
    raise TrialError("a rename onto an existing name succeeded", replaces=True)


def _rename(source_fd: int, source: str, destination_fd: int, destination: str) -> None:
    try:
        syscalls.renameat2(
            source, destination, syscalls.RENAME_NOREPLACE, src_dir_fd=source_fd, dst_dir_fd=destination_fd
        )
    except OSError as error:
        if error.errno not in UNSUPPORTED:
            raise
        raise TrialError(
            f"a rename with RENAME_NOREPLACE is refused: {error.strerror}", errno=error.errno, replaces=True
        ) from error


def _create(fd: int, name: str, data: bytes, *, sync: bool = False) -> None:
    file = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=fd)
    try:
        os.write(file, data)
        if sync:
            os.fsync(file)
    finally:
        os.close(file)


def _create_or_empty(fd: int, name: str, data: bytes) -> None:
    file = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=fd)
    try:
        os.write(file, data)
    finally:
        os.close(file)


def _remove(fd: int, *files: str) -> None:
    for name in files:
        os.unlink(name, dir_fd=fd)


def _read(fd: int, name: str) -> bytes:
    file = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=fd)
    try:
        return os.read(file, 64)
    finally:
        os.close(file)
