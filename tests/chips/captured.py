"""Texts that real machines printed, each with its right reading, where they are at hand."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

DATA = Path(__file__).resolve().parents[3] / "shared" / "data"


def entries(directory: str, wanted: Callable[[Any], bool]) -> list[Any]:
    """Return the entries of a directory that are wanted as parameters, or one stand-in that makes the test skip."""
    path = DATA / directory / "manifest.json"
    if not path.is_file():
        skip = pytest.mark.skip(reason=f"the captured texts are not at hand (../shared/data/{directory})")
        return [pytest.param(None, id="none", marks=skip)]
    found = json.loads(path.read_text())
    listed = found["entries"] if isinstance(found, dict) else found
    return [pytest.param(entry, id=entry.get("file") or entry["id"]) for entry in listed if wanted(entry)]


def text_of(directory: str, file: str) -> str:
    """Return one text."""
    return (DATA / directory / file).read_text()
