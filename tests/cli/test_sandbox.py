"""What a sandboxed command sees, and what it cannot reach."""

import json
import os
import shutil
import socket
import subprocess
import tempfile
from pathlib import Path

import pytest


@pytest.fixture
def inside(berth, sandbox_works):
    """Run a shell script in a sandbox and return what it printed."""
    if not sandbox_works:
        pytest.skip("bubblewrap cannot make a sandbox here; see `berth doctor`")

    def run(script: str, *options: str, **more) -> str:
        ended = berth.run("--sandbox", *options, "--", "sh", "-c", script, **more)
        assert ended.returncode == 0, ended.stderr
        return ended.stdout

    return run


def test_one_cpu_uid_1000_private_devices_and_loopback_only(inside):
    seen = inside("grep Cpus_allowed_list /proc/self/status; id -u; ls /dev; echo; cat /proc/net/dev", "--cores", "1")
    mask, uid, *rest = seen.splitlines()
    assert mask.split()[1].isdigit()
    assert uid == "1000"
    devices = rest[: rest.index("")]
    private = {"null", "zero", "full", "random", "urandom", "tty", "pts", "ptmx", "shm", "fd"}
    assert private <= set(devices)
    assert set(devices) <= private | {"core", "console", "stdin", "stdout", "stderr"}
    assert [line.split(":")[0].strip() for line in rest if ":" in line] == ["lo"]


def test_the_workspace_is_writable_and_what_is_written_stays(inside, berth):
    (berth.workspace / "given").write_text("from outside\n")
    assert inside("cat given; echo from inside > made; pwd") == "from outside\n/workspace\n"
    assert (berth.workspace / "made").read_text() == "from inside\n"


@pytest.mark.parametrize(
    "place", ["/", "/usr", "/usr/bin", "/etc", "/dev", "/proc", "/proc/sys/kernel", "/etc/passwd", "/bin/sh"]
)
def test_nothing_else_can_be_written(inside, place):
    script = f"if test -d {place}; then : > {place}/x; else : >> {place}; fi"
    assert inside(f"({script}) 2>/dev/null && echo written; true") == ""


def test_no_kernel_setting_can_be_written_whoever_the_caller_is(inside):
    """The files of /proc/sys let the host's root write, and a sandbox of root may be root outside."""
    script = "find /proc -maxdepth 3 -path '/proc/[0-9]*' -prune -o -type f -perm /222 -print 2>/dev/null"
    writable = f"for f in $({script}); do (: >> $f) 2>/dev/null && echo $f; done; true"
    assert inside(writable) == ""


def test_the_callers_environment_and_descriptors_do_not_reach_inside(inside, berth, tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("secret")
    with secret.open() as file:
        os.set_inheritable(file.fileno(), True)
        seen = inside("env; ls /proc/self/fd", env=berth.environment(API_TOKEN="secret"), pass_fds=(file.fileno(),))
    assert "secret" not in seen
    variables, _, descriptors = seen.rpartition("BERTH_RUN")[0], None, seen.split()[-4:]
    assert "API_TOKEN" not in variables
    assert sorted(descriptors) == ["0", "1", "2", "3"]


def test_host_processes_and_sockets_are_out_of_reach(inside):
    with socket.socket(socket.AF_UNIX) as listener:
        name = f"\0berth-test-{os.getpid()}"
        listener.bind(name)
        listener.listen()
        connect = f"import socket; socket.socket(socket.AF_UNIX).connect({name!r})"
        python = "/usr/bin/python3" if os.path.exists("/usr/bin/python3") else None
        if python:
            assert "refused" in inside(f'{python} -c "{connect}" 2>&1 | tail -n 1'.replace("\\x00", "\\\\x00"))
    assert inside(f"kill -0 {os.getpid()} 2>/dev/null && echo reached; ls -d /proc/[0-9]* | wc -l").strip() < "9"


def test_no_further_namespaces_no_mounts_no_devices(inside):
    assert (
        inside("unshare -U true 2>/dev/null && echo made; mount -t tmpfs t /tmp 2>/dev/null && echo made; true") == ""
    )
    assert (
        inside("mknod /tmp/n c 1 3 2>/dev/null && echo made; grep CapBnd /proc/self/status")
        == "CapBnd:\t" + 16 * "0" + "\n"
    )


def test_a_command_like_an_option_is_a_command(berth, sandbox_works):
    if not sandbox_works:
        pytest.skip("bubblewrap cannot make a sandbox here; see `berth doctor`")
    ended = berth.run("--sandbox", "--", "--ro-bind", "/etc/hostname", "/x")
    assert ended.returncode == 127


def test_the_record_lists_what_was_read_back(inside, berth):
    inside("true")
    sandbox = berth.record()["sandbox"]
    assert sandbox["uid_inside"] == 1000
    assert sandbox["uid_outside"] == os.geteuid()
    assert sandbox["capabilities"] == 16 * "0"
    assert sandbox["network_interfaces"] == ["lo"]
    assert "/usr" in sandbox["read_only"]
    assert bool([text for text in sandbox["downgrades"] if "root outside" in text]) == (os.geteuid() == 0)


def test_a_sandbox_of_root_becomes_the_workspaces_owner(inside, berth):
    if os.geteuid() != 0:
        pytest.skip("only root can become somebody else")
    with tempfile.TemporaryDirectory(prefix="berth-test-") as directory:
        os.chown(directory, 65534, 65534)
        inside("touch made", "--workspace", directory)
        assert os.stat(f"{directory}/made").st_uid == 65534
    assert berth.record()["sandbox"]["uid_outside"] == 65534
    assert berth.record()["sandbox"]["downgrades"] == []


def test_a_workspace_that_its_owner_cannot_reach_is_refused(berth, sandbox_works):
    if os.geteuid() != 0 or not sandbox_works:
        pytest.skip("only root can become somebody else")
    os.chown(berth.workspace, 65534, 65534)
    berth.state_root.parent.chmod(0o700)
    error = json.loads(berth.run("--json", "--sandbox", "--", "true").stdout)["error"]
    assert error["name"] == "workspace-unreachable"
    assert "65534" in error["message"]


def test_workspaces_that_a_sandbox_must_not_write_are_refused(berth, tmp_path):
    link = tmp_path / "link"
    link.symlink_to(tmp_path, target_is_directory=True)
    home = tmp_path / "home"
    home.mkdir()
    berth.run("--", "true")
    cases = {
        "/": "unsafe-workspace",
        "/etc": "unsafe-workspace",
        "/usr/lib": "unsafe-workspace",
        "/proc/self": "workspace-link",
        str(home): "unsafe-workspace",
        str(tmp_path): "unsafe-workspace",
        str(berth.state_root): "unsafe-workspace",
        str(berth.state_root / "records"): "unsafe-workspace",
        str(link / "workspace"): "workspace-link",
        str(tmp_path / "missing"): "bad-workspace",
        str(berth.state_root / ".berth.lock"): "bad-workspace",
    }
    for directory, name in cases.items():
        words = ["--json", "--sandbox", "--workspace", directory, "--", "true"]
        ended = berth.run(*words, env=berth.environment(HOME=str(home)))
        assert ended.returncode == 125
        assert json.loads(ended.stdout)["error"]["name"] == name, directory
    assert len(berth.records()) == 1


def test_a_workspace_swapped_for_a_link_is_not_followed(berth, tmp_path, sandbox_works):
    """The descriptor that was checked is the one that is bound: a link put in its place later changes nothing."""
    if not sandbox_works:
        pytest.skip("bubblewrap cannot make a sandbox here; see `berth doctor`")
    from berth.launch.workspace import open_sandbox_workspace
    from berth.sandbox.instance import prepare

    (berth.workspace / "mine").touch()
    other = tmp_path / "other"
    other.mkdir()
    opened = open_sandbox_workspace(str(berth.workspace), state_root=str(berth.state_root))
    berth.workspace.rename(tmp_path / "moved")
    berth.workspace.symlink_to(other)
    sandbox = prepare(["ls"], workspace=opened.fd, mark="0" * 64, terminal=None, user=None)
    with subprocess.Popen(sandbox.argv, pass_fds=sandbox.fds, stdout=subprocess.PIPE, text=True) as process:
        sandbox.close_passed()
        sandbox.wait_until_set_up()
        sandbox.let_begin()
        assert process.stdout.read() == "mine\n"
    sandbox.close()
    os.close(opened.fd)
    assert Path(other).is_dir()


def test_files_as_standard_streams_cannot_be_opened_again_inside(berth, tmp_path, sandbox_works):
    """/proc/self/fd/N would open them anew with every right that their permissions give."""
    if not sandbox_works:
        pytest.skip("bubblewrap cannot make a sandbox here; see `berth doctor`")
    given, log = tmp_path / "given", tmp_path / "log"
    given.write_text("input\n")
    log.write_text("before\n")
    script = "cat; for n in 0 1 2; do (echo EVIL > /proc/self/fd/$n) 2>/dev/null; : > /proc/$$/fd/$n; done; echo end"
    with given.open() as stdin, log.open("a") as out:
        ended = subprocess.run(
            berth.words("run", "--sandbox", "--", "sh", "-c", script),
            env=berth.environment(),
            cwd=berth.workspace,
            stdin=stdin,
            stdout=out,
            stderr=out,
            timeout=30,
        )
    assert ended.returncode == 0
    assert given.read_text() == "input\n"
    assert log.read_text().startswith("before\ninput\n")
    assert log.read_text().endswith("end\n")


def test_a_large_file_passes_through_a_sandbox_unchanged(berth, tmp_path, sandbox_works):
    if not sandbox_works:
        pytest.skip("bubblewrap cannot make a sandbox here; see `berth doctor`")
    given, copy = tmp_path / "given", tmp_path / "copy"
    given.write_bytes(os.urandom(5 << 20))
    with given.open("rb") as stdin, copy.open("wb") as out:
        berth.run("--sandbox", "--", "cat", capture_output=False, stdin=stdin, stdout=out, text=False)
    assert copy.read_bytes() == given.read_bytes()


def test_a_sandbox_of_root_holds_no_writable_way_to_bubblewrap(inside):
    if os.geteuid() != 0:
        pytest.skip("only root could write the program anyway")
    assert inside("readlink /proc/1/exe").startswith("/memfd:")
    assert inside("(echo x > /proc/1/exe) 2>/dev/null && echo written; true") == ""


def test_what_sets_the_sandbox_up_has_no_controlling_terminal(berth, sandbox_works):
    """Whoever it becomes could otherwise push input into the caller's terminal (TIOCSTI)."""
    if not sandbox_works:
        pytest.skip("bubblewrap cannot make a sandbox here; see `berth doctor`")
    from berth.linux.process import descendants

    with berth.start("--sandbox", "--", "sh", "-c", "echo up; sleep 60", stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"up\n"
        sessions = {stat.pid: os.getsid(stat.pid) for stat in descendants(process.pid)}
        keeper = next(pid for pid, session in sessions.items() if session == os.getsid(process.pid))
        assert [pid for pid, session in sessions.items() if session == os.getsid(process.pid)] == [keeper]
        process.terminate()


def test_a_program_named_bwrap_on_the_path_is_never_executed(berth, tmp_path, sandbox_works):
    if not sandbox_works:
        pytest.skip("bubblewrap cannot make a sandbox here; see `berth doctor`")
    planted = tmp_path / "bin" / "bwrap"
    planted.parent.mkdir()
    planted.write_text(f"#!/bin/sh\ntouch {tmp_path}/planted-ran\n")
    planted.chmod(0o755)
    env = berth.environment(PATH=f"{planted.parent}:{os.environ['PATH']}")
    assert berth.run("--sandbox", "--", "true", env=env).returncode == 0
    assert not (tmp_path / "planted-ran").exists()


def test_a_program_behind_a_link_that_only_holds_inside_is_found(berth, sandbox_works):
    if not sandbox_works:
        pytest.skip("bubblewrap cannot make a sandbox here; see `berth doctor`")
    (berth.workspace / "real").mkdir()
    (berth.workspace / "real" / "program").write_text("#!/bin/sh\necho ran\n")
    (berth.workspace / "real" / "program").chmod(0o755)
    (berth.workspace / "tools").symlink_to("/workspace/real")
    assert berth.run("--sandbox", "--", "tools/program").stdout == "ran\n"


@pytest.mark.parametrize("directory", ["/var/spool", "/var", "/home", "/opt"])
def test_directories_of_many_are_no_workspace(berth, directory):
    if not os.path.isdir(directory):
        pytest.skip(f"there is no {directory} here")
    error = json.loads(berth.run("--json", "--sandbox", "--workspace", directory, "--", "true").stdout)["error"]
    assert error["name"] == "unsafe-workspace"


def test_berths_own_program_is_not_in_a_workspace(berth, tmp_path):
    import sys

    shutil.copytree(Path(sys.modules["berth"].__file__).parent, berth.workspace / "lib" / "berth")
    env = berth.environment(PYTHONPATH=f"{berth.workspace}/lib")
    error = json.loads(berth.run("--json", "--sandbox", "--", "true", env=env).stdout)["error"]
    assert error["name"] == "unsafe-workspace"
    assert "berth's own program" in error["message"]
