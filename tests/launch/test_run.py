"""One run, driven from Python as the services drive it."""

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from berth.epoch.epoch import EpochRoot
from berth.errors import AbilityError, FailedError
from berth.launch import store
from berth.launch.request import RunRequest
from berth.launch.run import start
from berth.sandbox.bubblewrap import probe


@pytest.fixture
def root(tmp_path):
    with EpochRoot(str(tmp_path / "state")) as opened:
        yield opened


@pytest.fixture
def workspace(tmp_path):
    directory = tmp_path / "workspace"
    directory.mkdir()
    return directory


@pytest.fixture(params=[False, True], ids=["host", "sandbox"])
def sandbox(request):
    if request.param:
        try:
            probe()
        except AbilityError:
            pytest.skip("bubblewrap cannot make a sandbox here; see `berth doctor`")
    return request.param


def test_started_from_a_short_lived_thread_it_runs_to_its_end(root, workspace, sandbox):
    request = RunRequest(
        command=("sh", "-c", "sleep 0.5; echo done > result; exit 9"), sandbox=sandbox, workspace=str(workspace)
    )
    runs = []
    thread = threading.Thread(target=lambda: runs.append(start(request, root)))
    thread.start()
    thread.join()
    finished = runs[0].wait()
    assert finished.exit_code == 9
    assert (workspace / "result").read_text() == "done\n"


def test_a_taken_record_name_is_never_replaced_and_the_run_fails(root, workspace):
    request = RunRequest(command=("true",), workspace=str(workspace))
    run = start(request, root)
    taken = Path(store.record_path(root, run.epoch.id))
    taken.parent.mkdir()
    taken.write_text("somebody else's\n")
    with pytest.raises(FailedError, match="exists already") as caught:
        run.wait()
    assert caught.value.name == "record-exists"
    assert taken.read_text() == "somebody else's\n"
    assert json.loads((Path(run.epoch.path) / "record.json").read_text())["exit"]["code"] == 0


def test_several_runs_of_one_process_do_not_disturb_each_other(root, workspace):
    requests = [
        RunRequest(command=("sh", "-c", f"sleep 0.{5 - n}; exit {n}"), workspace=str(workspace)) for n in range(4)
    ]
    runs = [start(request, root) for request in requests]
    assert [run.wait().exit_code for run in runs] == [0, 1, 2, 3]
    assert len(root.retired()) == 4
    assert root.active() == []


RACE = """
import json, subprocess, sys
words = [sys.executable, "-m", "berth", "run", "--state-root", sys.argv[1], "--json", "--cores", "1", "--"]
for _ in range(6):
    ended = subprocess.run([*words, "sh", "-c", "sleep 0.1"], capture_output=True, text=True)
    answer = json.loads(ended.stdout)
    if "error" not in answer:
        print(answer["cores_seen"], answer["started_at"], answer["ended_at"], flush=True)
    elif answer["error"]["name"] != "cores-claimed":
        print("error", answer["error"]["name"])
"""


def test_two_users_never_share_a_core(everybodys_berth):
    """Four users race for one core each, six times, on a host with as many cores as it has."""
    if os.geteuid() != 0:
        pytest.skip("becoming two users needs root")
    python, environment, directory = everybodys_berth
    processes = []
    for uid in (0, 65533, 65534, 65532):
        home = directory / f"home-{uid}"
        home.mkdir()
        os.chown(home, uid, uid)
        words = ["setpriv", f"--reuid={uid}", f"--regid={uid}", "--clear-groups", python, "-c", RACE, f"{home}/state"]
        processes.append(subprocess.Popen(words, cwd=home, env=environment, stdout=subprocess.PIPE, text=True))
    spans = [line.split() for process in processes for line in process.communicate(timeout=60)[0].splitlines()]
    assert all(process.returncode == 0 for process in processes)
    assert not [span for span in spans if span[0] == "error"], spans
    assert len(spans) >= len(os.sched_getaffinity(0))
    for core, begun, ended in spans:
        overlapping = [s for s in spans if s[0] == core and s[1] < ended and begun < s[2]]
        assert overlapping == [[core, begun, ended]]


@pytest.fixture
def everybodys_berth():
    """An interpreter, an environment and a directory with which every user can run this berth."""
    import shutil
    import tempfile

    import click
    import msgspec

    import berth

    python = os.path.realpath(sys.executable)
    directory = Path(tempfile.mkdtemp(prefix="berth-test-"))
    directory.chmod(0o755)
    for package in (berth, click, msgspec):
        source = Path(package.__file__).parent
        shutil.copytree(source, directory / "lib" / source.name)
    subprocess.run(["chmod", "-R", "a+rX", str(directory)], check=True)
    yield python, {"PATH": os.environ["PATH"], "PYTHONPATH": str(directory / "lib")}, directory
    shutil.rmtree(directory)
