"""`berth epoch reclaim`: the thin front of `epoch.reclaim`."""

import contextlib
import json
import os
import signal
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

import click

from berth.cli.options import accepting_options
from berth.cli.roots import accepted_of, head, json_option, opened_root, root_argument
from berth.errors import RECLAIM_FAILED, SIGNAL_BASE, BerthError, MalformedError

if TYPE_CHECKING:
    from berth.epoch.epoch import EpochRoot
    from berth.epoch.reclaim import Budgets, Reclaimed

_COUNT_AT_MOST: Final = 1_000_000
_LOCK_WAIT_S: Final = 30.0
_ENDING: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
#: Why a step ended that left something it was asked to remove, whatever the budgets.
_STAYS: Final = ("blocked", "discovery-budget", "held")


@click.command(
    name="reclaim",
    epilog="""\b
Examples:
  berth epoch reclaim /var/lib/berth                   one step, as every run makes it
  berth epoch reclaim /var/lib/berth --all             everything, with a progress bar
  berth epoch reclaim /var/lib/berth --watch 10        a step every ten seconds, until Ctrl-C
  berth epoch reclaim /srv/state --entries 1000 --seconds 0.5 --json | jq .backlog

\b
Exit status: 0 within the budgets, 3 where something keeps the rest,
66 where nothing was removed because ROOT is not in order.""",
)
@root_argument
@click.option("--roots", type=int, metavar="N", help="Most retired epochs to touch.  [default: 1]")
@click.option("--entries", type=int, metavar="N", help="Most names to remove.  [default: 4096]")
@click.option("--seconds", type=float, metavar="S", help="Time for removing; one system call may outlast it.  [0.05]")
@click.option(
    "--discovery", type=int, metavar="N", help="Most names to read in ROOT; beyond, nothing is removed.  [65536]"
)
@click.option("--all", "everything", is_flag=True, help="Remove all that is retired, without budgets.")
@click.option("--watch", type=float, metavar="SECONDS", help="Make a step every SECONDS until told to end.")
@accepting_options
@json_option
def command(
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
    with opened_root(root, accepted_of(trust_network, allow_volatile), RECLAIM_FAILED, trials=False) as opened:
        if watch is not None:
            found, ended_by = _watch(opened, budgets, watch, quiet=as_json)
        else:
            found, ended_by = _one_step(opened, budgets, progress=everything and not as_json), None
        document = _document(opened, found)
    click.echo(json.dumps(document, indent=2) if as_json else _summary(document))
    _say_what_stays(opened, found)
    if ended_by is not None:
        return SIGNAL_BASE + ended_by
    return 3 if found.stop_reason in _STAYS else 0


def _say_what_stays(root: "EpochRoot", found: "Reclaimed") -> None:
    """Say on standard error what keeps the rest."""
    for name, why in found.blocked.items():
        click.echo(f"berth: {name} stays: {why}", err=True)
    if found.stop_reason == "discovery-budget":
        click.echo(
            f"berth: {root.path} holds more names than the discovery budget allows to read, so nothing was removed\n"
            "Raise --discovery, or use --all.",
            err=True,
        )
    if found.stop_reason == "held":
        click.echo("berth: processes hold what is left; `berth epoch list` names them", err=True)


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
    told = ""
    try:
        while True:
            try:
                found = step(root, budgets)
            except BerthError as error:  # it may be put in order meanwhile; a root that is gone will not
                if os.fstat(root.fd).st_nlink == 0:
                    raise
                if error.message != told:
                    click.echo(f"berth: {error.message}\n{error.fix}", err=True)
                found, told = None, error.message
            if found is not None:
                total.add(found)
                told = ""
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

    document = {**head(root.path), **asdict(found)}
    roots: object = document.pop("backlog_roots")
    entries, whole = None, False
    if count:  # what is there now, whatever the step has read
        left = _retired_names(root)
        roots, (entries, whole) = len(left), count_entries(root.path, left, most=_COUNT_AT_MOST)
    document["backlog"] = {"roots": roots, "entries": entries, "entries_complete": whole}
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


def _epochs(count: int) -> str:
    return "1 retired epoch" if count == 1 else f"{count} retired epochs"


def _retired_names(root: "EpochRoot") -> list[str]:
    from berth.epoch.names import retired_name

    return [retired_name(*ids) for ids in root.retired()]
