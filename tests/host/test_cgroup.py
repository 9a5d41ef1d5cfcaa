import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from berth.errors import AbilityError, MalformedError
from berth.host.cgroup import EffectiveCpuset, effective_cpuset
from berth.host.cpuset import CpuSet

ONLINE = "/sys/devices/system/cpu/online"
SOURCES = Path(__file__).resolve().parents[2] / "src"


def mount(kind: str, point: str, *, root: str = "/", options: str = "rw") -> str:
    """Return one line of mountinfo, with two optional fields before the separator."""
    return f"34 31 0:31 {root} {point} rw,relatime shared:9 master:1 - {kind} none {options}\n"


V1 = mount("cgroup", "/sys/fs/cgroup/cpuset", options="rw,cpuset")
V2 = mount("cgroup2", "/sys/fs/cgroup")
OTHER = mount("proc", "/proc") + mount("cgroup", "/sys/fs/cgroup/cpu", options="rw,cpu,cpuacct")


@pytest.fixture
def look(tree):
    """Return a function that writes a machine with CPUs 0-7 and reads the limit of its process."""

    def write_and_read(mounts: str, cgroup: str, files: dict[str, str]) -> EffectiveCpuset:
        tree.write({ONLINE: "0-7\n", "/proc/self/mountinfo": OTHER + mounts, "/proc/self/cgroup": cgroup, **files})
        return effective_cpuset(root=tree.root)

    return write_and_read


def brief(found: EffectiveCpuset) -> tuple[str, str, str, bool]:
    return str(found.cpus), found.version, found.source, found.inherited


# --- cgroup v1 -------------------------------------------------------------------------------------------------------


def test_v1_prefers_the_effective_file(look) -> None:
    directory = "/sys/fs/cgroup/cpuset/job"
    files = {f"{directory}/cpuset.cpus": "0-5\n", f"{directory}/cpuset.effective_cpus": "2-3\n"}
    found = look(V1, "9:name=systemd:/x\n3:cpuset:/job\n0::/y\n", files)
    assert found == EffectiveCpuset(
        cpus=CpuSet.parse_list("2-3"),
        version="v1",
        path="/job",
        source=f"{directory}/cpuset.effective_cpus",
        inherited=False,
        reason="The cgroup /job sets this limit.",
    )


def test_v1_without_effective_file_is_cut_to_online(look) -> None:
    found = look(V1, "3:cpuset:/job\n", {"/sys/fs/cgroup/cpuset/job/cpuset.cpus": "6-9\n"})
    assert brief(found) == ("6-7", "v1", "/sys/fs/cgroup/cpuset/job/cpuset.cpus", False)
    assert "CPUs 8-9 of it are offline" in found.reason


def test_v1_fresh_cpuset_allows_nothing(look) -> None:
    files = {f"/sys/fs/cgroup/cpuset/new/{name}": "\n" for name in ("cpuset.cpus", "cpuset.effective_cpus")}
    files["/sys/fs/cgroup/cpuset/cpuset.effective_cpus"] = "0-7\n"
    found = look(V1, "3:cpuset:/new\n", files)
    assert brief(found) == ("", "v1", "/sys/fs/cgroup/cpuset/new/cpuset.effective_cpus", False)


@pytest.mark.parametrize(
    "mounted",
    [mount("cgroup", "/dev/cpuset", options="rw,cpuset,noprefix,release_agent=/x"), mount("cpuset", "/dev/cpuset")],
)
def test_v1_without_prefix(look, mounted: str) -> None:
    found = look(mounted, "3:cpuset:/job\n", {"/dev/cpuset/job/cpus": "1\n"})
    assert brief(found) == ("1", "v1", "/dev/cpuset/job/cpus", False)


def test_v1_hierarchy_may_be_shared_with_other_controllers(look) -> None:
    mounted = mount("cgroup", "/cg", options="rw,cpuset,cpu")
    found = look(mounted, "3:cpuset,cpu:/a:b\n", {"/cg/a:b/cpuset.cpus": "1\n"})
    assert brief(found) == ("1", "v1", "/cg/a:b/cpuset.cpus", False)


# --- cgroup v2 and hybrid --------------------------------------------------------------------------------------------


def test_v2_reads_effective_and_never_the_wish(look) -> None:
    directory = "/sys/fs/cgroup/a/b"
    files = {f"{directory}/cpuset.cpus": "\n", f"{directory}/cpuset.cpus.effective": "4\n"}
    found = look(V2, "0::/a/b\n", files)
    assert brief(found) == ("4", "v2", f"{directory}/cpuset.cpus.effective", False)


def test_v2_leaf_without_cpuset_inherits_from_the_nearest_ancestor(look) -> None:
    files = {
        "/sys/fs/cgroup/cpuset.cpus.effective": "0-7\n",
        "/sys/fs/cgroup/a/cpuset.cpus.effective": "1-2\n",
        "/sys/fs/cgroup/a/b/c/cgroup.procs": "",
    }
    found = look(V2, "0::/a/b/c\n", files)
    assert brief(found) == ("1-2", "v2", "/sys/fs/cgroup/a/cpuset.cpus.effective", True)
    assert "/sys/fs/cgroup/a is the nearest" in found.reason


def test_a_removed_cgroup_inherits(look) -> None:
    found = look(V2, "0::/gone (deleted)\n", {"/sys/fs/cgroup/cpuset.cpus.effective": "0-1\n"})
    assert brief(found) == ("0-1", "v2", "/sys/fs/cgroup/cpuset.cpus.effective", True)


def test_hybrid_follows_the_cpuset_line(look) -> None:
    files = {
        "/sys/fs/cgroup/cpuset/job/cpuset.cpus": "1\n",
        "/sys/fs/cgroup/unified/x/cpuset.cpus.effective": "2\n",
    }
    mounts = V1 + mount("cgroup2", "/sys/fs/cgroup/unified")
    assert brief(look(mounts, "0::/x\n2:cpuset:/job\n", files))[:2] == ("1", "v1")
    assert brief(look(mounts, "0::/x\n2:memory:/job\n", files))[:2] == ("2", "v2")


# --- memory nodes ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mounts", "cgroup", "directory", "cpus", "mems"),
    [
        (V1, "3:cpuset:/job\n", "/sys/fs/cgroup/cpuset/job", "cpuset.cpus", "cpuset.mems"),
        (V1, "3:cpuset:/job\n", "/sys/fs/cgroup/cpuset/job", "cpuset.effective_cpus", "cpuset.effective_mems"),
        (mount("cpuset", "/dev/cpuset"), "3:cpuset:/job\n", "/dev/cpuset/job", "cpus", "mems"),
        (V2, "0::/job\n", "/sys/fs/cgroup/job", "cpuset.cpus.effective", "cpuset.mems.effective"),
    ],
)
def test_memory_nodes_are_those_that_are_there(look, tree, mounts, cgroup, directory, cpus, mems) -> None:
    tree.write({f"/sys/devices/system/node/node{number}/cpulist": "" for number in (0, 2, 8)})
    found = look(mounts, cgroup, {f"{directory}/{cpus}": "1\n", f"{directory}/{mems}": "2-8\n"})
    assert (str(found.cpus), str(found.mems)) == ("1", "2,8")


def test_effective_memory_nodes_count_and_the_wish_does_not(look) -> None:
    names = {"cpuset.cpus": "0-1", "cpuset.effective_cpus": "0", "cpuset.mems": "0-1", "cpuset.effective_mems": "1"}
    found = look(V1, "3:cpuset:/j\n", {f"/sys/fs/cgroup/cpuset/j/{name}": text for name, text in names.items()})
    assert (str(found.cpus), str(found.mems)) == ("0", "1")


def test_memory_nodes_are_inherited_with_the_cpus(look) -> None:
    names = {"cpuset.cpus.effective": "0-7\n", "cpuset.mems.effective": "3\n"}
    found = look(V2, "0::/a/b\n", {f"/sys/fs/cgroup/a/{name}": text for name, text in names.items()})
    assert (str(found.mems), found.inherited) == ("3", True)
    assert look("", "", {}).mems is None


def test_memory_nodes_of_this_process_are_those_the_kernel_prints() -> None:
    status = Path("/proc/self/status").read_text()
    assert f"Mems_allowed_list:\t{effective_cpuset().mems}\n" in status


# --- containers and namespaces ---------------------------------------------------------------------------------------


def test_a_namespaced_root_is_not_unlimited(look) -> None:
    found = look(V2, "0::/\n", {"/sys/fs/cgroup/cpuset.cpus.effective": "3\n"})
    assert brief(found) == ("3", "v2", "/sys/fs/cgroup/cpuset.cpus.effective", False)


@pytest.mark.parametrize("path", ["/..", "/../other", "/../../a/b", "/a/../b"])
def test_a_path_out_of_the_namespace_gives_the_mount_root(look, path: str) -> None:
    files = {"/sys/fs/cgroup/cpuset.cpus.effective": "3\n", "/sys/fs/other/cpuset.cpus.effective": "5\n"}
    found = look(V2, f"0::{path}\n", files)
    assert brief(found) == ("3", "v2", "/sys/fs/cgroup/cpuset.cpus.effective", True)
    assert "outside of what is mounted at /sys/fs/cgroup" in found.reason


def test_a_mount_of_a_part_is_relative_to_it(look) -> None:
    mounts = mount("cgroup", "/sys/fs/cgroup/cpuset", root="/docker/abc", options="rw,cpuset")
    files = {
        "/sys/fs/cgroup/cpuset/cpuset.cpus": "1-2\n",
        "/sys/fs/cgroup/cpuset/sub/cpuset.cpus": "2\n",
        "/sys/fs/cgroup/cpuset/def/cpuset.cpus": "7\n",
    }
    assert brief(look(mounts, "1:cpuset:/docker/abc\n", files))[0::3] == ("1-2", False)
    assert brief(look(mounts, "1:cpuset:/docker/abc/sub\n", files))[0::3] == ("2", False)
    assert brief(look(mounts, "1:cpuset:/docker/abcdef\n", files))[0::3] == ("1-2", True)
    assert brief(look(mounts, "1:cpuset:/\n", files))[0::3] == ("1-2", True)


def test_a_mount_that_shows_the_cgroup_is_preferred(look) -> None:
    places = {"/part": "/other", "/deep": "/job", "/all": "/"}
    mounts = "".join(mount("cgroup2", point, root=root) for point, root in places.items())
    files = {
        "/part/cpuset.cpus.effective": "0\n",
        "/deep/cpuset.cpus.effective": "1\n",
        "/all/job/cpuset.cpus.effective": "1\n",
    }
    assert brief(look(mounts, "0::/job\n", files)) == ("1", "v2", "/all/job/cpuset.cpus.effective", False)


def test_of_stacked_mounts_the_last_is_seen(look) -> None:
    mounts = mount("cgroup2", "/cg", root="/below") + mount("cgroup2", "/cg", root="/above")
    found = look(mounts, "0::/above/x\n", {"/cg/x/cpuset.cpus.effective": "1\n"})
    assert brief(found) == ("1", "v2", "/cg/x/cpuset.cpus.effective", False)
    hidden = look(V2 + mount("tmpfs", "/sys/fs/cgroup"), "0::/\n", {"/sys/fs/cgroup/cpuset.cpus.effective": "1\n"})
    assert hidden.version == "none"


def test_octal_escapes_of_the_mount_table_are_undone(look) -> None:
    mounts = mount("cgroup2", r"/my\040groups\134x\303\244", root=r"/a\011b")
    found = look(mounts, "0::/a\tb/c d\n", {"/my groups\\xä/c d/cpuset.cpus.effective": "1\n"})
    assert brief(found) == ("1", "v2", "/my groups\\xä/c d/cpuset.cpus.effective", False)


def test_names_may_hold_what_python_takes_for_a_line_end(look) -> None:
    found = look(V2, "0::/a\x0cb\x1dc\u2028\n", {"/sys/fs/cgroup/a\x0cb\x1dc\u2028/cpuset.cpus.effective": "1\n"})
    assert brief(found)[0::3] == ("1", False)


# --- no limit to be found --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mounts", "cgroup", "why"),
    [
        ("", "", "names no cgroup"),
        (V2, "4:memory:/x\n", "names no cgroup"),
        (V2, "3:cpuset:/job\n", "not mounted here"),
        ("", "0::/job\n", "not mounted here"),
        (V2, "0::/job\n", "No cpuset file"),
    ],
)
def test_without_a_limit_all_online_cpus_count(look, mounts: str, cgroup: str, why: str) -> None:
    found = look(mounts, cgroup, {})
    assert brief(found) == ("0-7", "none", ONLINE, False)
    assert why in found.reason


def test_a_kernel_without_cgroups_has_no_limit(tree) -> None:
    tree.write({ONLINE: "0-3\n"})
    assert brief(effective_cpuset(root=tree.root)) == ("0-3", "none", ONLINE, False)


def test_proc_cpuset_and_proc_mounts_serve_old_records(tree) -> None:
    tree.write(
        {
            ONLINE: "0-3\n",
            "/proc/mounts": "none /dev/cpuset cpuset rw 0 0\n",
            "/proc/self/cpuset": "/job\n",
            "/dev/cpuset/job/cpus": "1-2\n",
        }
    )
    assert brief(effective_cpuset(root=tree.root)) == ("1-2", "v1", "/dev/cpuset/job/cpus", False)


def test_another_process_of_the_record(tree) -> None:
    tree.write(
        {
            ONLINE: "0-3\n",
            "/proc/self/mountinfo": V2,
            "/proc/77/cgroup": "0::/b\n",
            "/sys/fs/cgroup/b/cpuset.cpus.effective": "2\n",
        }
    )
    assert str(effective_cpuset(77, tree.root).cpus) == "2"
    with pytest.raises(ProcessLookupError, match="hidepid"):
        effective_cpuset(78, tree.root)


def test_what_is_malformed_is_named(look, tree) -> None:
    with pytest.raises(MalformedError, match=r"/proc/self/mountinfo has a line that is no mount: b'one two'"):
        look("one two\n", "0::/\n", {})
    with pytest.raises(MalformedError, match=r"/sys/fs/cgroup/cpuset\.cpus\.effective"):
        look(V2, "0::/\n", {"/sys/fs/cgroup/cpuset.cpus.effective": "x\n"})


def test_a_machine_without_cpus_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(AbilityError, match="names no CPU"):
        effective_cpuset(root=str(tmp_path))


# --- recorded machines -----------------------------------------------------------------------------------------------


def test_recorded_machine(machine) -> None:
    expected, recorded = machine.expected, machine.expected["cgroup"]
    found = effective_cpuset(root=machine.root)
    assert str(found.cpus) == (expected["allowed_cpus"] or expected["online_cpus"])
    if expected["allowed_cpus"] is not None:
        assert found.version == recorded["version"].split()[0]
        assert found.path == recorded["path"]
        assert found.source == f"{recorded['mount_point']}{recorded['path']}/{recorded['cpus_file']}"
        assert not found.inherited
        assert str(found.mems) == expected["allowed_mems"]


# --- this machine, beside what the kernel does -----------------------------------------------------------------------


def run_python(code: str, *arguments: str, prefix: tuple[str, ...] = ()) -> str:
    environment = {**os.environ, "PYTHONPATH": str(SOURCES), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [*prefix, sys.executable, "-c", code, *arguments]
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment, timeout=30)
    return done.stdout.strip()


def test_the_limit_is_what_the_kernel_grants_to_a_mask_of_all_cpus() -> None:
    """Setting a mask cuts it to the cpuset (sched_setaffinity(2)), so reading it back tells the limit."""
    code = "import os; os.sched_setaffinity(0, range(8192)); print(*sorted(os.sched_getaffinity(0)))"
    granted = CpuSet.of(map(int, run_python(code).split()))
    found = effective_cpuset()
    assert found.cpus == granted, found.reason
    assert CpuSet.of(os.sched_getaffinity(0)) <= found.cpus


def test_own_number_and_no_number_agree() -> None:
    assert effective_cpuset(os.getpid()) == effective_cpuset()


def test_a_process_that_ended_is_not_found() -> None:
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    with pytest.raises(ProcessLookupError, match="no such process"):
        effective_cpuset(child.pid)


@dataclass(frozen=True)
class Hierarchy:
    """Where this machine lets us make a cpuset: the directory, and how to mount that hierarchy again."""

    directory: Path
    mount_arguments: tuple[str, ...]


def own_hierarchy() -> Hierarchy | None:
    """Find, without the code under test, a mounted cpuset hierarchy; None where none can be written."""
    for line in Path("/proc/mounts").read_text().splitlines():
        _source, point, kind, options = line.split(" ")[:4]
        directory = Path(point)
        if not os.access(directory, os.W_OK) or options.split(",")[0] != "rw":
            continue
        if kind == "cgroup" and "cpuset" in options.split(","):
            return Hierarchy(directory, ("-t", "cgroup", "-o", "cpuset"))
        if kind == "cgroup2" and "cpuset" in (directory / "cgroup.subtree_control").read_text().split():
            return Hierarchy(directory, ("-t", "cgroup2"))
    return None


@pytest.fixture(scope="module")
def hierarchy() -> Hierarchy:
    found = own_hierarchy() if os.geteuid() == 0 else None
    if found is None:
        pytest.skip("needs root and a cgroup hierarchy in which cpusets can be made")
    return found


@contextmanager
def cpuset_of_one_cpu(hierarchy: Hierarchy, cpu: int) -> Iterator[Path]:
    """Make a cpuset with one CPU beside this process and remove it again; it must be empty of processes by then."""
    directory = hierarchy.directory / f"berth-test-{os.getpid()}"
    directory.mkdir()
    try:
        memory = hierarchy.directory / "cpuset.mems"
        if "cgroup2" not in hierarchy.mount_arguments:
            (directory / "cpuset.mems").write_text(memory.read_text())
        (directory / "cpuset.cpus").write_text(f"{cpu}\n")
        yield directory
    finally:
        directory.rmdir()


@contextmanager
def sleeper() -> Iterator[int]:
    with subprocess.Popen(["sleep", "60"]) as child:
        try:
            yield child.pid
        finally:
            child.kill()


def test_a_process_in_a_real_cpuset(hierarchy: Hierarchy) -> None:
    cpu = effective_cpuset().cpus.min()
    with cpuset_of_one_cpu(hierarchy, cpu) as directory, sleeper() as pid:
        (directory / "cgroup.procs").write_text(f"{pid}\n")
        found = effective_cpuset(pid)
        status = Path(f"/proc/{pid}/status").read_text()
        assert f"Cpus_allowed_list:\t{cpu}\n" in status
    assert found.cpus == CpuSet.of([cpu])
    assert not found.inherited
    assert found.path == f"/{directory.name}"
    assert Path(found.source).parent == directory


def test_a_process_in_its_own_cgroup_namespace(hierarchy: Hierarchy, tmp_path: Path) -> None:
    """A container: its cgroup is `/` to itself, and the hierarchy is mounted anew inside."""
    if shutil.which("unshare") is None:
        pytest.skip("unshare (util-linux) is not installed")
    cpu = effective_cpuset().cpus.min()
    enter = 'echo $$ >"$1" && shift && exec unshare --cgroup --mount -- "$@"'
    remount = 'mount "$@" && exec "$PYTHON" -c "$CODE"'
    code = "from berth.host.cgroup import effective_cpuset as e; f = e(); print(f.cpus, f.path, f.source, f.inherited)"
    environment = {
        **os.environ,
        "PYTHON": sys.executable,
        "CODE": code,
        "PYTHONPATH": str(SOURCES),
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    with cpuset_of_one_cpu(hierarchy, cpu) as directory:
        inner = ["sh", "-c", remount, "sh", *hierarchy.mount_arguments, "none", str(tmp_path)]
        command = ["sh", "-c", enter, "sh", str(directory / "cgroup.procs"), *inner]
        done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=30)
    assert done.returncode == 0, done.stderr
    cpus, path, source, inherited = done.stdout.split()
    assert (cpus, path, inherited) == (str(cpu), "/", "False")
    assert Path(source).parent == tmp_path


def test_this_kernel_takes_strides_as_we_do(hierarchy: Hierarchy) -> None:
    if "cgroup2" in hierarchy.mount_arguments or not CpuSet.of([0, 1]) <= effective_cpuset().cpus:
        pytest.skip("needs CPUs 0 and 1 in a v1 cpuset")
    with cpuset_of_one_cpu(hierarchy, 0) as directory:
        for stride in ("0-1:1/2", "0-1:2/2", "0-1:1/1"):
            (directory / "cpuset.cpus").write_text(stride)
            assert CpuSet.parse_list((directory / "cpuset.cpus").read_text()) == CpuSet.parse_list(stride)
