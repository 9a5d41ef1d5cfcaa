"""What all answers of `npu-smi` have in common: lines, columns, and the sentences that stand where an answer should.

The program prints for people. It may print log lines before a table, warnings after it, and a sentence in place of it;
its exit status does not tell these apart (an empty table ends with 0), so the text decides.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Literal

from berth.errors import AbilityError

#: Why there is no answer. `unreadable` is a text in which no answer is recognised: cut, localized, or something else.
FailureKind = Literal["driver-init-failed", "device-occupied", "invalid-card", "no-card", "query-failed", "unreadable"]

#: What DCMI returns when another container holds a visible chip.
RET_OCCUPIED: Final = -8020

_FAILURES: Final[tuple[tuple[FailureKind, re.Pattern[str]], ...]] = (
    ("device-occupied", re.compile(r"dcmi \w+ initiali[sz]ed? failed.*\bdevice is used", re.IGNORECASE)),
    ("driver-init-failed", re.compile(r"dcmi \w+ initiali[sz]ed? failed", re.IGNORECASE)),
    ("invalid-card", re.compile(r"Invalid card id", re.IGNORECASE)),
    ("no-card", re.compile(r"There is no NPU card on this server", re.IGNORECASE)),
    (
        "query-failed",
        re.compile(
            r"Failed to (get card number|query card total info|get chip number of card|execute npu-smi)"
            r"|npu get board type failed",
            re.IGNORECASE,
        ),
    ),
)
_RET: Final = re.compile(r"\bret is (-?[0-9]{1,9})\.?\s*$")
_WARNING: Final = re.compile(r"\[WARNING\]", re.IGNORECASE)

_FIXES: Final[dict[FailureKind, str]] = {
    "driver-init-failed": (
        "See whether the driver is loaded, and whether you may open /dev/davinci_manager and /dev/davinciN "
        "(group HwHiAiUser); an occupied chip gives the same answer."
    ),
    "device-occupied": "Another container holds a chip that is visible here: end it, or hide that chip.",
    "invalid-card": "The card has dropped off the bus, or never was there: see `npu-smi info -l` and `dmesg`.",
    "no-card": "The driver sees no card: see `lspci` and `dmesg`.",
    "query-failed": "The driver answers in part only: see `dmesg`, and run `npu-smi info` as root.",
    "unreadable": "Give the whole text as npu-smi prints it under LC_ALL=C.",
}
_SHOWN_CHARACTERS: Final = 120


class NpuSmiError(AbilityError):
    """The text holds no answer.

    Attributes:
        kind: Why.
        ret: The return code of DCMI that it names, or None.
    """

    def __init__(self, kind: FailureKind, message: str, *, ret: int | None = None) -> None:
        super().__init__(f"npu-smi-{kind}", message, _FIXES[kind])
        self.kind = kind
        self.ret = ret


@dataclass(frozen=True, slots=True)
class Line:
    """One line.

    Attributes:
        text: The line without blanks around it.
        ended: Whether a newline ended it; without one its last word may be cut.
    """

    text: str
    ended: bool


def lines_of(text: str) -> Iterator[Line]:
    """Yield the lines that hold anything."""
    *ended, rest = text.split("\n")
    for line in ended:
        if stripped := line.strip():
            yield Line(stripped, True)
    if stripped := rest.strip():
        yield Line(stripped, False)


def bar_cells(line: str) -> list[str] | None:
    """Return the cells between the bars of a row of a table, or None where its first or last bar is missing."""
    if len(line) < 2 or line[0] != "|" or line[-1] != "|":
        return None
    return [cell.strip() for cell in line[1:-1].split("|")]


def column_name(text: str) -> str:
    """Return the name of a column in one spelling: lower case, single blanks."""
    return " ".join(text.lower().split())


def number(text: str | None) -> int | None:
    """Return the number of zero or more that a cell holds, or None where it holds anything else."""
    return int(text) if text is not None and re.fullmatch(r"[0-9]{1,9}", text) else None


def is_elision(line: str) -> bool:
    """Return whether somebody who shortened the text wrote dots here in place of rows."""
    return bool(re.fullmatch(r"[|\s]*(\.{2,}|…)[|\s.…]*", line))


def complaints(text: str) -> list[str]:
    """Return the lines that say that something went wrong, for a text that holds an answer nevertheless."""
    return [line.text for line in lines_of(text) if _WARNING.search(line.text) or _kind(line.text) is not None]


def failure_of(text: str, *, wanted: str) -> NpuSmiError:
    """Return why the text is no answer.

    Args:
        text: What was printed.
        wanted: What it should have held, for the message.
    """
    for line in lines_of(text):
        kind = _kind(line.text)
        if kind is None:
            continue
        code = _RET.search(line.text) if line.ended else None
        ret = None if code is None else int(code[1])
        if kind == "driver-init-failed" and ret == RET_OCCUPIED:
            kind = "device-occupied"
        return NpuSmiError(kind, f"npu-smi gave no {wanted} and said: {line.text[:_SHOWN_CHARACTERS]}", ret=ret)
    first = next(lines_of(text), None)
    seen = "it is empty" if first is None else f"it begins with {first.text[:_SHOWN_CHARACTERS]!a}"
    return NpuSmiError("unreadable", f"The text holds no {wanted} of npu-smi: {seen}.")


def _kind(line: str) -> FailureKind | None:
    return next((kind for kind, pattern in _FAILURES if pattern.search(line)), None)
