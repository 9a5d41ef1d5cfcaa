import contextlib
import errno
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

import pytest

from berth.linux.process import RUN_MARK, read_status
from berth.linux.spawn import Event

#: Python without its start-up files, for what a shell cannot tell.
PYTHON = (sys.executable, "-I", "-S", "-c")


def status_of(values: tuple[int, ...]) -> int:
    """Return what subprocess would call the exit code: negative for a signal."""
    return os.waitstatus_to_exitcode(values[0])


# --- the gate --------------------------------------------------------------------------------------------------------


def test_nothing_is_executed_before_go(launcher, tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    keeper = launcher.start("touch", str(marker))
    (pid,) = launcher.expect(keeper, "ready")
    assert os.readlink(f"/proc/{pid}/exe") == os.path.realpath(sys.executable)
    assert keeper.next_event(0.1) is None
    assert not marker.exists()
    keeper.go()
    assert [event.kind for event in launcher.events(keeper)] == ["started", "ended"]
    assert marker.exists()


@pytest.mark.parametrize("wait", [True, False])
def test_closing_without_go_leaves_nothing(launcher, tmp_path: Path, wait: bool) -> None:
    keeper = launcher.start("touch", str(tmp_path / "marker"))
    if wait:
        launcher.expect(keeper, "ready")
    keeper.close()
    assert launcher.left() == []
    assert keeper.process.returncode == 0
    assert os.listdir(tmp_path) == []


def test_end_before_go_executes_nothing(launcher, tmp_path: Path) -> None:
    keeper = launcher.start("touch", str(tmp_path / "marker"))
    launcher.expect(keeper, "ready")
    keeper.end(10)
    assert [event.kind for event in launcher.events(keeper)] == ["ended"]
    assert os.listdir(tmp_path) == []


def test_start_from_a_short_lived_thread_runs_to_its_end(launcher, tmp_path: Path) -> None:
    started = []
    thread = threading.Thread(
        target=lambda: started.append(launcher.begin("sh", "-c", f"sleep 0.3; echo x > {tmp_path}/done"))
    )
    thread.start()
    thread.join()
    (values,) = [event.values for event in launcher.events(started[0])]
    assert status_of(values) == 0
    assert (tmp_path / "done").exists()


# --- endings ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("script", "status"),
    [
        ("exit 0", 0),
        ("exit 7", 7),
        ("exit 255", 255),
        ("kill -KILL $$", -9),
        ("kill -TERM $$", -15),
        ("kill -PIPE $$", -13),
    ],
)
def test_status_is_delivered(launcher, script: str, status: int) -> None:
    keeper = launcher.begin("sh", "-c", script)
    (ended,) = launcher.events(keeper)
    assert (ended.kind, status_of(ended.values), ended.values[1:]) == ("ended", status, (0,))


def test_what_cannot_be_executed(launcher, tmp_path: Path) -> None:
    (tmp_path / "plain").write_text("no program")
    (tmp_path / "program").write_text("no program either")
    (tmp_path / "program").chmod(0o755)
    (tmp_path / "script").write_text("#!/no/such/interpreter\n")
    (tmp_path / "script").chmod(0o755)
    for program, code in [
        ("no-such-program-anywhere", errno.ENOENT),
        (str(tmp_path / "missing"), errno.ENOENT),
        (str(tmp_path / "plain"), errno.EACCES),
        (str(tmp_path), errno.EACCES),
        (str(tmp_path / "plain" / "below"), errno.ENOTDIR),
        (str(tmp_path / "program"), errno.ENOEXEC),
        (str(tmp_path / "script"), errno.ENOENT),
    ]:
        keeper = launcher.start(program)
        launcher.expect(keeper, "ready")
        keeper.go()
        failed, ended = launcher.events(keeper)
        assert (program, failed) == (program, Event("failed", (code,)))
        assert status_of(ended.values) == 1


def test_place_that_cannot_be_taken(launcher) -> None:
    keeper = launcher.start("true", cpus=(999,))
    failed, ended = launcher.events(keeper)
    assert failed == Event("failed", (errno.EINVAL,))
    assert ended.kind == "ended"


def test_command_that_heeds_the_request_to_end(launcher, tmp_path: Path) -> None:
    script = f"trap 'echo x > {tmp_path}/told; exit 3' TERM; echo x > {tmp_path}/begun; while :; do sleep 0.01; done"
    keeper = launcher.begin("sh", "-c", script)
    while not (tmp_path / "begun").exists():
        assert keeper.next_event(0.005) is None
    keeper.end(20)
    began = time.monotonic()
    (ended,) = launcher.events(keeper)
    assert status_of(ended.values) == 3
    assert (tmp_path / "told").exists()
    assert time.monotonic() - began < 10


def test_command_that_ignores_the_request_is_killed_after_the_grace(launcher, tmp_path: Path) -> None:
    keeper = launcher.begin("sh", "-c", f"trap '' TERM; sleep 60 & echo x > {tmp_path}/begun; wait; sleep 60")
    while not (tmp_path / "begun").exists():
        assert keeper.next_event(0.005) is None
    began = time.monotonic()
    keeper.end(0.3)
    assert keeper.next_event(0.2) is None
    (ended,) = launcher.events(keeper)
    assert status_of(ended.values) == -signal.SIGKILL
    assert 0.3 <= time.monotonic() - began < 5
    keeper.close()
    assert launcher.left() == []


def test_stopped_command_hears_the_request(launcher) -> None:
    keeper = launcher.begin("sh", "-c", "kill -STOP $$")
    assert launcher.expect(keeper, "stopped") == (signal.SIGSTOP,)
    keeper.end(20)
    assert status_of(launcher.expect(keeper, "ended")) == -signal.SIGTERM


def test_stopped_command_goes_on(launcher) -> None:
    keeper = launcher.begin("sh", "-c", "kill -STOP $$; exit 4")
    launcher.expect(keeper, "stopped")
    keeper.resume()
    assert status_of(launcher.expect(keeper, "ended")) == 4


def test_spared_process_is_not_asked(launcher, tmp_path: Path) -> None:
    """The spared command lives through the request and ends with its own status when its child has heeded it."""
    keeper = launcher.start("sh", "-c", f"sleep 60 & echo x > {tmp_path}/begun; wait $!; exit 5")
    (pid,) = launcher.expect(keeper, "ready")
    keeper.go()
    launcher.expect(keeper, "started")
    while not (tmp_path / "begun").exists():
        assert keeper.next_event(0.005) is None
    keeper.end(20, spare=(pid,))
    assert status_of(launcher.expect(keeper, "ended")) == 5


def test_waiting_for_an_event(launcher) -> None:
    keeper = launcher.start("true")
    launcher.expect(keeper, "ready")
    assert keeper.next_event(0) is None
    read, write = os.pipe()
    try:
        os.write(write, b"x")
        assert keeper.next_event(30, also=[read]) is None
    finally:
        os.close(read)
        os.close(write)


# --- what reaches the command ----------------------------------------------------------------------------------------


def test_environment_is_exactly_the_given_one(launcher, tmp_path: Path) -> None:
    odd = {b"ODD\xff": b"\xfe=\x01 \n", b"EMPTY": b"", "ÜNI".encode(): "ü".encode()}
    environment = {os.fsdecode(key): os.fsdecode(value) for key, value in odd.items()}
    keeper = launcher.begin("sh", "-c", f"exec env -0 > {tmp_path}/out", environment=environment)
    launcher.events(keeper)
    found = dict(entry.split(b"=", 1) for entry in (tmp_path / "out").read_bytes().split(b"\0") if entry)
    wanted = {**odd, b"PATH": os.fsencode(os.environ["PATH"]), RUN_MARK.encode(): launcher.mark.encode()}
    assert {key: value for key, value in found.items() if key not in (b"PWD", b"SHLVL", b"_", b"OLDPWD")} | {
        key: value for key, value in wanted.items() if key.startswith(b"ODD") or not key.isascii()
    } == wanted


def test_arguments_arrive_as_bytes(launcher, tmp_path: Path) -> None:
    words = [b"", b"\xff\xfe", b"two words\n", "ü".encode(), b"--", b"$HOME"]
    code = "import os, sys; open(sys.argv[1], 'wb').write(b'\\0'.join(map(os.fsencode, sys.argv[2:])))"
    keeper = launcher.begin(*PYTHON, code, str(tmp_path / "out"), *map(os.fsdecode, words))
    launcher.events(keeper)
    assert (tmp_path / "out").read_bytes() == b"\0".join(words)


def test_program_is_searched_in_the_given_path(launcher, tmp_path: Path) -> None:
    (tmp_path / "my-program").write_text(f"#!/bin/sh\necho x > {tmp_path}/out\n")
    (tmp_path / "my-program").chmod(0o755)
    keeper = launcher.begin("my-program", environment={"PATH": f"/nowhere:{tmp_path}"})
    launcher.events(keeper)
    assert (tmp_path / "out").exists()


# Writes the open descriptors of this process to the file argv[1].
DESCRIPTORS = """
import json, os, sys
def is_open(fd):
    try: os.fstat(fd)
    except OSError: return False
    return True
found = [fd for fd in range(1024) if is_open(fd)]
json.dump(found, open(sys.argv[1], "w"))
"""


def test_command_sees_the_standard_descriptors_only(launcher, tmp_path: Path) -> None:
    """Neither what the caller has open, inheritable or not, nor what the keeper holds for the run."""
    directory, held, leaky = (os.open(tmp_path, os.O_RDONLY) for _ in range(3))
    os.set_inheritable(leaky, True)
    try:
        keeper = launcher.begin(*PYTHON, DESCRIPTORS, str(tmp_path / "out"), directory=directory, held=[held])
        launcher.events(keeper)
    finally:
        for fd in (directory, held, leaky):
            os.close(fd)
    assert json.loads((tmp_path / "out").read_text()) == [0, 1, 2]


def test_listed_descriptor_reaches_the_command(launcher, tmp_path: Path) -> None:
    read, write = os.pipe()
    try:
        code = DESCRIPTORS + "os.write(int(sys.argv[2]), b'hello')\n"
        keeper = launcher.begin(*PYTHON, code, str(tmp_path / "out"), str(write), fds=[write])
        launcher.events(keeper)
        assert os.read(read, 9) == b"hello"
    finally:
        os.close(read)
        os.close(write)
    assert json.loads((tmp_path / "out").read_text()) == [0, 1, 2, write]


def test_streams_are_the_callers(children, tmp_path: Path) -> None:
    printed = children.run(
        "from berth.linux.spawn import Command, Keeper\n"
        "streams = [(2, 1)] if sys.argv[1] == 'moved' else []\n"
        "command = Command(argv=['sh', '-c', 'cat; echo error >&2'], environment={'PATH': '/usr/bin:/bin'},\n"
        "    mark='0' * 64, streams=streams)\n"
        "keeper = Keeper.start(command)\n"
        "keeper.go()\n"
        "while keeper.next_event(20).kind not in ('ended', 'lost'): pass\n"
        "keeper.close()\n",
        "as they are",
        input="input\n",
    )
    assert printed == "input\n"


def test_output_moved_to_standard_error(children) -> None:
    child = children.start(
        "from berth.linux.spawn import Command, Keeper\n"
        "command = Command(argv=['echo', 'out'], environment={'PATH': '/usr/bin:/bin'}, mark='0' * 64,\n"
        "    streams=[(2, 1)])\n"
        "keeper = Keeper.start(command)\n"
        "keeper.go()\n"
        "while keeper.next_event(20).kind not in ('ended', 'lost'): pass\n"
        "keeper.close()\n",
        stderr=-1,
    )
    assert child.communicate() == ("", "out\n")


def test_cpus_are_set_before_the_command_begins(launcher, tmp_path: Path) -> None:
    for cpu in sorted(os.sched_getaffinity(0)):
        keeper = launcher.start("grep", "Cpus_allowed_list", "/proc/self/status", cpus=(cpu,))
        (pid,) = launcher.expect(keeper, "ready")
        assert read_status(pid)["Cpus_allowed_list"] == str(cpu)
        keeper.go()
        launcher.events(keeper)
    keeper = launcher.start("true")
    (pid,) = launcher.expect(keeper, "ready")
    assert os.sched_getaffinity(pid) == os.sched_getaffinity(0)


def test_directory_is_entered_by_descriptor(launcher, tmp_path: Path) -> None:
    """Another directory under the same name is not entered."""
    (tmp_path / "work").mkdir()
    fd = os.open(tmp_path / "work", os.O_PATH)
    (tmp_path / "work").rename(tmp_path / "moved")
    (tmp_path / "work").mkdir()
    try:
        keeper = launcher.begin("sh", "-c", "echo x > here", directory=fd)
        launcher.events(keeper)
    finally:
        os.close(fd)
    assert (tmp_path / "moved" / "here").exists()
    assert not (tmp_path / "work" / "here").exists()


def test_user_is_taken_with_groups_and_death_signal(launcher, as_root) -> None:
    """The death signal is set after the change of credentials, which would make the kernel forget it."""
    keeper = launcher.start("sleep", "60", user=(65534, 65533, (65532, 65531)))
    (pid,) = launcher.expect(keeper, "ready")
    status = read_status(pid)
    assert set(status["Uid"].split()) == {"65534"}
    assert set(status["Gid"].split()) == {"65533"}
    assert set(status["Groups"].split()) == {"65532", "65531"}
    assert int(status["CapEff"], 16) == 0
    keeper.go()
    launcher.expect(keeper, "started")
    keeper.process.kill()
    assert launcher.events(keeper) == [Event("lost")]
    deadline = time.monotonic() + 5
    while launcher.left():
        assert time.monotonic() < deadline
        time.sleep(0.005)


# Starts `grep SigIgn` under a keeper, itself started with the signals argv[1:] ignored and the rest at their defaults.
IGNORED = """
import signal
ignored = set(map(int, sys.argv[1:]))
for number in (1, 2, 3, 15, 20): signal.signal(number, signal.SIG_IGN if number in ignored else signal.SIG_DFL)
from berth.linux.spawn import Command, Keeper
words = ["grep", "-E", "Sig(Ign|Blk)", "/proc/self/status"]
keeper = Keeper.start(Command(argv=words, environment={"PATH": "/usr/bin:/bin"}, mark="0" * 64))
keeper.go()
while keeper.next_event(20).kind not in ("ended", "lost"): pass
keeper.close()
"""


@pytest.mark.parametrize(
    "ignored", [(), (signal.SIGHUP,), (signal.SIGINT, signal.SIGQUIT), (signal.SIGTERM, signal.SIGTSTP)]
)
def test_ignored_signals_are_inherited_and_no_others(children, ignored: tuple[signal.Signals, ...]) -> None:
    words = children.run(IGNORED, *map(int, ignored)).split()
    assert words[0::2] == ["SigBlk:", "SigIgn:"]
    standard = (1 << 31) - 1  # make may leave the two realtime signals of the C library ignored
    assert int(words[1], 16) == 0
    assert int(words[3], 16) & standard == sum(1 << (number - 1) for number in ignored)


def test_command_has_its_own_process_group(launcher) -> None:
    keeper = launcher.start("true")
    (pid,) = launcher.expect(keeper, "ready")
    assert os.getpgid(pid) == pid
    assert os.getpgid(keeper.process.pid) not in (pid, os.getpgrp())


def test_interpreter_that_cannot_be_started_leaks_nothing(children) -> None:
    printed = children.run(
        "import os\n"
        "from berth.linux.spawn import Command, Keeper\n"
        "before = os.listdir('/proc/self/fd')\n"
        "sys.executable = '/no/such/python'\n"
        "try: Keeper.start(Command(argv=['true'], environment={}, mark='0' * 64))\n"
        "except FileNotFoundError: print(os.listdir('/proc/self/fd') == before, end='')\n"
    )
    assert printed == "True"


def test_close_is_repeatable_after_the_end(launcher) -> None:
    keeper = launcher.begin("true")
    launcher.events(keeper)
    keeper.close()
    with contextlib.suppress(OSError):
        keeper.close()
    assert keeper.process.returncode == 0
