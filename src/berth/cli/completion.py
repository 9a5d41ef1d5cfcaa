"""`berth completion`: the script that teaches a shell berth's verbs and options."""

import click
from click.shell_completion import CompletionItem, get_completion_class

_EPILOG = """\b
Examples:
  eval "$(berth completion bash)"                        this shell
  mkdir -p ~/.local/share/bash-completion/completions
  berth completion bash > ~/.local/share/bash-completion/completions/berth
  mkdir -p ~/.zfunc && berth completion zsh > ~/.zfunc/_berth
  berth completion fish > ~/.config/fish/completions/berth.fish
"""


def directories(_context: click.Context, _parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Complete a directory: the shell does it."""
    return [CompletionItem(incomplete, type="dir")]


def files(_context: click.Context, _parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Complete a file: the shell does it."""
    return [CompletionItem(incomplete, type="file")]


@click.command(name="completion", epilog=_EPILOG, short_help="Print the completion script for a shell.")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def command(shell: str) -> None:
    """Print the completion script for SHELL."""
    from berth.cli.main import cli

    completer = get_completion_class(shell)
    assert completer is not None
    click.echo(completer(cli, {}, "berth", "_BERTH_COMPLETE").source())
