"""doctor on this host, and on this host changed for real: what it finds, and what it says mends it."""

import errno
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import click
import msgspec
import pytest

import berth
from berth.claims.claims import Claim, try_claim
from berth.doctor import cores, isolation, mpi, storage
from berth.doctor.abilities import Ability, excuse_user_namespaces
from berth.doctor.deadline import attempt
from berth.epoch.capability import NOTHING_ACCEPTED
from berth.host.cgroup import effective_cpuset
from berth.host.cpuset import CpuSet
from berth.linux import syscalls

SOURCES = Path(berth.__file__).parent.parent
DOCTOR = [sys.executable, "-m", "berth", "doctor"]
#: Numbers of system calls: asm/unistd_64.h and asm-generic/unistd.h.
CALLS = {
    "x86_64": {"prctl": 157, "unshare": 272, "renameat2": 316},
    "aarch64": {"prctl": 167, "unshare": 97, "renameat2": 276},
}
JSON = [*DOCTOR, "--json"]
NAMES = [
    "user namespaces",
    "bubblewrap",
    "seccomp",
    "sandbox user",
    "state root",
    "cpuset",
    "claims",
    "NPU driver",
    "MPI",
]
#: Record every path that Python opens and every library that it loads (argument 1: the record), then run doctor.
AUDIT = """
import os, sys
record = os.open(sys.argv[1], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
def heard(event, arguments):
    if event in ("open", "ctypes.dlopen"):
        os.write(record, ascii(arguments[0]).encode() + b"\\n")
sys.addaudithook(heard)
from berth.cli.main import main
sys.exit(main(["doctor", "--json"]))
"""


def environment(**changes: str) -> dict[str, str]:
    """Return an environment in which berth's own sources come first."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("BERTH_", "XDG_"))}
    return {**kept, "PYTHONPATH": f"{SOURCES}:{os.environ.get('PYTHONPATH', '')}", **changes}


def run_doctor(argv: Sequence[str], **changes: str) -> dict[str, dict[str, Any]]:
    """Run `argv`, which must print one JSON document of doctor and exit with 0; return its abilities by name."""
    done = subprocess.run(argv, capture_output=True, text=True, env=environment(**changes), cwd="/", timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    return {ability["name"]: ability for ability in json.loads(done.stdout)["abilities"]}


def tried(check: Callable[[], Ability], change: Callable[[], object] = lambda: None) -> Ability:
    """Return what `check` finds in a process that `change` was done to."""

    def changed() -> str:
        change()
        return json.dumps(asdict(check()))

    return Ability(**json.loads(attempt(changed, timeout_s=30)))


def deny(call: str, code: int, *, first: int | None = None) -> Callable[[], None]:
    """Return a change: a system call, with that first argument if one is given, is refused with the errno `code`."""
    numbers = CALLS.get(platform.machine())
    if numbers is None:
        pytest.skip(f"system call numbers of {platform.machine()} are not in this test")
    load, jump, answer = 0x20, 0x15, 0x06
    test_first = [] if first is None else [(load, 0, 0, 16), (jump, 0, 1, first)]
    program = [
        (load, 0, 0, 0),
        (jump, 0, 1 + len(test_first), numbers[call]),
        *test_first,
        (answer, 0, 0, 0x50000 | code),
        (answer, 0, 0, 0x7FFF0000),
    ]

    def change() -> None:
        syscalls.set_no_new_privileges()
        syscalls.set_seccomp_filter(program)

    return change


@pytest.fixture
def as_root() -> None:
    """Skip where this process is not root, which mounts and changes of user need."""
    if os.geteuid() != 0:
        pytest.skip("needs root, to mount and to become another user")


@pytest.fixture(scope="session")
def anybodys_copy() -> Iterator[Path]:
    """Return a directory that everybody can read, with berth and what it imports."""
    with tempfile.TemporaryDirectory(prefix="berth-test-") as name:
        copy = Path(name)
        for package in (SOURCES / "berth", *click.__path__, *msgspec.__path__):
            shutil.copytree(package, copy / Path(package).name, ignore=shutil.ignore_patterns("__pycache__"))
        subprocess.run(["chmod", "-R", "a+rX", name], check=True)
        yield copy


def user_mount_namespace(script: str) -> list[str]:
    """Return a command that changes mounts for itself alone, and then runs doctor."""
    return ["unshare", "--mount", "sh", "-ec", f'{script}\nexec "$@"', "sh", *JSON]


def test_every_ability_is_told_and_nothing_is_left_behind(tmp_path: Path) -> None:
    root = tmp_path / "not" / "yet"
    found = run_doctor(JSON, BERTH_STATE_ROOT=str(root))
    assert list(found) == NAMES
    assert {ability["level"] for ability in found.values()} <= {"works", "works with less", "does not"}
    assert all(ability["why"] for ability in found.values())
    assert all(ability["mend"] for ability in found.values() if ability["level"] == "does not")
    assert found["state root"]["level"] == "works"
    assert f"{str(root)!r} does not exist yet; in {str(tmp_path)!r}, above it" in found["state root"]["why"]
    assert list(tmp_path.iterdir()) == []
    root.mkdir(parents=True, mode=0o700)
    (root / "kept").touch()
    assert f"in {str(root)!r} a rename" in run_doctor(JSON, BERTH_STATE_ROOT=str(root))["state root"]["why"]
    assert sorted(path.name for path in root.iterdir()) == [".berth.lock", "kept"]


def test_an_ordinary_user(as_root: None, anybodys_copy: Path) -> None:
    python = os.path.realpath(sys.executable)
    become = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", python, "-m", "berth", "doctor", "--json"]
    found = run_doctor(become, PYTHONPATH=str(anybodys_copy), HOME="/proc/1/nowhere")
    assert list(found) == NAMES
    assert "uid 65534" in found["sandbox user"]["why"]
    assert found["claims"]["level"] == "works"
    assert found["state root"]["level"] == "does not"
    assert "nothing can be made in '/proc/1'" in found["state root"]["why"]
    assert "`install -d -m 700 -o 65534 -g 65534 /proc/1/nowhere/.local/state/berth`" in found["state root"]["mend"]


def test_no_more_user_namespaces() -> None:
    script = 'echo 0 >/proc/sys/user/max_user_namespaces && exec "$@"'
    entered = ["unshare", "--user", "--map-root-user"]
    if subprocess.run([*entered, "true"], capture_output=True).returncode != 0:
        pytest.skip("this host allows no user namespace to set the limit in")
    found = run_doctor([*entered, "sh", "-c", script, "sh", *JSON])
    for name in ("user namespaces", "bubblewrap"):
        assert found[name]["level"] == "does not"
        assert found[name]["mend"].endswith("`sysctl -w user.max_user_namespaces=10000`.")
    assert os.strerror(errno.ENOSPC) in found["user namespaces"]["why"]
    assert found["sandbox user"]["level"] == "does not"
    assert found["seccomp"]["level"] == "works"


def test_write_protected_kernel_knobs_leave_bubblewrap_with_less(as_root: None) -> None:
    script = "mount --bind /proc/sys /proc/sys; mount -o remount,bind,ro /proc/sys"
    found = run_doctor(user_mount_namespace(script))["bubblewrap"]
    assert found["level"] == "works with less"
    assert "--disable-userns does not work here" in found["why"]
    assert "systempaths=unconfined" in found["mend"]


def test_no_bubblewrap(as_root: None) -> None:
    found = run_doctor(user_mount_namespace("mount --bind /dev/null /usr/bin/bwrap"))["bubblewrap"]
    assert found["level"] == "does not"
    assert "`apt-get install bubblewrap`" in found["mend"]


def test_user_namespaces_without_rights_in_them_but_for_bubblewrap() -> None:
    refuse = deny("unshare", errno.EPERM, first=isolation.INNER_NAMESPACES)
    found = tried(partial(isolation.user_namespaces, None), refuse)
    assert found.level == "does not"
    assert "were refused in it: Operation not permitted" in found.why
    assert found.mend
    bubblewrap = tried(partial(isolation.bubblewrap, None), refuse)
    if bubblewrap.level == "does not":
        pytest.skip("bubblewrap does not work on this host, so it cannot be the exception")
    excused = excuse_user_namespaces(found, bubblewrap)
    assert (excused.level, excused.mend) == ("works with less", "")


def test_no_seccomp() -> None:
    found = tried(isolation.seccomp, deny("prctl", errno.EINVAL, first=syscalls.PR_SET_SECCOMP))
    assert found.level == "does not"
    assert found.why.endswith("failed: Invalid argument")
    assert "CONFIG_SECCOMP_FILTER=y" in found.mend


def test_a_state_root_that_would_replace_names(tmp_path: Path) -> None:
    for root in (tmp_path, tmp_path / "new"):
        found = tried(partial(storage.state_root, str(root), NOTHING_ACCEPTED), deny("renameat2", errno.EINVAL))
        assert found.level == "does not"
        assert "does not protect existing work-state" in found.why
        assert "BERTH_STATE_ROOT" in found.mend
    assert [path.name for path in tmp_path.iterdir()] == [".berth.lock"]


def test_a_state_root_below_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path in ("file", "file/below/it"):
        found = tried(partial(storage.state_root, str(tmp_path / path), NOTHING_ACCEPTED))
        assert found.level == "does not"
        assert f"{str(tmp_path / 'file')!r} is not a directory" in found.why


def test_a_narrower_mask_is_told() -> None:
    allowed = effective_cpuset().cpus
    if len(allowed) < 2:
        pytest.skip("one CPU cannot be narrowed")
    found = tried(cores.cpuset, lambda: os.sched_setaffinity(0, {allowed.min()}))
    assert found.level == "works with less"
    assert f"CPUs {allowed}, " in found.why
    assert f"is narrower, CPUs {allowed.min()}," in found.why
    assert found.mend == f"Widen it for this shell: `taskset -cp {allowed} $$`."


@pytest.mark.parametrize("shared", [False, True])
def test_claimed_cores_are_told_with_their_holder(shared: bool) -> None:
    claim = claim_any(shared=shared)
    try:
        found = tried(cores.claims)
    finally:
        claim.release()
    assert found.level == "works"
    assert f"CPU {claim.cpus} {'shared ' if shared else ''}by " in found.why
    assert f"pid {os.getpid()} (" in found.why


def claim_any(*, shared: bool) -> Claim:
    """Claim one CPU, whichever nobody else has at the moment."""
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        for cpu in effective_cpuset().cpus:
            claimed = try_claim(CpuSet.of([cpu]), shared=shared)
            if isinstance(claimed, Claim):
                return claimed
        time.sleep(0.01)
    pytest.skip("others have claimed every CPU")


def test_an_ascend_driver_is_seen_and_never_opened(as_root: None, tmp_path: Path) -> None:
    devices, local, record = tmp_path / "dev", tmp_path / "local", tmp_path / "record"
    library = local / "Ascend/driver/lib64/driver/libdcmi.so"
    library.parent.mkdir(parents=True)
    library.touch()
    devices.mkdir()
    for name in ("davinci_manager", "davinci10", "davinci2"):
        os.mknod(devices / name, 0o20600, os.makedev(1, 3))
    (devices / "davinci3").touch()
    command = user_mount_namespace(
        f"mount -t overlay -o lowerdir={local}:/usr/local none /usr/local\n"
        f"mount -t overlay -o lowerdir={devices}:/dev none /dev"
    )
    command[-len(JSON) :] = [sys.executable, "-c", AUDIT, str(record)]
    found = run_doctor(command)["NPU driver"]
    assert found["level"] == "works"
    assert "device nodes: davinci_manager, davinci2, davinci10; " in found["why"]
    assert "library: /usr/local/Ascend/driver/lib64/driver/libdcmi.so " in found["why"]
    opened = record.read_text()
    assert "/proc/self/mountinfo" in opened
    assert "davinci" not in opened
    assert "dcmi" not in opened


def test_no_mpi(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python3"))
    found = tried(mpi.mpi)
    assert found.level == "does not"
    assert "`apt-get install openmpi-bin libopenmpi-dev`" in found.mend
    assert f"`{tmp_path}/python3 -m pip install mpi4py`" in found.mend


def test_the_mpi_of_this_host() -> None:
    if shutil.which("mpirun") is None:
        pytest.skip("needs an mpirun in PATH, such as openmpi-bin")
    found = tried(mpi.mpi)
    assert "ran two ranks" in found.why
    has_mpi4py = subprocess.run([sys.executable, "-c", "import mpi4py.MPI"], capture_output=True).returncode == 0
    assert found.level == ("works" if has_mpi4py else "works with less")


@pytest.mark.parametrize(
    ("launcher", "why"),
    [
        ('[ "$1" = -n ] || { echo "unknown option $1" >&2; exit 2; }; echo rank; echo rank', "ran two ranks"),
        ("echo rank", "did not run two ranks: exit code 0, rank"),
        ("echo no slots >&2; exit 3", "did not run two ranks: exit code 3, no slots"),
    ],
    ids=["other options", "one rank", "refused"],
)
def test_other_launchers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, launcher: str, why: str) -> None:
    program = tmp_path / "mpirun"
    program.write_text(f"#!/bin/sh\n{launcher}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    found = tried(mpi.mpi)
    assert f"{program} {why}" in found.why
    assert (found.level == "does not") == ("did not" in why)


def test_a_launcher_that_hangs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    program = tmp_path / "mpirun"
    program.write_text("#!/bin/sh\nsleep 60 & wait\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(mpi, "RUN_TIMEOUT_S", 0.3)
    found = tried(mpi.mpi)
    assert (found.level, found.why) == ("does not", f"{program} did not run two ranks: it gave no answer within 0.3 s")


def test_the_user_of_sandboxes_is_tried(as_root: None) -> None:
    account = (1, 1, (1,))
    found = tried(partial(isolation.sandbox_user, account))
    assert (found.level, found.mend) == ("works", "")
    assert "(uid 1) (sandbox.user)" in found.why
    assert tried(partial(isolation.sandbox_user, None)).level == "works with less"
    assert tried(partial(isolation.bubblewrap, account)).why.endswith("(uid 1)")
