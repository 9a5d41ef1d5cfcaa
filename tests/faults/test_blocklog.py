"""The power is cut after every single write to the device: the disk shows what was acknowledged by then."""

from pathlib import Path

import pytest

from berth.errors import BerthError
from faults import workload
from faults.blocklog import Cut, copy, logged, replay, skip_without_log
from faults.chance import seeded
from faults.images import Kind, attached, make_image, mounted_tmpfs, skip_without
from faults.invariants import ViolationError, check_next_start, check_tree, read_tree

pytestmark = pytest.mark.faults

#: Eight epochs.
STEPS = 8 * workload.STEPS_OF_AN_EPOCH
#: Choices of lost writes between two flushes.
LOSSES = 3


@pytest.mark.parametrize("kind", ["ext4", "xfs", "btrfs"])
def test_cut_after_every_write(tmp_path: Path, kind: Kind, capsys: pytest.CaptureFixture[str]) -> None:
    cuts, violations = cut_everywhere(kind, tmp_path, steps=STEPS)
    lossy = sum(cut.lost > 0 for cut in cuts)
    with capsys.disabled():
        print(
            f"\n{kind}: {len(cuts)} cuts after a write, {lossy} of them with writes lost, {len(violations)} violations"
        )
    assert violations == []
    assert 0 < lossy < len(cuts) > STEPS


@pytest.mark.parametrize("careless", ["directories", "files"])
@pytest.mark.parametrize("kind", ["ext4", "xfs", "btrfs"])
def test_missing_sync_is_caught(tmp_path: Path, kind: Kind, careless: workload.Careless) -> None:
    _, violations = cut_everywhere(kind, tmp_path, steps=workload.STEPS_OF_AN_EPOCH, careless=careless)
    assert any("none of the" in violation for violation in violations)


def cut_everywhere(
    kind: Kind, directory: Path, *, steps: int, careless: workload.Careless = ""
) -> tuple[list[Cut], list[str]]:
    """Log so many steps of work and return the cuts that were tried, and what did not hold after them."""
    skip_without(kind)
    skip_without("tmpfs")
    skip_without_log()
    chance = seeded()
    cuts, violations = [], []
    with mounted_tmpfs(directory, size="2g") as store:
        acknowledged = log_work(kind, store, steps=steps, careless=careless)
        for cut in replay(store / "start", store / "log", store / "built", chance, losses=LOSSES):
            cuts.append(cut)
            done = sum(end <= cut.end for end in acknowledged)
            try:
                with attached(kind, store / "built", store / "root") as image:
                    check_tree(read_tree(image.root / "work"), workload.allowed(done), temporaries=True)
                    check_next_start(image.root / "work")
            except (ViolationError, BerthError, OSError) as violation:
                violations.append(f"cut {len(cuts)} after {done} steps, {cut.lost} writes lost: {violation}")
    return cuts, violations


def log_work(kind: Kind, store: Path, *, steps: int, careless: workload.Careless) -> list[int]:
    """Work on a file system on a logged device; return the size of the log at each acknowledgement.

    The image before the work is left at `start`, the log at `log`.
    """
    make_image(kind, store / "start")
    with attached(kind, store / "start", store / "root") as image:
        workload.prepare(image.root / "work")
    copy(store / "start", store / "disk")
    with (
        logged(store / "disk", store / "log", store / "served") as disk,
        attached(kind, disk, store / "root") as image,
        workload.working(image.root / "work", careless=careless, pause_after=steps, log=store / "log") as worker,
    ):
        return [int(line) for line in worker.await_steps(steps)]
