from contextlib import suppress
from dataclasses import asdict
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from berth.chips.npu_smi import PROCESS_ROWS_MAX, SmiChip, SmiProcess, SmiTable, parse_info
from berth.chips.npu_text import NpuSmiError
from chips.captured import entries, text_of

THIN = "+---------------------------+---------------+----------------------------------------------------+\n"
WHOLE = "+------------------------------------------------------------------------------------------------+\n"
THICK = THIN.replace("-", "=")
TITLE = "| npu-smi 25.2.0                   Version: 25.2.0                                               |\n"
HEADER = (
    "| NPU   Name                | Health        | Power(W)    Temp(C)           Hugepages-Usage(page)|\n"
    "| Chip                      | Bus-Id        | AICore(%)   Memory-Usage(MB)  HBM-Usage(MB)        |\n"
)
A3_HEADER = HEADER.replace("| Chip        ", "| Chip  Phy-ID")
PROCESSES = "| NPU     Chip              | Process id    | Process name             | Process memory(MB)      |\n"
FIRST = (
    "| 0     910B3               | OK            | 94.6        36                0    / 0             |\n"
    "| 0                         | 0000:C1:00.0  | 0           0    / 0          37705/ 65536         |\n"
)
SECOND = (
    "| 12    910B3               | Alarm         | NA          36                0    / 0             |\n"
    "| 0                         | NA            | 7           2387 / 13553      3318 / 65536         |\n"
)
TABLE = (
    WHOLE + TITLE + THIN + HEADER + THICK + FIRST + THICK + SECOND + THICK + THIN + PROCESSES + THICK
    + "| 0       0                 | 3104272       |                          | 116                     |\n"
    + "| 0       0                 | 3104266       | /usr/bin/python          | 33895                   |\n"
    + THICK
    + "| No running processes found in NPU 12                                                           |\n"
    + THICK
)  # fmt: skip
DIES = (
    THIN + A3_HEADER + THICK
    + "| 1     Ascend910           | OK            | 165.4       37                0    / 0             |\n"
    + "| 0     2                   | 0000:9D:00.0  | 0           0    / 0          3173 / 65536         |\n"
    + WHOLE
    + "| 1     Ascend910           | OK            | -           36                0    / 0             |\n"
    + "| 1     3                   | 0000:9F:00.0  | 0           0    / 0          2885 / 65536         |\n"
    + THICK + THIN + PROCESSES + THICK
    + "| 1       1                 | 990711        | python                   | 7746                    |\n"
    + THICK
)  # fmt: skip
#: 310 family: the logic id, no HBM, one bus id for both chips, and "-" with column marks between them.
DUO = (
    "+-------------------------------+-----------------+------------------------------------------------------+\n"
    "| NPU     Name                  | Health          | Power(W)     Temp(C)           Hugepages-Usage(page) |\n"
    "| Chip    Device                | Bus-Id          | AICore(%)    Memory-Usage(MB)                        |\n"
    "+===============================+=================+======================================================+\n"
    "| 2       310P3                 | OK              | NA           51                1123  / 1123          |\n"
    "| 0       4                     | 0000:01:00.0    | 0            1529 / 44280                            |\n"
    "+-------------------------------+-----------------+------------------------------------------------------+\n"
    "| 2       310P3                 | OK              | NA           49                0     / 0             |\n"
    "| 1       5                     | 0000:01:00.0    | 0            1411 / 43693                            |\n"
    "+===============================+=================+======================================================+\n"
)
#: The id and the model are cells of their own, chips have no number, and a process row names the card alone.
SERIES_950 = (
    "| npu-smi x.x.x                           Version: x.x.x                                          |\n"
    "+--------+------------------+---------------+-----------------------------------------------------+\n"
    "| NPU ID | Name             | Health        | Power(W)    Temp(C)           Hugepages-Usage(page) |\n"
    "|        |                  | Bus-Id        | NPU Util(%) Memory-Usage(MB)  HBM-Usage(MB)         |\n"
    "+========+==================+===============+=====================================================+\n"
    "| 3      | Ascend950PR      | Critical      | 205.7       71                0     / 0             |\n"
    "|        |                  | 0000:71:00.0  | 100         0    / 0          90633 / 114688        |\n"
    "+========+==================+===============+=====================================================+\n"
    "+---------------------------+---------------+-----------------------------------------------------+\n"
    "| NPU ID                    | Process id    | Process name             | Process memory(MB)       |\n"
    "+===========================+===============+=====================================================+\n"
    "| 3                         | 1530715       | python                   | 4724                    |\n"
    "+===========================+===============+=====================================================+\n"
)


def chips_of(table: SmiTable) -> tuple[SmiChip, ...]:
    assert table.chips is not None
    return table.chips


def processes_of(table: SmiTable) -> tuple[SmiProcess, ...]:
    assert table.processes is not None
    return table.processes


# --- captured answers ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "entry", entries("npu-smi", lambda entry: entry["command"] == "npu-smi info" and not entry.get("error"))
)
def test_captured_answer(entry) -> None:
    found = parse_info(text_of("npu-smi", entry["file"]))
    assert found.driver_version == found.tool_version == entry["driver"]
    assert [as_entry(chip, wanted) for chip, wanted in zip(found.chips or (), entry["chips"], strict=True)] == entry[
        "chips"
    ]
    assert (found.processes is not None) == entry["process_table"]
    assert [
        {key: value for key, value in asdict(process).items() if key != "container_pid"}
        for process in found.processes or ()
    ] == entry["processes"]
    assert list(found.idle_cards) == entry["no_process_cards"]
    named = {chip["card"] for chip in entry["chips"]}
    mentioned = {process["card"] for process in entry["processes"]} | set(entry["no_process_cards"])
    assert set(found.silent_cards) == (named - mentioned if entry["process_table"] else set())
    if entry["process_table"] and entry["complete"] and not found.silent_cards:
        assert found.gaps == ()
    if not entry["complete"]:
        assert found.gaps


@pytest.mark.parametrize("entry", entries("npu-smi", lambda entry: bool(entry.get("error"))))
def test_captured_failure(entry) -> None:
    with pytest.raises(NpuSmiError) as caught:
        parse_info(text_of("npu-smi", entry["file"]))
    assert {"ret": caught.value.ret, "kind": caught.value.kind.replace("-", "_")} == entry["error"]


def as_entry(chip: SmiChip, wanted: dict[str, Any]) -> dict[str, Any]:
    """Return a chip under the names of the manifest, which leaves out the physical id where no column has it."""
    names = {"phy_id": "physical_id", "mem_used_mb": "ddr_used_mb", "mem_total_mb": "ddr_total_mb"}
    values = asdict(chip) | {new: getattr(chip, old) for new, old in names.items()} | {"util_pct": chip.busy_percent}
    assert values["phy_id"] == wanted.get("phy_id")
    return {key: values[key] for key in wanted}


@pytest.mark.parametrize("entry", entries("npu-topo", lambda entry: "devices" in entry["expected"]))
def test_captured_devices(entry) -> None:
    found = parse_info(text_of("npu-topo", next(file for file in entry["files"] if file.endswith(".info.txt"))))
    expected = entry["expected"]
    assert found.gaps == ()
    assert [
        {"card": chip.card, "chip": chip.chip, "phy_id": chip.physical_id, "bus_id": chip.bus_id, "health": chip.health}
        for chip in chips_of(found)
    ] == [{key: value for key, value in device.items() if key != "logical_id"} for device in expected["devices"]]
    assert {chip.logic_id for chip in chips_of(found)} == {None}
    pids: dict[str, list[int]] = {}
    for process in processes_of(found):
        pids.setdefault(str(process.card), []).append(process.pid)
    assert pids == expected["processes"]
    assert found.cut_lists == (((0, 0),) if pids else ())
    for pid, card in expected.get("owner_by_memory", {}).items():
        most = max((p for p in processes_of(found) if p.pid == int(pid)), key=lambda p: p.memory_mb or 0)
        assert most.card == card


# --- layouts ---------------------------------------------------------------------------------------------------------


def test_table() -> None:
    found = parse_info(TABLE)
    assert (found.tool_version, found.driver_version, found.gaps) == ("25.2.0", "25.2.0", ())
    assert chips_of(found) == (
        SmiChip(
            card=0, chip=0, logic_id=None, physical_id=None, name="910B3", health="OK", bus_id="0000:C1:00.0",
            hbm_used_mb=37705, hbm_total_mb=65536, ddr_used_mb=0, ddr_total_mb=0, busy_percent=0,
        ),
        SmiChip(
            card=12, chip=0, logic_id=None, physical_id=None, name="910B3", health="Alarm", bus_id=None,
            hbm_used_mb=3318, hbm_total_mb=65536, ddr_used_mb=2387, ddr_total_mb=13553, busy_percent=7,
        ),
    )  # fmt: skip
    assert processes_of(found) == (
        SmiProcess(card=0, chip=0, pid=3104272, name="", memory_mb=116, container_pid=None),
        SmiProcess(card=0, chip=0, pid=3104266, name="/usr/bin/python", memory_mb=33895, container_pid=None),
    )
    assert (found.idle_cards, found.silent_cards, found.cut_lists) == ((12,), (), ())


def test_two_dies_of_a_card() -> None:
    found = parse_info(DIES)
    assert [(chip.card, chip.chip, chip.physical_id, chip.logic_id) for chip in chips_of(found)] == [
        (1, 0, 2, None),
        (1, 1, 3, None),
    ]
    assert [(process.card, process.chip) for process in processes_of(found)] == [(1, 1)]
    assert found.gaps == ()
    assert found.tool_version is None


def test_duo_card() -> None:
    found = parse_info(DUO)
    assert [(c.card, c.chip, c.logic_id, c.bus_id, c.hbm_total_mb, c.ddr_used_mb) for c in chips_of(found)] == [
        (2, 0, 4, "0000:01:00.0", None, 1529),
        (2, 1, 5, "0000:01:00.0", None, 1411),
    ]
    assert found.processes is None
    assert found.gaps == ("The text has no table of processes, so nothing is known about them.",)


def test_950() -> None:
    found = parse_info(SERIES_950)
    (chip,) = chips_of(found)
    assert (chip.card, chip.chip, chip.name, chip.health) == (3, None, "Ascend950PR", "Critical")
    assert (chip.hbm_used_mb, chip.hbm_total_mb, chip.busy_percent) == (90633, 114688, 100)
    assert [(process.card, process.chip, process.pid) for process in processes_of(found)] == [(3, None, 1530715)]
    assert (found.tool_version, found.driver_version, found.gaps) == (None, None, ())


def test_column_of_pids_in_containers() -> None:
    text = (
        "| NPU     Chip | Process id    | Process name  | Process memory(MB)    | Process id in container |\n"
        "+==============+===============+===============+=======================+=========================+\n"
        "| 0       0    | 485946        | pytest        | 5175                  | NA                      |\n"
        "| 0       0    | 485947        | pytest        | 5175                  | 17                      |\n"
        "+==============+===============+===============+=======================+=========================+\n"
    )
    found = parse_info(text)
    assert [(process.pid, process.container_pid) for process in processes_of(found)] == [(485946, None), (485947, 17)]
    assert found.chips is None
    assert found.gaps == ("The text has no table of chips.",)


def test_columns_are_taken_by_their_names() -> None:
    swapped = TABLE.replace("Memory-Usage(MB)  HBM-Usage(MB)   ", "HBM-Usage(MB)     Memory-Usage(MB)")
    assert [chip.ddr_used_mb for chip in chips_of(parse_info(swapped))] == [37705, 3318]


# --- noise -----------------------------------------------------------------------------------------------------------


def test_lines_without_bars_and_blanks_around_rows_do_not_matter() -> None:
    indented = "".join(f"    {line} \r\n" for line in TABLE.splitlines())
    assert parse_info("[ERROR] a line of a log\n" + indented + '""",\n  { 0: {"name": "910B3"} }\n') == parse_info(
        TABLE
    )


def test_complaint_beside_a_table_is_a_gap() -> None:
    warning = "[WARNING]The driver package may not be completely installed, please check."
    found = parse_info(f"{TABLE}{warning}\nnpu get board type failed. ret is -8005\n")
    assert found.gaps == (warning, "npu get board type failed. ret is -8005")
    assert found.chips == parse_info(TABLE).chips


@pytest.mark.parametrize(
    ("text", "kind", "ret"),
    [
        ("", "unreadable", None),
        ("| NPU编号 | 健康状态 |\n| 0 | 正常 |\n", "unreadable", None),
        ("DrvMngGetConsoleLogLevel failed. (ret=4)\ndcmi module initialize failed. ret is -8005\n",
         "driver-init-failed", -8005),
        ("dcmi model initialized failed, because the device is used. ret is -8020\n", "device-occupied", -8020),
        ("Invalid card id.\nError parameter of -i\n", "invalid-card", None),
    ],
)  # fmt: skip
def test_text_without_a_table_is_refused(text: str, kind: str, ret: int | None) -> None:
    with pytest.raises(NpuSmiError) as caught:
        parse_info(text)
    assert (caught.value.kind, caught.value.ret) == (kind, ret)


# --- what is not known -----------------------------------------------------------------------------------------------


def test_empty_table_is_a_gap() -> None:
    found = parse_info(THIN + HEADER + THICK)
    assert found.chips == ()
    assert "no row" in found.gaps[0]


def test_chip_without_its_head_row_has_no_card() -> None:
    lines = DIES.splitlines(keepends=True)
    del lines[7]  # the head row of the second die
    found = parse_info("".join(lines))
    assert [(chip.card, chip.name, chip.health, chip.physical_id) for chip in chips_of(found)] == [
        (1, "Ascend910", "OK", 2),
        (None, None, None, 3),
    ]
    assert "head row is missing" in found.gaps[0]


def test_head_row_without_its_chip_is_a_gap() -> None:
    lines = TABLE.splitlines(keepends=True)
    del lines[7]  # the chip row of the first card
    found = parse_info("".join(lines))
    assert [chip.card for chip in chips_of(found)] == [12]
    assert found.gaps == ("A head row has no chip: card 0.",)


def test_card_whose_set_up_failed() -> None:
    found = parse_info(TABLE.replace("| 12    910B3", "| -1    910B3"))
    assert [chip.card for chip in chips_of(found)] == [0, None]
    assert "failed: its id is -1" in found.gaps[0]


def test_memory_of_a_failed_query_is_unknown() -> None:
    found = parse_info(TABLE.replace("37705/ 65536 ", "0    / 0     "))
    assert (chips_of(found)[0].hbm_used_mb, chips_of(found)[0].hbm_total_mb) == (None, None)
    assert "0 of 0 stands for a failed query" in found.gaps[0]


def test_logic_id_of_two_chips_counts_for_none() -> None:
    found = parse_info(DUO.replace("| 1       5 ", "| 1       4 "))
    assert [chip.logic_id for chip in chips_of(found)] == [None, None]
    assert found.gaps[0] == "2 chips have the logic id 4, so it counts for none."


def test_chip_that_stands_twice() -> None:
    again = FIRST.replace("37705", "40000").replace("94.6", "90.1")
    found = parse_info(TABLE.replace(SECOND, again))
    (chip,) = chips_of(found)
    assert (chip.bus_id, chip.hbm_used_mb, chip.hbm_total_mb) == ("0000:C1:00.0", None, 65536)
    assert "stands twice" in found.gaps[0]


def test_cell_that_does_not_fit_is_left_out_alone() -> None:
    found = parse_info(
        TABLE.replace("0           0    / 0          37705/ 65536", "0           0    / 0                       ")
    )
    chip = chips_of(found)[0]
    assert (chip.bus_id, chip.card, chip.hbm_used_mb, chip.ddr_used_mb) == ("0000:C1:00.0", 0, None, None)
    assert "does not fit" in found.gaps[0]


@pytest.mark.parametrize(
    ("cell", "instead", "said"),
    [
        ("37705/ 65536", "37705/      ", "HBM of the chip at 0000:C1:00.0 is '37705/'"),
        ("2387 / 13553", "2387 13553  ", "A cell does not fit its header"),
        ("| 116 ", "| ?   ", "no chip or no memory"),
        (
            "| 0                         | NA",
            "| ?                         | NA",
            "chip number of the chip at NA is '?'",
        ),
    ],
)
def test_value_that_cannot_be_read_is_unknown_and_a_gap(cell: str, instead: str, said: str) -> None:
    found = parse_info(TABLE.replace(cell, instead))
    assert len(chips_of(found)) == len(processes_of(found)) == 2
    assert said in found.gaps[0]


@pytest.mark.parametrize("dots", ["...\n", "| ...                       | ...           | ...           |\n", "……\n"])
def test_rows_left_out_are_a_gap(dots: str) -> None:
    found = parse_info(TABLE.replace(SECOND, dots + SECOND))
    assert found.gaps == ("Rows were left out of the table.",)
    assert found.chips == parse_info(TABLE).chips


def test_bar_in_the_name_of_a_process_is_a_gap() -> None:
    found = parse_info(TABLE.replace("/usr/bin/python ", "/usr|bin/python "))
    assert [process.pid for process in processes_of(found)] == [3104272]
    assert "5 cells where its header has 4" in found.gaps[0]


def test_card_without_a_line_is_silent_and_not_idle() -> None:
    found = parse_info(TABLE.replace("processes found in NPU 12", "processes found in NPU 1 "))
    assert found.silent_cards == (12,)
    assert "does not mention card 12" in found.gaps[0]


@pytest.mark.parametrize(("rows", "cut"), [(PROCESS_ROWS_MAX - 1, ()), (PROCESS_ROWS_MAX, ((0, 0),))])
def test_list_of_as_many_processes_as_are_printed_may_be_cut(rows: int, cut: tuple[tuple[int, int], ...]) -> None:
    row = "| 0       0                 | {}       | python                   | 116                     |\n"
    found = parse_info(THIN + PROCESSES + THICK + "".join(row.format(1000 + at) for at in range(rows)) + THICK)
    assert len(processes_of(found)) == rows
    assert found.cut_lists == cut


def test_table_of_processes_closed_like_a_row_may_go_on() -> None:
    end = "| No running processes found in NPU 12                                                           |\n"
    assert parse_info(TABLE.replace(end + THICK, end + THIN)).gaps == (
        "The table of processes is not closed: rows may be missing.",
    )


# --- any text --------------------------------------------------------------------------------------------------------


def assert_cut_is_never_wrong(text: str, at: int, whole: SmiTable) -> None:
    """Compare a text cut at one place with the whole: what is read from it is the same, and less is a gap."""
    try:
        found = parse_info(text[:at])
    except NpuSmiError:
        return
    for one, full in ((found.chips, whole.chips), (found.processes, whole.processes)):
        assert (one or ()) == (full or ())[: len(one or ())]
    assert found.idle_cards == whole.idle_cards[: len(found.idle_cards)]
    assert found.driver_version in (None, whole.driver_version)
    same = (found.chips, found.processes, found.idle_cards) == (whole.chips, whole.processes, whole.idle_cards)
    assert same or len(found.gaps) > 0


@pytest.mark.parametrize("text", [TABLE, DIES, DUO, SERIES_950])
def test_every_cut(text: str) -> None:
    whole = parse_info(text)
    for at in range(len(text)):
        assert_cut_is_never_wrong(text, at, whole)


@pytest.mark.parametrize(
    "entry", entries("npu-smi", lambda entry: entry["command"] == "npu-smi info" and not entry.get("error"))
)
def test_cuts_of_captured_answers(entry) -> None:
    text = text_of("npu-smi", entry["file"])
    whole = parse_info(text)
    for at in range(0, len(text), len(text) // 23):
        assert_cut_is_never_wrong(text, at, whole)


@given(st.sampled_from([TABLE, DIES, DUO, SERIES_950]), st.data())
def test_lost_lines_are_a_gap_or_change_nothing_else(text: str, data) -> None:
    whole = parse_info(text)
    lines = text.splitlines(keepends=True)
    lost = data.draw(st.sets(st.integers(0, len(lines) - 1), min_size=1, max_size=2))
    try:
        found = parse_info("".join(line for at, line in enumerate(lines) if at not in lost))
    except NpuSmiError:
        return
    known = {(chip.card, chip.chip, chip.bus_id, chip.hbm_used_mb, chip.ddr_used_mb) for chip in whole.chips or ()}
    for chip in found.chips or ():
        if chip.card is not None:
            assert (chip.card, chip.chip, chip.bus_id, chip.hbm_used_mb, chip.ddr_used_mb) in known
    assert set(found.processes or ()) <= set(whole.processes or ())


PIECES = [*TABLE.splitlines(keepends=True), *SERIES_950.splitlines(keepends=True), "|", "\n", "| NA |", "0", "/", " "]


@given(st.binary().map(lambda data: data.decode("latin-1")) | st.lists(st.sampled_from(PIECES)).map("".join))
def test_any_text_is_read_or_refused(text: str) -> None:
    with suppress(NpuSmiError):
        parse_info(text)
