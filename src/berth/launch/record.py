"""`record.json`: what was run, where, and how it ended. One per run, published once, never changed.

Times are UTC in ISO 8601. Arguments that are not UTF-8 are shown with `\\xNN` for each odd byte.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

from berth.errors import SIGNAL_BASE
from berth.host.cpuset import CpuSet
from berth.launch.request import RunRequest

#: Version of `request.json` and `record.json` (design, section 3).
SCHEMA_VERSION: Final = "0.2.0"


@dataclass(frozen=True, slots=True)
class Ending:
    """How the command ended.

    Attributes:
        outcome: `succeeded`, `failed` (it ended by itself with a failure), `timed-out`, `stopped` (a signal to berth
            ended it), `not-started` or `interrupted` (berth was killed; how the command ended is unknown).
        code: Exit code of the command, or None where a signal ended it or nothing is known.
        signal: Number of the signal that ended the command, or None.
        error: Name of the error where berth itself failed or refused, or None.
    """

    outcome: str
    code: int | None = None
    signal: int | None = None
    error: str | None = None


def ending_of(code: int | None, signal: int | None) -> Ending:
    """Return the ending of a command that ended by itself."""
    return Ending("succeeded" if code == 0 else "failed", code, signal)


def exit_code_of(ending: Ending) -> int:
    """Return the exit code that passes the command's own ending on: its code, or 128 plus its signal."""
    if ending.signal is not None:
        return SIGNAL_BASE + ending.signal
    return ending.code if ending.code is not None else SIGNAL_BASE


def timestamp(seconds: float) -> str:
    """Return `seconds` since 1970 as ISO 8601 in UTC with milliseconds."""
    moment = datetime.fromtimestamp(seconds, UTC)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def shown(words: Sequence[str]) -> list[str]:
    """Return command words fit for JSON."""
    return [word.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace") for word in words]


def request_document(
    epoch: str,
    request: RunRequest,
    *,
    storage: dict[str, object],
    boot_id: str,
    pid: int,
    start_ticks: int,
    now: float,
) -> dict[str, object]:
    """Return `request.json`: what will be run and by whom, on disk before any process is made.

    Args:
        epoch: The run's epoch id.
        request: What was asked for.
        storage: What the probe of the state root found, and what the operator accepted of it.
        boot_id: Id of the present boot.
        pid: This process.
        start_ticks: Its start time in clock ticks since boot.
        now: Seconds since 1970.
    """
    return {
        "schema_version": SCHEMA_VERSION,
        "epoch": epoch,
        "command": shown(request.command),
        "kind": "sandbox" if request.sandbox else "host",
        "workspace": shown([request.workspace])[0],
        "cores_asked": {
            "cores": request.cores,
            "cpus": None if request.cpus is None else request.cpus.to_list(),
            "shared": request.share_cores,
        },
        "timeout_seconds": request.timeout_s,
        "requested_at": timestamp(now),
        "storage": storage,
        "berth": {"boot_id": boot_id, "pid": pid, "start_ticks": start_ticks},
    }


def run_record(
    document: dict[str, object],
    ending: Ending,
    *,
    claimed: CpuSet | None,
    seen: CpuSet | None,
    sandbox: dict[str, object] | None,
    started_at: float | None,
    ended_at: float,
    duration_s: float | None,
    processes_ended: int,
    stuck: Sequence[int],
    pid: int | None,
) -> dict[str, object]:
    """Return the record of a run that berth saw to its end.

    Args:
        document: Its `request.json`.
        ending: How the command ended.
        claimed: CPUs that were claimed for it, or None.
        seen: Affinity mask read back from the waiting process, or None where it came to none.
        sandbox: What was read back of the sandbox, or None on the host.
        started_at: Seconds since 1970 when the command began, or None where it did not.
        ended_at: Seconds since 1970.
        duration_s: Seconds the command ran, or None.
        processes_ended: How many processes outlived the command and were ended.
        stuck: Pids that could not be ended.
        pid: Pid of the command on the host, or None.
    """
    return {
        **document,
        "command_started": started_at is not None,
        "pid": pid,
        "cores_claimed": None if claimed is None else claimed.to_list(),
        "cores_seen": None if seen is None else seen.to_list(),
        "sandbox": sandbox,
        "started_at": None if started_at is None else timestamp(started_at),
        "ended_at": timestamp(ended_at),
        "duration_seconds": None if duration_s is None else round(duration_s, 6),
        "exit": _exit(ending),
        "processes_ended": processes_ended,
        "processes_stuck": list(stuck),
    }


def interrupted_record(
    document: dict[str, object] | None, epoch: str, *, found_at: float, processes_ended: int
) -> dict[str, object]:
    """Return the record of a run whose berth was killed, written by the next start.

    Args:
        document: Its `request.json`, or None where it was killed before that was written: nothing was started then.
        epoch: Its epoch id.
        found_at: Seconds since 1970.
        processes_ended: How many of its processes were still there and were ended.
    """
    known = document or {"schema_version": SCHEMA_VERSION, "epoch": epoch, "command": None}
    return {
        **known,
        "command_started": None if document else False,
        "found_at": timestamp(found_at),
        "exit": _exit(Ending("interrupted")),
        "processes_ended": processes_ended,
    }


def _exit(ending: Ending) -> dict[str, object]:
    return {"outcome": ending.outcome, "code": ending.code, "signal": ending.signal, "error": ending.error}
