"""Work that goes on until the power is cut: epochs are opened, filled, published from and retired, one after another.

The plan is fixed, so that the number of acknowledged steps says what has to be on the disk. This module is both sides:
`main` is the child that works and acknowledges, the rest tells the parent what it may find.
"""

import contextlib
import hashlib
import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count, islice
from pathlib import Path
from typing import Final, Literal

import berth
from berth.durable.files import durable_replace
from berth.epoch.epoch import Epoch, EpochRoot
from berth.epoch.names import active_name, retired_name
from faults.invariants import Tree

#: What a broken berth leaves out: the fsync of directories, or of files.
Careless = Literal["", "directories", "files"]

_RECORDS: Final = "records"
_RECORD: Final = "record.json"
#: The source of a replacement bears the name of a temporary: a cut may leave it behind.
_NEXT_STATUS: Final = ".status.0123456789abcdef.tmp"


@dataclass(frozen=True)
class Step:
    """One step of the work.

    Attributes:
        kind: What is done.
        epoch: Id of the epoch it is done to.
        name: The file of the epoch that is written.
        data: What is written.
    """

    kind: Literal["open", "write", "replace", "publish", "retire"]
    epoch: str
    name: str = ""
    data: bytes = b""

    def after(self, tree: Tree) -> dict[str, bytes | None]:
        """Return what is on the disk once the step is done, given what was there before it."""
        active, retired = active_name(self.epoch), _retired(self.epoch)
        match self.kind:
            case "open":
                return {**tree, active: None}
            case "write" | "replace":
                return {**tree, f"{active}/{self.name}": self.data}
            case "publish":
                moved = {f"{active}/{_RECORD}": f"{_RECORDS}/{self.epoch}"}
                return {moved.get(path, path): data for path, data in tree.items()}
            case "retire":
                return {path.replace(active, retired): data for path, data in tree.items()}

    def torn(self, tree: Tree) -> list[Tree]:
        """Return what else a power cut in the step may leave: btrfs shows a moved file in both directories."""
        return [{**tree, **self.after(tree)}] if self.kind == "publish" else []


def plan() -> Iterator[Step]:
    """Return the steps of the work, without end."""
    for number in count():
        epoch = hashlib.sha256(b"%d" % number).hexdigest()
        yield Step("open", epoch)
        yield Step("write", epoch, "request.json", _bytes(epoch, 1, 300))
        yield Step("write", epoch, "status", _bytes(epoch, 2, 5000))
        yield Step("write", epoch, "status", _bytes(epoch, 3, 40))
        yield Step("replace", epoch, "status", _bytes(epoch, 4, 9000))
        yield Step("write", epoch, "result", _bytes(epoch, 5, 70_000))
        yield Step("write", epoch, _RECORD, _bytes(epoch, 6, 600))
        yield Step("publish", epoch)
        yield Step("retire", epoch)


#: How many steps the plan has for each epoch.
STEPS_OF_AN_EPOCH: Final = 9


def allowed(acknowledged: int) -> list[Tree]:
    """Return the trees that a root may show when so many steps were acknowledged and the next was perhaps begun."""
    tree: dict[str, bytes | None] = {_RECORDS: None}
    *done, following = islice(plan(), acknowledged + 1)
    for step in done:
        tree = step.after(tree)
    return [tree, following.after(tree), *following.torn(tree)]


def prepare(root: Path) -> None:
    """Make the root of the work."""
    root.mkdir(mode=0o700)
    (root / _RECORDS).mkdir()


@dataclass(frozen=True)
class Worker:
    """The child that works.

    Attributes:
        process: It, with pipes for input and output.
    """

    process: "subprocess.Popen[str]"

    def await_steps(self, number: int) -> list[str]:
        """Wait for so many acknowledgements and return their lines.

        Raises:
            AssertionError: It ended before.
        """
        assert self.process.stdout is not None
        lines = [self.process.stdout.readline() for _ in range(number)]
        assert all(lines), f"the work ended after {lines.index('')} of {number} steps"
        return lines

    def end(self) -> list[str]:
        """See it end, because something failed, it was killed, or it waits; return what it had acknowledged since."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        return self.process.stdout.readlines()

    def kill(self) -> None:
        """Kill it and see it end."""
        self.process.kill()
        self.process.wait()


@contextlib.contextmanager
def working(root: Path, *, careless: Careless = "", pause_after: int = -1, log: Path | None = None) -> Iterator[Worker]:
    """Start the child that works in `root` and acknowledges every step that is done.

    Args:
        root: Made by `prepare`.
        careless: What it leaves out.
        pause_after: After so many steps it waits, and ends when `Worker.end` is called.
        log: A file whose size after the step is its acknowledgement, instead of its number.
    """
    paths = [str(Path(berth.__file__).parents[1]), str(Path(__file__).parents[1])]
    code = f"import sys; sys.path[:0] = {paths!r}; from faults.workload import main; main(*sys.argv[1:])"
    words = [os.path.realpath(sys.executable), "-I", "-S", "-B", "-c", code]
    words += [str(root), careless, str(pause_after), str(log or "")]
    with subprocess.Popen(
        words, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as child:
        try:
            yield Worker(child)
        finally:
            child.kill()


def main(path: str, careless: Careless, pause_after: str, log: str) -> None:
    """Work until something fails or it is time to pause. The arguments are those of `working`."""
    _leave_out(careless)
    records = os.open(os.path.join(path, _RECORDS), os.O_RDONLY | os.O_DIRECTORY)
    root = EpochRoot(path)
    held: Epoch | None = None
    for number, step in enumerate(plan(), start=1):
        held = _perform(step, root, held, records)
        # Nothing is acknowledged after the power went: xfs answers an fsync with success even then, fstat(2) does not.
        os.fstat(records)
        os.write(1, b"%d\n" % (os.stat(log).st_size if log else number))
        if number == int(pause_after):
            sys.stdin.read()
            return


def _perform(step: Step, root: EpochRoot, held: Epoch | None, records: int) -> Epoch | None:
    if held is None:
        return root.open_epoch(step.epoch)
    match step.kind:
        case "write":
            held.write(step.name, step.data)
        case "replace":
            held.write(_NEXT_STATUS, step.data)
            durable_replace(_NEXT_STATUS, step.name, src_dir_fd=held.fd, dst_dir_fd=held.fd)
        case "publish":
            held.publish(_RECORD, dir_fd=records, as_name=step.epoch)
        case "retire":
            held.retire(_retired(step.epoch)[-32:])
            held.__exit__()
            return None
    return held


def _leave_out(careless: Careless) -> None:
    """Make this process skip the fsync of one kind of file, as a broken berth would."""
    skipped = {"directories": stat.S_IFDIR, "files": stat.S_IFREG, "": None}[careless]
    sync = os.fsync

    def sync_or_not(fd: int) -> None:
        if stat.S_IFMT(os.fstat(fd).st_mode) != skipped:
            sync(fd)

    os.fsync = sync_or_not  # type: ignore[assignment]


def _retired(epoch: str) -> str:
    return retired_name(epoch, epoch[:32])


def _bytes(epoch: str, number: int, size: int) -> bytes:
    """Return bytes that belong to one step alone."""
    block = hashlib.sha256(f"{epoch} {number}".encode()).digest()
    return (block * (size // len(block) + 1))[:size]
