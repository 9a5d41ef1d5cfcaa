from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from berth.chips.npu_list import ListedCard, MappedChip, parse_list, parse_map
from berth.chips.npu_text import NpuSmiError
from chips.captured import entries, text_of

MAP = (
    "\tNPU ID                         Chip ID                        Chip Logic ID                  Chip Name\n"
    "\t4                              0                              0                              Ascend 910B3\n"
    "\t4                              1                              -                              Mcu\n"
    "\t12                             0                              11                             Ascend 910B3\n"
    "\t12                             1                              -                              Mcu\n"
)
#: Two dies on a card; the header is not indented and ends in blanks, and the physical ids have a gap.
A3_MAP = (
    "NPU ID      Chip ID      Chip Logic ID      Chip Phy-ID      Chip Name        \n"
    "\t1           0            0                  2                Ascend910\n"
    "\t1           1            1                  3                Ascend910\n"
    "\t1           2            -                  -                Mcu              \n"
)
LIST = (
    "\tTotal Count                    : 2\n\n"
    "\tNPU ID                         : 1\n\tChip Count                     : 12\n\n"
    "\tNPU ID                         : 32768\n\tProduct Name                   : Card : x\n"
    "\tChip Count                     : 1\n"
)


def chip(card: int, number: int, logic: int | None, name: str | None, **more: int | None) -> MappedChip:
    ids: dict[str, int | None] = {"physical_id": None, "slot": None, **more}
    return MappedChip(card=card, chip=number, logic_id=logic, name=name, **ids)


# --- captured --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("entry", entries("npu-smi", lambda entry: entry["command"] == "npu-smi info -m"))
def test_captured_map(entry) -> None:
    found = parse_map(text_of("npu-smi", entry["file"]))
    assert found.gaps == ()
    assert found.chips == tuple(
        chip(wanted["card"], wanted["chip"], wanted["logic_id"], wanted["name"], physical_id=wanted.get("phy_id"))
        for wanted in entry["chips"]
    )


@pytest.mark.parametrize("entry", entries("npu-smi", lambda entry: "total_count" in entry))
def test_captured_list(entry) -> None:
    found = parse_list(text_of("npu-smi", entry["file"]))
    assert found.gaps == ()
    assert found.total_count == entry["total_count"]
    assert [{"card": card.card, "chip_count": card.chip_count} for card in found.cards] == entry["cards"]


# --- the table of ids ------------------------------------------------------------------------------------------------


def test_map() -> None:
    found = parse_map("a line of a log\n" + MAP)
    assert found.chips == (chip(4, 0, 0, "Ascend 910B3"), chip(12, 0, 11, "Ascend 910B3"))
    assert found.gaps == ()


def test_columns_are_taken_by_their_names() -> None:
    assert parse_map(A3_MAP).chips == (
        chip(1, 0, 0, "Ascend910", physical_id=2),
        chip(1, 1, 1, "Ascend910", physical_id=3),
    )
    slots = "NPU ID  Slot ID  Chip ID  Chip Phy-ID  Chip Name\n  0       5        1        7            Ascend950PR\n"
    assert parse_map(slots).chips == (chip(0, 1, None, "Ascend950PR", physical_id=7, slot=5),)


@pytest.mark.parametrize("name", ["Mcu", "MCU", "cpu", "3559", "cpu 3559"])
def test_controllers_are_no_chips(name: str) -> None:
    found = parse_map(MAP.replace("-                              Mcu", f"9                              {name}"))
    assert [entry.chip for entry in found.chips] == [0, 0]
    assert found.gaps == ()


def test_logic_id_of_two_chips_counts_for_none() -> None:
    found = parse_map(MAP.replace(" 11 ", " 0  "))
    assert [entry.logic_id for entry in found.chips] == [None, None]
    assert found.gaps == ("2 chips have the logic id 0, so it counts for none.",)
    found = parse_map(A3_MAP.replace("  3  ", "  2  "))
    assert [(entry.logic_id, entry.physical_id) for entry in found.chips] == [(0, None), (1, None)]


def test_id_that_is_no_number_is_a_gap() -> None:
    found = parse_map(MAP.replace(" 11 ", " ?? "))
    assert [entry.logic_id for entry in found.chips] == [0, None]
    assert found.gaps == ("The chip logic id of chip 0 on card 12 is '??'.",)


def test_card_whose_set_up_failed_is_a_gap() -> None:
    found = parse_map(MAP.replace("\t12 ", "\t-1 "))
    assert [entry.card for entry in found.chips] == [4]
    assert "set-up failed" in found.gaps[0]


def test_row_of_other_width_is_a_gap() -> None:
    found = parse_map(MAP.replace("11                             Ascend 910B3", "11"))
    assert [entry.card for entry in found.chips] == [4]
    assert "has 3 cells where the header has 4" in found.gaps[0]


def test_map_without_chips_is_a_gap() -> None:
    assert parse_map(MAP.splitlines()[0]).gaps == ("The table of chip ids names no chip.",)
    assert parse_map(MAP.splitlines()[0] + "\n ...\n").gaps[0] == "Rows were left out of the table of chip ids."


def test_last_word_without_newline_may_be_cut() -> None:
    found = parse_map(MAP[: MAP.rindex("B3")])
    assert found.chips[-1] == chip(12, 0, 11, None)
    assert "may be cut" in found.gaps[0]


# --- the list of cards -----------------------------------------------------------------------------------------------


def test_list() -> None:
    found = parse_list("noise\n" + LIST)
    assert found.total_count == 2
    assert found.cards == (
        ListedCard(card=1, chip_count=12, product=None),
        ListedCard(card=32768, chip_count=1, product="Card : x"),
    )
    assert found.gaps == ()
    assert found.missing_from([7, 1]) == (32768,)
    assert parse_list(LIST.replace("Total", "Card")).total_count == 2


def test_list_that_contradicts_itself_is_a_gap() -> None:
    assert parse_list(LIST.replace(": 2", ": 3")).gaps == ("The list counts 3 cards and names 2.",)
    assert parse_list(LIST.replace(": 32768", ": 1")).gaps == ("The list counts 2 cards and names 2.",)
    assert "set-up failed" in parse_list(LIST.replace(": 32768", ": -1")).gaps[0]
    without = parse_list(LIST.replace("Chip Count                     : 12", ""))
    assert without.gaps == ("The list does not say how many chips are on card 1.",)


# --- both ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("parse", [parse_map, parse_list])
@pytest.mark.parametrize(
    ("text", "kind", "ret"),
    [
        ("", "unreadable", None),
        ("NPU编号   芯片编号\n0   0\n", "unreadable", None),
        ("DrvMngGetConsoleLogLevel failed. (g_conLogLevel=3)\n", "unreadable", None),
        ("noise\ndcmi module initialize failed. ret is -8005\n", "driver-init-failed", -8005),
        ("dcmi module initialize failed. ret is -80", "driver-init-failed", None),
        ("dcmi module initialize failed. ret is -8020\n", "device-occupied", -8020),
        ("dcmi model initialized failed, because the device is used. ret is -8020\n", "device-occupied", -8020),
        ("Invalid card id.\nError parameter of -i\nUsage: npu-smi info <watch>\n", "invalid-card", None),
        ("There is no NPU card on this server.\n", "no-card", None),
        ("Failed to execute npu-smi info. ret is -8009.\n", "query-failed", -8009),
        ("Failed to get chip number of card3.\n", "query-failed", None),
    ],
)
def test_text_without_an_answer_is_refused(parse, text: str, kind: str, ret: int | None) -> None:
    with pytest.raises(NpuSmiError) as caught:
        parse(text)
    assert (caught.value.kind, caught.value.ret) == (kind, ret)
    assert caught.value.name == f"npu-smi-{kind}"


def test_complaint_beside_an_answer_is_a_gap() -> None:
    warning = "[WARNING]The driver package may not be completely installed, please check."
    assert parse_map(f"{MAP}{warning}\n").gaps == (warning,)
    assert parse_list(f"Failed to get chip number of card3.\n{LIST}").gaps == ("Failed to get chip number of card3.",)


@pytest.mark.parametrize("text", [MAP, A3_MAP])
def test_every_cut_of_a_map(text: str) -> None:
    whole = parse_map(text)
    for at in range(len(text)):
        try:
            found = parse_map(text[:at])
        except NpuSmiError:
            continue
        for one, full in zip(found.chips, whole.chips, strict=False):
            assert one in (full, chip(full.card, full.chip, full.logic_id, None, physical_id=full.physical_id))
        # Nothing marks the end of this table: cut between two lines, it looks whole.
        between = text[:at].rstrip(" \t").endswith("\n")
        assert found.gaps or found.chips == whole.chips or between


def test_every_cut_of_a_list() -> None:
    whole = parse_list(LIST)
    for at in range(len(LIST)):
        try:
            found = parse_list(LIST[:at])
        except NpuSmiError:
            continue
        assert found.total_count == 2
        for one, full in zip(found.cards, whole.cards, strict=False):
            assert one.card == full.card
            assert one.chip_count in (full.chip_count, None)
            assert one.product in (full.product, None)
        assert found.gaps or found == whole


WORDS = ["NPU ID", "Chip ID", "Chip Logic ID", "Chip Name", "Total Count", ":", "0", "-1", "-", "Mcu", "\n", "  ", "\t"]


@given(st.binary().map(lambda data: data.decode("latin-1")) | st.lists(st.sampled_from(WORDS)).map("".join))
def test_any_text_is_read_or_refused(text: str) -> None:
    for parse in (parse_map, parse_list):
        with suppress(NpuSmiError):
            parse(text)
