"""Read the answer of `npu-smi info`: the chips with their state, and the processes that use them.

The table of processes lists at most eight of a chip, or says that a card has none. A card that it does not mention is
unknown, not idle; so is every card where the table is missing.
"""

import re
from collections import Counter
from dataclasses import dataclass, fields, replace
from typing import Any, Final

from berth.chips.npu_table import Row, read_tables
from berth.chips.npu_text import complaints, failure_of, number

#: How many processes of one chip are printed at most.
PROCESS_ROWS_MAX: Final = 8

_PAIR: Final = re.compile(r"([0-9]{1,12})\s*/\s*([0-9]{1,12})")
_UNKNOWN: Final = ("", "-", "NA", "N/A")
_NUMBER: Final = re.compile(r"[0-9]{1,9}")
#: What a cell of a chip holds where it holds anything.
_FORMS: Final = {
    "card": ("card id", _NUMBER),
    "chip": ("chip number", _NUMBER),
    "logic": ("logic id", _NUMBER),
    "physical": ("physical id", _NUMBER),
    "hbm": ("HBM", _PAIR),
    "ddr": ("memory", _PAIR),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SmiChip:
    """One chip. Memory in MB as printed.

    Attributes:
        card: Card id; None where the row that names the card is missing, which is not guessed from its neighbours.
        chip: Number of the chip on its card; None where the table has no such column (950).
        logic_id: None where the table has no `Device` column; only the 310 family has one.
        physical_id: None where the table has no `Phy-ID` column; only the A3 has one.
        name: Model as printed.
        health: OK, Warning, Alarm, Critical, UNKNOWN; a failed query prints OK too.
        bus_id: As printed; two chips of one card may share it.
        hbm_used_mb: None where there is no such column, or where 0 of 0 says that the query failed.
        hbm_total_mb: As `hbm_used_mb`.
        ddr_used_mb: Memory of the board; 0 of 0 on chips that have HBM alone.
        ddr_total_mb: As `ddr_used_mb`.
        busy_percent: Use of its cores; it says nothing about whether the chip is free.
    """

    card: int | None
    chip: int | None
    logic_id: int | None
    physical_id: int | None
    name: str | None
    health: str | None
    bus_id: str | None
    hbm_used_mb: int | None
    hbm_total_mb: int | None
    ddr_used_mb: int | None
    ddr_total_mb: int | None
    busy_percent: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SmiProcess:
    """One row of the process table. One process may use several chips.

    Attributes:
        card: Card id.
        chip: Number of the chip on its card; None where the table has no such column (950).
        pid: Of the host, or inside an unprivileged container that container's own.
        name: At most 15 characters; empty where the cell is.
        memory_mb: Memory it holds on the chip, in MB; None where that is no number.
        container_pid: Its pid inside its container, or None.
    """

    card: int
    chip: int | None
    pid: int
    name: str
    memory_mb: int | None
    container_pid: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SmiTable:
    """What one answer says.

    Attributes:
        tool_version: Of npu-smi; None where the title is missing or masked.
        driver_version: What it prints as `Version:`.
        chips: None where the text has no table of chips.
        processes: None where the text has no table of processes.
        idle_cards: Cards of which it says that no process runs there. A query that failed says so too.
        silent_cards: Cards that the process table does not mention; unknown, not idle.
        cut_lists: (card, chip) of lists of as many processes as are ever printed: there may be more.
        gaps: What could not be read, a sentence each.
    """

    tool_version: str | None
    driver_version: str | None
    chips: tuple[SmiChip, ...] | None
    processes: tuple[SmiProcess, ...] | None
    idle_cards: tuple[int, ...]
    silent_cards: tuple[int, ...]
    cut_lists: tuple[tuple[int, int | None], ...]
    gaps: tuple[str, ...]


def parse_info(text: str) -> SmiTable:
    """Return what a text of `npu-smi info` says.

    A row that is cut, or that does not fit its header, is left out and named in `gaps`, as is a table that is not
    closed by its rule.

    Raises:
        NpuSmiError: The text holds neither a header of the chips nor one of the processes.
    """
    tables = read_tables(text)
    if tables.chips is None and tables.processes is None:
        raise failure_of(text, wanted="table")
    gaps = [*complaints(text), *tables.gaps]
    chips = None if tables.chips is None else _agreed([_chip(row, gaps) for row in tables.chips], gaps)
    processes = None
    if tables.processes is not None:
        processes = tuple(process for row in tables.processes if (process := _process(row, gaps)) is not None)
    silent = _silent(chips or (), processes, tables.idle_cards)
    if chips is None:
        gaps.append("The text has no table of chips.")
    elif not chips:
        gaps.append("The table of chips has no row; so it looks where the driver hides every chip.")
    if processes is None:
        gaps.append("The text has no table of processes, so nothing is known about them.")
    if silent:
        gaps.append(f"The table of processes does not mention card {', '.join(map(str, silent))}.")
    rows = Counter((process.card, process.chip) for process in processes or ())
    return SmiTable(
        tool_version=_version(tables.versions[0]),
        driver_version=_version(tables.versions[1]),
        chips=chips,
        processes=processes,
        idle_cards=tuple(dict.fromkeys(tables.idle_cards)),
        silent_cards=silent,
        cut_lists=tuple(key for key, count in rows.items() if count >= PROCESS_ROWS_MAX),
        gaps=tuple(dict.fromkeys(gaps)),
    )


def _chip(row: Row, gaps: list[str]) -> SmiChip:
    hbm, ddr = _pair(row.get("hbm")), _pair(row.get("ddr"))
    if hbm[1] == 0:
        hbm = (None, None)
        gaps.append(f"The HBM of the chip at {row['bus']} is unknown: 0 of 0 stands for a failed query.")
    if row.get("card") == "-1":
        gaps.append(f"The set-up of the card of the chip at {row['bus']} failed: its id is -1.")
    for key, (what, form) in _FORMS.items():
        if key in row and row[key] not in (*_UNKNOWN, "-1") and not form.fullmatch(row[key]):
            gaps.append(f"The {what} of the chip at {row['bus']} is {row[key]!a}.")
    return SmiChip(
        card=number(row.get("card")),
        chip=number(row.get("chip")),
        logic_id=number(row.get("logic")),
        physical_id=number(row.get("physical")),
        name=_known(row.get("name")),
        health=_known(row.get("health")),
        bus_id=_known(row.get("bus")),
        hbm_used_mb=hbm[0],
        hbm_total_mb=hbm[1],
        ddr_used_mb=ddr[0],
        ddr_total_mb=ddr[1],
        busy_percent=number(row.get("busy")),
    )


def _process(row: Row, gaps: list[str]) -> SmiProcess | None:
    card, pid = number(row.get("card")), number(row.get("pid"))
    if card is None or pid is None:
        gaps.append(f"A row of a process names no card or no pid: {row}.")
        return None
    if number(row.get("used")) is None or ("chip" in row and number(row["chip"]) is None):
        gaps.append(f"A row of a process names no chip or no memory: {row}.")
    return SmiProcess(
        card=card,
        chip=number(row.get("chip")),
        pid=pid,
        name=row.get("process", ""),
        memory_mb=number(row.get("used")),
        container_pid=number(row.get("inner")),
    )


def _agreed(chips: list[SmiChip], gaps: list[str]) -> tuple[SmiChip, ...]:
    """Return each chip once, without what two rows of it say differently and without a logic id that two share."""
    found: dict[object, SmiChip] = {}
    for at, chip in enumerate(chips):
        key = (chip.card, chip.chip) if chip.card is not None else at
        first = found.setdefault(key, chip)
        if first != chip:
            gaps.append(f"Chip {chip.chip} of card {chip.card} stands twice in the table, with different values.")
            names = (part.name for part in fields(chip) if getattr(first, part.name) != getattr(chip, part.name))
            differing: dict[str, Any] = dict.fromkeys(names)
            found[key] = replace(first, **differing)
    counts = Counter(chip.logic_id for chip in found.values() if chip.logic_id is not None)
    twins = [value for value, count in counts.items() if count > 1]
    gaps += [f"{counts[value]} chips have the logic id {value}, so it counts for none." for value in twins]
    return tuple(replace(chip, logic_id=None) if chip.logic_id in twins else chip for chip in found.values())


def _silent(
    chips: tuple[SmiChip, ...], processes: tuple[SmiProcess, ...] | None, idle_cards: list[int]
) -> tuple[int, ...]:
    """Return the cards that a table of processes does not mention."""
    if processes is None:
        return ()
    mentioned = {*idle_cards, *(process.card for process in processes)}
    return tuple(sorted({chip.card for chip in chips if chip.card is not None} - mentioned))


def _pair(text: str | None) -> tuple[int | None, int | None]:
    match = _PAIR.fullmatch(text or "")
    return (None, None) if match is None else (int(match[1]), int(match[2]))


def _known(text: str | None) -> str | None:
    return None if text is None or text in _UNKNOWN else text


def _version(text: str | None) -> str | None:
    """Return a version; one that does not begin with a digit has been masked."""
    return text if text is not None and text[:1].isdigit() else None
