"""What is on the disk after a kill, a power cut or an error in the middle of an operation."""

import errno
import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from berth.durable.state import State, StateFile
from berth.errors import FailedError


def read(work: Path) -> State:
    """Return what a new opening of `s` reads."""
    with StateFile.open(str(work / "s")) as state:
        return state.read()


def test_log_cut_at_every_byte_of_its_last_line(work: Path, state: StateFile) -> None:
    state.append({"three": "ü" * 3})
    data = (work / "s.log").read_bytes()
    start = data.index(b'{"generation":1,"record":{"three"')
    for size in range(start, len(data)):
        (work / "s.log").write_bytes(data[:size])
        assert read(work) == State({"a": 1}, ["one", "two"])
        with StateFile.open(str(work / "s")) as writer:
            assert (work / "s.log").read_bytes() == data[:size]  # a reader cuts nothing off
            writer.append(4)
            writer.append(5)
        assert (work / "s.log").read_bytes() == data[
            :start
        ] + b'{"generation":1,"record":4}\n{"generation":1,"record":5}\n'
        assert read(work) == State({"a": 1}, ["one", "two", 4, 5])


@pytest.mark.parametrize("torn", [b"", b'{"gener'])
def test_kill_between_the_two_steps_of_a_fold(work: Path, state: StateFile, torn: bytes) -> None:
    log = (work / "s.log").read_bytes()
    state.fold({"folded": ["one", "two"]})
    (work / "s.log").write_bytes(log + torn)
    assert read(work) == State({"folded": ["one", "two"]}, [])
    assert (work / "s.log").read_bytes() == log + torn
    with StateFile.open(str(work / "s")) as writer:
        writer.append("three")
        assert writer.read() == State({"folded": ["one", "two"]}, ["three"])
    assert (work / "s.log").read_bytes() == b'{"generation":2,"record":"three"}\n'


def test_fold_after_a_killed_fold(work: Path, state: StateFile) -> None:
    log = (work / "s.log").read_bytes()
    state.fold({"a": 2})
    (work / "s.log").write_bytes(log)
    with StateFile.open(str(work / "s")) as writer:
        writer.fold({"a": 3})
    assert os.listdir(work) == ["s"]
    assert read(work) == State({"a": 3}, [])


def test_old_copy_beside_a_newer_log_is_refused(work: Path, state: StateFile) -> None:
    copy = (work / "s").read_bytes()
    state.fold({"a": 2})
    state.append("three")
    (work / "s").write_bytes(copy)
    log = (work / "s.log").read_bytes()
    with pytest.raises(FailedError, match="old copy") as caught:
        read(work)
    assert caught.value.name == "damaged-state"
    assert ((work / "s").read_bytes(), (work / "s.log").read_bytes()) == (copy, log)


# One step after the other; prints after each what it ended with. The marks are a call that nothing else makes.
STEPS = """
import json, os
from berth.durable.state import StateFile
from berth.errors import BerthError
path, states = sys.argv[1], []
def step(function, *arguments):
    os.getpriority(os.PRIO_PROCESS, 0)
    try: states.append(function(*arguments))
    except BerthError as error: print(json.dumps([type(error).__name__, error.name]), flush=True)
    except OSError as error: print(json.dumps([type(error).__name__, error.errno, error.filename]), flush=True)
    except KeyboardInterrupt: print('"interrupted"', flush=True)
    else: print("null", flush=True)
step(StateFile.create, path, {"a": 1})
if not states: sys.exit()
step(states[0].append, 1)
step(states[0].append, 2)
step(states[0].fold, {"a": 2})
step(states[0].append, 3)
"""
CALLS = "write,fsync,renameat2,renameat,unlinkat,ftruncate,getpriority"
DONE = [None] * 5
ENDED = ["ForbiddenError", "state-ended"]
UNCERTAIN = ["UncertainError", "uncertain"]


def steps(strace: Callable[..., Any], work: Path, *inject: str) -> tuple[list[Any], list[list[str]]]:
    """Return what each step ended with, and the calls it made."""
    traced = strace(STEPS, work / "s", trace=CALLS, inject=inject)
    outcomes = [json.loads(line) for line in traced.output.splitlines()]
    calls: list[list[str]] = []
    for line in traced.calls:
        if line.startswith("getpriority"):
            calls.append([])
        elif calls and not line.startswith("write(1<"):
            calls[-1].append(line)
    return outcomes, calls


def short(call: str, work: Path) -> str:
    """Return the name of a call and that of the file or directory."""
    file = call.split("<")[1].split(">")[0].removeprefix(str(work)) or "/"
    return f"{call.split('(')[0]} {'.tmp' if file.endswith('.tmp') else file}"


def test_order_of_the_calls(strace, work: Path) -> None:
    outcomes, calls = steps(strace, work)
    assert outcomes == DONE
    assert [[short(call, work) for call in made] for made in calls] == [
        ["write .tmp", "fsync .tmp", "renameat2 /", "fsync /"],
        ["write /s.log", "fsync /s.log", "fsync /"],
        ["write /s.log", "fsync /s.log"],
        ["write .tmp", "fsync .tmp", "renameat /", "fsync /", "unlinkat /", "fsync /"],
        ["write /s.log", "fsync /s.log", "fsync /"],
    ]
    assert "RENAME_NOREPLACE" in calls[0][2]


@pytest.mark.parametrize("error", ["EIO", "ENOSPC"])
@pytest.mark.parametrize(
    ("when", "outcomes", "left"),
    [
        (1, [["OSError", "s"]], None),
        (2, [UNCERTAIN], State({"a": 1}, [])),
        (3, [None, UNCERTAIN, ENDED, ENDED, ENDED], State({"a": 1}, [1])),
        (4, [None, UNCERTAIN, ENDED, ENDED, ENDED], State({"a": 1}, [1])),
        (5, [None, None, UNCERTAIN, ENDED, ENDED], State({"a": 1}, [1, 2])),
        (6, [None, None, None, ["OSError", "s"], None], State({"a": 1}, [1, 2, 3])),
        (7, [None, None, None, UNCERTAIN, ENDED], State({"a": 2}, [])),
        (8, [None, None, None, UNCERTAIN, ENDED], State({"a": 2}, [])),
        (9, [None, None, None, None, UNCERTAIN], State({"a": 2}, [3])),
        (10, [None, None, None, None, UNCERTAIN], State({"a": 2}, [3])),
    ],
)
def test_failed_fsync(strace, work: Path, error: str, when: int, outcomes: list[Any], left: State | None) -> None:
    found, calls = steps(strace, work, f"fsync:error={error}:when={when}")
    number = getattr(errno, error)
    assert found == [["OSError", number, str(work / "s")] if out == ["OSError", "s"] else out for out in outcomes]
    failed = next(number for number, made in enumerate(calls) if any(error in call for call in made))
    assert error in [call for call in calls[failed] if call.startswith("fsync")][-1]  # nothing is synced again
    if found[failed][0] == "UncertainError":
        assert calls[failed + 1 :] == [[]] * (len(calls) - failed - 1)
    assert not list(work.glob(".*"))
    if left is None:
        assert os.listdir(work) == []
    else:
        assert read(work) == left


@pytest.mark.parametrize(
    ("call", "when", "outcomes", "left"),
    [
        ("write", 1, [["OSError", 5, "s"]], None),
        ("write", 3, [None, ["OSError", 5, "s.log"], None, None, None], State({"a": 2}, [3])),
        ("write", 5, [None, None, ["OSError", 5, "s.log"], None, None], State({"a": 2}, [3])),
        ("write", 7, [None, None, None, ["OSError", 5, "s"], None], State({"a": 1}, [1, 2, 3])),
        ("write", 9, [None, None, None, None, ["OSError", 5, "s.log"]], State({"a": 2}, [])),
        ("renameat2", 1, [["OSError", 5, "s"]], None),
        ("renameat", 1, [None, None, None, ["OSError", 5, "s"], None], State({"a": 1}, [1, 2, 3])),
        ("unlinkat", 1, [None, None, None, ["PartlyError", "log-not-removed"], None], State({"a": 2}, [3])),
    ],
)
def test_failed_call(strace, work: Path, call: str, when: int, outcomes: list[Any], left: State | None) -> None:
    """Every second write is the report of a step."""
    found, _calls = steps(strace, work, f"{call}:error=EIO:when={when}")
    assert found == [out and [str(work / word) if word in ("s", "s.log") else word for word in out] for out in outcomes]
    assert not list(work.glob(".*"))
    if left is None:
        assert os.listdir(work) == []
    else:
        assert read(work) == left


@pytest.mark.parametrize(
    ("when", "left"), [(3, State({"a": 1}, [1])), (5, State({"a": 1}, [1, 2])), (7, State({"a": 2}, []))]
)
def test_interrupted_step_is_the_last(strace, work: Path, when: int, left: State) -> None:
    """The step after a Ctrl-C cannot know how far the one before it came."""
    found, calls = steps(strace, work, f"fsync:signal=INT:when={when}")
    stop = found.index("interrupted")
    assert found[:stop] == [None] * stop
    assert found[stop + 1 :] == [ENDED] * (len(found) - stop - 1)
    assert calls[stop + 1 :] == [[]] * (len(calls) - stop - 1)
    assert read(work) == left


def test_half_of_a_record_that_cannot_be_cut_off_ends_writing(strace, small_tmpfs: Path) -> None:
    code = STEPS.replace("append, 1)", "append, 'x' * 100_000)")
    traced = strace(code, small_tmpfs / "s", trace="ftruncate", inject=["ftruncate:error=EIO"])
    assert [json.loads(line) for line in traced.output.splitlines()] == [None, UNCERTAIN, ENDED, ENDED, ENDED]
    assert (small_tmpfs / "s.log").stat().st_size > 4096
    assert read(small_tmpfs) == State({"a": 1}, [])


def test_full_disk_leaves_no_half_of_a_record(small_tmpfs: Path) -> None:
    with StateFile.create(str(small_tmpfs / "s"), {"a": 1}) as state:
        state.append("x" * 20_000)
        before = (small_tmpfs / "s.log").read_bytes()
        with pytest.raises(OSError, match="No space") as caught:
            state.append("y" * 50_000)
        assert caught.value.filename == str(small_tmpfs / "s.log")
        assert (small_tmpfs / "s.log").read_bytes() == before
        with pytest.raises(OSError, match="No space") as caught:
            state.fold({"a": "z" * 60_000})
        assert caught.value.filename == str(small_tmpfs / "s")
        assert sorted(os.listdir(small_tmpfs)) == ["s", "s.log"]
        state.append("short")
    assert read(small_tmpfs) == State({"a": 1}, ["x" * 20_000, "short"])


#: What may be on the disk when so many steps were reported: as after the last of them, or after the next.
AFTER = [
    None,
    State({"a": 1}, []),
    State({"a": 1}, [1]),
    State({"a": 1}, [1, 2]),
    State({"a": 2}, []),
    State({"a": 2}, [3]),
]


def test_kill_before_every_call(strace, children, work: Path) -> None:
    _outcomes, calls = steps(strace, work)
    names = [call.split("(")[0] for made in calls for call in [*made, "write(report)"]]
    points = [(name, names[: index + 1].count(name)) for index, name in enumerate(names)]
    for name, count in points:
        shutil.rmtree(work)
        work.mkdir()
        prefix = ["strace", "-qq", "-o", os.devnull, "-e", f"trace={name}"]
        prefix += ["-e", f"inject={name}:signal=KILL:when={count}", "--"]
        child = children.start(STEPS, work / "s", prefix=prefix)
        reported = child.stdout.read().count("null")
        assert child.wait() in (-signal.SIGKILL, 128 + signal.SIGKILL)
        left = read(work) if (work / "s").exists() else None
        assert left in AFTER[reported : reported + 2], (name, count, reported)
        if left is not None:
            with StateFile.open(str(work / "s")) as writer:
                writer.append("next")
                assert writer.read() == State(left.document, [*left.records, "next"]), (name, count)
