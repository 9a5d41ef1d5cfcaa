"""What the verbs about state roots have in common."""

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

import click

from berth.cli.completion import directories
from berth.errors import ROOT_REFUSED, BerthError

if TYPE_CHECKING:
    from berth.epoch.capability import Accepted
    from berth.epoch.epoch import EpochRoot

root_argument = click.argument("root", metavar="ROOT", shell_complete=directories)
json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON document on stdout.")


def head(root: str) -> dict[str, object]:
    """Return how every JSON answer about a root begins."""
    from berth.epoch.capability import SCHEMA_VERSION

    return {"schema_version": SCHEMA_VERSION, "root": root}


def accepted_of(trust_network: bool, allow_volatile: bool) -> "Accepted":
    """Return what the options and the settings accept."""
    from berth.settings import accepted, load_settings

    return accepted(load_settings(trust_network=trust_network, allow_volatile=allow_volatile, needs_root=False))


@contextlib.contextmanager
def opened_root(root: str, accepted: "Accepted", failure: int, *, trials: bool = True) -> "Iterator[EpochRoot]":
    """Open an existing root; what goes wrong with it then ends with the code `failure`."""
    from berth.epoch.epoch import EpochRoot

    with failures_are(ROOT_REFUSED):
        opened = EpochRoot(root, accepted=accepted, create=False, trials=trials)
    with opened, failures_are(failure):
        yield opened


@contextlib.contextmanager
def failures_are(code: int) -> Iterator[None]:
    """Give failures and missing abilities the exit code `code`; bad requests keep their own."""
    try:
        yield
    except BerthError as error:
        if error.code in (1, 5):
            error.exit_code = code
        raise
