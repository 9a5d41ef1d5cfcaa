"""`berth demo`: the shortest true picture of the whole, on this machine, with real work."""

import click

from berth.errors import FailedError

_EPILOG = """\b
Examples:
  berth demo                 in a temporary directory that is removed afterwards
  berth demo --keep DIR      in DIR, which stays for a look around
"""


@click.command(name="demo", epilog=_EPILOG, short_help="See berth at work on this machine, in half a minute.")
@click.option("--keep", metavar="DIR", help="Work in this new directory and leave it.")
def command(keep: str | None) -> int:
    """Count the words of Python's own library on one claimed core, on the host and in a sandbox; kill a third run.

    Everything happens in a directory of its own, with a state root of its own. What is left at the end is shown: one
    record a run, the last retired epoch, and nothing else.
    """
    from berth.cli.demo_scenes import Stage, play

    with Stage.open(keep) as stage:
        failures = play(stage)
    if failures:
        raise FailedError("demo-failed", "; ".join(failures), "`berth doctor` shows what this host lacks.")
    return 0
