"""The scenes of `berth demo`: real text, real work, a real kill, and a look at what is left."""

import contextlib
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import click

from berth.epoch import names
from berth.errors import MalformedError
from berth.linux.process import marked

#: How much text is worked on, in bytes: a second or two of one core.
_TEXT_BYTES: Final = 4 << 20
#: The commonest words of the text, by tools that every system has: six processes, all busy.
_COUNT_WORDS: Final = 'tr -cs A-Za-z "\\n" < library.txt | tr A-Z a-z | sort | uniq -c | sort -k1,1nr -k2 | head -n 5'
_ENDLESS: Final = "while :; do sort library.txt | sort -r > /dev/null; done"
_TIMEOUT_S: Final = "20"
_POLL_S: Final = 0.02


@dataclass(frozen=True, slots=True)
class Stage:
    """The directory of the demonstration: a workspace with the text, and a state root."""

    directory: str

    @classmethod
    @contextlib.contextmanager
    def open(cls, keep: str | None) -> "Iterator[Stage]":
        """Make the directory, and remove it at the end unless it is to be kept.

        Raises:
            MalformedError: The directory exists already.
        """
        if keep is None:
            directory = os.path.realpath(tempfile.mkdtemp(prefix="berth-demo-"))
        else:
            directory = os.path.realpath(keep)
            try:
                os.makedirs(directory)
            except FileExistsError:
                raise MalformedError("demo-exists", f"{keep!r} exists already", "Name a new directory.") from None
        try:
            os.mkdir(os.path.join(directory, "workspace"))
            yield cls(directory)
        finally:
            if keep is None:
                shutil.rmtree(directory, ignore_errors=True)

    @property
    def workspace(self) -> str:
        """Where the commands work."""
        return os.path.join(self.directory, "workspace")

    @property
    def state_root(self) -> str:
        """Where the records go."""
        return os.path.join(self.directory, "state")

    def berth(self, *words: str) -> list[str]:
        """Return the argument list of a `berth run` here."""
        # The state root is thrown away in the end, so it may lie in a /tmp that is.
        place = ["--allow-volatile", "--state-root", self.state_root, "--workspace", self.workspace]
        return [sys.executable, "-m", "berth", "run", *place, *words]


def play(stage: Stage) -> list[str]:
    """Play every scene, telling what happens; return what went wrong, which is nothing on a sound host."""
    size = _copy_text(stage)
    _tell(f"Real work: the commonest words in {size >> 20} MiB of Python's own library, on one claimed core.")
    host = _run(stage, "on the host", "--cores", "1")
    sandbox = _run(stage, "in a sandbox", "--cores", "1", "--sandbox")
    failures = []
    if "error" in (host or {}):
        return ["without a free core there is nothing to show; try again when one is free"]
    if host is None or host["exit"]["code"] != 0:
        failures.append("the run on the host failed")
    elif sandbox is not None and sandbox["exit"]["code"] != 0:
        failures.append("the run in a sandbox failed")
    failures += _kill(stage)
    failures += _show_what_is_left(stage, runs=3 if sandbox is None else 4)
    return failures


def _copy_text(stage: Stage) -> int:
    """Join the sources of the standard library until there is enough of them; return the number of bytes."""
    library = sysconfig.get_paths()["stdlib"]
    size = 0
    with open(os.path.join(stage.workspace, "library.txt"), "wb") as text:
        for directory, below, files in os.walk(library):
            below[:] = sorted(set(below) - {"site-packages", "dist-packages"})
            for name in sorted(name for name in files if name.endswith(".py")):
                with open(os.path.join(directory, name), "rb") as source:
                    size += text.write(source.read())
                if size >= _TEXT_BYTES:
                    return size
    return size


def _run(stage: Stage, where: str, *options: str) -> dict[str, dict[str, object]] | None:
    """Count the words once and tell what the record says; None where this host has no sandbox."""
    command = ["sh", "-c", _COUNT_WORDS]
    _tell(f"\n$ berth run {' '.join(options)} -- {shlex.join(command)}")
    words = stage.berth("--json", *options, "--timeout", _TIMEOUT_S, "--", *command)
    ended = subprocess.run(words, capture_output=True, text=True, env=_environment())
    answer = json.loads(ended.stdout)
    if ended.stderr:
        _tell(ended.stderr.rstrip())
    if "error" in answer:
        _tell(f"  {where}: {answer['error']['message']}\n  {answer['error']['fix']}")
        return None if "--sandbox" in options else answer
    record: dict[str, dict[str, object]] = answer
    _tell(f"  {where}: CPUs {record['cores_seen']}, {record['duration_seconds']:.2f} s, exit {record['exit']['code']}")
    return record


def _kill(stage: Stage) -> list[str]:
    """Kill berth in the middle of a run, with no chance to clean up, and see what becomes of the run."""
    _tell("\nNow a run whose berth is killed in the middle (SIGKILL):")
    berth = subprocess.Popen(stage.berth("--cores", "1", "--", "sh", "-c", _ENDLESS), env=_environment())
    epoch, alive = _wait_for_processes(stage, berth)
    berth.send_signal(signal.SIGKILL)
    berth.wait()
    deadline = time.monotonic() + 10
    while (left := len(marked(epoch, not_before_ticks=0)) if epoch else 0) and time.monotonic() < deadline:
        time.sleep(_POLL_S)
    _tell(f"  {alive} processes inside before, {left} after; its work-state is still there.")
    _tell("  The next start finishes what it left:")
    subprocess.run(stage.berth("--", "true"), env=_environment(), check=False)
    record = os.path.join(stage.state_root, "records", f"{epoch}.json")
    with contextlib.suppress(FileNotFoundError), open(record, encoding="utf-8") as file:
        outcome = json.load(file)["exit"]["outcome"]
        _tell(f"  recorded as {outcome!r}.")
        return [] if outcome == "interrupted" and not left else ["the killed run left something behind"]
    return ["the killed run was not recorded"]


def _wait_for_processes(stage: Stage, berth: subprocess.Popen[bytes]) -> tuple[str, int]:
    """Return the epoch of the run that `berth` started and its number of processes, once it is at work."""
    deadline = time.monotonic() + 10
    while berth.poll() is None and time.monotonic() < deadline:
        for name in os.listdir(stage.state_root):
            epoch = names.parse_active(name)
            inside = marked(epoch, not_before_ticks=0) if epoch else []
            if epoch and len(inside) > 2:
                return epoch, len(inside)
        time.sleep(_POLL_S)
    return "", 0


def _show_what_is_left(stage: Stage, *, runs: int) -> list[str]:
    """List the state root: one record a run, the last retired epoch, and nothing else."""
    entries = sorted(os.listdir(stage.state_root))
    records = len(os.listdir(os.path.join(stage.state_root, "records")))
    retired = sum(names.parse_retired(name) is not None for name in entries)
    active = sum(names.parse_active(name) is not None for name in entries)
    ours = ("records", ".berth.lock", ".berth-reclaim.lock")
    others = [name for name in entries if name not in ours and not names.parse_retired(name)]
    epochs = "1 retired epoch" if retired == 1 else f"{retired} retired epochs"
    _tell(f"\nWhat is left of {runs} runs: {records} records, {epochs}, {active} active ones.")
    sound = records == runs and 1 <= retired < runs and not others
    return [] if sound else [f"the state root holds something else: {others or entries}"]


def _environment() -> dict[str, str]:
    """The demonstration's own berth, whatever else is installed; its output in the order of events."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path), "PYTHONUNBUFFERED": "1"}


def _tell(text: str) -> None:
    click.echo(text)
