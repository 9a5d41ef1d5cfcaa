"""Fixtures for real processes: children that run a few lines of berth, strace around them, other users, mounts."""

import contextlib
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

import berth
from berth.epoch import names
from berth.linux.mounts import Medium, medium_of, mount_of

_SOURCE = Path(berth.__file__).resolve().parents[1]
#: The interpreter itself, not the link in a virtual environment: another user may not reach that.
_PYTHON = os.path.realpath(sys.executable)
_OTHER_ID = 65534
_TIMEOUT_S = 60.0
#: Where temporary files go that survive a restart (Filesystem Hierarchy Standard 3.0, section 5.15).
_LASTING = "/var/tmp"


def pytest_configure() -> None:
    """Keep temporary directories on a disk: berth refuses state roots on what a restart empties, as many a /tmp is."""
    if "PYTEST_DEBUG_TEMPROOT" in os.environ or _medium(tempfile.gettempdir()) is not Medium.VOLATILE:
        return
    os.environ["PYTEST_DEBUG_TEMPROOT"] = os.environ["TMPDIR"] = tempfile.tempdir = _LASTING


def _medium(path: str) -> Medium | None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        mount = mount_of(fd)
    finally:
        os.close(fd)
    return medium_of(mount) if mount else None


@pytest.fixture(scope="session", autouse=True)
def default_signals() -> None:
    """Undo what nohup, background jobs and CI daemons leave ignored: the commands under test would inherit it."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGQUIT, signal.SIGHUP, signal.SIGTERM, signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU):
        signal.signal(number, signal.SIG_DFL)


@dataclass(frozen=True)
class Children:
    """Starts Python children that import the tree under test, without site-packages."""

    source: str
    _started: list[subprocess.Popen[str]] = field(default_factory=list)

    def argv(self, code: str, *arguments: object) -> list[str]:
        """Return the command that runs `code`, which sees `arguments` from sys.argv[1] on."""
        prelude = f"import sys; sys.path.insert(0, {self.source!r})\n"
        return [_PYTHON, "-I", "-S", "-B", "-c", prelude + code, *map(str, arguments)]

    def run(self, code: str, *arguments: object, prefix: Sequence[str] = (), **options: Any) -> str:
        """Run a child to its end, which must be a success, and return what it printed."""
        done = subprocess.run(
            [*prefix, *self.argv(code, *arguments)], capture_output=True, text=True, timeout=_TIMEOUT_S, **options
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def start(self, code: str, *arguments: object, prefix: Sequence[str] = (), **options: Any) -> subprocess.Popen[str]:
        """Start a child with pipes for input and output; it is killed at the end of the test."""
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, **options}
        child = subprocess.Popen([*prefix, *self.argv(code, *arguments)], **pipes)
        self._started.append(child)
        return child

    def end(self) -> None:
        """Kill the children that are left."""
        for child in self._started:
            child.kill()
            child.wait()
            for stream in filter(None, (child.stdin, child.stdout, child.stderr)):
                with contextlib.suppress(BrokenPipeError):
                    stream.close()


@pytest.fixture
def children() -> Iterator[Children]:
    """Return the starter of children of this user."""
    starter = Children(str(_SOURCE))
    yield starter
    starter.end()


@pytest.fixture
def readable_children() -> Iterator[Children]:
    """Return the starter of children that any user may be: the tree under test is copied where all can read it."""
    with tempfile.TemporaryDirectory(prefix="berth-test-") as directory:
        os.chmod(directory, 0o755)
        shutil.copytree(_SOURCE, os.path.join(directory, "src"))
        starter = Children(os.path.join(directory, "src"))
        yield starter
        starter.end()


@pytest.fixture
def as_root() -> None:
    """Skip where the tests do not run as root."""
    if os.geteuid() != 0:
        pytest.skip("needs root")


@pytest.fixture
def other_user(as_root: None) -> list[str]:
    """Return the words before a command that run it as an unprivileged user, uid and gid 65534."""
    if shutil.which("setpriv") is None:
        pytest.skip("setpriv (package util-linux) is not installed")
    words = ["setpriv", f"--reuid={_OTHER_ID}", f"--regid={_OTHER_ID}", "--clear-groups"]
    if subprocess.run([*words, _PYTHON, "-I", "-S", "-c", ""], stderr=subprocess.DEVNULL).returncode != 0:
        pytest.skip(f"other users may not execute {_PYTHON}")
    return words


@pytest.fixture
def open_directory() -> Iterator[Path]:
    """Return an empty directory that every user can reach and write; pytest's own can be reached by one only."""
    with tempfile.TemporaryDirectory(prefix="berth-test-") as directory:
        os.chmod(directory, 0o777)
        yield Path(directory)


@pytest.fixture
def small_tmpfs(as_root: None, tmp_path: Path) -> Iterator[Path]:
    """Return the root of a mounted file system of 64 KiB."""
    path = tmp_path / "small"
    path.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", path], stderr=subprocess.DEVNULL)
    if mounted.returncode != 0:
        pytest.skip("root may not mount a tmpfs here")
    yield path
    subprocess.run(["umount", path], check=True)


@dataclass(frozen=True)
class Traced:
    """A child that ran under strace.

    Attributes:
        output: What it printed.
        calls: The traced system calls, one a line; every descriptor is followed by its path.
    """

    output: str
    calls: list[str]


@pytest.fixture
def strace(children: Children, tmp_path: Path) -> Callable[..., Traced]:
    """Return a function that runs a child under strace, which may also inject errors."""
    if shutil.which("strace") is None:
        pytest.skip("strace is not installed")
    if subprocess.run(["strace", "-o", os.devnull, "true"], stderr=subprocess.DEVNULL).returncode != 0:
        pytest.skip("strace may not trace processes here")
    log = tmp_path / "strace.log"

    def run(code: str, *arguments: object, trace: str, inject: Sequence[str] = ()) -> Traced:
        words = ["strace", "-y", "-qq", "-s", "4096", "-o", str(log), "-e", f"trace={trace}"]
        words += [word for rule in inject for word in ("-e", f"inject={rule}")]
        output = children.run(code, *arguments, prefix=[*words, "--"])
        return Traced(output, log.read_text(errors="replace").splitlines())

    return run


@pytest.fixture
def make_retired() -> Callable[..., Path]:
    """Return a function that makes a retired epoch in a root, with as many files as it is told, and returns it."""

    def make(root: str | Path, *, files: int = 3, at_ms: int = 1_700_000_000_000, epoch: str | None = None) -> Path:
        retirement = names.retirement_id(at_ms, secrets.randbits(80))
        path = Path(root) / names.retired_name(epoch or secrets.token_hex(32), retirement)
        path.mkdir(mode=0o700)
        for number in range(files):
            (path / f"file-{number}").write_bytes(b"content")
        return path

    return make


@pytest.fixture
def mount(as_root: None) -> Iterator[Callable[..., None]]:
    """Return a function that mounts, given the words of mount(8); everything is unmounted when the test ends."""
    points: list[str] = []

    def do(*words: str | Path) -> None:
        done = subprocess.run(["mount", *map(str, words)], stderr=subprocess.PIPE, text=True)
        if done.returncode != 0:
            pytest.skip(f"root may not mount here: {done.stderr.strip()}")
        points.append(str(words[-1]))

    yield do
    for point in reversed(points):
        subprocess.run(["umount", point], check=True)


@pytest.fixture
def make_immutable(as_root: None) -> Iterator[Callable[[Path], None]]:
    """Return a function that makes a file immutable until the test ends."""
    if shutil.which("chattr") is None:
        pytest.skip("chattr (package e2fsprogs) is not installed")
    changed: list[Path] = []

    def change(path: Path) -> None:
        if subprocess.run(["chattr", "+i", path], stderr=subprocess.DEVNULL).returncode != 0:
            pytest.skip("this file system has no immutable files")
        changed.append(path)

    yield change
    for path in changed:
        subprocess.run(["chattr", "-i", path], check=True)


#: Lock files of state roots: they say nothing about what is in one.
_LOCKS = (".berth.lock", ".berth-reclaim.lock")


@pytest.fixture
def snapshot() -> Callable[..., dict[str, tuple[int, int, bytes]]]:
    """Return a function that returns every name below a directory with inode, mode and content, lock files apart."""

    def take(path: str | Path) -> dict[str, tuple[int, int, bytes]]:
        found = {}
        for below in Path(path).rglob("*"):
            status, content = below.lstat(), b""
            if below.is_symlink():
                content = os.fsencode(os.readlink(below))
            elif below.is_file():
                content = below.read_bytes()
            if below.name not in _LOCKS:
                found[str(below)] = (status.st_ino, status.st_mode, content)
        return found

    return take
