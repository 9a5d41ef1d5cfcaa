"""Read `npu-smi info -m`, the table that joins the ids of each chip, and `npu-smi info -l`, the list of cards.

The table has blanks and no bars; its columns are known by their names alone: the A3 puts `Chip Phy-ID` before the name,
the 950 has `Slot ID` and no logic id. Nothing in it marks its end, so a text cut between two lines looks whole: compare
it with the cards that `-l` or the table of `npu-smi info` names.
"""

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Final

from berth.chips.npu_text import Line, column_name, complaints, failure_of, is_elision, lines_of, number

_CARD: Final = "npu id"
_CHIP: Final = "chip id"
_LOGIC: Final = "chip logic id"
_PHYSICAL: Final = "chip phy-id"
_SLOT: Final = "slot id"
_NAME: Final = "chip name"
#: Parts of a card that are listed beside its chips: its controller, and on 310 boards a processor of its own.
_NO_CHIP: Final = re.compile(r"mcu|cpu|(cpu|hi)?\s*3559\w*", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class MappedChip:
    """One chip of the table; what has no column, or no number in it, is None.

    Attributes:
        card: Card id.
        chip: Number of the chip on its card.
        logic_id: Number by which callers name the chip.
        physical_id: Number of its device node.
        slot: Slot of the card.
        name: Its model as printed, `Ascend 910B3`.
    """

    card: int
    chip: int
    logic_id: int | None
    physical_id: int | None
    slot: int | None
    name: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ChipMap:
    """The chips of the table, without the controllers.

    Attributes:
        chips: In the order printed.
        gaps: What could not be read, a sentence each.
    """

    chips: tuple[MappedChip, ...]
    gaps: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedCard:
    """One card of the list.

    Attributes:
        card: Card id.
        chip_count: Chips on it; None where the list does not say.
        product: Its product name, or None.
    """

    card: int
    chip_count: int | None
    product: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class CardList:
    """The list.

    Attributes:
        total_count: How many cards there are by its own first line; None where that is missing.
        cards: In the order printed.
        gaps: What could not be read, a sentence each.
    """

    total_count: int | None
    cards: tuple[ListedCard, ...]
    gaps: tuple[str, ...]

    def missing_from(self, cards: Iterable[int]) -> tuple[int, ...]:
        """Return the listed cards that another answer does not name, ascending."""
        return tuple(sorted({entry.card for entry in self.cards} - set(cards)))


def parse_map(text: str) -> ChipMap:
    """Return the chips of a text of `npu-smi info -m`.

    Raises:
        NpuSmiError: The text holds no header of that table.
    """
    lines = list(lines_of(text))
    start = next((at for at, line in enumerate(lines) if {_CARD, _CHIP} <= set(_names(line))), None)
    if start is None:
        raise failure_of(text, wanted="table of chip ids")
    names = _names(lines[start])
    gaps = complaints(text)
    chips = []
    for line in lines[start + 1 :]:
        if is_elision(line.text):
            gaps.append("Rows were left out of the table of chip ids.")
        elif re.match(r"-?[0-9]", line.text) and (chip := _mapped(line, names, gaps)) is not None:
            chips.append(chip)
    if not chips:
        gaps.append("The table of chip ids names no chip.")
    return ChipMap(chips=_without_twins(chips, gaps), gaps=tuple(dict.fromkeys(gaps)))


def parse_list(text: str) -> CardList:
    """Return the cards of a text of `npu-smi info -l`.

    Raises:
        NpuSmiError: The text names neither a total nor a card.
    """
    gaps = complaints(text)
    total: int | None = None
    blocks: list[dict[str, str]] = []
    for line in lines_of(text):
        name, colon, value = (part.strip() for part in line.text.partition(":"))
        name = column_name(name)
        if not colon:
            continue
        if not line.ended:
            gaps.append(f"The line {line.text!a} is the end of the text and may be cut.")
        elif name in ("total count", "card count"):
            total = number(value)
        elif name == _CARD:
            blocks.append({name: value})
        elif blocks:
            blocks[-1].setdefault(name, value)
    if total is None and not blocks:
        raise failure_of(text, wanted="list of cards")
    cards = tuple(card for block in blocks if (card := _listed(block, gaps)) is not None)
    gaps += _list_gaps(total, cards)
    return CardList(total_count=total, cards=cards, gaps=tuple(dict.fromkeys(gaps)))


def _names(line: Line) -> list[str]:
    return [column_name(name) for name in _fields(line)]


def _fields(line: Line) -> list[str]:
    """Return the cells of a line: names and models hold single blanks, so two or a tab part them."""
    return re.split(r"\s{2,}|\t", line.text)


def _mapped(line: Line, names: list[str], gaps: list[str]) -> MappedChip | None:
    """Return the chip of one row; None for a controller and for what cannot be told."""
    cells = _fields(line)
    if len(cells) != len(names):
        gaps.append(f"The row {line.text!a} has {len(cells)} cells where the header has {len(names)}.")
        return None
    row: dict[str, str] = dict(zip(names, cells, strict=True))
    if not line.ended:
        gaps.append(f"The row {line.text!a} is the end of the text and may be cut.")
        del row[names[-1]]
    ids = {key: row.get(key) for key in (_LOGIC, _PHYSICAL)}
    if _NO_CHIP.fullmatch(row.get(_NAME, "")) or "-" in ids.values():
        return None
    card, chip = number(row.get(_CARD)), number(row.get(_CHIP))
    if card is None or chip is None:
        gaps.append(f"The row {line.text!a} names no card and chip; -1 stands for a card whose set-up failed.")
        return None
    for key, value in ids.items():
        if value is not None and number(value) is None:
            gaps.append(f"The {key} of chip {chip} on card {card} is {value!a}.")
    return MappedChip(
        card=card,
        chip=chip,
        logic_id=number(ids[_LOGIC]),
        physical_id=number(ids[_PHYSICAL]),
        slot=number(row.get(_SLOT)),
        name=row.get(_NAME),
    )


def _without_twins(chips: list[MappedChip], gaps: list[str]) -> tuple[MappedChip, ...]:
    """Return the chips with no id that two of them share: a query that failed prints 0."""
    shared: dict[str, set[int]] = {}
    for what, ids in (("logic", [chip.logic_id for chip in chips]), ("physical", [chip.physical_id for chip in chips])):
        counts = Counter(value for value in ids if value is not None)
        shared[what] = {value for value, count in counts.items() if count > 1}
        gaps += [f"{counts[value]} chips have the {what} id {value}, so it counts for none." for value in shared[what]]
    return tuple(
        replace(
            chip,
            logic_id=None if chip.logic_id in shared["logic"] else chip.logic_id,
            physical_id=None if chip.physical_id in shared["physical"] else chip.physical_id,
        )
        for chip in chips
    )


def _listed(block: dict[str, str], gaps: list[str]) -> ListedCard | None:
    card = number(block[_CARD])
    if card is None:
        gaps.append(f"A card has the id {block[_CARD]!a}; -1 stands for one whose set-up failed.")
        return None
    return ListedCard(card=card, chip_count=number(block.get("chip count")), product=block.get("product name"))


def _list_gaps(total: int | None, cards: tuple[ListedCard, ...]) -> list[str]:
    gaps = []
    if total is None:
        gaps.append("The list does not say how many cards there are, so some may be missing from it.")
    elif total != len({entry.card for entry in cards}):
        gaps.append(f"The list counts {total} cards and names {len(cards)}.")
    silent = [str(entry.card) for entry in cards if entry.chip_count is None]
    if silent and len(silent) < len(cards):
        gaps.append(f"The list does not say how many chips are on card {', '.join(silent)}.")
    return gaps
