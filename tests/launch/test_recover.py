import json
import os
import secrets
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from berth.epoch import names
from berth.epoch.epoch import EpochRoot
from berth.errors import FailedError, UncertainError
from berth.launch.recover import Recovered, recover
from berth.linux.process import RUN_MARK, boot_id, read_stat

pytestmark = pytest.mark.usefixtures("no_temporaries")

#: Syncs of the probe when a root is opened: its directory made, tried, and removed.
PROBE_SYNCS = 3


def leave(root: EpochRoot, **files: object) -> str:
    """Make the active epoch of a killed run with these JSON or plain files, and return its id."""
    epoch = secrets.token_hex(32)
    path = Path(root.path) / names.active_name(epoch)
    path.mkdir(mode=0o700)
    for name, content in files.items():
        data = json.dumps({"epoch": epoch, **content}).encode() if isinstance(content, dict) else content
        (path / f"{name}.json").write_bytes(data)
    return epoch


def request(**berth: Any) -> dict[str, object]:
    """Return a request document of a berth of this boot."""
    return {
        "schema_version": "0.2.0",
        "command": ["sleep", "60"],
        "kind": "host",
        "berth": {"boot_id": boot_id(), "pid": 1, "start_ticks": 0, **berth},
    }


def record_of(root: EpochRoot, epoch: str) -> Any:
    return json.loads((Path(root.path) / "records" / f"{epoch}.json").read_text())


def work_of(root: EpochRoot, epoch: str) -> Path:
    return Path(root.path) / names.active_name(epoch)


def is_retired(root: EpochRoot, epoch: str) -> bool:
    return epoch not in root.active() and [found for found, _ in root.retired()].count(epoch) == 1


@pytest.fixture
def leftover(children) -> Callable[[str], subprocess.Popen[str]]:
    """Return a function that starts a process with the mark of a run."""

    def start(epoch: str) -> subprocess.Popen[str]:
        child = children.start("print(flush=True)\nsys.stdin.read()\n", env={RUN_MARK: epoch})
        child.stdout.readline()
        return child

    return start


# --- what becomes of an epoch ----------------------------------------------------------------------------------------


def test_nothing_to_do(root: EpochRoot) -> None:
    assert recover(root) == []
    assert os.listdir(root.path) == [".berth.lock"]


def test_killed_before_the_request_was_written(root: EpochRoot) -> None:
    epoch = leave(root)
    assert recover(root) == [Recovered(epoch)]
    record = record_of(root, epoch)
    assert (record["command"], record["command_started"]) == (None, False)
    assert record["exit"]["outcome"] == "interrupted"
    assert is_retired(root, epoch)


def test_killed_while_the_command_ran(root: EpochRoot) -> None:
    epoch = leave(root, request=request())
    assert recover(root) == [Recovered(epoch)]
    record = record_of(root, epoch)
    assert (record["command"], record["command_started"]) == (["sleep", "60"], None)
    assert record["exit"] == {"outcome": "interrupted", "code": None, "signal": None, "error": None}
    assert record["processes_ended"] == 0
    assert is_retired(root, epoch)
    assert recover(root) == []


def test_killed_before_the_ready_record_was_published(root: EpochRoot) -> None:
    epoch = leave(root, request=request(), record={"exit": {"outcome": "succeeded"}})
    assert recover(root) == [Recovered(epoch)]
    assert record_of(root, epoch) == {"epoch": epoch, "exit": {"outcome": "succeeded"}}
    assert is_retired(root, epoch)


@pytest.mark.parametrize("again", [False, True])
def test_killed_before_the_retirement(root: EpochRoot, again: bool) -> None:
    """The published record is as it was, even where another one stands ready."""
    files: dict[str, object] = {"request": request(), **({"record": {"turn": 2}} if again else {})}
    epoch = leave(root, **files)
    (Path(root.path) / "records").mkdir()
    published = Path(root.path) / "records" / f"{epoch}.json"
    published.write_bytes(b"as it was")
    assert recover(root) == [Recovered(epoch)]
    assert published.read_bytes() == b"as it was"
    assert is_retired(root, epoch)


def test_epoch_of_a_living_run_is_left_alone(root: EpochRoot) -> None:
    with root.open_epoch(secrets.token_hex(32)) as living:
        dead = leave(root, request=request())
        assert recover(root) == [Recovered(dead)]
        assert root.active() == [living.id]


def test_two_starts_at_once_finish_each_run_once(root: EpochRoot, children) -> None:
    epochs = sorted(leave(root, request=request()) for _ in range(12))
    code = (
        "from berth.epoch.epoch import EpochRoot\n"
        "from berth.launch.recover import recover\n"
        "root = EpochRoot(sys.argv[1])\n"
        "sys.stdin.read()\n"
        "for found in recover(root): print(found.epoch if found.error is None else found.error)\n"
    )
    starts = [children.start(code, root.path) for _ in range(3)]
    for start in starts:
        start.stdin.close()
    finished = sorted(line for start in starts for line in start.stdout.read().split("\n") if line)
    assert finished == epochs
    assert sorted(epoch for epoch, _ in root.retired()) == epochs


# --- what is damaged -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "files",
    [
        {"request": b"{half a docu"},
        {"request": b""},
        {"request": b'{"epoch": "another"}'},
        {"request": request(), "record": b"\xff"},
        {"request": {"berth": "nobody"}},
        {"request": {}},
        {"request": request(start_ticks="soon")},
        {"request": request(start_ticks=None)},
        {"request": request(start_ticks=-1)},
        {"request": request(start_ticks=True)},
        {"request": {"berth": {"boot_id": boot_id()}}},
        {"request": request(boot_id=7)},
    ],
)
def test_damaged_file_is_kept_and_stops_no_other_run(root: EpochRoot, files: dict[str, object]) -> None:
    good = [leave(root, request=request()) for _ in range(2)]
    bad = leave(root, **files)
    good.append(leave(root, request=request()))
    before = {path.name: path.read_bytes() for path in work_of(root, bad).iterdir()}
    found = {recovered.epoch: recovered.error for recovered in recover(root)}
    assert {epoch for epoch, error in found.items() if error is None} == set(good)
    error = found[bad]
    assert isinstance(error, FailedError)
    assert error.name == "damaged-state"
    assert str(work_of(root, bad)) in error.message
    assert root.active() == [bad]
    after = {path.name: path.read_bytes() for path in work_of(root, bad).iterdir()}
    assert {name: after[name] for name in before} == before
    assert not (Path(root.path) / "records" / f"{bad}.json").exists()


@pytest.mark.parametrize("kind", ["link in place of the epoch", "link in place of the request", "directory"])
def test_what_is_no_file_is_not_followed_and_stops_no_other_run(root: EpochRoot, tmp_path: Path, kind: str) -> None:
    good = leave(root, request=request())
    (tmp_path / "victim").mkdir()
    bad = leave(root)
    (tmp_path / "victim" / "request.json").write_text(json.dumps({"epoch": bad, **request()}))
    match kind:
        case "link in place of the epoch":
            work_of(root, bad).rmdir()
            work_of(root, bad).symlink_to(tmp_path / "victim")
        case "link in place of the request":
            (work_of(root, bad) / "request.json").symlink_to(tmp_path / "victim" / "request.json")
        case "directory":
            (work_of(root, bad) / "request.json").mkdir()
    found = {recovered.epoch: recovered.error for recovered in recover(root)}
    assert found[good] is None
    assert found[bad] is not None
    assert found[bad].name == "not-recovered"
    assert root.active() == [bad]
    assert os.listdir(tmp_path / "victim") == ["request.json"]


def test_record_that_cannot_be_synced_is_uncertain_and_finished_later(root: EpochRoot, strace) -> None:
    """The first start publishes and is not sure; the second finds the record and retires the run."""
    epoch = leave(root, request=request(), record={"turn": 1})
    (Path(root.path) / "records").mkdir()
    output = strace(
        "from berth.epoch.epoch import EpochRoot\n"
        "from berth.launch.recover import recover\n"
        "print(type(recover(EpochRoot(sys.argv[1]))[0].error).__name__, end='')\n",
        root.path,
        trace="fsync",
        inject=[f"fsync:error=EIO:when={1 + PROBE_SYNCS}"],
    ).output
    assert output == UncertainError.__name__
    assert root.active() == [epoch]
    assert recover(root) == [Recovered(epoch)]
    assert record_of(root, epoch) == {"epoch": epoch, "turn": 1}
    assert is_retired(root, epoch)


# --- what still runs -------------------------------------------------------------------------------------------------


def test_leftovers_are_ended_by_mark(root: EpochRoot, leftover) -> None:
    epoch = leave(root, request=request())
    mine, other = [leftover(epoch) for _ in range(2)], leftover(secrets.token_hex(32))
    assert recover(root) == [Recovered(epoch, processes_ended=2)]
    assert [process.wait() for process in mine] == [-signal.SIGKILL] * 2
    assert other.poll() is None
    assert record_of(root, epoch)["processes_ended"] == 2


def test_marked_process_of_another_boot_is_not_touched(root: EpochRoot, leftover) -> None:
    """After a reboot the pids and start times in the document mean nothing."""
    epoch = leave(root, request=request(boot_id="00000000-0000-0000-0000-000000000000"))
    process = leftover(epoch)
    assert recover(root) == [Recovered(epoch)]
    assert process.poll() is None
    assert record_of(root, epoch)["processes_ended"] == 0


def test_marked_process_that_is_older_than_the_run_is_not_touched(root: EpochRoot, leftover) -> None:
    later = secrets.token_hex(32)
    process = leftover(later)
    stat = read_stat(process.pid)
    assert stat is not None
    path = Path(root.path) / names.active_name(later)
    path.mkdir(mode=0o700)
    (path / "request.json").write_text(json.dumps({"epoch": later, **request(start_ticks=stat.start_ticks + 1)}))
    assert recover(root) == [Recovered(later)]
    assert process.poll() is None


def test_keeper_that_still_ends_things_is_waited_for(root: EpochRoot, children) -> None:
    """The keeper of a killed berth holds its lock while it ends what is inside; only then the run is recorded."""
    epoch = leave(root, request=request())
    keeper = children.start(
        "import os, time\n"
        "from berth.linux.locks import open_lock_file, try_lock\n"
        "assert try_lock(open_lock_file('keeper.lock', dir_fd=os.open(sys.argv[1], os.O_RDONLY)))\n"
        "print(flush=True)\n"
        "time.sleep(0.3)\n",
        work_of(root, epoch),
    )
    keeper.stdout.readline()
    began = time.monotonic()
    assert recover(root) == [Recovered(epoch)]
    assert time.monotonic() - began > 0.2
    assert keeper.wait() == 0
    assert is_retired(root, epoch)
