"""`berth bind`: the thin front of `binding`."""

import sys
from typing import Final

import click

from berth.cli.completion import files
from berth.errors import MalformedError

_EPILOG = """\b
Examples:
  berth bind snapshot --match 'vllm serve' --sample 5
  berth bind snapshot --pid 4711 --pid 4712 --rank-map rank0=4711:npu0,rank1=4712:npu1 -o before.json
"""
_LONGEST_SAMPLE_S: Final = 3600.0


@click.group(name="bind", epilog=_EPILOG, short_help="See where the threads of running jobs really run.")
def command() -> None:
    """See where the threads of running jobs run, next to which accelerator, and what is wrong with that."""


@command.command(
    epilog="""\b
Examples:
  berth bind snapshot --pid 4711
  berth bind snapshot --match 'python.*train' --sample 10 -o snapshot.json
  berth bind snapshot --accelerator --json | jq '.processes[].cpus_allowed_list'

\b
Exit status: 0 written, 2 a bad option or nothing matches, 4 a process is gone."""
)
@click.option("--pid", "pids", type=int, multiple=True, metavar="N", help="A process; may be repeated.")
@click.option("--match", multiple=True, metavar="REGEX", help="Processes by their command line; may be repeated.")
@click.option("--accelerator", is_flag=True, help="Processes that have an accelerator's device open.")
@click.option("--sample", type=float, metavar="SECONDS", default=0.0, help="Watch their load for so long.")
@click.option("--rank-map", metavar="FILE|SPEC", shell_complete=files, help="Who is which rank: rank0=4711:npu0,...")
@click.option("-o", "output", metavar="FILE", shell_complete=files, help="Write here; an existing file is kept.")
@click.option("--json", "as_json", is_flag=True, help="Print the snapshot on stdout.")
def snapshot(
    *,
    pids: tuple[int, ...],
    match: tuple[str, ...],
    accelerator: bool,
    sample: float,
    rank_map: str | None,
    output: str | None,
    as_json: bool,
) -> int:
    """Write down where processes, their threads and their memory are, and what the host is made of.

    Nothing is changed, and no rights are needed for processes of your own. What cannot be read is listed under
    `availability`, with what that means.
    """
    from berth.binding.choose import holding_accelerators, matching, read_ranks
    from berth.binding.collect import CollectRequest, collect
    from berth.binding.snapshot import NpuTopology, encode_snapshot

    if not 0 <= sample <= _LONGEST_SAMPLE_S:
        raise MalformedError("bad-sample", f"--sample is {sample:g}", "Give seconds from 0 to 3600.")
    ranks = read_ranks(rank_map) if rank_map else ()
    chosen = [*pids, *(matching(match) if match else []), *(holding_accelerators() if accelerator else [])]
    targets = tuple(dict.fromkeys([*chosen, *(rank.pid for rank in ranks)]))
    if not targets:
        raise MalformedError(
            "no-target", "no process is named, or none has an accelerator open", "Give --pid N or --match REGEX."
        )
    request = CollectRequest(pids=targets, sample_s=sample, ranks=ranks, command=tuple(sys.argv[1:]))
    found = collect(request, accelerators=NpuTopology(vendor=None, source=[]))
    data = encode_snapshot(found)
    if as_json:
        click.echo(data.decode(), nl=False)
    if output or not as_json:
        path = output or "snapshot.json"
        _write_new(path, data)
        threads = sum(len(process.threads) for process in found.processes if process.target)
        click.echo(
            f"{path}: {len(targets)} processes with {threads} threads; "
            f"{len(found.availability.missing)} facts could not be read.",
            err=True,
        )
    return 0


def _write_new(path: str, data: bytes) -> None:
    """Write `path` durably, never over an existing file.

    Raises:
        MalformedError: It exists, or its directory does not.
    """
    from berth.durable.files import durable_create

    try:
        durable_create(path, data, mode=0o644)
    except FileExistsError as error:
        raise MalformedError("file-exists", f"{path!r} exists already, and is kept", "Give another name.") from error
    except (OSError, ValueError) as error:
        raise MalformedError("not-written", f"{path!r} could not be written: {error}", "Give another name.") from error
