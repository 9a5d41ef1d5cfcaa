import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from berth.errors import MalformedError
from berth.host.quota import CpuQuota, QuotaLevel, read_quota

CG = "/sys/fs/cgroup"
STAT = "usage_usec 9\nnr_periods 40\nnr_throttled 7\nthrottled_usec 123456\nnr_bursts 0\n"


def mount(kind: str, point: str, *, root: str = "/", options: str = "rw") -> str:
    return f"34 31 0:31 {root} {point} rw,relatime shared:9 - {kind} none {options}\n"


V2 = mount("cgroup2", CG)
V1 = mount("cgroup", f"{CG}/cpu,cpuacct", options="rw,cpu,cpuacct")


@pytest.fixture
def look(tree):
    """Return a function that writes a machine and reads the quota of its process."""

    def write_and_read(mounts: str, cgroup: str, files: dict[str, str]) -> CpuQuota:
        tree.write({"/proc/self/mountinfo": mounts, "/proc/self/cgroup": cgroup, **files})
        return read_quota(root=tree.root)

    return write_and_read


def brief(found: CpuQuota) -> tuple[str, str | None, int | None, list[tuple[str, bool, float]], bool]:
    levels = [(level.directory, level.inherited, level.cpus) for level in found.levels]
    return found.version, found.cpu_max, found.weight, levels, found.complete


# --- v2 --------------------------------------------------------------------------------------------------------------


def test_v2_reads_the_whole_of_its_own_cgroup(look) -> None:
    files = {"cpu.max": "350000 100000\n", "cpu.weight": "79\n", "cpu.stat": STAT, "cgroup.type": "domain\n"}
    found = look(V2, "0::/a\n", {f"{CG}/a/{name}": text for name, text in files.items()})
    level = QuotaLevel(
        directory=f"{CG}/a",
        inherited=False,
        quota_us=350000,
        period_us=100000,
        nr_periods=40,
        nr_throttled=7,
        throttled_us=123456,
    )
    assert found == CpuQuota(
        version="v2", path="/a", cpu_max="350000 100000", weight=79, levels=(level,), complete=True
    )
    assert found.tightest == level
    assert level.cpus == 3.5


def test_the_tightest_of_all_above_decides_and_is_marked_as_inherited(look) -> None:
    files = {
        f"{CG}/pod/cpu.max": "100000 50000\n",  # 2 CPUs
        f"{CG}/pod/cpu.stat": STAT,
        f"{CG}/pod/box/cpu.max": "max 100000\n",
        f"{CG}/pod/box/leaf/cpu.max": "300000 100000\n",  # 3 CPUs
        f"{CG}/pod/box/leaf/cpu.weight": "100\n",
    }
    found = look(V2, "0::/pod/box/leaf\n", files)
    levels = [(f"{CG}/pod/box/leaf", False, 3.0), (f"{CG}/pod", True, 2.0)]
    assert brief(found) == ("v2", "300000 100000", 100, levels, True)
    assert found.tightest is not None
    assert (found.tightest.directory, found.tightest.nr_throttled) == (f"{CG}/pod", 7)
    assert found.levels[0].nr_throttled is None


def test_of_equal_quotas_the_nearest_is_named(look) -> None:
    found = look(V2, "0::/a/b\n", {f"{CG}/a/cpu.max": "200 100\n", f"{CG}/a/b/cpu.max": "400 200\n"})
    assert found.tightest is not None
    assert found.tightest.directory == f"{CG}/a/b"


def test_a_cgroup_without_the_controller_is_under_those_above_it(look) -> None:
    found = look(V2, "0::/a/b/c\n", {f"{CG}/a/cpu.max": "1000 2000\n", f"{CG}/a/b/c/cgroup.procs": ""})
    assert brief(found) == ("v2", None, None, [(f"{CG}/a", True, 0.5)], True)


def test_the_root_cgroup_has_no_quota_and_that_is_known(look) -> None:
    found = look(V2, "0::/\n", {f"{CG}/cgroup.controllers": "cpuset cpu io\n"})
    assert brief(found) == ("v2", None, None, [], True)


def test_an_empty_v2_tree_says_nothing(look) -> None:
    """A hybrid machine mounts a v2 tree for names alone."""
    found = look(V2, "0::/x\n", {f"{CG}/cgroup.controllers": "hugetlb\n", f"{CG}/x/cpu.stat": "usage_usec 4\n"})
    assert brief(found) == ("none", None, None, [], False)


# --- v1 and hybrid ---------------------------------------------------------------------------------------------------


def test_v1_converts_its_units(look) -> None:
    directory = f"{CG}/cpu,cpuacct"
    files = {
        f"{directory}/cgroup.sane_behavior": "0\n",
        f"{directory}/cpu.cfs_quota_us": "-1\n",
        f"{directory}/cpu.cfs_period_us": "100000\n",
        f"{directory}/job/cpu.cfs_quota_us": "150000\n",
        f"{directory}/job/cpu.cfs_period_us": "100000\n",
        f"{directory}/job/cpu.shares": "2048\n",
        f"{directory}/job/cpu.stat": "nr_periods 5\nnr_throttled 2\nthrottled_time 1999999\n",
    }
    found = look(V1 + mount("cgroup2", f"{CG}/unified"), "4:cpu,cpuacct:/job\n0::/other\n", files)
    assert brief(found) == ("v1", "150000 100000", 200, [(f"{directory}/job", False, 1.5)], True)
    assert (found.levels[0].nr_periods, found.levels[0].throttled_us) == (5, 1999)


@pytest.mark.parametrize(("shares", "weight"), [(1024, 100), (2, 1), (512, 50), (262144, 10000), (1000, 98)])
def test_v1_shares_become_the_weight_the_kernel_would_print(look, shares: int, weight: int) -> None:
    assert look(V1, "4:cpu,cpuacct:/\n", {f"{CG}/cpu,cpuacct/cpu.shares": f"{shares}\n"}).weight == weight


def test_v1_no_quota_is_written_as_max(look) -> None:
    files = {"cpu.cfs_quota_us": "-1\n", "cpu.cfs_period_us": "50000\n"}
    found = look(V1, "4:cpu,cpuacct:/\n", {f"{CG}/cpu,cpuacct/{name}": text for name, text in files.items()})
    assert brief(found) == ("v1", "max 50000", None, [], False)


def test_a_mount_of_cpuacct_alone_is_not_the_one(look) -> None:
    accounting = mount("cgroup", f"{CG}/cpuacct", options="rw,cpuacct")
    own = mount("cgroup", f"{CG}/cpu", options="rw,cpu")
    files = {f"{CG}/cpu/x/cpu.cfs_quota_us": "10000\n", f"{CG}/cpu/x/cpu.cfs_period_us": "20000\n"}
    found = look(accounting + own, "2:cpuacct:/y\n1:cpu:/x\n0::/\n", files)
    assert found.levels[0].directory == f"{CG}/cpu/x"


def test_hybrid_with_the_controller_in_v2(look) -> None:
    mounts = mount("cgroup", f"{CG}/cpuset", options="rw,cpuset") + mount("cgroup2", f"{CG}/unified")
    found = look(mounts, "3:cpuset:/a\n0::/b\n", {f"{CG}/unified/b/cpu.max": "7 1\n"})
    assert brief(found)[0:2] == ("v2", "7 1")


# --- containers ------------------------------------------------------------------------------------------------------


def test_a_container_sees_its_own_quota_and_says_that_more_may_be_above(look) -> None:
    files = {f"{CG}/cpu.max": "200000 100000\n", f"{CG}/cgroup.type": "domain\n", f"{CG}/cpu.weight": "100\n"}
    assert brief(look(V2, "0::/\n", files)) == ("v2", "200000 100000", 100, [(CG, False, 2.0)], False)


def test_a_cgroup_outside_of_the_namespace_is_under_the_mount_root(look) -> None:
    found = look(V2, "0::/../other\n", {f"{CG}/cpu.max": "200000 100000\n", f"{CG}/cpu.weight": "100\n"})
    assert brief(found) == ("v2", None, None, [(CG, True, 2.0)], False)


def test_a_bind_mount_of_a_part_is_relative_to_it(look) -> None:
    part = mount("cgroup", f"{CG}/cpu", root="/docker/abc", options="rw,cpu")
    files = {f"{CG}/cpu/cpu.cfs_quota_us": "10000\n", f"{CG}/cpu/cpu.cfs_period_us": "20000\n"}
    found = look(part, "1:cpu:/docker/abc\n", files)
    assert brief(found) == ("v1", "10000 20000", None, [(f"{CG}/cpu", False, 0.5)], False)


# --- nothing, nonsense, nobody ---------------------------------------------------------------------------------------


def test_without_cgroups_nothing_is_known(tree) -> None:
    assert read_quota(root=tree.root) == CpuQuota(
        version="none", path="", cpu_max=None, weight=None, levels=(), complete=False
    )


@pytest.mark.parametrize(
    ("name", "text"),
    [
        *(("cpu.max", text) for text in ("max\n", "5 0\n", "-1 100\n", "")),
        *(("cpu.stat", text) for text in ("nr_periods\n", "nr_periods -4\n", "a b c\n")),
        ("cpu.weight", "x\n"),
    ],
)
def test_what_is_malformed_is_named(look, name: str, text: str) -> None:
    with pytest.raises(MalformedError, match=f"{CG}/a/{name}"):
        look(V2, "0::/a\n", {f"{CG}/a/cpu.max": "1 1\n", f"{CG}/a/{name}": text})


def test_v1_period_of_zero_is_refused(look) -> None:
    files = {f"{CG}/cpu,cpuacct/cpu.cfs_quota_us": "1\n", f"{CG}/cpu,cpuacct/cpu.cfs_period_us": "0\n"}
    with pytest.raises(MalformedError, match=r"cpu\.cfs_period_us"):
        look(V1, "4:cpu,cpuacct:/\n", files)


def test_a_process_that_ended_has_no_quota() -> None:
    with subprocess.Popen(["true"]) as child:
        pass
    with pytest.raises(ProcessLookupError):
        read_quota(child.pid)


def test_recorded_machine(machine) -> None:
    """Only the made-up machine was recorded with the files of the controller, and it sets no quota."""
    found = read_quota(root=machine.root)
    recorded = machine.expected["cgroup"].get("version") == "v2" and machine.expected["kind"] == "made-up"
    assert (found.version, found.cpu_max) == (("v2", "max 100000") if recorded else ("none", None))
    assert found.tightest is None


# --- this machine ----------------------------------------------------------------------------------------------------


@contextmanager
def limited(quota_us: int, period_us: int) -> Iterator[tuple[Path, Path]]:
    """Make a cgroup with a quota and an empty one inside it, found without the code under test."""
    for line in Path("/proc/mounts").read_text().splitlines():
        _source, point, kind, options = line.split(" ")[:4]
        top = Path(point)
        v1 = kind == "cgroup" and "cpu" in options.split(",")
        if v1 or (kind == "cgroup2" and "cpu" in (top / "cgroup.subtree_control").read_text().split()):
            break
    else:
        pytest.skip("no cgroup hierarchy with the cpu controller is mounted")
    if not os.access(top, os.W_OK):
        pytest.skip("needs root and a cgroup hierarchy in which cgroups can be made")
    outer = top / f"berth-test-{os.getpid()}"
    inner = outer / "inner"
    inner.mkdir(parents=True)
    try:
        if v1:
            (outer / "cpu.cfs_period_us").write_text(str(period_us))
            (outer / "cpu.cfs_quota_us").write_text(str(quota_us))
        else:
            (outer / "cpu.max").write_text(f"{quota_us} {period_us}")
        yield outer, inner
    finally:
        inner.rmdir()
        outer.rmdir()


@pytest.mark.skipif(shutil.which("sh") is None, reason="needs a shell")
def test_a_real_quota_throttles_a_real_process(as_root: None) -> None:
    """The counters of the kernel and of the quota agree, and those above are marked."""
    with limited(2000, 100000) as (outer, inner):
        spin = 'echo $$ >"$1" && i=0; while :; do i=$((i+1)); done'
        with subprocess.Popen(["sh", "-c", spin, "sh", str(inner / "cgroup.procs")]) as child:
            try:
                while not (counted := read_quota(child.pid).levels) or not counted[0].nr_throttled:
                    assert child.poll() is None
                found = read_quota(child.pid)
            finally:
                child.kill()
        assert found.tightest is not None
        assert (found.tightest.directory, found.tightest.inherited) == (str(outer), True)
        assert (found.tightest.quota_us, found.tightest.period_us) == (2000, 100000)
        stat = dict(line.split(" ") for line in (outer / "cpu.stat").read_text().splitlines())
        assert 0 < (found.tightest.nr_throttled or 0) <= int(stat["nr_throttled"])
        after = stat.get("throttled_usec") or int(stat["throttled_time"]) // 1000
        assert 0 <= (found.tightest.throttled_us or 0) <= int(after)
        assert (found.path, found.weight) == (f"/{outer.name}/inner", 100)
