import re
import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from berth.epoch import names

EPOCH = "0123456789abcdef" * 4
RETIREMENT = "fedcba9876543210" * 2

hexadecimal = st.sampled_from("0123456789abcdef")
epochs = st.text(hexadecimal, min_size=64, max_size=64)
retirements = st.text(hexadecimal, min_size=32, max_size=32)
#: What resembles a name: pieces of real ones, glued at random.
pieces = st.lists(
    st.sampled_from(
        [".standalone-work-", ".retired-", ".berth-probe-", "-", EPOCH, RETIREMENT, "0", "1-2-", "\n", "F"]
    ),
    max_size=6,
).map("".join)


def test_names_are_those_of_the_interface() -> None:
    assert names.active_name(EPOCH) == f".standalone-work-{EPOCH}"
    assert names.retired_name(EPOCH, RETIREMENT) == f".retired-standalone-work-{EPOCH}-{RETIREMENT}"


@given(epochs, retirements)
def test_names_are_read_back(epoch: str, retirement: str) -> None:
    assert names.parse_active(names.active_name(epoch)) == epoch
    assert names.parse_retired(names.retired_name(epoch, retirement)) == (epoch, retirement)
    assert names.parse_active(names.retired_name(epoch, retirement)) is None
    assert names.parse_retired(names.active_name(epoch)) is None


@given(st.one_of(pieces, st.text(string.printable)))
def test_only_whole_names_are_names(text: str) -> None:
    active, retired = names.parse_active(text), names.parse_retired(text)
    assert active is None or names.active_name(active) == text
    assert retired is None or names.retired_name(*retired) == text
    assert [active is not None, retired is not None, names.is_probe(text)].count(True) <= 1


@pytest.mark.parametrize(
    "text",
    [
        "",
        EPOCH[:-1],
        EPOCH + "0",
        EPOCH.upper(),
        EPOCH[:-1] + "g",
        EPOCH[:-1] + "\n",
        EPOCH + "\n",
        EPOCH[:-1] + "٣",
        " " + EPOCH[1:],
    ],
)
def test_what_is_no_epoch_id(text: str) -> None:
    assert not names.is_epoch_id(text)
    assert names.parse_active(names.ACTIVE_PREFIX + text) is None
    assert names.parse_retired(f"{names.RETIRED_PREFIX}{text}-{RETIREMENT}") is None
    with pytest.raises(ValueError, match="not an epoch id"):
        names.active_name(text)
    with pytest.raises(ValueError, match="not an epoch id"):
        names.retired_name(text, RETIREMENT)


@pytest.mark.parametrize("text", ["", RETIREMENT[:-1], RETIREMENT + "0", RETIREMENT.upper(), RETIREMENT + "\n"])
def test_what_is_no_retirement_id(text: str) -> None:
    with pytest.raises(ValueError, match="retirement id"):
        names.retired_name(EPOCH, text)


@pytest.mark.parametrize(
    "prefix", ["x.standalone-work-", "standalone-work-", ".standalone-work", "./.standalone-work-"]
)
def test_prefix_is_matched_from_the_start(prefix: str) -> None:
    assert names.parse_active(prefix + EPOCH) is None


milliseconds = st.integers(0, 2**48 - 1)
chance = st.integers(0, 2**80 - 1)


@given(milliseconds, chance, milliseconds, chance)
def test_retirements_sort_by_time(first: int, one: int, second: int, other: int) -> None:
    earlier, later = names.retirement_id(first, one), names.retirement_id(second, other)
    assert re.fullmatch("[0-9a-f]{32}", earlier)
    assert (int(earlier[:12], 16), int(earlier[12:], 16)) == (first, one)
    assert (earlier < later) == ((first, one) < (second, other))


@pytest.mark.parametrize(("when", "random"), [(-1, 0), (2**48, 0), (0, -1), (0, 2**80)])
def test_numbers_that_do_not_fit_a_retirement(when: int, random: int) -> None:
    with pytest.raises(ValueError, match="48 bits"):
        names.retirement_id(when, random)


def test_probe_names() -> None:
    assert names.is_probe(f".berth-probe-12-345-{RETIREMENT}")
    for text in ("", ".berth-probe-", f".berth-probe-12-{RETIREMENT}", f".berth-probe-12-345-{RETIREMENT}\n"):
        assert not names.is_probe(text)
    assert not names.is_probe(f".berth-probe-12-345-{RETIREMENT[1:]}")
    assert not names.is_probe(f"x.berth-probe-12-345-{RETIREMENT}")
