"""`berth run`: the thin front of `launch`."""

import contextlib
import json
import os
import sys
from typing import TYPE_CHECKING

import click

from berth.cli.completion import directories, files
from berth.cli.options import accepting_options
from berth.errors import RUN_TIMED_OUT, BerthError, MalformedError

if TYPE_CHECKING:
    from berth.epoch.epoch import EpochRoot

_EPILOG = """\b
Examples:
  berth run --cores 2 -- ./train.sh
  berth run --cpus 4-7 --timeout 3600 -- python3 train.py
  berth run --sandbox --workspace ~/case1 -- sh -c 'make && ./check'
  berth run --json -- true 2>/dev/null | jq .exit

\b
Exit status: that of COMMAND, 128+N where signal N ended it, 124 time limit,
126 not executable, 127 not found, 125 berth itself failed or refused.
Records: <state root>/records/, one JSON file per run.
"""


@click.command(
    name="run",
    epilog=_EPILOG,
    short_help="Give a command its place: cores, sandbox, durable record.",
    context_settings={"ignore_unknown_options": False, "allow_interspersed_args": False},
)
@click.option("--sandbox", is_flag=True, help="Run in a fresh sandbox, with the workspace as /workspace.")
@click.option("--cores", type=int, metavar="N", help="Claim N whole cores, on one NUMA node where they fit.")
@click.option("--cpus", metavar="LIST", help="Claim exactly these CPUs, such as 0-3,8.")
@click.option(
    "--share-cores", is_flag=True, help="Claim them together with others who share, never with one who does not."
)
@click.option(
    "--workspace",
    metavar="DIR",
    shell_complete=directories,
    help="Directory the command works in.  [default: this directory]",
)
@click.option("--state-root", metavar="DIR", shell_complete=directories, help="Directory of records and work-state.")
@accepting_options
@click.option("--timeout", type=float, metavar="SECONDS", help="End the command after this time (exit status 124).")
@click.option("--json", "as_json", is_flag=True, help="Print the record on stdout; COMMAND's output goes to stderr.")
@click.argument("command", nargs=-1, metavar="-- COMMAND...", type=click.UNPROCESSED, shell_complete=files)
def command(
    *,
    sandbox: bool,
    cores: int | None,
    cpus: str | None,
    share_cores: bool,
    workspace: str | None,
    state_root: str | None,
    trust_network: bool,
    allow_volatile: bool,
    timeout: float | None,
    as_json: bool,
    command: tuple[str, ...],
) -> int:
    """Give COMMAND its place, run it, and take all of it back when it ends.

    Claims the cores that are asked for, so that no other `berth run` gets them; runs the command with standard input,
    output and exit status passed through; ends everything it started when it ends, when its time is over, on Ctrl-C,
    and when berth itself is killed; and leaves one durable record. Without --cores and --cpus the caller's CPU mask
    stays as it is.
    """
    from berth.epoch.epoch import EpochRoot
    from berth.host.cpuset import CpuSet
    from berth.launch.recover import recover
    from berth.launch.request import RunRequest, check_request
    from berth.launch.run import start
    from berth.linux.signals import SignalInbox
    from berth.settings import accepted, load_settings, sandbox_account, settings_directories

    settings = load_settings(state_root=state_root, trust_network=trust_network, allow_volatile=allow_volatile)
    assert settings.state_root is not None
    request = RunRequest(
        command=command,
        sandbox=sandbox,
        cores=cores,
        cpus=None if cpus is None else CpuSet.parse_list(cpus, source="--cpus"),
        share_cores=share_cores,
        workspace=_directory(workspace),
        timeout_s=timeout,
        output_to_stderr=as_json,
        settings_directories=settings_directories(),
    )
    check_request(request)
    with EpochRoot(settings.state_root, accepted=accepted(settings)) as root:
        for left in recover(root):
            if left.error is not None:
                _note(left.error.message)
            elif left.processes_ended:
                _note(f"{_processes(left.processes_ended)} of the killed run {left.epoch[:12]}... had to be ended")
        if settings.epoch.reclaim_at_start:
            _reclaim(root)
        run = start(request, root, sandbox_user=sandbox_account(settings) if sandbox else None)
        with SignalInbox() as inbox:
            finished = run.wait(inbox)
    if finished.exit_code == RUN_TIMED_OUT and timeout is not None and not as_json:
        _note(f"the time limit of {timeout:g} s ended the command")
    ended = finished.record["processes_ended"]
    if isinstance(ended, int) and ended:
        _note(f"{_processes(ended)} outlived the command and had to be ended")
    if stuck := finished.record["processes_stuck"]:
        _note(f"processes {stuck} cannot be ended; what they were given stays claimed until they are gone")
    if as_json:
        with contextlib.suppress(BrokenPipeError):  # nobody wants it; the command's own status still counts
            print(json.dumps(finished.record, indent=2), flush=True)
    return finished.exit_code


def _reclaim(root: "EpochRoot") -> None:
    """Make one reclaim step; a root that is not in order keeps no command from running."""
    from berth.epoch.reclaim import reclaim

    try:
        step = reclaim(root)
        for name, why in (step.blocked if step else {}).items():
            _note(f"the retired epoch {name} stays: {why}")
    except BerthError as error:
        _note(f"{error.message}. {error.fix}")
    except OSError as error:
        _note(f"the retired epochs of {root.path!r} could not be looked at: {error}")


def _directory(workspace: str | None) -> str:
    if workspace == "":
        raise MalformedError("bad-workspace", "--workspace is empty", "Give a directory, or leave it out.")
    try:
        return workspace or os.getcwd()
    except FileNotFoundError:
        raise MalformedError(
            "bad-workspace", "the current directory was removed", "Change to one that exists, or give --workspace DIR."
        ) from None


def _processes(count: int) -> str:
    return "1 process" if count == 1 else f"{count} processes"


def _note(text: str) -> None:
    """Say something beside the command's output, if anybody still reads it."""
    with contextlib.suppress(OSError):
        print(f"berth: {text}", file=sys.stderr, flush=True)
