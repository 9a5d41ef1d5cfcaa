"""`berth epoch`: the thin front of `epoch`."""

import json
import os
import time

import click

from berth.cli.completion import directories
from berth.cli.options import accepting_options
from berth.cli.reclaim import command as reclaim
from berth.cli.roots import accepted_of, failures_are, head, json_option, opened_root, root_argument
from berth.errors import RETIRE_FAILED, ROOT_REFUSED

_EPILOG = """\b
Examples:
  berth epoch probe /mnt/scratch              can work-state lie there?
  berth epoch list /var/lib/berth             what runs, what was left, what waits to be reclaimed
  berth epoch reclaim /var/lib/berth --all    remove everything that is retired

\b
Exit status: 0 done, 3 partly, 66 reclaim failed, 67 root refused,
72 not retired, otherwise as every verb.
"""


@click.group(name="epoch", epilog=_EPILOG, short_help="Examine, list, retire and reclaim the work-state of runs.")
def command() -> None:
    """Look after state roots: the directories that hold the work-state of runs.

    The work-state of a run is an epoch, a directory of its own. When the run ends it is retired: renamed, in one step
    that never replaces anything. Later it is reclaimed: removed, a bounded step at a time.
    """


@command.command(
    epilog="""\b
Examples:
  berth epoch probe /mnt/scratch
  berth epoch probe /mnt/nfs/state --trust-network --json | jq .operations
  berth epoch probe /srv/state --publication-root /srv/corpus

\b
Exit status: 0 fit, 67 refused, 2 where ROOT is not a directory."""
)
@root_argument
@click.option(
    "--publication-root",
    metavar="DIR",
    shell_complete=directories,
    help="Try as well whether results can be renamed from ROOT into DIR.",
)
@accepting_options
@json_option
def probe(*, root: str, publication_root: str | None, trust_network: bool, allow_volatile: bool, as_json: bool) -> int:
    """Try everything that work-state in ROOT relies on, and say what was found.

    Files and directories are renamed, replaced, linked, synced and locked in a private directory inside ROOT, which is
    removed afterwards.
    """
    from berth.epoch.examine import examine

    found = examine(root, accepted=accepted_of(trust_network, allow_volatile), publication_root=publication_root)
    document = found.document()
    if found.refusal is not None:
        document["refusal"] = found.refusal.as_dict(ROOT_REFUSED)
    if as_json:
        click.echo(json.dumps(document, indent=2))
    else:
        _print_probe(document)
        if found.refusal is not None:
            click.echo(f"berth: {found.refusal.message}\n{found.refusal.fix}", err=True)
    return 0 if found.refusal is None else ROOT_REFUSED


@command.command(
    name="list",
    epilog="""\b
Examples:
  berth epoch list /var/lib/berth
  berth epoch list /var/lib/berth --json | jq '.epochs[] | select(.state == "left")'""",
)
@root_argument
@json_option
def list_(*, root: str, as_json: bool) -> int:
    """List the epochs in ROOT; nothing is changed.

    active: a process holds it. left: its processes are gone; the next run in ROOT finishes it. retired: waits to be
    reclaimed. foreign: the name is reserved and none that berth gives.
    """
    from dataclasses import asdict

    from berth.epoch.listing import list_epochs

    with failures_are(ROOT_REFUSED):
        found = list_epochs(root)
    if as_json:
        epochs = [asdict(one) for one in found]
        click.echo(json.dumps({**head(os.path.abspath(root)), "epochs": epochs}, indent=2))
        return 0
    for one in found:
        since = _utc(one.retired_at_ms) if one.retired_at_ms else ""
        held = f"held by {', '.join(map(str, one.holders))}" if one.holders else ""
        click.echo(f"{one.state:8} {one.epoch or repr(one.name)}  {since or held}".rstrip())
    counts = {state: sum(one.state == state for one in found) for state in ("active", "left", "retired", "foreign")}
    click.echo(", ".join(f"{count} {state}" for state, count in counts.items()) + ".", err=True)
    return 0


@command.command(
    epilog="""\b
Example:
  berth epoch retire /srv/state 3f0c...e1   (64 digits)

\b
Exit status: 0 retired, 4 in use or the next run's to finish, 72 not retired."""
)
@root_argument
@click.argument("epoch", metavar="EPOCH")
@accepting_options
@json_option
def retire(*, root: str, epoch: str, trust_network: bool, allow_volatile: bool, as_json: bool) -> int:
    """Retire the epoch EPOCH of ROOT, whose processes are gone, and give up what it holds.

    The work-state of a killed `berth run` is left to the next run in ROOT, which records it first.
    """
    from berth.launch.retire import retire_left

    with opened_root(root, accepted_of(trust_network, allow_volatile), RETIRE_FAILED) as opened:
        retired = retire_left(opened, epoch)
        name = os.path.join(opened.path, retired)
    click.echo(json.dumps({**head(opened.path), "epoch": epoch, "retired": name}) if as_json else name)
    return 0


def _print_probe(document: dict[str, object]) -> None:
    operations = document["operations"]
    assert isinstance(operations, dict)
    width = max(map(len, operations))
    for name, one in operations.items():
        took = f"{one['seconds'] * 1000:8.2f} ms" if one["seconds"] is not None else ""
        click.echo(f"{name:{width}}  {one['result']:9}  {took}  {one['why']}".rstrip())
    durable = "outlasts a power cut" if document["durable"] else "not known to outlast a power cut"
    where = f"{document['file_system']} at {document['mount_point']}"
    click.echo(f"{document['verdict']}: {document['root']} ({where}, {document['medium']}; {durable})")


def _utc(milliseconds: int) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%SZ", time.gmtime(milliseconds / 1000))


command.add_command(reclaim)
