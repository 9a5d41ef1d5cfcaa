import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from berth.errors import MalformedError
from berth.host.cpuset import MAX_CPU, CpuSet

numbers = st.frozensets(st.integers(0, 700) | st.integers(0, MAX_CPU), max_size=80)
relaxed = settings(deadline=None)


@pytest.mark.parametrize(
    ("text", "members"),
    [
        ("", []),
        ("\n", []),
        ("0", [0]),
        ("0-3,8", [0, 1, 2, 3, 8]),
        ("0-3,8\n", [0, 1, 2, 3, 8]),
        ("8,0-3", [0, 1, 2, 3, 8]),
        ("0-2,1-3", [0, 1, 2, 3]),
        ("5-5", [5]),
        ("007", [7]),
        ("0-31:1/8", [0, 8, 16, 24]),
        ("0-10:2/4", [0, 1, 4, 5, 8, 9]),
        ("3-10:2/4", [3, 4, 7, 8]),
        ("0-3:4/4", [0, 1, 2, 3]),
        ("0-1:1/60000", [0]),
        ("0-3:0/4", []),
        (str(MAX_CPU), [MAX_CPU]),
    ],
)
def test_parses_what_the_kernel_accepts(text: str, members: list[int]) -> None:
    assert list(CpuSet.parse_list(text)) == members


@pytest.mark.parametrize(
    "text",
    [
        "3-1", "a", "1,,2", ",", "1,", ",1", "-1", "0-", "-", "0-99999999999", "65536", "9" * 5000, "٣", "1-٣", "²",
        "0 ,1", " 0", "0 ", "0\n\n", "0\r\n", "0\n1", "0x1", "1_0", "+1", "1.0", "all", "N", "0-N", "0-10:2", "3:1/2",
        "0-3:1/0", "0-3:5/4", "0-3:1/2/3", "0-3:1/99999999", "0--3", "0-1-2", "\x000",
    ],
)  # fmt: skip
def test_refuses_what_is_no_list_and_names_it(text: str) -> None:
    with pytest.raises(MalformedError) as caught:
        CpuSet.parse_list(text, source="/some/file")
    assert caught.value.name == "bad-cpu-list"
    assert ascii(text)[1:-1][:70] in caught.value.message
    assert "/some/file" in caught.value.message
    assert "0-3,8" in caught.value.fix
    assert len(caught.value.message) < 400


def test_says_which_part_is_wrong_and_why() -> None:
    with pytest.raises(MalformedError, match=r"'0,3-1' cannot be read: the range 3-1 runs backwards\."):
        CpuSet.parse_list("0,3-1")
    with pytest.raises(MalformedError, match=r"'a' is not a number, a range or a stride"):
        CpuSet.parse_list("0,a")
    with pytest.raises(MalformedError, match=f"'99999999999' is above the limit {MAX_CPU}"):
        CpuSet.parse_list("0-99999999999")


@pytest.mark.parametrize(
    ("text", "listed"),
    [
        ("00000000,ffffffff", "0-31"),
        ("00000001,00000000\n", "32"),
        ("3", "0-1"),
        ("fffff", "0-19"),
        ("0000,00000000,0000000f", "0-3"),
        ("1,0", "32"),
        ("00010001,00010001", "0,16,32,48"),
        ("F", "0-3"),
        ("0", ""),
        (",".join(["80000000", *["00000000"] * (MAX_CPU // 32)]), str(MAX_CPU)),
    ],
)
def test_parses_masks_of_any_width(text: str, listed: str) -> None:
    assert CpuSet.parse_mask(text).to_list() == listed


@pytest.mark.parametrize(
    "text",
    ["", "\n", "g", "0x1", "-1", "1,", ",1", "1,,1", " 1", "1 ", "1_0", "fffffffff", "٣", "1\n\n",
     ",".join(["1", *["00000000"] * (MAX_CPU // 32 + 1)])],
)  # fmt: skip
def test_refuses_what_is_no_mask(text: str) -> None:
    with pytest.raises(MalformedError) as caught:
        CpuSet.parse_mask(text, source="/some/file")
    assert caught.value.name == "bad-cpu-mask"
    assert "/some/file" in caught.value.message
    assert "00000000,ffffffff" in caught.value.fix
    assert len(caught.value.message) < 400


def test_prints_the_widths_the_kernel_prints() -> None:
    assert CpuSet().to_mask() == "00000000"
    assert CpuSet.of([0, 1]).to_mask() == "00000003"
    assert CpuSet.of([32]).to_mask() == "00000001,00000000"
    assert CpuSet.of([0, 1]).to_mask(2) == "3"
    assert CpuSet.of(range(20)).to_mask(20) == "fffff"
    assert CpuSet.of(range(16)).to_mask(176) == "0000,00000000,00000000,00000000,00000000,0000ffff"
    with pytest.raises(ValueError, match="CPU 5 does not fit a mask of 4 CPUs"):
        CpuSet.of([5]).to_mask(4)


@pytest.mark.parametrize("number", [-1, MAX_CPU + 1, 10**12])
def test_refuses_numbers_that_are_no_cpu(number: int) -> None:
    with pytest.raises(MalformedError) as caught:
        CpuSet.of([0, number])
    assert caught.value.name == "bad-cpu-number"
    assert str(number) in caught.value.message


@pytest.mark.parametrize("mask", [-1, 1 << (MAX_CPU + 1)], ids=["negative", "wide"])
def test_refuses_masks_outside_the_limit(mask: int) -> None:
    with pytest.raises(MalformedError, match="is not a CPU number"):
        CpuSet(mask)


def test_shows_itself_as_a_list() -> None:
    cpus = CpuSet.of([0, 1, 2, 8])
    assert str(cpus) == "0-2,8"
    assert repr(cpus) == "CpuSet.parse_list('0-2,8')"
    assert eval(repr(cpus)) == cpus


def test_contains_only_what_is_in_it() -> None:
    cpus = CpuSet.of([0, 64])
    assert 64 in cpus
    assert 1 not in cpus
    assert -1 not in cpus
    assert 10**9 not in cpus
    assert "0" not in cpus


def test_the_empty_set_has_no_ends() -> None:
    with pytest.raises(ValueError, match="no lowest"):
        CpuSet().min()
    with pytest.raises(ValueError, match="no highest"):
        CpuSet().max()


@relaxed
@given(numbers)
def test_both_forms_round_trip(members: frozenset[int]) -> None:
    cpus = CpuSet.of(members)
    assert CpuSet.parse_list(cpus.to_list()) == cpus
    assert CpuSet.parse_mask(cpus.to_mask()) == cpus
    assert CpuSet.parse_mask(cpus.to_mask(MAX_CPU + 1)) == cpus
    assert CpuSet.parse_list(",".join(map(str, members))) == cpus


@relaxed
@given(numbers, numbers)
def test_behaves_like_a_python_set(left: frozenset[int], right: frozenset[int]) -> None:
    a, b = CpuSet.of(left), CpuSet.of(right)
    assert list(a) == sorted(left)
    assert len(a) == len(left)
    assert bool(a) == bool(left)
    assert set(a & b) == left & right
    assert set(a | b) == left | right
    assert set(a - b) == left - right
    assert (a <= b) == (left <= right)
    assert (a & b) <= a
    assert a.isdisjoint(b) == left.isdisjoint(right)
    assert (a == b) == (left == right)
    assert hash(a) == hash(CpuSet.of(left))
    assert all(number in a for number in left)
    if left:
        assert (a.min(), a.max()) == (min(left), max(left))


@relaxed
@given(st.integers(0, 300), st.integers(0, 300), st.integers(0, 40), st.integers(1, 40))
def test_strides_follow_their_definition(first: int, length: int, used: int, group: int) -> None:
    used = min(used, group)
    last = first + length
    stride = CpuSet.parse_list(f"{first}-{last}:{used}/{group}")
    assert set(stride) == {cpu for cpu in range(first, last + 1) if (cpu - first) % group < used}


@relaxed
@given(st.text(alphabet="0123456789-,:/ aN\n\0²٣é", max_size=12))
def test_any_text_is_a_set_or_a_named_error(text: str) -> None:
    for parse in (CpuSet.parse_list, CpuSet.parse_mask):
        try:
            cpus = parse(text)
        except MalformedError:
            continue
        assert CpuSet.parse_list(cpus.to_list()) == cpus
