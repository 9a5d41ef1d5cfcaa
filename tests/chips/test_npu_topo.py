import re
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from berth.chips.npu_text import NpuSmiError
from berth.chips.npu_topo import NpuTopo, TopoLink, node_near, nodes_near, parse_topo
from berth.host.cpuset import CpuSet
from berth.host.topology import Node
from chips.captured import entries, text_of

LEGEND = "\nLegend:\n\n  X    = Self\n  HCCS = Connection traversing HCCS.\n  NA   = Unknown relationship.\n"
PAIRED = (
    "\t   NPU0       NPU2       CPU Affinity\n"
    "NPU0       X          HCCS       144-167\n"
    "NPU2       HCCS       X          0-23,96-119       \n" + LEGEND
)


def cpus(text: str) -> CpuSet:
    return CpuSet.parse_list(text)


def affinities(text: str) -> dict[int, str | None]:
    return {row.number: None if row.affinity is None else str(row.affinity) for row in parse_topo(text).rows}


# --- captured matrices -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("entry", entries("npu-smi", lambda entry: "topo" in entry))
def test_captured_matrix(entry) -> None:
    expected = entry["topo"]
    found = parse_topo(text_of("npu-smi", entry["file"]))
    assert found.gaps == ()
    assert found.id_kind == "NPU"
    assert [f"NPU{row.number}" for row in found.rows] == expected["order"]
    assert {f"NPU{row.number}": str(row.affinity) for row in found.rows} == expected["cpu_affinity"]
    for row in found.rows:
        types = dict(zip(expected["order"], expected["links"][f"NPU{row.number}"], strict=True))
        assert types.pop(f"NPU{row.number}") == "X"
        assert {f"NPU{link.target}": link.type for link in row.links} == types


@pytest.mark.parametrize("entry", entries("npu-topo", lambda entry: entry["expected"].get("npu") is not None))
def test_captured_affinity(entry) -> None:
    expected = entry["expected"]
    found = parse_topo(text_of("npu-topo", next(file for file in entry["files"] if file.endswith(".topo.txt"))))
    assert found.gaps == ()
    assert found.id_kind == expected["id_kind"]
    assert {str(row.number): str(row.affinity) for row in found.rows} == expected["npu"]
    for pair, wanted in expected["links"].items():
        one, other = map(int, pair.split("-"))
        row = found.row(one)
        assert row is not None
        assert TopoLink(target=other, type=wanted) in row.links
    if expected["npu_numa"] is not None:
        text = text_of("npu-topo", expected["npu_numa_if_nodes_from"].split()[0])
        lists = re.findall(r"^NUMA node([0-9]+) CPU\(s\): +(\S+)$", text, re.MULTILINE)
        nodes = [Node(number=int(number), cpus=cpus(cpu_list)) for number, cpu_list in lists]
        assert {str(row.number): node_near(row.affinity, nodes) for row in found.rows} == expected["npu_numa"]


# --- one trap each ---------------------------------------------------------------------------------------------------


def test_matrix() -> None:
    found = parse_topo(PAIRED)
    assert found.id_kind == "NPU"
    assert found.gaps == ()
    assert affinities(PAIRED) == {0: "144-167", 2: "0-23,96-119"}
    assert [row.links for row in found.rows] == [
        (TopoLink(target=2, type="HCCS"),),
        (TopoLink(target=0, type="HCCS"),),
    ]
    assert found.row(1) is None


def test_matrix_without_affinity_column() -> None:
    found = parse_topo("           Phy-ID0    Phy-ID1\nPhy-ID0    X          SIO\nPhy-ID1    SIO        X\n" + LEGEND)
    assert found.id_kind == "Phy-ID"
    assert found.gaps == ()
    assert [(row.number, row.affinity, row.links[0].type) for row in found.rows] == [(0, None, "SIO"), (1, None, "SIO")]


def test_columns_of_network_cards_are_no_links() -> None:
    text = (
        "       NPU0   NPU1   NIC0   CPU Affinity\n"
        "NPU0   X      HCCS   PIX    0-23\n"
        "NPU1   HCCS   X      SYS    24-47\n"
        "NIC0   PIX    SYS    X      0-47\n"
    )
    found = parse_topo(text)
    assert found.gaps == ()
    assert affinities(text) == {0: "0-23", 1: "24-47"}
    assert [[link.target for link in row.links] for row in found.rows] == [[1], [0]]


def test_column_behind_the_affinity_is_not_taken_for_it() -> None:
    text = "   NPU0   CPU Affinity   NUMA Affinity\nNPU0   X   0-23   7\n"
    assert affinities(text) == {0: "0-23"}
    assert affinities(text.replace("X   ", "")) == {0: None}


def test_single_npu() -> None:
    found = parse_topo("NPU5   CPU Affinity\r\nNPU5   X   0-3\r\n")
    assert [(row.number, str(row.affinity), row.links) for row in found.rows] == [(5, "0-3", ())]


@pytest.mark.parametrize("printed", ["NA", "-", "N/A"])
def test_affinity_that_npu_smi_does_not_know(printed: str) -> None:
    found = parse_topo(f"   NPU0   CPU Affinity\nNPU0   X   {printed}\n")
    assert found.rows[0].affinity is None
    assert found.gaps == ()


@pytest.mark.parametrize("printed", ["0-", "3-1", "0-99999999999", "0-63,", "zero"])
def test_affinity_that_is_no_list_is_a_gap(printed: str) -> None:
    found = parse_topo(f"   NPU0   CPU Affinity\nNPU0   X   {printed}\n")
    assert found.rows[0].affinity is None
    assert "CPU affinity of NPU0" in found.gaps[0]


def test_list_with_blanks_is_taken_whole() -> None:
    assert affinities("   NPU0   CPU Affinity\nNPU0   X   0-63, 128-191\n") == {0: "0-63,128-191"}


def test_row_that_does_not_fit_keeps_its_list_and_no_link() -> None:
    found = parse_topo(PAIRED.replace("NPU0       X          HCCS", "NPU0       HCCS"))
    row = found.row(0)
    assert row is not None
    assert str(row.affinity) == "144-167"
    assert row.links == ()
    assert "NPU0 has 2 cells where the header has 3" in found.gaps[0]


def test_row_that_does_not_fit_and_ends_with_a_link_has_no_list() -> None:
    found = parse_topo(PAIRED.replace("144-167", ""))
    row = found.row(0)
    assert row is not None
    assert row.affinity is None
    assert row.links == ()
    assert len(found.gaps) == 1


def test_missing_rows_are_a_gap() -> None:
    lines = PAIRED.splitlines(keepends=True)
    assert parse_topo(lines[0] + lines[1]).gaps == ("The matrix has no row for NPU2.",)
    assert parse_topo(lines[0] + lines[1] + "...\n" + lines[2]).gaps == ("Rows were left out of the matrix.",)


def test_rows_that_differ_count_for_nothing() -> None:
    found = parse_topo(PAIRED + "NPU0       X          HCCS       0-23\n")
    assert affinities(PAIRED + "NPU0       X          HCCS       0-23\n")[0] is None
    assert found.gaps == ("Two rows of NPU0 differ, so neither counts.",)
    assert parse_topo(PAIRED + PAIRED) == parse_topo(PAIRED)


def test_rows_of_the_other_kind_are_not_mixed_in() -> None:
    found = parse_topo(PAIRED.replace("NPU2       HCCS", "Phy-ID2    HCCS"))
    assert [row.number for row in found.rows] == [0]
    assert found.gaps == ("The matrix has no row for NPU2.",)


@pytest.mark.parametrize("text", ["", "\n", "NPU0", "拓扑信息\n", LEGEND, "NPU0       X          HCCS       144-167\n"])
def test_text_without_a_header_is_refused(text: str) -> None:
    with pytest.raises(NpuSmiError) as caught:
        parse_topo(text)
    assert caught.value.kind == "unreadable"


def test_failed_call_is_told() -> None:
    with pytest.raises(NpuSmiError) as caught:
        parse_topo("DrvMngGetConsoleLogLevel failed. (ret=4)\ndcmi module initialize failed. ret is -8005\n")
    assert (caught.value.kind, caught.value.ret, caught.value.code) == ("driver-init-failed", -8005, 5)


# --- nodes -----------------------------------------------------------------------------------------------------------

NODES = (
    Node(number=0, cpus=cpus("0-3")),
    Node(number=2, cpus=cpus("4-7")),
    Node(number=8, cpus=CpuSet()),
)


@pytest.mark.parametrize(
    ("affinity", "near", "node"),
    [
        ("0-3", (0,), 0),
        ("5", (2,), 2),
        ("4-7,64-67", (2,), 2),  # CPUs that are in no node, being offline
        ("0-7", (0, 2), None),
        ("64", (), None),
        ("", (), None),
    ],
)
def test_node_near_an_affinity(affinity: str, near: tuple[int, ...], node: int | None) -> None:
    assert nodes_near(cpus(affinity), NODES) == near
    assert node_near(cpus(affinity), NODES) == node


def test_node_near_unknown_cpus_is_unknown() -> None:
    assert node_near(None, NODES[:1]) is None
    assert node_near(cpus("0-3"), [*NODES, Node(number=9, cpus=cpus("3"))]) is None


# --- any text --------------------------------------------------------------------------------------------------------


def assert_cut_is_never_wrong(text: str, at: int, whole: NpuTopo) -> None:
    """Compare a text cut at one place with the whole: what is read from it is the same, and less is a gap."""
    try:
        found = parse_topo(text[:at])
    except NpuSmiError:
        return
    assert found.id_kind == whole.id_kind
    for row in found.rows:
        full = whole.row(row.number)
        assert full is not None
        assert row.affinity in (full.affinity, None)
        assert row.links in (full.links, ())
    assert found.gaps or found.rows == whole.rows


def test_every_cut_of_a_matrix() -> None:
    whole = parse_topo(PAIRED)
    for at in range(len(PAIRED)):
        assert_cut_is_never_wrong(PAIRED, at, whole)


ranges = st.lists(st.integers(0, 700), min_size=1, max_size=8).map(CpuSet.of)


@given(st.data(), st.sampled_from(["NPU", "Phy-ID"]), st.lists(st.integers(0, 40), min_size=1, max_size=8, unique=True))
def test_written_matrix_is_read_back_and_cut(data, kind: str, numbers: list[int]) -> None:
    near = data.draw(st.none() | st.lists(ranges, min_size=len(numbers), max_size=len(numbers)))
    links = {pair: data.draw(st.sampled_from(["HCCS", "SYS", "NA", "HCCS_SW"])) for pair in pairs(numbers)}
    gap = data.draw(st.sampled_from([" ", "\t", "       "]))
    text = "" if near is None and len(numbers) == 1 else data.draw(st.sampled_from(["", "\t  "]))
    text += gap.join([f"{kind}{number}" for number in numbers] + ([] if near is None else ["CPU Affinity"])) + "\n"
    for at, number in enumerate(numbers):
        cells = ["X" if other == number else links[number, other] for other in numbers]
        text += gap.join([f"{kind}{number}", *cells] + ([] if near is None else [str(near[at])])) + " \n"
    found = parse_topo(text)
    assert (found.id_kind, found.gaps) == (kind, ())
    assert [(row.number, row.affinity) for row in found.rows] == list(zip(numbers, near or [None] * 8, strict=False))
    assert {(row.number, link.target): link.type for row in found.rows for link in row.links} == links
    assert_cut_is_never_wrong(text, data.draw(st.integers(0, len(text))), found)


def pairs(numbers: list[int]) -> list[tuple[int, int]]:
    return [(one, other) for one in numbers for other in numbers if one != other]


@given(
    st.binary().map(lambda data: data.decode("latin-1"))
    | st.lists(st.sampled_from(["NPU0", "Phy-ID1", "CPU Affinity", "X", "0-3", ",", "\n", " "])).map("".join)
)
def test_any_text_is_read_or_refused(text: str) -> None:
    with suppress(NpuSmiError):
        parse_topo(text)
