"""P1 to P5: what durability costs, each against a named peer, interleaved in one run.

    P1  durable_rename_noreplace      os.replace + fsync of the directory                     at most 1.05
    P2  the four steps of the probe   one durable replace                                     at most 3.0
    P3  retire 100,000 files          retire 3 files                                          at most 1.10
    P4  reclaim 100,000 entries       rm -rf of the same tree (shutil.rmtree beside)          at most 0.65; 1.05 flat
    P5  a step of 64 of 100,000       a step of 64 of 129 entries                             at most 1.20

Usage: bench/durable.py [--directory DIR] [P1 P2 ...]. DIR lies on the disk to measure (default: the one that holds
temporary files). Root gets a fresh ext4 in an image there, an overlay on that and a tmpfs as well.
"""

import argparse
import contextlib
import itertools
import json
import os
import platform
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from berth.durable.files import durable_rename_noreplace, durable_replace
from berth.durable.tree import durable_rmtree, durable_rmtree_step
from berth.epoch.capability import NOTHING_ACCEPTED, Accepted
from berth.epoch.epoch import EpochRoot
from berth.epoch.probe import probe

RESULT = Path(__file__).parent / "results" / "durable.json"
WARM_UPS = 5
SAMPLES = 80
TREES = 5
ENTRIES = 100_000
#: The seed's own steps; the canary, links and locks are timed apart and stand in the record.
FOUR_STEPS = ("create-and-sync", "rename-noreplace-directory", "remove-and-sync")

Samples = dict[str, list[float]]


def main() -> int:
    """Measure, print ratios, keep the raw samples; 1 where a goal is missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--directory", default=tempfile.gettempdir())
    parser.add_argument("rows", nargs="*", metavar="ROW", help="P1 to P5; all by default")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # mounts and trees are taken away then too
    rows: list[dict[str, object]] = []
    with places(options.directory) as found:
        for name, place in found.items():
            for key, measure in ROWS.items():
                if not options.rows or key in options.rows:
                    for row in measure(name, place):
                        print(line(row), flush=True)
                        rows.append(row)
    machine = {"cpus": os.cpu_count(), "kernel": platform.release(), "python": platform.python_version()}
    if not options.rows:
        RESULT.write_text(json.dumps({"bench": "P1-P5", "machine": machine, "rows": rows}, indent=1) + "\n")
    return 0 if all(row["met"] in (True, None) for row in rows) else 1


@contextlib.contextmanager
def places(directory: str) -> Iterator[dict[str, Path]]:
    """Yield the directories to measure in, by the name of their file system; `disk` is DIR as it is mounted.

    Root also gets a fresh ext4 in an image there, an overlay on that, and a tmpfs.
    """
    with contextlib.ExitStack() as stack:
        base = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="berth-bench-", dir=directory)))
        found = {"disk": base / "disk"}
        for part in ("disk", "ext4", "overlay", "tmpfs"):
            (base / part).mkdir()
        image = base / "image"
        image.touch()
        os.truncate(image, 24 << 30)
        made = shutil.which("mkfs.ext4", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")
        if made is None or subprocess.run([made, "-q", "-F", "-N", "3000000", image]).returncode != 0:
            yield found
            return
        layers = base / "ext4" / "layers"
        options = f"lowerdir={layers / 'lower'},upperdir={layers / 'upper'},workdir={layers / 'work'}"
        for name, words in (
            ("ext4", ["-o", "loop", image]),
            ("overlay", ["-t", "overlay", "-o", options, "overlay"]),
            ("tmpfs", ["-t", "tmpfs", "-o", "size=9g", "tmpfs"]),
        ):
            done = subprocess.run(["mount", *words, base / name], stderr=subprocess.DEVNULL)
            if done.returncode == 0:
                stack.callback(subprocess.run, ["umount", base / name], check=True)
                found[name] = base / name
            if name == "ext4" and done.returncode == 0:
                for layer in ("lower", "upper", "work"):
                    (layers / layer).mkdir(parents=True)
        yield found


def row(
    key: str, place: str, what: str, samples: Samples, *, peer: str, goal: float | None, unit: str = "ms"
) -> dict[str, object]:
    """Return one row of the result: medians, P95, the ratio of the first to the peer, the raw samples."""
    medians = {name: statistics.median(values) for name, values in samples.items()}
    first = next(iter(samples))
    ratio = medians[first] / medians[peer]
    return {
        "row": key,
        "file_system": place,
        "what": what,
        "peer": peer,
        "ratio": round(ratio, 3),
        "goal": goal,
        "met": None if goal is None else ratio <= goal,
        "median": {name: round(value, 4) for name, value in medians.items()},
        "p95": {name: round(percentile95(values), 4) for name, values in samples.items()},
        "unit": unit,
        "samples": {name: [round(value, 4) for value in values] for name, values in samples.items()},
    }


def percentile95(values: list[float]) -> float:
    return statistics.quantiles(values, n=20, method="inclusive")[18]


def line(row: dict[str, object]) -> str:
    verdict = {True: "met", False: "MISSED", None: "no goal"}[row["met"]]  # type: ignore[index]
    medians = ", ".join(f"{name} {value:.3f}" for name, value in row["median"].items())  # type: ignore[attr-defined]
    return (
        f"{row['row']} {row['file_system']:8} {row['what']:24} {row['ratio']:6.3f} (goal {row['goal']}, {verdict})   "
        f"{medians} {row['unit']}"
    )


def milliseconds(work: Callable[[], object]) -> float:
    begun = time.perf_counter()
    work()
    return 1000 * (time.perf_counter() - begun)


def interleaved(work: dict[str, Callable[[], float]], *, samples: int, warm_ups: int) -> Samples:
    """Take every sample of each in turn, the first one of a round another one each time."""
    names = list(work)
    taken: Samples = {name: [] for name in names}
    for number in range(warm_ups + samples):
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            elapsed = work[name]()
            if number >= warm_ups:
                taken[name].append(elapsed)
    return taken


def goal_for(place: str, goal: float) -> float | None:
    """A sync costs nothing on tmpfs, so that a ratio to one says nothing there."""
    return None if place == "tmpfs" else goal


# --- P1 ---------------------------------------------------------------------------------------------------------------


def rename(place: str, directory: Path) -> Iterator[dict[str, object]]:
    """One file gets its name, durably: without replacing, against the way that replaces."""
    source, target = str(directory / "source"), str(directory / "target")

    def one(work: Callable[[], object]) -> float:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(target)
        write_synced(source)
        sync(directory)
        elapsed = milliseconds(work)
        os.unlink(target)
        return elapsed

    def plain() -> None:
        os.replace(source, target)
        sync(directory)

    samples = interleaved(
        {
            "noreplace": lambda: one(lambda: durable_rename_noreplace(source, target)),
            "os.replace + fsync": lambda: one(plain),
        },
        samples=4 * SAMPLES,
        warm_ups=WARM_UPS,
    )
    yield row("P1", place, "rename a file", samples, peer="os.replace + fsync", goal=goal_for(place, 1.05))


def write_synced(path: str) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    os.write(fd, b"x" * 1024)
    os.fsync(fd)
    os.close(fd)


def sync(directory: Path) -> None:
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    os.fsync(fd)
    os.close(fd)


# --- P2 ---------------------------------------------------------------------------------------------------------------


def probing(place: str, directory: Path) -> Iterator[dict[str, object]]:
    """The probe of every start against one durable replace of the same file system."""
    fd = os.open(directory, os.O_RDONLY)
    apart: Samples = {}
    source, target = str(directory / "source"), str(directory / "target")

    def steps() -> float:
        found = probe(fd, str(directory), accepted=Accepted(volatile=True))
        assert found.refusal is None
        for name, one in found.operations.items():
            apart.setdefault(name, []).append(1000 * (one.seconds or 0.0))
        return sum(apart[name][-1] for name in FOUR_STEPS)

    def replacing() -> float:
        write_synced(source)
        return milliseconds(lambda: durable_replace(source, target))

    samples = interleaved({"four steps": steps, "durable_replace": replacing}, samples=SAMPLES, warm_ups=WARM_UPS)
    os.close(fd)
    os.unlink(target)
    found = row("P2", place, "probe at every start", samples, peer="durable_replace", goal=goal_for(place, 3.0))
    found["steps_median"] = {name: round(statistics.median(values), 4) for name, values in apart.items()}
    yield found


# --- P3 ---------------------------------------------------------------------------------------------------------------


def retiring(place: str, directory: Path) -> Iterator[dict[str, object]]:
    """The end of an epoch costs the same whatever it holds."""
    accepted = NOTHING_ACCEPTED if place != "tmpfs" else Accepted(volatile=True)
    with EpochRoot(str(directory / "root"), accepted=accepted) as root:
        epochs = {"100,000 files": root.open_epoch("a" * 64), "3 files": root.open_epoch("b" * 64)}
        for number in range(ENTRIES):
            make_file(os.path.join(epochs["100,000 files"].path, f"f{number}"))
        for number in range(3):
            make_file(os.path.join(epochs["3 files"].path, f"f{number}"))
        os.sync()

        def one(name: str) -> float:
            epoch = epochs[name]
            active = os.path.basename(epoch.path)
            begun = time.perf_counter()
            retired = epoch.retire()
            elapsed = 1000 * (time.perf_counter() - begun)
            os.rename(retired, active, src_dir_fd=root.fd, dst_dir_fd=root.fd)
            os.fsync(root.fd)
            return elapsed

        samples = interleaved(
            {name: lambda name=name: one(name) for name in epochs},  # type: ignore[misc]
            samples=SAMPLES,
            warm_ups=WARM_UPS,
        )
        for epoch in epochs.values():
            os.close(epoch.fd)
    durable_rmtree(str(directory / "root"))
    yield row("P3", place, "retire an epoch", samples, peer="3 files", goal=goal_for(place, 1.10))


# --- P4 ---------------------------------------------------------------------------------------------------------------


def reclaiming(place: str, directory: Path) -> Iterator[dict[str, object]]:
    """Whole trees against rm -rf and shutil.rmtree: many directories, and one that holds everything."""
    if place in ("disk", "overlay"):  # millions of files, on whatever else that disk is for, or once more on the ext4
        return
    ways: dict[str, Callable[[Path], object]] = {
        "durable_rmtree": lambda tree: durable_rmtree(str(tree)),
        "rm -rf": lambda tree: subprocess.run(["rm", "-rf", tree], check=True),
        "shutil.rmtree": shutil.rmtree,
    }
    shapes = {"1000 x 100 entries": (1000, 100, 0.65), "one flat directory": (0, ENTRIES, 1.05)}
    for what, (directories, files, goal) in shapes.items():
        # All are made before the first is removed: ext4 is slow to give out inodes that were freed a moment ago.
        left = {name: [directory / f"{name.split()[0]}{number}" for number in range(TREES)] for name in ways}
        for tree in itertools.chain(*left.values()):
            make_tree(tree, directories, files)
        os.sync()

        def one(name: str, left: dict[str, list[Path]] = left) -> float:
            tree = left[name].pop()
            elapsed = milliseconds(lambda: ways[name](tree))
            os.sync()
            return elapsed

        samples = interleaved(
            {name: lambda name=name: one(name) for name in ways},  # type: ignore[misc]
            samples=TREES,
            warm_ups=0,
        )
        wanted = goal if directories or place == "ext4" else None
        yield row("P4", place, what, samples, peer="rm -rf", goal=wanted)


def make_tree(root: Path, directories: int, files: int) -> None:
    root.mkdir()
    for below in [root / f"d{number:04}" for number in range(directories)] or [root]:
        if below != root:
            below.mkdir()
        for number in range(files):
            make_file(f"{below}/f{number:06}")


def make_file(path: str) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    os.write(fd, b"x" * 1024)
    os.close(fd)


# --- P5 ---------------------------------------------------------------------------------------------------------------


def stepping(place: str, directory: Path) -> Iterator[dict[str, object]]:
    """A bounded step costs the same whatever is left."""
    for what, directories, files in (("step in 1000 x 100", 1000, 100), ("step in a flat one", 0, ENTRIES)):
        large, small = directory / "large", directory / "small"
        make_tree(large, directories, files)
        os.sync()

        def one(tree: Path) -> float:
            if tree.name == "small":
                make_tree(tree, 0, 128)
                os.sync()
            begun = time.perf_counter()
            step = durable_rmtree_step(str(tree), entry_limit=64)
            elapsed = 1000 * (time.perf_counter() - begun)
            assert step.removed_entries == 64
            if tree.name == "small":
                durable_rmtree(str(tree))
                os.sync()
            return elapsed

        samples = interleaved(
            {"of 100,000": lambda: one(large), "of 129": lambda: one(small)},  # noqa: B023
            samples=SAMPLES,
            warm_ups=WARM_UPS,
        )
        durable_rmtree(str(large))
        yield row("P5", place, what, samples, peer="of 129", goal=goal_for(place, 1.20))


ROWS: dict[str, Callable[[str, Path], Iterator[dict[str, object]]]] = {
    "P1": rename,
    "P2": probing,
    "P3": retiring,
    "P4": reclaiming,
    "P5": stepping,
}

if __name__ == "__main__":
    sys.exit(main())
