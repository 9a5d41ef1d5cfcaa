"""`berth doctor`: the thin front of `doctor`."""

import json
import os
import shutil
import sys
import textwrap
from typing import TYPE_CHECKING, Final

import click

from berth import __version__
from berth.cli.completion import directories
from berth.cli.options import accepting_options

if TYPE_CHECKING:
    from berth.doctor.abilities import Ability

_EPILOG = """\b
Examples:
  berth doctor
  berth doctor --fs /mnt/scratch
  berth doctor --json | jq -r '.abilities[] | select(.level != "works") | .mend'

\b
Exit status: 0 when it could look, whatever it found. With --fs: 5 where
work-state cannot lie in DIR, 2 where DIR is not a directory.
"""

#: Mark and colour of each level, on a terminal.
_MARKS: Final = {"works": ("+", "green"), "works with less": ("~", "yellow"), "does not": ("-", "red")}
_LEAST_TEXT_WIDTH: Final = 30
#: Not a space to textwrap: keeps the words of a command on one line, where they can be copied.
_FIXED_SPACE: Final = "\N{NO-BREAK SPACE}"


@click.command(
    name="doctor",
    epilog=_EPILOG,
    short_help="Say what works on this host, what does not, and what mends it.",
)
@click.option(
    "--fs", "directory", metavar="DIR", shell_complete=directories, help="Only try whether work-state can lie in DIR."
)
@accepting_options
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document on stdout.")
def command(*, directory: str | None, trust_network: bool, allow_volatile: bool, as_json: bool) -> int:
    """Try what berth can use on this host, and say what works, what does not, and what mends it.

    Everything is tried on the real object and nothing is derived from a version: namespaces are made, a sandbox is set
    up, names are renamed, cores are locked, ranks are run. Nothing is left behind, no NPU is opened.
    """
    from berth.doctor import checks
    from berth.doctor.abilities import DOES_NOT, document, summary
    from berth.settings import accepted, load_settings, sandbox_account

    settings = load_settings(trust_network=trust_network, allow_volatile=allow_volatile, needs_root=directory is None)
    if directory is None:
        assert settings.state_root is not None
        found = checks.look(
            state_root=settings.state_root, accepted=accepted(settings), sandbox_user=sandbox_account(settings)
        )
    else:
        path = os.path.abspath(directory) if directory else ""
        found = [checks.look_at_file_system(path, accepted(settings))]
    kernel = os.uname().release
    if as_json:
        click.echo(json.dumps(document(found, berth=__version__, kernel=kernel), indent=2))
    else:
        _print(found)
        _echo(f"{summary(found)} (berth {__version__}, Linux {kernel}).")
    return 5 if directory is not None and found[0].level == DOES_NOT else 0


def _print(found: "list[Ability]") -> None:
    """Print one line for each ability, folded to the terminal where there is one, and what mends it below."""
    terminal = sys.stdout.isatty()
    width = shutil.get_terminal_size().columns - 1 if terminal else sys.maxsize
    name_width = max(len(ability.name) for ability in found)
    level_width = max(len(ability.level) for ability in found)
    for ability in found:
        mark, colour = _MARKS[ability.level]
        begin = f"{ability.name:{name_width}}  {ability.level:{level_width}}  "
        if terminal:
            begin = f"{mark} {begin}"
        folded = _fold(ability.why, len(begin), width)
        if terminal:
            styled = click.style(mark, fg=colour) if _wants_colour() else mark
            begin = styled + begin[1:]
        _echo(begin + folded)
        if ability.mend:
            _echo("    " + _fold(ability.mend, 4, width))


def _fold(text: str, indent: int, width: int) -> str:
    """Fold `text` so that it fits beside or below an indent of that many columns; commands in backticks stay whole."""
    text = _shown(text)
    if width - indent < _LEAST_TEXT_WIDTH:
        return text
    parts = text.split("`")
    parts[1::2] = [part.replace(" ", _FIXED_SPACE) for part in parts[1::2]]
    lines = textwrap.wrap("`".join(parts), width=width - indent, break_long_words=False, break_on_hyphens=False)
    return ("\n" + " " * indent).join(lines).replace(_FIXED_SPACE, " ")


def _shown(text: str) -> str:
    """Return `text` without what would steer a terminal: it may hold the command line of anybody's process."""
    return "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in text)


def _wants_colour() -> bool:
    return not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def _echo(text: str) -> None:
    """Print `text`, whatever the encoding of standard output can show."""
    encoding = sys.stdout.encoding or "ascii"
    click.echo(text.encode(encoding, "backslashreplace").decode(encoding))
