"""The documentation is what the program does: verbs, options, settings, fields, links and examples are compared.

A fenced block that begins with ```console holds what a user types after "$ " and what came back. Every `berth` line in
one must parse. In a block marked ```console exit=N the berth line is run, and must end with N.
"""

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import msgspec
import pytest

import berth
from berth.cli.main import VERBS, cli
from berth.errors import AbilityError
from berth.sandbox.bubblewrap import probe
from berth.settings import Settings

ROOT = Path(__file__).resolve().parents[1]
MANUAL = ROOT / "docs" / "manual"
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
#: Where the options of a verb are explained, if not on a page of its own.
PAGE_OF = {"demo": "README.md", "completion": "README.md"}

_LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)")
_BLOCK = re.compile(r"^```console(?: exit=(\d+))?\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def page_of(verb: str) -> str:
    return (MANUAL / PAGE_OF.get(verb, f"{verb}.md")).read_text()


def verb_command(verb: str) -> click.Command:
    command = cli.get_command(click.Context(cli), verb)
    assert command is not None
    return command


def examples() -> Iterator[tuple[str, str, int | None]]:
    """Yield (place, line without "$ ", exit code or None) for every berth line in a console block."""
    for page in PAGES:
        for block in _BLOCK.finditer(page.read_text()):
            lines = [line[2:] for line in block[2].splitlines() if line.startswith("$ ")]
            for line in lines:
                if re.search(r"(^|\$\()berth\b", line):
                    yield str(page.relative_to(ROOT)), line, int(block[1]) if block[1] else None


def berth_words(line: str) -> list[str]:
    """Return the words after `berth`, as a shell splits them, up to the first pipe, redirection or separator."""
    inside = re.search(r"\$\((berth [^)]*)\)", line)
    lexer = shlex.shlex(inside[1] if inside else line, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    words = []
    for word in lexer:
        if word and set(word) <= set("|&;<>()"):
            break
        words.append(word)
    return words[1:]


EXAMPLES = sorted(set(examples()), key=str)
RUNNABLE = [(line, code) for _, line, code in EXAMPLES if code is not None]


@pytest.mark.parametrize("verb", VERBS)
def test_help_line_of_the_list_is_that_of_the_verb(verb):
    assert verb_command(verb).short_help == VERBS[verb][1]


@pytest.mark.parametrize("verb", VERBS)
def test_verb_and_its_options_are_in_the_manual(verb):
    page = page_of(verb)
    assert f"berth {verb}" in page
    options = [name for p in verb_command(verb).params if isinstance(p, click.Option) for name in p.opts]
    missing = [name for name in options if not re.search(rf"`{name}[ `]", page)]
    assert not missing


def test_settings_are_in_the_manual():
    def keys(struct: type[msgspec.Struct], prefix: str = "") -> Iterator[str]:
        for field in msgspec.structs.fields(struct):
            if isinstance(field.type, type) and issubclass(field.type, msgspec.Struct):
                yield from keys(field.type, f"{prefix}{field.name}.")
            else:
                yield prefix + field.name

    page = (MANUAL / "settings.md").read_text()
    assert not [key for key in keys(Settings) if f"| `{key}` |" not in page]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_relative_links_resolve(page):
    broken = []
    for target in _LINK.findall(page.read_text()):
        path, _, anchor = target.partition("#")
        if re.match(r"[a-z]+:", target):
            continue
        file = page.parent / path if path else page
        if not file.exists() or (anchor and anchor not in anchors(file)):
            broken.append(target)
    assert not broken


def anchors(page: Path) -> set[str]:
    """Return the anchors that are made of the headings of `page`."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.M | re.S), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_paths_in_the_architecture_exist():
    text = (ROOT / "docs" / "architecture.md").read_text().partition("## Old names")[0]
    tests = set(re.findall(r"`(tests/[\w./]+)`", text))
    modules = set(re.findall(r"`([a-z]+/[a-z_]+\.py)`", text))
    assert tests
    assert modules
    assert not [path for path in tests if not (ROOT / path).exists()]
    assert not [path for path in modules if not (ROOT / "src" / "berth" / path).exists()]


@pytest.mark.parametrize(("place", "line"), [example[:2] for example in EXAMPLES])
def test_example_parses(place, line):
    verb, *words = berth_words(line)
    if verb.startswith("--"):
        assert any(verb in option.opts for option in cli.get_params(click.Context(cli)))
    else:
        verb_command(verb).make_context(verb, words)


@pytest.fixture
def shell(tmp_path):
    """Run a line of bash in an empty workspace, where `berth` is this one and has a state root of its own."""
    program = tmp_path / "bin" / "berth"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m berth "$@"\n')
    program.chmod(0o755)
    workspace = tmp_path / "workspace"
    workspace.mkdir()
    environment = {
        **os.environ,
        "PATH": f"{program.parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(Path(berth.__file__).parents[1]),
        "BERTH_STATE_ROOT": str(tmp_path / "state"),
    }

    def run(line: str) -> subprocess.CompletedProcess[str]:
        if "--sandbox" in line:
            try:
                probe()
            except AbilityError as error:
                pytest.skip(error.message)
        ended = subprocess.run(
            ["bash", "-c", line], cwd=workspace, env=environment, text=True, capture_output=True, timeout=30
        )
        if ended.returncode == 125 and "cannot be claimed" in ended.stderr + ended.stdout:
            pytest.skip("somebody else on this host has claimed its cores")
        return ended

    return run


@pytest.mark.parametrize(("line", "code"), RUNNABLE)
def test_example_ends_as_documented(shell, line, code):
    ended = shell(line)
    assert ended.returncode == code, ended.stderr


def test_fields_of_a_record_are_in_the_manual(shell):
    record = json.loads(shell("berth run --json --sandbox -- true").stdout)
    page = page_of("run")
    assert not [
        name for name in {*record, *record["sandbox"]} if not re.search(rf"^\|.*`{name}`.*\|", page, re.MULTILINE)
    ]
