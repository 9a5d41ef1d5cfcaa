"""`berth epoch`: the thin front of `epoch`."""

import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Final

import click

from berth.cli.completion import directories
from berth.cli.options import accepting_options
from berth.errors import RECLAIM_FAILED, RETIRE_FAILED, ROOT_REFUSED, SIGNAL_BASE, BerthError, MalformedError

if TYPE_CHECKING:
    from berth.epoch.capability import Accepted
    from berth.epoch.epoch import EpochRoot
    from berth.epoch.reclaim import Budgets, Reclaimed

_EPILOG = """\b
Examples:
  berth epoch probe /mnt/scratch              can work-state lie there?
  berth epoch list /var/lib/berth             what runs, what was left, what waits to be reclaimed
  berth epoch reclaim /var/lib/berth --all    remove everything that is retired

\b
Exit status: 0 done, 3 partly, 66 reclaim failed, 67 root refused,
72 not retired, otherwise as every verb.
"""
_COUNT_AT_MOST: Final = 1_000_000
_LOCK_WAIT_S: Final = 30.0
_ENDING: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_root_argument = click.argument("root", metavar="ROOT", shell_complete=directories)
_json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON document on stdout.")


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
@_root_argument
@click.option(
    "--publication-root",
    metavar="DIR",
    shell_complete=directories,
    help="Try as well whether results can be renamed from ROOT into DIR.",
)
@accepting_options
@_json_option
def probe(*, root: str, publication_root: str | None, trust_network: bool, allow_volatile: bool, as_json: bool) -> int:
    """Try everything that work-state in ROOT relies on, and say what was found.

    Files and directories are renamed, replaced, linked, synced and locked in a private directory inside ROOT, which is
    removed afterwards.
    """
    from berth.epoch.examine import examine

    with _failures_are(ROOT_REFUSED):
        found = examine(root, accepted=_accepted(trust_network, allow_volatile), publication_root=publication_root)
    document = found.document()
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
@_root_argument
@_json_option
def list_(*, root: str, as_json: bool) -> int:
    """List the epochs in ROOT; nothing is changed.

    active: a process holds it. left: its processes are gone; the next run in ROOT finishes it. retired: waits to be
    reclaimed. foreign: the name is reserved and none that berth gives.
    """
    from dataclasses import asdict

    from berth.epoch.listing import list_epochs

    with _failures_are(ROOT_REFUSED):
        found = list_epochs(root)
    if as_json:
        epochs = [asdict(one) for one in found]
        click.echo(json.dumps({**_head(os.path.abspath(root)), "epochs": epochs}, indent=2))
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
@_root_argument
@click.argument("epoch", metavar="EPOCH")
@accepting_options
@_json_option
def retire(*, root: str, epoch: str, trust_network: bool, allow_volatile: bool, as_json: bool) -> int:
    """Retire the epoch EPOCH of ROOT, whose processes are gone, and give up what it holds.

    The work-state of a killed `berth run` is left to the next run in ROOT, which records it first.
    """
    from berth.epoch.retire import retire_left

    with _opened(root, _accepted(trust_network, allow_volatile), RETIRE_FAILED) as opened:
        retired = retire_left(opened, epoch)
        name = os.path.join(opened.path, retired)
    click.echo(json.dumps({**_head(opened.path), "epoch": epoch, "retired": name}) if as_json else name)
    return 0


@command.command(
    epilog="""\b
Examples:
  berth epoch reclaim /var/lib/berth                   one step, as every run makes it
  berth epoch reclaim /var/lib/berth --all             everything, with a progress bar
  berth epoch reclaim /var/lib/berth --watch 10        a step every ten seconds, until Ctrl-C
  berth epoch reclaim /srv/state --entries 1000 --seconds 0.5 --json | jq .backlog

\b
Exit status: 0 within the budgets, 3 where something keeps the rest,
66 where nothing was removed because ROOT is not in order."""
)
@_root_argument
@click.option("--roots", type=int, metavar="N", help="Most retired epochs to touch.  [default: 1]")
@click.option("--entries", type=int, metavar="N", help="Most names to remove.  [default: 4096]")
@click.option("--seconds", type=float, metavar="S", help="Time for removing; one system call may outlast it.  [0.05]")
@click.option(
    "--discovery", type=int, metavar="N", help="Most names to read in ROOT; beyond, nothing is removed.  [65536]"
)
@click.option("--all", "everything", is_flag=True, help="Remove all that is retired, without budgets.")
@click.option("--watch", type=float, metavar="SECONDS", help="Make a step every SECONDS until told to end.")
@accepting_options
@_json_option
def reclaim(
    *,
    root: str,
    roots: int | None,
    entries: int | None,
    seconds: float | None,
    discovery: int | None,
    everything: bool,
    watch: float | None,
    trust_network: bool,
    allow_volatile: bool,
    as_json: bool,
) -> int:
    """Remove retired epochs of ROOT, within budgets; what is left is the next step's.

    Each step removes at least one name if any can be removed. Active epochs, records and everything else in ROOT stay
    as they are; a retired epoch with something mounted in it is not touched.
    """
    from berth.epoch.reclaim import UNLIMITED, Budgets

    given = {"roots": roots, "entries": entries, "seconds": seconds, "discovery": discovery}
    given = {name: value for name, value in given.items() if value is not None}
    if everything and (given or watch is not None):
        raise click.UsageError("--all knows no budgets and no --watch")
    if watch is not None and not 0 < watch <= 86_400:
        raise MalformedError("bad-interval", f"--watch is {watch:g}", "Give seconds above 0, a day at most.")
    if watch is not None:
        given.setdefault("discovery", None)
    budgets = UNLIMITED if everything else Budgets(**given)  # type: ignore[arg-type]
    with _opened(root, _accepted(trust_network, allow_volatile), RECLAIM_FAILED) as opened:
        if watch is not None:
            found, ended_by = _watch(opened, budgets, watch, quiet=as_json)
        else:
            found, ended_by = _one_step(opened, budgets, progress=everything and not as_json), None
        document = _document(opened, found)
    click.echo(json.dumps(document, indent=2) if as_json else _summary(document))
    for name, why in found.blocked.items():
        click.echo(f"berth: {name} stays: {why}", err=True)
    if ended_by is not None:
        return SIGNAL_BASE + ended_by
    return 3 if found.stop_reason in ("blocked", "discovery-budget") else 0


def _one_step(root: "EpochRoot", budgets: "Budgets", *, progress: bool) -> "Reclaimed":
    from berth.epoch.listing import count_entries
    from berth.epoch.reclaim import reclaim as step
    from berth.errors import FailedError

    with contextlib.ExitStack() as shown:
        tell: Callable[[int], None] = lambda _count: None  # noqa: E731
        if progress and sys.stderr.isatty():
            total, _ = count_entries(root.path, _retired_names(root), most=_COUNT_AT_MOST)
            bar = shown.enter_context(click.progressbar(length=total, label="Reclaiming", file=sys.stderr))
            tell = bar.update
        found = step(root, budgets, wait_s=_LOCK_WAIT_S, workers=2, on_removed=tell)
    if found is None:
        raise FailedError(
            "reclaim-lock",
            f"another process is reclaiming {root.path!r} and did not finish in {_LOCK_WAIT_S:.0f} s",
            "Let it finish; what is retired stays retired.",
        )
    return found


def _watch(
    root: "EpochRoot", budgets: "Budgets", interval_s: float, *, quiet: bool
) -> "tuple[Reclaimed, signal.Signals]":
    """Make a step every `interval_s` seconds until a signal comes; return the sum of all, and the signal."""
    from berth.epoch.reclaim import Reclaimed
    from berth.epoch.reclaim import reclaim as step

    total = Reclaimed()
    # A signal is taken between steps only: a step is short, and its end is synced.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _ENDING)
    try:
        while True:
            found = step(root, budgets)
            if found is not None:
                total.add(found)
                if found.removed_entries and not quiet:
                    click.echo(_summary(_document(root, found, count=False)))
            ended_by = signal.sigtimedwait(_ENDING, interval_s)
            if ended_by is not None:
                return total, signal.Signals(ended_by.si_signo)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _document(root: "EpochRoot", found: "Reclaimed", *, count: bool = True) -> dict[str, object]:
    """Return what a step did as the JSON answer, with the backlog in roots and entries."""
    from dataclasses import asdict

    from berth.epoch.listing import count_entries

    entries, whole = count_entries(root.path, _retired_names(root), most=_COUNT_AT_MOST) if count else (None, False)
    document = {**_head(root.path), **asdict(found)}
    document["backlog"] = {"roots": document.pop("backlog_roots"), "entries": entries, "entries_complete": whole}
    return document


def _summary(document: dict[str, object]) -> str:
    removed, backlog = document["removed_roots"], document["backlog"]
    assert isinstance(removed, list)
    assert isinstance(backlog, dict)
    left = f"{backlog['roots']} retired left"
    if backlog["entries"] is not None and backlog["roots"]:
        left += f", with {'' if backlog['entries_complete'] else 'at least '}{backlog['entries']} names"
    return (
        f"{_epochs(len(removed))} removed, {document['removed_entries']} names in all; {left} "
        f"({document['stop_reason']})."
    )


def _head(root: str) -> dict[str, object]:
    from berth.epoch.capability import SCHEMA_VERSION

    return {"schema_version": SCHEMA_VERSION, "root": root}


def _epochs(count: int) -> str:
    return "1 retired epoch" if count == 1 else f"{count} retired epochs"


def _retired_names(root: "EpochRoot") -> list[str]:
    from berth.epoch.names import retired_name

    return [retired_name(*ids) for ids in root.retired()]


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


def _accepted(trust_network: bool, allow_volatile: bool) -> "Accepted":
    from berth.settings import accepted, load_settings

    return accepted(load_settings(trust_network=trust_network, allow_volatile=allow_volatile, needs_root=False))


@contextlib.contextmanager
def _opened(root: str, accepted: "Accepted", failure: int) -> "Iterator[EpochRoot]":
    """Open an existing root; what goes wrong with it then ends with the code `failure`."""
    from berth.epoch.epoch import EpochRoot

    with _failures_are(ROOT_REFUSED):
        opened = EpochRoot(root, accepted=accepted, create=False)
    with opened, _failures_are(failure):
        yield opened


@contextlib.contextmanager
def _failures_are(code: int) -> Iterator[None]:
    """Give failures and missing abilities the exit code `code`; bad requests keep their own."""
    try:
        yield
    except BerthError as error:
        if error.code in (1, 5):
            error.exit_code = code
        raise
