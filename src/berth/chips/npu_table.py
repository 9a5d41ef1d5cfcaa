"""The tables of `npu-smi info` as rows, every cell found by the name above it; what the cells mean is not decided here.

Each chip is two rows, as are the headers: a head row (card, model, health) and a chip row (chip, bus id, memory). The
columns differ by release and product. A second table has the processes. A chip row is known by its bus id and belongs
to the head row right before it; without one its card is unknown, since a failed query of the health leaves that out.
"""

import re
from dataclasses import dataclass, field
from typing import Final, Literal

from berth.chips.npu_text import Line, bar_cells, column_name, is_elision, lines_of

_TITLE: Final = re.compile(r"npu-smi\s+(\S+)(?:\s+Version:\s*(\S+))?")
_IDLE: Final = re.compile(r"No running processes found in NPU ([0-9]{1,9})", re.IGNORECASE)
_RULE: Final = re.compile(r"\+[-=+]+\+")
_BUS_ID: Final = re.compile(r"(?:[0-9A-Fa-f]{4,8}:)?[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}\.[0-7]|NA")
_VALUE: Final = re.compile(r"[0-9]+\s*/\s*[0-9]+|\S+")

#: The columns that are read, by their names in any release.
_KEYS: Final = {
    "npu": "card",
    "npu id": "card",
    "name": "name",
    "health": "health",
    "chip": "chip",
    "phy-id": "physical",
    "chip phy-id": "physical",
    "device": "logic",
    "bus-id": "bus",
    "aicore(%)": "busy",
    "npu util(%)": "busy",
    "memory-usage(mb)": "ddr",
    "hbm-usage(mb)": "hbm",
    "process id": "pid",
    "process name": "process",
    "process memory(mb)": "used",
    "process id in container": "inner",
}

#: The cells of one row by the keys above; a column that the table lacks is not in it.
Row = dict[str, str]


@dataclass(slots=True)
class Tables:
    """What the tables hold.

    Attributes:
        versions: Of npu-smi and of the driver, as the title prints them.
        chips: Chip rows, each joined with its head row; without one they lack the key `card`. None without a table.
        processes: Rows of processes; None without a table.
        idle_cards: Cards with a line that no process was found there.
        gaps: What could not be read, a sentence each.
    """

    versions: tuple[str | None, str | None] = (None, None)
    chips: list[Row] | None = None
    processes: list[Row] | None = None
    idle_cards: list[int] = field(default_factory=list)
    gaps: list[str] = field(default_factory=list)


def read_tables(text: str) -> Tables:
    """Return the rows of a text; lines without a bar are in no table.

    A row that is cut or does not fit its header is left out and named in the gaps, as is a table that is not closed.
    """
    reader = _Reader()
    for line in lines_of(text):
        reader.take(line)
    reader.leave_table()
    return reader.tables


@dataclass(slots=True)
class _Reader:
    """Goes through the lines once; `open` until a rule of "=" closes the rows seen last."""

    tables: Tables = field(default_factory=Tables)
    table: Literal["", "chips", "processes"] = ""
    heads: list[list[str]] = field(default_factory=list)
    columns: list[list[str]] = field(default_factory=list)
    head: Row | None = None
    open: bool = False

    def take(self, line: Line) -> None:
        if is_elision(line.text):
            self.gap("Rows were left out of the table.")
        elif _RULE.fullmatch(line.text):
            self.drop_head()
            self.open = self.open and "=" not in line.text
        elif line.text.startswith("|"):
            cells = bar_cells(line.text)
            if cells is None:
                self.gap(f"A row of the table is cut: {line.text[:120]!a}.")
                self.open = True
            elif title := _TITLE.match(cells[0]):
                self.tables.versions = (title[1], title[2])
            elif not self.take_header(cells):
                self.open = True
                self.take_row(cells)

    def take_header(self, cells: list[str]) -> bool:
        """Note the columns where the row is a header, and return whether it is."""
        columns = [_keys(cell) for cell in cells]
        keys = {key for names in columns for key in names}
        if "pid" in keys and "card" in keys:
            self.leave_table()
            self.table, self.columns = "processes", columns
            self.tables.processes = self.tables.processes or []
        elif "health" in keys and "card" in keys:
            self.leave_table()
            self.table, self.heads, self.columns = "chips", columns, []
            self.tables.chips = self.tables.chips or []
        elif "bus" in keys and self.table == "chips":
            self.columns = columns
        else:
            return False
        self.open = True
        return True

    def take_row(self, cells: list[str]) -> None:
        idle = _IDLE.fullmatch(cells[0]) if len(cells) == 1 else None
        if self.table == "processes" and self.tables.processes is not None:
            if idle is not None:
                self.tables.idle_cards.append(int(idle[1]))
            elif (row := self.values(cells, self.columns)) is not None:
                self.tables.processes.append(row)
        elif self.table == "chips" and self.columns:
            bus = next(at for at, names in enumerate(self.columns) if "bus" in names)
            if bus < len(cells) and _BUS_ID.fullmatch(cells[bus]):
                self.take_chip(cells)
            else:
                self.drop_head()
                self.head = self.values(cells, self.heads)
        elif len(cells) > 1:
            self.gap(f"A row stands where no header names its columns: {_shown(cells)}.")

    def take_chip(self, cells: list[str]) -> None:
        row = self.values(cells, self.columns)
        head, self.head = self.head, None
        if row is None or self.tables.chips is None:
            return
        if head is None:
            self.gap(f"The card of a chip is unknown, its head row is missing: {_shown(cells)}.")
        self.tables.chips.append({**(head or {}), **row})

    def values(self, cells: list[str], columns: list[list[str]]) -> Row | None:
        """Return the cells by column, or None where the row does not fit; a cell that does not is left out alone."""
        if len(cells) != len(columns):
            self.gap(f"A row has {len(cells)} cells where its header has {len(columns)}: {_shown(cells)}.")
            return None
        found: Row = {}
        for cell, names in zip(cells, columns, strict=True):
            if len(names) == 1:
                words = [cell]
            elif names[-1:] == ["name"]:
                words = cell.split(None, len(names) - 1)
            else:
                words = _VALUE.findall(cell)
            if len(words) == len(names):
                found.update(zip(names, words, strict=True))
            elif names:
                self.gap(f"A cell does not fit its header: {cell!a} in {_shown(cells)}.")
        return found

    def drop_head(self) -> None:
        if self.head is not None:
            self.gap(f"A head row has no chip: card {self.head.get('card')}.")
            self.head = None

    def leave_table(self) -> None:
        self.drop_head()
        if self.table and self.open:
            self.gap(f"The table of {self.table} is not closed: rows may be missing.")
        self.open = False

    def gap(self, sentence: str) -> None:
        self.tables.gaps.append(sentence)


def _keys(cell: str) -> list[str]:
    """Return the columns that a cell of a header names, with those that are not read under their own names."""
    names = [column_name(name) for name in re.split(r"\s{2,}|(?<=\))\s+", cell) if name]
    return [_KEYS.get(name, name) for name in names]


def _shown(cells: list[str]) -> str:
    return ascii(" | ".join(cells)[:120])
