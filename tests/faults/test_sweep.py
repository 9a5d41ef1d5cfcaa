"""Every system call that changes something fails once, and is once the one before which the process is killed.

The bounded form tries a random sample, the long one every point, also with the power cut right after the kill. Set
BERTH_TEST_SEED to repeat a sample.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import pytest

from faults import scenarios
from faults.chance import seeded
from faults.images import Image, Kind, mounted, mounted_tmpfs, skip_without
from faults.sweep import Fault, Scenario, Sweeper, skip_without_strace

#: Runs of each scenario in the bounded form.
SAMPLE = 16


@pytest.fixture(scope="module")
def sweeper(tmp_path_factory: pytest.TempPathFactory) -> Sweeper:
    """Return the runner of scenarios."""
    skip_without_strace()
    return Sweeper(tmp_path_factory.mktemp("sweep"))


@pytest.fixture(scope="module")
def image(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Image]:
    """Return a mounted file system of the kind that is the parameter, in memory: a cut takes no time there."""
    kind: Kind = request.param
    skip_without(kind)
    skip_without("tmpfs")
    with mounted_tmpfs(tmp_path_factory.mktemp(kind), size="512m") as store, mounted(kind, store) as image:
        yield image


@pytest.mark.parametrize("scenario", scenarios.SCENARIOS, ids=lambda scenario: scenario.name)
def test_sample_of_points(sweeper: Sweeper, scenario: Scenario) -> None:
    tally = sweeper.sweep(scenario, (Fault.ERROR, Fault.KILL), sample=(seeded(), SAMPLE))
    assert tally.violations == []


@pytest.mark.parametrize("image", ["ext4", "xfs"], indirect=True)
@pytest.mark.parametrize("scenario", scenarios.SCENARIOS, ids=lambda scenario: scenario.name)
def test_sample_of_points_with_power_cut(sweeper: Sweeper, scenario: Scenario, image: Image) -> None:
    tally = sweeper.sweep(scenario, [Fault.CUT], image=image, sample=(seeded(), SAMPLE // 3))
    assert tally.violations == []


@pytest.mark.faults
@pytest.mark.parametrize("scenario", scenarios.SCENARIOS, ids=lambda scenario: scenario.name)
def test_every_point(sweeper: Sweeper, scenario: Scenario, capsys: pytest.CaptureFixture[str]) -> None:
    sweep_all(sweeper, scenario, (Fault.ERROR, Fault.KILL), None, capsys)


@pytest.mark.faults
@pytest.mark.parametrize("image", ["ext4", "xfs", "btrfs"], indirect=True)
@pytest.mark.parametrize("scenario", scenarios.SCENARIOS, ids=lambda scenario: scenario.name)
def test_every_point_with_power_cut(
    sweeper: Sweeper, scenario: Scenario, image: Image, capsys: pytest.CaptureFixture[str]
) -> None:
    sweep_all(sweeper, scenario, [Fault.CUT], image, capsys)


def sweep_all(
    sweeper: Sweeper,
    scenario: Scenario,
    faults: Sequence[Fault],
    image: Image | None,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Try everything, and say on the terminal how much that was."""
    tally = sweeper.sweep(scenario, faults, image=image)
    with capsys.disabled():
        where = f" on {image.kind}" if image else ""
        print(f"\n{scenario.name}{where}: {tally.points} points, {tally.runs} runs, {len(tally.violations)} violations")
    assert tally.violations == []


@pytest.mark.xfail(strict=True, reason="EpochRoot lets the OSError of flock(2) through instead of explaining it")
def test_refused_lock_is_explained(sweeper: Sweeper) -> None:
    scenario = replace(scenarios.PROBE, check=scenarios.check_explained)
    assert sweeper.sweep(scenario, [Fault.ERROR], only=["flock"]).violations == []


# --- the sweep catches what is broken --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("broken", "fault", "calls", "told"),
    [
        pytest.param(scenarios.DELETES, Fault.KILL, ["rmdir", "unlinkat"], "without", id="deletes"),
        pytest.param(scenarios.OVERWRITES, Fault.KILL, ["write"], "holds 0 bytes", id="overwrites"),
        pytest.param(scenarios.LINKS, Fault.KILL, ["unlinkat"], "with", id="links"),
        pytest.param(scenarios.LEAVES_TEMPORARY, Fault.ERROR, ["fchmod"], ".tmp", id="leaves its temporary"),
        pytest.param(scenarios.SYNCS_AGAIN, Fault.ERROR, ["fsync"], "not durable since", id="syncs again"),
        pytest.param(scenarios.MISNAMES_PROBE, Fault.KILL, ["write"], "opening a root left", id="misnames its probe"),
    ],
)
def test_broken_program_is_caught(
    sweeper: Sweeper, broken: Scenario, fault: Fault, calls: list[str], told: str
) -> None:
    tally = sweeper.sweep(broken, [fault], only=calls)
    assert [found for found in tally.violations if "without a fault" not in found and told in found], tally.violations


@pytest.mark.parametrize("scenario", [scenarios.RETIRE, scenarios.PUBLISH, scenarios.WRITE], ids=lambda one: one.name)
@pytest.mark.parametrize("broken", [scenarios.without_directory_sync, scenarios.without_file_sync])
def test_missing_sync_is_caught_without_any_fault(
    sweeper: Sweeper, scenario: Scenario, broken: Callable[[Scenario], Scenario]
) -> None:
    (violation,) = sweeper.sweep(broken(scenario), []).violations
    assert "without a fault" in violation
    assert "is not durable since" in violation


def test_program_that_always_fails_is_no_scenario(sweeper: Sweeper) -> None:
    with pytest.raises(AssertionError, match="fails without a fault"):
        sweeper.sweep(replace(scenarios.WRITE, program="begin()\nraise OSError('no')\n"), [])


def test_unexpected_error_is_a_violation(sweeper: Sweeper) -> None:
    program = "begin()\ntry: os.mkdir(os.path.join(root, 'd'))\nexcept OSError: raise KeyError\n"
    broken = Scenario("unexpected", program, check=lambda root, run: None, recover=lambda root: None)
    (violation,) = sweeper.sweep(broken, [Fault.ERROR]).violations
    assert "nobody expects" in violation
