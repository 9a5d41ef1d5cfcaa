"""What a caller asks berth to run, checked as far as that needs nothing but the request itself."""

import math
from dataclasses import dataclass

from berth.errors import MalformedError
from berth.host.cpuset import CpuSet


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRequest:
    """One command and the place it asks for.

    Attributes:
        command: Program and arguments.
        sandbox: Run in a fresh sandbox; otherwise on the host, as the caller.
        cores: Number of whole cores to claim, or None.
        cpus: Exactly these CPUs to claim, or None.
        share_cores: Claim them together with others who share.
        workspace: Directory the command works in.
        timeout_s: Time limit in seconds from the moment the command begins, or None.
        output_to_stderr: Send the command's standard output to standard error.
        settings_directories: Directories of berth's settings, which no sandbox may write.
    """

    command: tuple[str, ...]
    sandbox: bool = False
    cores: int | None = None
    cpus: CpuSet | None = None
    share_cores: bool = False
    workspace: str
    timeout_s: float | None = None
    output_to_stderr: bool = False
    settings_directories: tuple[str, ...] = ()


def check_request(request: RunRequest) -> None:
    """Refuse a request that can work on no host.

    Raises:
        MalformedError: With the option that is wrong.
    """
    if not request.command or not request.command[0]:
        raise MalformedError(
            "empty-command", "there is no command to run", "Write it after --, as in: berth run -- sleep 1"
        )
    if any("\0" in word for word in request.command):
        raise MalformedError("bad-command", "the command holds a NUL character", "No program can be given one.")
    if request.cores is not None and request.cpus is not None:
        raise MalformedError(
            "cores-and-cpus", "--cores and --cpus exclude each other", "Give a number of cores, or a list of CPUs."
        )
    if request.cores is not None and request.cores < 1:
        raise MalformedError(
            "bad-cores",
            f"--cores {request.cores}: at least one core is needed",
            "Leave --cores out to claim no core.",
        )
    if request.cpus is not None and not request.cpus:
        raise MalformedError("bad-cpu-list", "--cpus names no CPU", "Write CPU numbers and ranges like 0-3,8.")
    if request.share_cores and request.cores is None and request.cpus is None:
        raise MalformedError(
            "nothing-to-share",
            "--share-cores shares what --cores or --cpus claims, and neither is given",
            "Add --cores N or --cpus LIST, or leave --share-cores out.",
        )
    if request.timeout_s is not None and not (math.isfinite(request.timeout_s) and request.timeout_s > 0):
        raise MalformedError(
            "bad-timeout",
            f"--timeout {request.timeout_s:g}: a time limit is a number of seconds above 0",
            "Leave --timeout out for no limit.",
        )
