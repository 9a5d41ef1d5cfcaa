import contextlib
import json
import os
import shutil
import signal
import stat
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from berth.errors import AbilityError, FailedError
from berth.linux.process import descendants
from berth.sandbox.bubblewrap import find_bubblewrap, probe, system_layout
from berth.sandbox.instance import ROOT_OUTSIDE, Sandbox, prepare


@pytest.fixture
def sandboxes() -> None:
    """Skip where no sandbox can be made."""
    try:
        probe()
    except AbilityError as error:
        pytest.skip(error.message)


@pytest.fixture
def workspace(tmp_path: Path) -> Iterator[int]:
    """Return the open workspace `work`."""
    (tmp_path / "work").mkdir()
    fd = os.open(tmp_path / "work", os.O_PATH | os.O_DIRECTORY)
    yield fd
    os.close(fd)


class Running:
    """A sandbox and the bwrap process around it."""

    def __init__(self, sandbox: Sandbox) -> None:
        self.sandbox = sandbox
        self.process = subprocess.Popen(
            sandbox.argv,
            pass_fds=sandbox.fds,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        sandbox.close_passed()

    def output(self) -> str:
        """Let the command begin, and return what it printed once it has ended successfully."""
        self.sandbox.wait_until_set_up()
        self.sandbox.let_begin()
        output, errors = self.process.communicate(timeout=20)
        assert self.process.returncode == 0, errors
        return output

    def stop(self) -> None:
        """Kill everything inside and wait until it is gone."""
        inside = [found.pid for found in descendants(self.process.pid)]
        if self.sandbox.inside_pid not in (0, *inside):
            inside.append(self.sandbox.inside_pid)
        self.process.kill()
        for pid in inside:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.communicate(timeout=20)


@pytest.fixture
def start(sandboxes: None, workspace: int) -> Iterator[Callable[..., Running]]:
    """Return a function that starts a sandbox for a command and stops it at its gate."""
    started: list[Running] = []

    def start(*command: str, mark: str = "0" * 64, terminal: str | None = None) -> Running:
        started.append(Running(prepare(command, workspace=workspace, mark=mark, terminal=terminal, user=None)))
        return started[-1]

    before = os.listdir("/proc/self/fd")
    yield start
    for running in started:
        running.stop()
        running.sandbox.close()
    assert os.listdir("/proc/self/fd") == before


def shell(start: Callable[..., Running], script: str) -> str:
    return start("sh", "-c", script).output()


# --- the gate --------------------------------------------------------------------------------------------------------


def test_nothing_is_executed_before_the_gate_opens(start, tmp_path: Path) -> None:
    running = start("touch", "marker")
    running.sandbox.wait_until_set_up()
    time.sleep(0.1)
    assert os.listdir(tmp_path / "work") == []
    assert running.process.poll() is None
    running.sandbox.let_begin()
    assert running.process.wait(20) == 0
    assert os.listdir(tmp_path / "work") == ["marker"]
    assert running.sandbox.command_began()


def test_death_of_bubblewrap_opens_no_gate(start, tmp_path: Path) -> None:
    """What stands at the gate goes on waiting, and has executed nothing when it is killed."""
    running = start("touch", "marker")
    running.sandbox.wait_until_set_up()
    running.process.kill()
    running.process.wait()
    time.sleep(0.1)
    assert os.listdir(tmp_path / "work") == []
    running.stop()
    assert not running.sandbox.command_began()
    assert os.listdir(tmp_path / "work") == []


def test_closed_end_of_the_gate_is_no_permission(start, tmp_path: Path) -> None:
    running = start("touch", "marker")
    running.sandbox.wait_until_set_up()
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, running.sandbox._gate_write)  # closes the writing end and keeps the number
    os.close(null)
    time.sleep(0.2)
    assert running.process.poll() is None
    assert os.listdir(tmp_path / "work") == []


def test_command_that_cannot_be_executed_did_not_begin(start) -> None:
    running = start("/workspace/missing")
    running.sandbox.wait_until_set_up()
    assert not running.sandbox.finds("/workspace/missing")
    running.sandbox.let_begin()
    assert running.process.wait(20) != 0
    assert not running.sandbox.command_began()


def test_programs_are_found_as_inside(start, tmp_path: Path) -> None:
    (tmp_path / "work" / "mine").touch()
    running = start("true")
    running.sandbox.wait_until_set_up()
    for program, found in [
        ("sh", True),
        ("/bin/sh", True),
        ("./mine", True),
        ("/workspace/mine", True),
        ("mine", False),
        ("no-such-program", False),
        (str(tmp_path / "work" / "mine"), False),
    ]:
        assert (program, running.sandbox.finds(program)) == (program, found)


# --- what is inside --------------------------------------------------------------------------------------------------


def test_identity_inside(start) -> None:
    assert shell(start, "id -u; id -g; id -un; cat /proc/sys/kernel/hostname").split() == [
        "1000",
        "1000",
        "berth",
        "berth",
    ]


def test_no_privilege_inside(start) -> None:
    found = dict(line.split(":\t") for line in shell(start, "cat /proc/self/status").splitlines() if ":\t" in line)
    assert {found[key] for key in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")} == {"0" * 16}
    assert found["NoNewPrivs"] == "1"


def test_devices_are_private(start) -> None:
    listed = set(shell(start, "ls /dev; test -c /dev/null").split())
    assert {"null", "zero", "full", "random", "urandom", "tty", "pts", "shm"} <= listed
    assert listed <= {
        *("console", "core", "fd", "full", "null", "ptmx", "pts", "random", "shm"),
        *("stderr", "stdin", "stdout", "tty", "urandom", "zero"),
    }


def test_network_is_loopback_only(start) -> None:
    lines = shell(start, "cat /proc/net/dev").splitlines()
    assert [line.split(":")[0].strip() for line in lines if ":" in line] == ["lo"]


def test_processes_of_the_host_are_not_visible(start, sandboxes) -> None:
    if not probe().fresh_proc:
        pytest.skip("a new /proc cannot be mounted here")
    pids = [int(name) for name in shell(start, "ls /proc").split() if name.isdigit()]
    assert 1 in pids
    assert max(pids) < 20


def test_environment_is_nothing_of_the_callers(start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_TOKEN", "x")
    lines = start("env", mark="ab" * 32, terminal="dumb").output().splitlines()
    found = dict(line.split("=", 1) for line in lines)
    assert "SECRET_TOKEN" not in found
    assert (found["BERTH_RUN"], found["TERM"], found["HOME"]) == ("ab" * 32, "dumb", "/workspace")


def test_workspace_is_writable_and_the_rest_is_not(start, tmp_path: Path) -> None:
    script = (
        "echo x > file && echo x > /tmp/file && echo x > /dev/shm/file\n"
        "for path in / /usr /etc /usr/bin /bin /proc/sys/kernel; do touch $path/file 2>/dev/null && echo $path; done\n"
        "pwd\n"
    )
    assert shell(start, script) == "/workspace\n"
    assert (tmp_path / "work" / "file").read_text() == "x\n"
    assert not os.path.exists("/tmp/file")


def test_files_of_the_host_are_not_visible(start, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("secret")
    script = f"cat {tmp_path}/secret /etc/shadow /root/.profile 2>/dev/null; ls /; cat /etc/passwd"
    found = shell(start, script)
    assert "secret" not in found
    assert "root:x:0:0:root:/root:/bin/sh\nberth:x:1000:1000:" in found
    assert not {"home", "root", "var", "run", "srv", "mnt"} & set(found.split())


def test_no_descriptor_of_the_caller_is_inside(start) -> None:
    """The workspace, the gate and the rest are closed before the command begins."""
    script = "for fd in /proc/self/fd/*; do readlink $fd || true; done"
    found = [line for line in shell(start, script).splitlines() if line]
    assert found[0] == "/dev/null"
    assert all(line.startswith(("/dev/null", "pipe:", "/proc/")) for line in found)
    assert len(found) <= 4


def test_workspace_is_the_opened_directory(start, tmp_path: Path) -> None:
    """A directory that takes the name afterwards is not what the command gets."""
    (tmp_path / "work").rename(tmp_path / "moved")
    (tmp_path / "work").mkdir()
    shell(start, "echo x > here")
    assert (tmp_path / "moved" / "here").exists()
    assert os.listdir(tmp_path / "work") == []


def test_everything_inside_dies_with_bubblewrap(start, tmp_path: Path) -> None:
    running = start("sh", "-c", "setsid sleep 60 & setsid sleep 60 & touch begun; sleep 60")
    running.sandbox.wait_until_set_up()
    running.sandbox.let_begin()
    deadline = time.monotonic() + 10
    while len(inside := descendants(running.process.pid)) < 4 or not (tmp_path / "work" / "begun").exists():
        assert time.monotonic() < deadline
        time.sleep(0.005)
    running.process.kill()
    while any(os.path.exists(f"/proc/{found.pid}/exe") for found in inside):
        assert time.monotonic() < deadline
        time.sleep(0.005)


# --- what is read back -----------------------------------------------------------------------------------------------


def test_facts_are_those_of_the_kernel(start) -> None:
    running = start("true")
    running.sandbox.wait_until_set_up()
    facts: dict[str, Any] = running.sandbox.facts
    assert facts["uid_inside"] == 1000
    assert facts["uid_outside"] == os.getuid()
    assert int(facts["capabilities"], 16) == 0
    assert facts["no_new_privileges"] is True
    assert facts["network_interfaces"] == ["lo"]
    assert "null" in facts["devices"]
    assert facts["writable"] == ["/workspace", "/tmp", "/dev/shm"]
    assert "/usr" in facts["read_only"]
    assert all(os.path.exists(path) for path in facts["read_only"])
    assert (ROOT_OUTSIDE in facts["downgrades"]) == (os.getuid() == 0)
    json.dumps(facts)


def test_mask_is_read_back(start) -> None:
    allowed = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(allowed)})
        running = start("true")
    finally:
        os.sched_setaffinity(0, allowed)
    running.sandbox.wait_until_set_up()
    assert running.sandbox.mask() == str(min(allowed))


@pytest.mark.parametrize("moment", ["at once", "during the set-up"])
def test_bubblewrap_that_dies_during_the_set_up(sandboxes, workspace: int, moment: str) -> None:
    sandbox = prepare(["true"], workspace=workspace, mark="0" * 64, terminal=None, user=None)
    broken = (
        [sandbox.argv[0], "--no-such-option"]
        if moment == "at once"
        else [*sandbox.argv[: sandbox.argv.index("--")], "--ro-bind", "/no/such/path", "/x", "--", "true"]
    )
    with subprocess.Popen(broken, pass_fds=sandbox.fds, stderr=subprocess.DEVNULL):
        sandbox.close_passed()
        try:
            with pytest.raises(FailedError) as caught:
                sandbox.wait_until_set_up()
            assert caught.value.name == "sandbox-set-up"
        finally:
            sandbox.close()


# --- finding and probing ---------------------------------------------------------------------------------------------


def test_layout_is_that_of_this_host() -> None:
    layout = system_layout()
    assert layout.directories[0] == "/usr"
    for path, target in layout.links.items():
        assert os.readlink(path) == target
    for path in layout.read_only:
        assert os.path.exists(path)
        assert not os.path.islink(path) or path.startswith("/etc/")
    assert not set(layout.links) & set(layout.directories)


@pytest.fixture
def standing_in(as_root, tmp_path: Path):
    """Return the words that put a script in the place of bwrap, in a mount namespace of its own, before a command."""
    installed = shutil.which("bwrap", path="/usr/bin:/bin:/usr/local/bin")
    if installed is None:
        pytest.skip("bubblewrap is not installed")
    real = shutil.copy(os.path.realpath(installed), tmp_path / "real-bwrap")

    def prefix(script: str, mode: int = 0o755) -> list[str]:
        fake = tmp_path / "bwrap"
        fake.write_text(script.replace("REAL", str(real)))
        fake.chmod(mode)
        mount = f'mount --bind {fake} {os.path.realpath(installed)} && exec "$@"'
        return ["unshare", "--mount", "sh", "-c", mount, "sh"]

    return prefix


def test_bubblewrap_with_the_set_user_id_bit_is_refused(children, standing_in) -> None:
    printed = children.run(
        "from berth.errors import AbilityError\n"
        "from berth.sandbox.bubblewrap import find_bubblewrap\n"
        "try: find_bubblewrap()\n"
        "except AbilityError as error: print(error.name, 'chmod u-s /' in error.fix, end='')\n",
        prefix=standing_in("#!/bin/sh\n", stat.S_ISUID | 0o755),
    )
    assert printed == "setuid-bubblewrap True"


def test_bubblewrap_that_others_can_change_is_refused(children, standing_in) -> None:
    printed = children.run(
        "from berth.errors import AbilityError\n"
        "from berth.sandbox.bubblewrap import find_bubblewrap\n"
        "try: find_bubblewrap()\n"
        "except AbilityError as error: print(error.name, 'can be changed by others' in error.message, end='')\n",
        prefix=standing_in("#!/bin/sh\n", 0o777),
    )
    assert printed == "no-bubblewrap True"


def test_bubblewrap_outside_path_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    if not any(os.access(f"{directory}/bwrap", os.X_OK) for directory in ("/usr/local/bin", "/usr/bin", "/bin")):
        pytest.skip("bubblewrap is not installed")
    monkeypatch.setenv("PATH", "/nowhere")
    assert find_bubblewrap().endswith("/bwrap")


def test_missing_bubblewrap(children, standing_in) -> None:
    """In a mount namespace in which bwrap is no program of an administrator, the message says how to install it."""
    printed = children.run(
        "from berth.errors import AbilityError\n"
        "from berth.sandbox.bubblewrap import find_bubblewrap\n"
        "try: find_bubblewrap()\n"
        "except AbilityError as error:\n"
        "    print(error.name, error.code, 'apt-get install bubblewrap' in error.fix, end='')\n",
        prefix=standing_in("", 0o666),
    )
    assert printed == "no-bubblewrap 5 True"


# Probes with a bwrap of its own that fails as argv[1] says, then prints what was found.
PROBE = """
import json
from berth.errors import AbilityError
from berth.sandbox.bubblewrap import probe
try: found = probe()
except AbilityError as error: print(json.dumps([error.name, error.message]))
else: print(json.dumps([found.disable_userns, found.fresh_proc, len(found.downgrades)]))
"""


@pytest.mark.parametrize(
    ("refuses", "found"),
    [
        ("nothing", [True, True, 0]),
        ("--disable-userns", [False, True, 1]),
        ("--proc", [True, False, 1]),
    ],
)
def test_strongest_form_that_works_is_taken(sandboxes, children, standing_in, refuses: str, found: list[Any]) -> None:
    """A bwrap that refuses one option stands for a host on which it does not work."""
    script = f'for word; do [ "$word" = {refuses} ] && {{ echo refused >&2; exit 1; }}; done\nexec REAL "$@"\n'
    assert json.loads(children.run(PROBE, prefix=standing_in(f"#!/bin/sh\n{script}"))) == found


def test_no_form_works(children, standing_in) -> None:
    prefix = standing_in("#!/bin/sh\necho the first reason >&2\nexit 1\n")
    name, message = json.loads(children.run(PROBE, prefix=prefix))
    assert name == "no-sandbox"
    assert "the first reason" in message


def test_probe_leaves_no_descriptor(children, sandboxes) -> None:
    printed = children.run(
        "import os\n"
        "from berth.sandbox.bubblewrap import probe\n"
        "from berth.sandbox.instance import prepare\n"
        "before = os.listdir('/proc/self/fd')\n"
        "probe()\n"
        "workspace = os.open('/', os.O_PATH)\n"
        "prepare(['true'], workspace=workspace, mark='0' * 64, terminal=None, user=None).close()\n"
        "os.close(workspace)\n"
        "print(os.listdir('/proc/self/fd') == before, end='')\n"
    )
    assert printed == "True"
