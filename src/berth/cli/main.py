"""The command line: find the verb, run it, turn every failure into one paragraph and an exit code.

This is the only place that catches everything. Verbs, and whatever only a failure needs, are imported when they are
called, so that `berth --help` starts quickly.
"""

import contextlib
import importlib
import io
import os
import signal
import sys
from typing import Final

import click

from berth import __version__
from berth.errors import RUN_FAILED, SIGNAL_BASE, BerthError

#: Verb, module below berth.cli, one line of help. A test compares the lines with the verbs' own help.
VERBS: Final = {
    "run": ("run", "Give a command its place: cores, sandbox, durable record."),
    "bind": ("bind", "See where the threads of running jobs really run."),
    "epoch": ("epoch", "Examine, list, retire and reclaim the work-state of runs."),
    "doctor": ("doctor", "Say what works on this host, what does not, and what mends it."),
    "demo": ("demo", "See berth at work on this machine, in half a minute."),
    "completion": ("completion", "Print the completion script for a shell."),
}

_HELP = """Give a command its place on a shared accelerator host, and take all of it back when it ends.

\b
Examples:
  berth run --cores 2 -- ./train.sh          on the host, on two claimed cores
  berth run --sandbox -- sh                  in a fresh sandbox, with this directory as /workspace
  berth doctor                               what works here, and what mends the rest
"""


class _Verbs(click.Group):
    """The verbs, each imported when it is called."""

    def list_commands(self, _context: click.Context) -> list[str]:
        return list(VERBS)

    def get_command(self, _context: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in VERBS:
            return None
        module = importlib.import_module(f"berth.cli.{VERBS[cmd_name][0]}")
        command: click.Command = module.command
        return command

    def format_commands(self, _context: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, help_line) for name, (_, help_line) in VERBS.items()])


def _help_width() -> int:
    """Return the width of help texts; click would import all of shutil, and the compressors with it, to find it."""
    try:
        columns = int(os.environ.get("COLUMNS") or os.get_terminal_size(1).columns)
    except (OSError, ValueError):
        columns = 80
    return max(min(columns, 80) - 2, 50)


@click.group(
    cls=_Verbs,
    help=_HELP,
    context_settings={"help_option_names": ["-h", "--help"], "terminal_width": _help_width()},
)
@click.version_option(__version__, prog_name="berth")
def cli() -> None:
    """All verbs hang here."""


def main(arguments: list[str] | None = None) -> int:
    """Run berth with `arguments`, by default those of the process, and return its exit code."""
    _open_missing_streams()
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    words = sys.argv[1:] if arguments is None else arguments
    try:
        result = cli.main(args=words, prog_name="berth", standalone_mode=False)
        code = result if isinstance(result, int) else 0
        with contextlib.suppress(BrokenPipeError):  # nobody reads the rest; what was done still counts
            sys.stdout.flush()
    except click.exceptions.NoArgsIsHelpError as error:
        _say(error.format_message())
        code = 2
    except click.ClickException as error:
        code = _report(words, BerthError("bad-usage", error.format_message(), _usage_hint(error)), 2)
    except (click.Abort, KeyboardInterrupt):
        code = SIGNAL_BASE + signal.SIGINT
        _report(words, _interrupted(code), code)
    except BerthError as error:
        code = _report(words, error, error.code)
    except BrokenPipeError:
        code = RUN_FAILED if words[:1] == ["run"] else 1
    except OSError as error:
        code = _report(words, BerthError("system-call", _told(error), "The reason is the kernel's own."), 1)
    except Exception as error:  # noqa: BLE001 - the one place: a bug becomes a report, never a traceback
        code = _report(words, _unexpected(error), 1)
    _drop_unwritable_output()
    return code


def _report(words: list[str], error: BerthError, code: int) -> int:
    """Print `error` and return its exit code.

    `berth run` keeps the low codes for the command it runs: a failure of berth itself is 125 there, unless the error
    carries a code of its own.
    """
    if error.exit_code is not None:
        code = error.exit_code
    elif words[:1] == ["run"]:
        code = RUN_FAILED
    if _asks_for_json(words):
        import json

        try:
            print(json.dumps({"error": error.as_dict(code)}), flush=True)
            return code
        except OSError:
            _drop_unwritable_output()
    _say(f"berth: {error.message}" + (f"\n{error.fix}" if error.fix else ""))
    return code


def _interrupted(code: int) -> BerthError:
    error = BerthError("interrupted", "stopped by Ctrl-C")
    error.exit_code = code
    return error


def _told(error: OSError) -> str:
    return str(error) if error.filename else f"standard output, or another open file: {error.strerror}"


def _asks_for_json(words: list[str]) -> bool:
    """Say whether `--json` stands among berth's own options; those of `berth run` end where its command begins."""
    verb = cli.get_command(click.Context(cli), words[0]) if words else None
    if isinstance(verb, click.Group):
        words = words[1:]
        verb = verb.get_command(click.Context(verb), words[0]) if words else None
    options = verb.params if verb else []
    with_value = {
        name for option in options if isinstance(option, click.Option) and not option.is_flag for name in option.opts
    }
    own_words_only = verb is None or verb.context_settings.get("allow_interspersed_args", True)
    rest = iter(words[1:])
    for word in rest:
        if word == "--json":
            return True
        if word in with_value:
            next(rest, None)
        elif word == "--" or not (own_words_only or word.startswith("-")):
            return False
    return False


def _usage_hint(error: click.ClickException) -> str:
    context = error.ctx if isinstance(error, click.UsageError) else None
    return f"See `{context.command_path if context else 'berth'} --help`."


def _unexpected(error: Exception) -> BerthError:
    """Keep what a developer needs in a file, and return what a user needs."""
    import tempfile
    import traceback

    try:
        with tempfile.NamedTemporaryFile("w", prefix="berth-error-", suffix=".txt", delete=False) as file:
            file.write(f"berth {__version__}, Python {sys.version}\n{traceback.format_exc()}")
        where = f"The details are in {file.name}; please report them."
    except OSError:
        where = "The details could not be written to a file."
    return BerthError("internal-error", f"unexpected {type(error).__name__}: {error}", where)


def _say(text: str) -> None:
    """Write to standard error, if anybody still reads it."""
    with contextlib.suppress(OSError):
        print(text, file=sys.stderr, flush=True)


def _open_missing_streams() -> None:
    """Open /dev/null in place of standard streams that the caller closed: no other file may get their numbers."""
    while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(fd, True)
    os.close(fd)
    # The interpreter found them closed, and has no object for them.
    sys.stdout = sys.stdout or os.fdopen(1, "w", closefd=False)
    sys.stderr = sys.stderr or os.fdopen(2, "w", closefd=False)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="backslashreplace")  # names need not be text


def _drop_unwritable_output() -> None:
    """Point standard streams that take no more at /dev/null: the interpreter then has nothing to report at its end."""
    for stream, number in ((sys.stdout, 1), (sys.stderr, 2)):
        try:
            stream.flush()
        except OSError:
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, number)
            os.close(null)
