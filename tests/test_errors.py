import re
from pathlib import Path

import pytest

import berth.launch.placement  # noqa: F401 - defines an error of its own
from berth.errors import (
    EXIT_CODES,
    RECLAIM_FAILED,
    RETIRE_FAILED,
    ROOT_REFUSED,
    RUN_FAILED,
    RUN_NOT_EXECUTABLE,
    RUN_NOT_FOUND,
    RUN_TIMED_OUT,
    SIGNAL_BASE,
    AbilityError,
    BerthError,
    FailedError,
    ForbiddenError,
    MalformedError,
    PartlyError,
    UncertainError,
)

MANUAL = Path(__file__).resolve().parents[1] / "docs" / "manual" / "exit-codes.md"


def families(error: type[BerthError]) -> list[type[BerthError]]:
    return [error, *(below for child in error.__subclasses__() for below in families(child))]


def test_every_error_has_a_documented_code() -> None:
    found = families(BerthError)
    assert len(found) >= 7
    assert {error.__name__ for error in found if error.code not in EXIT_CODES} == set()
    assert {error.__name__ for error in found if error.code == 0} == set()


def test_categories_have_codes_of_their_own() -> None:
    codes = [error.code for error in (FailedError, MalformedError, PartlyError, ForbiddenError, AbilityError)]
    assert codes == [1, 2, 3, 4, 5]


def test_codes_of_run_are_those_of_the_shell() -> None:
    assert (RUN_TIMED_OUT, RUN_FAILED, RUN_NOT_EXECUTABLE, RUN_NOT_FOUND, SIGNAL_BASE) == (124, 125, 126, 127, 128)


def test_codes_of_epoch_are_those_of_its_design() -> None:
    assert (RECLAIM_FAILED, ROOT_REFUSED, RETIRE_FAILED) == (66, 67, 72)


def test_manual_lists_every_code() -> None:
    rows = re.findall(r"^\| *([0-9]+) *\| *(.+?) *\|$", MANUAL.read_text(encoding="utf-8"), re.MULTILINE)
    assert {int(code): meaning for code, meaning in rows} == EXIT_CODES
    assert len(rows) == len(EXIT_CODES)


@pytest.mark.parametrize("code", [None, 125])
def test_error_as_json(code: int | None) -> None:
    error = ForbiddenError("cores-claimed", "CPU 1 is claimed", "Wait.")
    assert error.as_dict(code) == {
        "code": code or 4,
        "name": "cores-claimed",
        "message": "CPU 1 is claimed",
        "fix": "Wait.",
    }
    assert str(error) == "CPU 1 is claimed"


def test_uncertain_error_keeps_both_paths() -> None:
    error = UncertainError("it may be gone", errno=5, filename="/a", filename2="/b")
    assert (error.name, error.errno, error.filename, error.filename2, error.code) == ("uncertain", 5, "/a", "/b", 1)
    assert "Do not repeat" in error.fix
