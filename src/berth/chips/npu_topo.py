"""Read `npu-smi info -t topo`: which CPUs are near an NPU, and how the NPUs are joined.

The answer is a matrix. Its header names the columns, `NPU0` or `Phy-ID0` and so on, and `CPU Affinity` last where there
is that column; some releases add columns of network cards. A row begins with the name of its device. Whether an id is
a card id (`NPU`) or a physical id (`Phy-ID`) is told by the header, and the two must never be mixed.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Final, Literal

from berth.chips.npu_text import Line, complaints, failure_of, is_elision, lines_of
from berth.errors import MalformedError
from berth.host.cpuset import CpuSet
from berth.host.topology import Node

#: What the numbers of the rows are: card ids, or physical ids.
IdKind = Literal["NPU", "Phy-ID"]

_ID: Final = re.compile(r"(NPU|Phy-ID)([0-9]{1,9})")
_AFFINITY: Final = "CPU_Affinity"
_LIST: Final = re.compile(r"[0-9][0-9,\-]*")
_UNKNOWN: Final = ("NA", "N/A", "-")


@dataclass(frozen=True, slots=True, kw_only=True)
class TopoLink:
    """How a row's device is joined to another.

    Attributes:
        target: Id of the other one, of the same kind.
        type: As printed: HCCS, HCCS_SW, SIO, UB, PIX, PXB, PHB, SYS, NA, or what a later release knows.
    """

    target: int
    type: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TopoRow:
    """One device of the matrix.

    Attributes:
        number: Its id, of the kind that the matrix names.
        affinity: CPUs near it; None where the text names none.
        links: To the other devices, in the order of the header; empty where the row does not fit the header.
    """

    number: int
    affinity: CpuSet | None
    links: tuple[TopoLink, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class NpuTopo:
    """The matrix.

    Attributes:
        id_kind: What the ids are.
        rows: Its devices, each once, in the order printed.
        gaps: What could not be read, a sentence each.
    """

    id_kind: IdKind
    rows: tuple[TopoRow, ...]
    gaps: tuple[str, ...]

    def row(self, number: int) -> TopoRow | None:
        """Return the row of a device, or None."""
        return next((row for row in self.rows if row.number == number), None)


def parse_topo(text: str) -> NpuTopo:
    """Return the matrix that a text holds.

    A row that does not fit the header keeps its CPU list, where it ends with one, and loses its links. The last line
    of a text that does not end with a newline may be cut, so nothing is taken from it.

    Raises:
        NpuSmiError: The text holds no header of such a matrix.
    """
    lines = list(lines_of(text))
    header = next((columns for line in lines if (columns := _header(line)) is not None), None)
    if header is None:
        raise failure_of(text, wanted="topology matrix")
    kind: IdKind = "Phy-ID" if header[0].startswith("Phy-ID") else "NPU"
    gaps = complaints(text)
    rows: dict[int, TopoRow] = {}
    for line in lines:
        if is_elision(line.text):
            gaps.append("Rows were left out of the matrix.")
        words = _words(line.text)
        name = _ID.fullmatch(words[0])
        if name is None or name[1] != kind or _header(line) is not None:
            continue
        if not line.ended:
            gaps.append(f"The line {line.text[:80]!a} is the end of the text and may be cut.")
            continue
        row = _row(int(name[2]), words[1:], header, name[0], gaps)
        known = rows.setdefault(row.number, row)
        if known != row:
            gaps.append(f"Two rows of {name[0]} differ, so neither counts.")
            rows[row.number] = replace(row, affinity=None, links=())
    wanted = [int(match[2]) for column in header if (match := _ID.fullmatch(column))]
    if missing := [f"{kind}{number}" for number in wanted if number not in rows]:
        gaps.append(f"The matrix has no row for {', '.join(missing)}.")
    return NpuTopo(id_kind=kind, rows=tuple(rows.values()), gaps=tuple(dict.fromkeys(gaps)))


def nodes_near(affinity: CpuSet, nodes: Iterable[Node]) -> tuple[int, ...]:
    """Return the numbers of all nodes that have a CPU of the set, ascending."""
    return tuple(sorted(node.number for node in nodes if not node.cpus.isdisjoint(affinity)))


def node_near(affinity: CpuSet | None, nodes: Iterable[Node]) -> int | None:
    """Return the node that a device with this affinity is near to; None where it is none or more than one."""
    near = () if affinity is None else nodes_near(affinity, nodes)
    return near[0] if len(near) == 1 else None


def _words(line: str) -> list[str]:
    """Return the cells of a line; names of two words and lists printed with blanks are one cell each."""
    joined = re.sub(r"\s*,\s*", ",", line)
    return re.sub(r"\b(\w+) Affinity\b", r"\1_Affinity", joined).split()


def _header(line: Line) -> list[str] | None:
    """Return the columns a header names, or None for a line that is none.

    A row begins with a name too, but has a link next, so a header is known by its second name or its affinity column.
    """
    columns = _words(line.text)
    first = _ID.fullmatch(columns[0])
    if first is None or not line.ended:
        return None
    second = _ID.fullmatch(columns[1]) if len(columns) > 1 else first
    if (second is None or second[1] != first[1]) and _AFFINITY not in columns:
        return None
    return columns


def _row(number: int, cells: list[str], header: list[str], name: str, gaps: list[str]) -> TopoRow:
    fits = len(cells) == len(header)
    if not fits:
        gaps.append(f"The row of {name} has {len(cells)} cells where the header has {len(header)}: no links from it.")
    affinity: CpuSet | None = None
    if _AFFINITY in header:
        at = header.index(_AFFINITY)
        if fits:
            affinity = _cpus(cells[at], name, gaps)
        elif at == len(header) - 1 and cells and _LIST.fullmatch(cells[-1]):
            affinity = _cpus(cells[-1], name, gaps)
    links = zip(header, cells, strict=True) if fits else ()
    return TopoRow(
        number=number,
        affinity=affinity,
        links=tuple(
            TopoLink(target=int(target[2]), type=cell)
            for column, cell in links
            if (target := _ID.fullmatch(column)) and int(target[2]) != number
        ),
    )


def _cpus(cell: str, name: str, gaps: list[str]) -> CpuSet | None:
    if cell in _UNKNOWN:
        return None
    try:
        return CpuSet.parse_list(cell)
    except MalformedError as error:
        gaps.append(f"The CPU affinity of {name} cannot be read: {error.message}")
        return None
