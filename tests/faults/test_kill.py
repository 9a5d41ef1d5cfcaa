"""berth is killed at random moments: nothing inside lives on, and what is found afterwards is whole.

The bounded form runs with every test run, the long one with `make faults`. Both print their seed; set BERTH_TEST_SEED
to repeat one.
"""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from berth.epoch.names import is_epoch_id, parse_active, parse_retired

#: A command whose processes try to live on: a new session, a double fork, one that ignores SIGTERM.
STUBBORN = """
setsid sleep {mark} &
(trap '' TERM HUP; (setsid sleep {mark} &) ; sleep {mark}) &
touch started
sleep {mark}
"""


def test_killed_at_a_few_random_moments(tmp_path, sandbox_options):
    kill_at_random_moments(tmp_path, sandbox_options, rounds=16, longest_s=0.30)


@pytest.mark.faults
def test_killed_at_300_random_moments(tmp_path, sandbox_options):
    kill_at_random_moments(tmp_path, sandbox_options, rounds=300, longest_s=0.30)


@pytest.mark.faults
def test_berth_and_keeper_killed_together_at_100_random_moments(tmp_path, sandbox_options):
    kill_at_random_moments(tmp_path, sandbox_options, rounds=100, longest_s=0.30, keeper_too=True)


def test_berth_and_keeper_killed_together(tmp_path, sandbox_options):
    kill_at_random_moments(tmp_path, sandbox_options, rounds=6, longest_s=0.30, keeper_too=True)


@pytest.fixture
def sandbox_options(tmp_path_factory):
    """The kinds of run that work here, each as the options that ask for it."""
    words = ["run", "--state-root", str(tmp_path_factory.mktemp("state")), "--sandbox", "--", "true"]
    tried = subprocess.run([*berth_words(), *words], capture_output=True, cwd=tmp_path_factory.mktemp("work"))
    return [(), ("--cores", "1")] + ([("--sandbox",)] if tried.returncode == 0 else [])


def kill_at_random_moments(tmp_path, kinds, *, rounds, longest_s, keeper_too=False):
    seed = int(os.environ.get("BERTH_TEST_SEED") or random.SystemRandom().randrange(1 << 32))
    print(f"BERTH_TEST_SEED={seed}")
    chance = random.Random(seed)
    state_root, workspace = tmp_path / "state", tmp_path / "workspace"
    workspace.mkdir()
    started = 0
    for number in range(rounds):
        after_start = number % 2 == 1
        mark = f"7{os.getpid()}{number:04d}"
        options = chance.choice(kinds)
        words = [*berth_words(), "run", "--state-root", str(state_root), *options, "--"]
        with subprocess.Popen([*words, "sh", "-c", STUBBORN.format(mark=mark)], cwd=workspace) as berth:
            wait_for_start = time.monotonic() + 30
            while after_start and not (workspace / "started").exists() and time.monotonic() < wait_for_start:
                time.sleep(0.001)
            time.sleep(chance.uniform(0, longest_s / 3 if after_start else longest_s))
            keepers = keepers_of(berth.pid) if keeper_too else []
            for pid in (berth.pid, *keepers):
                os.kill(pid, signal.SIGKILL)
        started += (workspace / "started").exists()
        (workspace / "started").unlink(missing_ok=True)
        if not keeper_too:
            assert gone(mark, within_s=10), f"round {number}: a process lives on after berth was killed"
        check_whole(state_root)
        again = subprocess.run(
            [*berth_words(), "run", "--state-root", str(state_root), "--", "true"], capture_output=True, text=True
        )
        assert again.returncode == 0, f"round {number}: {again.stderr}"
        assert gone(mark, within_s=0), f"round {number}: a process lives on after the next start"
        names = os.listdir(state_root)
        assert not [name for name in names if parse_active(name)], f"round {number}: an epoch is still active"
        retired = [name for name in names if parse_retired(name)]
        assert 1 <= len(retired) <= len(os.listdir(state_root / "records"))  # every start reclaims one
        assert {"records", ".berth.lock"} <= set(names) <= {"records", ".berth.lock", ".berth-reclaim.lock", *retired}
    assert started >= rounds // 2


def check_whole(state_root: Path) -> None:
    """Every document that is there under its name can be read and belongs where it stands."""
    documents = [*state_root.glob(".standalone-work-*/*.json"), *state_root.glob("records/*.json")]
    for path in documents:
        document = json.loads(path.read_text())
        epoch = path.stem if path.parent.name == "records" else parse_active(path.parent.name)
        assert is_epoch_id(document["epoch"])
        assert document["epoch"] == epoch


def keepers_of(pid: int) -> list[int]:
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return []
    return [int(child) for child in children]


def gone(mark: str, *, within_s: float) -> bool:
    """Wait until no living process has `mark` as an argument."""
    deadline = time.monotonic() + within_s
    while living(mark):
        if time.monotonic() >= deadline:
            return False
        time.sleep(0.01)
    return True


def living(mark: str) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                words = (entry / "cmdline").read_bytes().split(b"\0")
                state = (entry / "stat").read_text().rsplit(")", 1)[1].split()[0]
            except OSError:
                continue
            if state not in "ZX" and any(mark.encode() in word for word in words):
                found.append(int(entry.name))
    return found


def berth_words() -> list[str]:
    return [sys.executable, "-m", "berth"]
