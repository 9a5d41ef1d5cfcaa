"""A sweep over the system calls of a program: every one that changes something fails once, and is once never reached.

A scenario is a few lines of Python that run in a child under strace. A dry run lists its calls; then the program runs
anew for every point, in a fresh directory: once with an error injected into the call, once killed before it, and once
killed before it with the power cut straight after. Each time the invariants are checked here, and a recovery has to
succeed.

A program sees `root`, calls `begin()` where its points begin and `done(line)` to acknowledge a step; it must always
make the same calls, in one process. To add a scenario, write its program, its check and its recovery as one `Scenario`
in `scenarios`.
"""

import compileall
import enum
import os
import random
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Final

import pytest

import berth
from berth.errors import BerthError
from faults.images import Image
from faults.invariants import Call, ViolationError, check_synced

#: What each call is made to fail with: what a sick or full disk answers, or a file server without locks.
ERRORS: Final = {
    **dict.fromkeys(("fsync", "fdatasync", "fchmod", "ftruncate", "unlink", "unlinkat", "rmdir"), ("EIO",)),
    **dict.fromkeys(("rename", "renameat", "renameat2"), ("EIO",)),
    **dict.fromkeys(("write", "pwrite64", "writev"), ("EIO", "ENOSPC")),
    **dict.fromkeys(("openat", "mkdir", "mkdirat", "link", "linkat", "symlink", "symlinkat"), ("ENOSPC",)),
    "flock": ("ENOLCK",),
}
#: The rare call that marks where the points begin.
_MARK: Final = "getpriority"
_TIMEOUT_S: Final = 60.0
_PRELUDE: Final = """
import os, sys
sys.path.insert(0, {source!r})
root = sys.argv[1]
def begin(): os.getpriority(os.PRIO_PROCESS, 0)
def done(line): os.write(1, (line + "\\n").encode())
def report(kind, error, trace):
    done("error " + " ".join(one.__name__ for one in kind.__mro__))
    sys.__excepthook__(kind, error, trace)
sys.excepthook = report
"""


class Fault(enum.Enum):
    """What happens at a point."""

    ERROR = "fails"
    KILL = "is killed before"
    CUT = "is killed before, and the power is cut after"


@dataclass(frozen=True)
class Point:
    """One system call of a program.

    Attributes:
        name: Name of the call.
        nth: Which call of that name it is, in the life of the process.
        index: How many traced calls lie between the beginning and it.
        call: As the dry run showed it.
    """

    name: str
    nth: int
    index: int
    call: Call


@dataclass(frozen=True)
class Run:
    """How a program ended.

    Attributes:
        fault: What was done to it; None for a dry run.
        acknowledged: The lines that it acknowledged.
        error: The exception that ended it and the bases of that, by name; empty where there was none.
        calls: Its system calls since the beginning.
        stderr: What it printed there.
    """

    fault: Fault | None
    acknowledged: tuple[str, ...]
    error: tuple[str, ...]
    calls: tuple[Call, ...]
    stderr: str


@dataclass(frozen=True)
class Scenario:
    """A program and what must hold after any fault in it.

    Attributes:
        name: Its name in reports.
        program: Its text.
        check: Raises ViolationError where the disk below the root is not what `Run` allows.
        recover: Does what the next start would do; that it fails is a violation.
        prepare: Makes what the program finds in the root.
    """

    name: str
    program: str
    check: Callable[[Path, Run], None]
    recover: Callable[[Path], None]
    prepare: Callable[[Path], None] = lambda root: None


@dataclass
class Tally:
    """What a sweep tried and found.

    Attributes:
        points: Points of the program.
        runs: Runs, one for each point and fault.
        violations: What did not hold, each with its scenario, fault and call.
    """

    points: int = 0
    runs: int = 0
    violations: list[str] = field(default_factory=list)


class Sweeper:
    """Runs scenarios in fresh directories below `directory`, with a compiled copy of the tree under test."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._log = directory / "strace.log"
        self._numbers = count()
        source = directory / "src"
        shutil.copytree(Path(berth.__file__).parent, source / "berth", ignore=shutil.ignore_patterns("__pycache__"))
        # Compiled, because then every run of a program makes the same calls, and fewer of them.
        assert compileall.compile_dir(source, quiet=1)
        self._prelude = _PRELUDE.format(source=str(source))

    def sweep(
        self,
        scenario: Scenario,
        faults: Iterable[Fault],
        *,
        image: Image | None = None,
        sample: tuple[random.Random, int] | None = None,
        only: Collection[str] = tuple(ERRORS),
    ) -> Tally:
        """Run the program without a fault, and then with every fault at every point, or a random sample of that.

        Args:
            scenario: What to run.
            faults: What to do to it.
            image: The file system whose power is cut; the runs take place on it.
            sample: Chance, and how many runs.
            only: Names of the calls to try.

        Raises:
            AssertionError: The program fails without a fault, has no points, or does not always make the same calls.
        """
        tally = Tally()
        points = [point for point in self._points(scenario, tally) if point.name in only]
        runs = [(point, fault, error) for point in points for fault, error in _ways(point, faults)]
        if sample is not None:
            chance, size = sample
            runs = chance.sample(runs, min(size, len(runs)))
        for point, fault, error in runs:
            self._run(scenario, point, fault, error, image, tally)
        tally.points, tally.runs = len(points), len(runs)
        return tally

    def _points(self, scenario: Scenario, tally: Tally) -> list[Point]:
        """Run the program without a fault and return its points."""
        root = self._fresh(self._directory, scenario)
        run, before = self._trace(scenario, root, None)
        assert not run.error, f"{scenario.name} fails without a fault: {run.stderr}"
        self._judge(scenario, root, run, "without a fault", tally)
        seen = dict(before)
        points = []
        for index, call in enumerate(run.calls):
            seen[call.name] = seen.get(call.name, 0) + 1
            if _changes_something(call):
                points.append(Point(call.name, seen[call.name], index, call))
        assert points, f"{scenario.name} has no points: does it call begin()?"
        return points

    def _run(
        self, scenario: Scenario, point: Point, fault: Fault, error: str, image: Image | None, tally: Tally
    ) -> None:
        root = self._fresh(image.root if image else self._directory, scenario)
        if image is not None:
            image.sync()
        how = f"error={error}" if fault is Fault.ERROR else "signal=KILL"
        run, _ = self._trace(scenario, root, fault, f"{point.name}:{how}:when={point.nth}")
        reached = run.calls[: point.index + 1] if fault is Fault.ERROR else run.calls
        assert [call.name for call in reached][point.index :] == [point.name], (
            f"{scenario.name} made other calls than without a fault: {[call.text for call in run.calls]}"
        )
        if fault is Fault.CUT:
            assert image is not None, "a power cut needs an image"
            image.cut()
        self._judge(scenario, root, run, f"{error or fault.value} {point.call.text}", tally)
        shutil.rmtree(root)

    def _judge(self, scenario: Scenario, root: Path, run: Run, where: str, tally: Tally) -> None:
        """Check everything that has to hold after `run`, recovery included, and note in `tally` what does not."""
        try:
            if run.error and not {"OSError", "BerthError"} & set(run.error):
                raise ViolationError(f"it ended with an error that nobody expects: {run.stderr}")
            check_synced(run.calls)
            scenario.check(root, run)
            scenario.recover(root)
        except (ViolationError, OSError, BerthError) as violation:
            told = violation if isinstance(violation, ViolationError) else f"the recovery failed: {violation!r}"
            tally.violations.append(f"{scenario.name}, {where}: {told}")

    def _fresh(self, directory: Path, scenario: Scenario) -> Path:
        root = directory / f"{scenario.name}-{next(self._numbers)}"
        root.mkdir(mode=0o700)
        scenario.prepare(root)
        return root

    def _trace(
        self, scenario: Scenario, root: Path, fault: Fault | None, inject: str | None = None
    ) -> tuple[Run, dict[str, int]]:
        """Run the program under strace; return how it ended, and how often it made each call before its beginning."""
        words = ["strace", "-y", "-qq", "-s", "256", "-o", str(self._log), "-e", f"trace={_MARK},{','.join(ERRORS)}"]
        words += ["-e", f"inject={inject}"] if inject else []
        # The interpreter itself: what a virtual environment starts makes more calls, and other ones elsewhere.
        words += [os.path.realpath(sys.executable), "-I", "-S", "-B", "-c", self._prelude + scenario.program, str(root)]
        ended = subprocess.run(words, capture_output=True, text=True, timeout=_TIMEOUT_S, cwd=self._directory)
        calls = list(_calls(self._log.read_text(errors="replace").splitlines()))
        names = [call.name for call in calls]
        assert _MARK in names, f"{scenario.name} never began: {ended.stderr}"
        begin = names.index(_MARK)
        before = {name: names[:begin].count(name) for name in ERRORS}
        lines = ended.stdout.splitlines()
        error = next((tuple(line.split()[1:]) for line in lines if line.startswith("error ")), ())
        assert (ended.returncode == 0) == (not error and fault in (None, Fault.ERROR)), ended.stderr
        acknowledged = tuple(line for line in lines if not line.startswith("error "))
        return Run(fault, acknowledged, error, tuple(calls[begin + 1 :]), ended.stderr), before


def skip_without_strace() -> None:
    """Skip the test where strace is missing or may not trace."""
    if shutil.which("strace") is None:
        pytest.skip("strace is not installed")
    if subprocess.run(["strace", "-o", os.devnull, "true"], stderr=subprocess.DEVNULL).returncode != 0:
        pytest.skip("strace may not trace processes here")


def _calls(lines: Sequence[str]) -> Iterator[Call]:
    for line in lines:
        match = re.match(r"(\w+)\(", line)
        if match:
            yield Call(match[1], line)


def _changes_something(call: Call) -> bool:
    """Whether the call is a point: not the acknowledgements, and opening a file only where that may create it."""
    if call.name == _MARK or (call.name == "openat" and "O_CREAT" not in call.text):
        return False
    return call.name != "write" or (call.descriptor is not None and call.descriptor[0] > 2)


def _ways(point: Point, faults: Iterable[Fault]) -> Iterator[tuple[Fault, str]]:
    for fault in faults:
        for error in ERRORS[point.name] if fault is Fault.ERROR else ("",):
            yield fault, error
