import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from berth.host.cpuset import CpuSet
from berth.launch.record import (
    SCHEMA_VERSION,
    Ending,
    ending_of,
    exit_code_of,
    interrupted_record,
    request_document,
    run_record,
    shown,
    timestamp,
)
from berth.launch.request import RunRequest

EPOCH = "ab" * 32
NOW = 1_700_000_000.25
STORAGE: dict[str, object] = {"file_system": "ext4", "medium": "local", "durable": True}


def document(**asked: Any) -> dict[str, object]:
    request = RunRequest(**{"command": ("true",), "workspace": "/work", **asked})
    return request_document(EPOCH, request, storage=STORAGE, boot_id="boot", pid=12, start_ticks=345, now=NOW)


def record(ending: Ending, **seen: Any) -> dict[str, object]:
    values: dict[str, Any] = {
        "claimed": None,
        "seen": None,
        "sandbox": None,
        "started_at": NOW + 1,
        "ended_at": NOW + 3,
        "duration_s": 2.00000049,
        "processes_ended": 0,
        "stuck": (),
        "pid": 99,
        **seen,
    }
    return run_record(document(), ending, **values)


def test_request_on_the_host() -> None:
    assert document() == {
        "schema_version": SCHEMA_VERSION,
        "epoch": EPOCH,
        "command": ["true"],
        "kind": "host",
        "workspace": "/work",
        "cores_asked": {"cores": None, "cpus": None, "shared": False},
        "timeout_seconds": None,
        "requested_at": "2023-11-14T22:13:20.250Z",
        "storage": {"file_system": "ext4", "medium": "local", "durable": True},
        "berth": {"boot_id": "boot", "pid": 12, "start_ticks": 345},
    }


def test_request_with_everything() -> None:
    found = document(
        command=("a", "\udcff"),
        workspace="/w\udcfe",
        sandbox=True,
        cpus=CpuSet.of([0, 1, 5]),
        share_cores=True,
        timeout_s=1.5,
    )
    assert found["command"] == ["a", "\\xff"]
    assert found["workspace"] == "/w\\xfe"
    assert found["kind"] == "sandbox"
    assert found["cores_asked"] == {"cores": None, "cpus": "0-1,5", "shared": True}
    assert found["timeout_seconds"] == 1.5


def test_record_of_a_run() -> None:
    found = record(
        ending_of(0, None),
        claimed=CpuSet.of([1]),
        seen=CpuSet.of([1]),
        sandbox={"uid_inside": 1000},
        processes_ended=2,
        stuck=(7,),
    )
    assert {key: value for key, value in found.items() if key not in document()} == {
        "command_started": True,
        "pid": 99,
        "cores_claimed": "1",
        "cores_seen": "1",
        "sandbox": {"uid_inside": 1000},
        "started_at": "2023-11-14T22:13:21.250Z",
        "ended_at": "2023-11-14T22:13:23.250Z",
        "duration_seconds": 2.0,
        "exit": {"outcome": "succeeded", "code": 0, "signal": None, "error": None},
        "processes_ended": 2,
        "processes_stuck": [7],
    }
    assert {key: found[key] for key in document()} == document()


def test_record_of_a_command_that_did_not_begin() -> None:
    found = record(Ending("not-started", error="command-not-started"), started_at=None, duration_s=None, pid=None)
    assert (found["command_started"], found["started_at"], found["duration_seconds"]) == (False, None, None)
    assert found["exit"] == {"outcome": "not-started", "code": None, "signal": None, "error": "command-not-started"}


@pytest.mark.parametrize(("known", "started", "command"), [(document(), None, ["true"]), (None, False, None)])
def test_record_of_an_interrupted_run(known: dict[str, object] | None, started: bool | None, command: object) -> None:
    """Without a request nothing was started; with one nobody knows."""
    found = interrupted_record(known, EPOCH, found_at=NOW, processes_ended=3)
    assert found["schema_version"] == SCHEMA_VERSION
    assert found["epoch"] == EPOCH
    assert found["command"] == command
    assert found["command_started"] is started
    assert found["found_at"] == "2023-11-14T22:13:20.250Z"
    assert found["processes_ended"] == 3
    assert found["exit"] == {"outcome": "interrupted", "code": None, "signal": None, "error": None}
    json.dumps(found)


@pytest.mark.parametrize(
    ("code", "signal", "outcome", "exit_code"),
    [
        (0, None, "succeeded", 0),
        (7, None, "failed", 7),
        (255, None, "failed", 255),
        (None, 9, "failed", 137),
        (None, 15, "failed", 143),
    ],
)
def test_own_ending_of_a_command(code: int | None, signal: int | None, outcome: str, exit_code: int) -> None:
    ending = ending_of(code, signal)
    assert ending == Ending(outcome, code, signal)
    assert exit_code_of(ending) == exit_code


def test_ending_that_is_not_known_is_no_success() -> None:
    assert exit_code_of(ending_of(None, None)) != 0
    assert ending_of(None, None).outcome != "succeeded"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "1970-01-01T00:00:00.000Z"),
        (NOW, "2023-11-14T22:13:20.250Z"),
        (1709208000.9999, "2024-02-29T12:00:00.999Z"),
    ],
)
def test_timestamp(seconds: float, text: str) -> None:
    assert timestamp(seconds) == text


@given(st.lists(st.binary()))
def test_any_words_are_fit_for_json(raw: list[bytes]) -> None:
    words = shown([word.decode("utf-8", "surrogateescape") for word in raw])
    assert json.loads(json.dumps(words, ensure_ascii=False).encode("utf-8")) == words
    for before, after in zip(raw, words, strict=True):
        try:
            assert after == before.decode("utf-8")
        except UnicodeDecodeError:
            assert "\\x" in after
