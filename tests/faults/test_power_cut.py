"""The power is cut while epochs are opened, filled, published from and retired: the disk shows what was acknowledged.

The bounded form keeps its images in memory, the long one on the disk, where a step takes longer and a cut more often
falls into its midst. ext4 and xfs are shut down under the work, without a flush of their log; of btrfs, whose power
cannot be cut like that, the image is copied right after the process was killed. The moment is chance; set
BERTH_TEST_SEED to repeat a series as far as the machine allows.
"""

import random
import time
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from berth.errors import BerthError
from faults import workload
from faults.chance import seeded
from faults.images import Image, Kind, mounted, mounted_tmpfs, skip_without
from faults.invariants import ViolationError, check_next_start, check_tree, read_tree

#: At most so many steps are waited for before the cut, somewhat more than two epochs.
LATEST_STEP = 20
#: At most so many seconds pass between the last awaited step and the cut: about two more steps.
LATEST_S = 0.004


@pytest.mark.parametrize("kind", ["ext4", "xfs"])
def test_a_few_cuts(tmp_path: Path, kind: Kind) -> None:
    skip_without("tmpfs")
    with mounted_tmpfs(tmp_path, size="512m") as quick:
        assert cut_at_random(kind, quick, cuts=12).violations == []


@pytest.mark.faults
@pytest.mark.parametrize("kind", ["ext4", "xfs", "btrfs"])
def test_200_cuts(tmp_path: Path, kind: Kind, capsys: pytest.CaptureFixture[str]) -> None:
    found = cut_at_random(kind, tmp_path, cuts=200)
    with capsys.disabled():
        print(f"\n{kind}: 200 power cuts, {found.amid} of them seen to be amid a step, ", end="")
        print(f"{len(found.violations)} violations")
    assert found.violations == []
    assert found.amid > 0


@pytest.mark.parametrize("kind", ["ext4", "xfs", pytest.param("btrfs", marks=pytest.mark.faults)])
@pytest.mark.parametrize(
    ("careless", "steps"),
    [
        pytest.param("directories", 2, id="written file, directory not synced"),
        pytest.param("directories", workload.STEPS_OF_AN_EPOCH, id="retired epoch, directory not synced"),
        pytest.param("files", 2, id="written file, content not synced"),
    ],
)
def test_missing_sync_is_caught(tmp_path: Path, kind: Kind, careless: workload.Careless, steps: int) -> None:
    skip_without(kind)
    with mounted(kind, tmp_path) as image:
        root = prepared(image, 0)
        with workload.working(root, careless=careless, pause_after=steps) as worker:
            worker.await_steps(steps)
            assert cut_power(image, worker) == []
        image.restart()
        with pytest.raises(ViolationError, match="none of the"):
            check_tree(read_tree(root), workload.allowed(steps), temporaries=True)


def test_same_cut_of_complete_work_is_no_violation(tmp_path: Path) -> None:
    """The counterpart of the test before: it is the missing fsync that it catches."""
    skip_without("xfs")
    with mounted("xfs", tmp_path) as image:
        root = prepared(image, 0)
        with workload.working(root, pause_after=2) as worker:
            worker.await_steps(2)
            assert cut_power(image, worker) == []
        image.restart()
        check_tree(read_tree(root), workload.allowed(2)[:1])


@dataclass
class Found:
    """What a series of cuts has shown.

    Attributes:
        amid: How often the disk showed more than what was acknowledged: a temporary, or the next step.
        violations: What did not hold.
    """

    amid: int = 0
    violations: list[str] = field(default_factory=list)


def cut_at_random(kind: Kind, directory: Path, *, cuts: int) -> Found:
    """Cut the power so many times and return what that has shown."""
    skip_without(kind)
    chance = seeded()
    found = Found()
    with mounted(kind, directory) as image:
        for number in range(cuts):
            root = prepared(image, number)
            acknowledged = work_until_cut(image, root, chance)
            tree, states = read_tree(root), workload.allowed(acknowledged)
            found.amid += tree != states[0]
            try:
                check_tree(tree, states, temporaries=True)
                check_next_start(root)
            except (ViolationError, BerthError, OSError) as violation:
                found.violations.append(f"cut {number} after {acknowledged} steps: {violation}")
    return found


def work_until_cut(image: Image, root: Path, chance: random.Random) -> int:
    """Cut the power at a random moment of the work and switch it on again; return how many steps were acknowledged."""
    awaited = chance.randint(1, LATEST_STEP)
    with workload.working(root) as worker:
        acknowledged = worker.await_steps(awaited)
        time.sleep(chance.uniform(0, LATEST_S))  # the moment of the cut, not a wait for anything
        acknowledged += cut_power(image, worker)
    image.restart()
    return len(acknowledged)


def cut_power(image: Image, worker: workload.Worker) -> list[str]:
    """Cut the power under the worker, see it end, and return what it had acknowledged since it was asked last."""
    if image.kind == "btrfs":
        worker.kill()
    image.stop()
    return worker.end()


def prepared(image: Image, number: int) -> Path:
    """Return a fresh root on the image, which is durable already."""
    root: Path = image.root / f"round-{number}"
    workload.prepare(root)
    image.sync()
    return root
