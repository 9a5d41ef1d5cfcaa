"""A trial cannot take its parent along, and leaves nothing behind."""

import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from berth.doctor.deadline import NoAnswerError, attempt, start
from berth.linux.process import read_stat


def test_an_answer_of_any_length_arrives() -> None:
    text = "Zürich\udcff" * 100_000
    assert attempt(lambda: text, timeout_s=10) == text
    assert attempt(lambda: "", timeout_s=10) == ""


def test_a_hanging_trial_ends_with_everything_it_started(tmp_path: Path) -> None:
    def hang() -> str:
        # The shell ends at once: its background process is an orphan that no longer names this trial as its parent.
        subprocess.run(["sh", "-c", f"sleep 61 & echo $! >{tmp_path}/new; mv {tmp_path}/new {tmp_path}/pid"])
        time.sleep(62)
        return "never"

    trial = start(hang, timeout_s=60)
    deadline = time.monotonic() + 10
    while not (tmp_path / "pid").exists():
        assert time.monotonic() < deadline
        time.sleep(0.005)
    over = type(trial)(trial.pid, trial.fd, time.monotonic(), 0.5)
    with pytest.raises(NoAnswerError, match=r"^gave no answer within 0\.5 s$"):
        over.answer()
    orphan = int((tmp_path / "pid").read_text())
    while (stat := read_stat(orphan)) is not None and stat.state not in "ZX":
        assert time.monotonic() < deadline
        time.sleep(0.005)
    assert read_stat(trial.pid) is None


def test_a_failure_becomes_the_reason() -> None:
    def fail() -> str:
        os.open("/no/such", os.O_RDONLY)
        return ""

    with pytest.raises(NoAnswerError, match=r"^failed: No such file or directory \(/no/such\)$"):
        attempt(fail, timeout_s=10)
    with pytest.raises(NoAnswerError, match=r"^failed: ZeroDivisionError: "):
        attempt(lambda: str(1 // 0), timeout_s=10)


def test_a_killed_trial_gave_no_answer() -> None:
    def die() -> str:
        os.kill(os.getpid(), signal.SIGKILL)
        return ""

    with pytest.raises(NoAnswerError, match=r"^ended without an answer$"):
        attempt(die, timeout_s=10)


def test_a_host_without_descriptors_is_a_reason_too() -> None:
    def without() -> str:
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, 3))
        return attempt(lambda: "", timeout_s=10)

    with pytest.raises(NoAnswerError, match=r"could not be started: Too many open files$"):
        attempt(without, timeout_s=10)


def test_nothing_of_the_parents_is_printed_twice() -> None:
    program = "print('once', end=''); from berth.doctor.deadline import attempt; attempt(lambda: '', timeout_s=10)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("once", "")
