import json
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from berth.durable.state_format import StoredLog, decode_log, decode_state, encode_line, encode_state
from berth.errors import FailedError, MalformedError

#: Every code point, surrogates too: names that are not UTF-8 hold them.
TEXT = st.text(st.characters(exclude_categories=()))
SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXT
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4), max_leaves=12
)
OURS = {"schema_version", "log", "generation"}
DOCUMENTS = st.dictionaries(TEXT.filter(lambda key: key not in OURS), VALUES, max_size=5)
#: Two escapes that a reader of JSON has to take for one character.
PAIR = re.compile("[\ud800-\udbff][\udc00-\udfff]")

NESTED = "[" * 100_000


def state(document: dict[str, Any], generation: int = 1) -> bytes:
    return encode_state(document, generation=generation, log="s.log", path="/d/s")


def refused(data: bytes) -> FailedError:
    """Return the error that reading `data` as a state file ends with."""
    with pytest.raises(FailedError) as caught:
        decode_state(data, log="s.log", path="/d/s")
    assert "'/d/s'" in caught.value.message
    assert caught.value.fix
    return caught.value


def log(*generations: int) -> bytes:
    """Return a log of one record per generation, which are numbered from 1."""
    return b"".join(encode_line(n, generation=g, path="/d/s.log") for n, g in enumerate(generations, 1))


def read_log(data: bytes, generation: int = 1) -> StoredLog:
    return decode_log(data, generation=generation, path="/d/s.log")


# --- round trips -----------------------------------------------------------------------------------------------------


@settings(deadline=None)
@given(DOCUMENTS, st.integers(1, 2**40))
def test_document_comes_back_or_is_refused(document: dict[str, Any], generation: int) -> None:
    if PAIR.search(json.dumps(document, ensure_ascii=False)):
        with pytest.raises(MalformedError):
            state(document, generation)
        return
    data = state(document, generation)
    data.decode()  # no surrogate is in the file
    stored = decode_state(data, log="s.log", path="/d/s")
    # repr tells 1 from True and 0.0 from -0.0.
    assert (repr(stored.document), stored.generation) == (repr(document), generation)


@settings(deadline=None)
@given(st.lists(VALUES, max_size=4))
def test_records_come_back_in_one_line_each(records: list[Any]) -> None:
    records = [record for record in records if not PAIR.search(json.dumps(record, ensure_ascii=False))]
    lines = [encode_line(record, generation=7, path="/d/s.log") for record in records]
    assert [line.count(b"\n") for line in lines] == [1] * len(lines)
    assert repr(read_log(b"".join(lines), 7).records) == repr(records)


def test_state_file_is_for_people_and_other_programs_too() -> None:
    data = state({"name": "über \udcff\n", "none": None}, 3)
    assert json.loads(data) == {
        "schema_version": "0.2.0",
        "log": "s.log",
        "generation": 3,
        "name": "über \udcff\n",
        "none": None,
    }
    assert '"über \\udcff\\n"'.encode() in data
    assert data.startswith(b'{\n  "schema_version"')
    assert data.endswith(b"\n}\n")


@pytest.mark.parametrize(
    "value",
    [
        float("nan"),
        float("inf"),
        b"bytes",
        {1: "key"},
        {None: 1},
        {"a": (1, 2)},
        {1, 2},
        "\ud83d\ude00",
        object(),
        10**5000,
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_is_no_json_is_not_written(value: object) -> None:
    for write in (lambda: state({"field": value}), lambda: encode_line(value, generation=1, path="/d/s")):
        with pytest.raises(MalformedError) as caught:
            write()
        assert caught.value.name == "state-not-json"
        assert "'/d/s'" in caught.value.message


def test_what_has_no_end_is_not_written() -> None:
    value: list[object] = []
    value.append(value)
    deep: list[object] = []
    for _ in range(100_000):
        deep = [deep]
    for endless in (value, deep):
        with pytest.raises(MalformedError) as caught:
            state({"field": endless})
        assert caught.value.name == "state-not-json"


@pytest.mark.parametrize("field", sorted(OURS))
def test_fields_of_ours_are_not_the_documents(field: str) -> None:
    with pytest.raises(MalformedError, match=repr(field)):
        state({field: 1})


# --- versions --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", ["0.2.0", "0.2.1", "0.2.10", "0.2.999"])
def test_versions_with_a_log(version: str) -> None:
    text = json.dumps({"a": 1, "schema_version": version, "generation": 5, "log": "s.log"})
    stored = decode_state(text.encode(), log="s.log", path="/d/s")
    assert (stored.generation, stored.document) == (5, {"a": 1})


def test_version_without_a_log() -> None:
    stored = decode_state(b'{"schema_version": "0.1.0", "actions": []}', log="s.log", path="/d/s")
    assert (stored.generation, stored.document) == (0, {"actions": []})


@pytest.mark.parametrize(
    "version",
    [
        "0.3.0",
        "0.10.0",
        "1.0.0",
        "1.2.0",
        "0.1.1",
        "0.0.1",
        "0.2",
        "0.2.",
        "0.2.0.0",
        "0.2.x",
        "0.2.01",
        "0.02.0",
        " 0.2.0",
        "0.2.0\n",
        "0.2.٣",
        "0.2.0-rc1",
        "",
        2,
        0.2,
        None,
        True,
        ["0.2.0"],
    ],
)
def test_other_versions_are_refused(version: object) -> None:
    text = json.dumps({"schema_version": version, "log": "s.log", "generation": 1})
    error = refused(text.encode())
    assert error.name == "unknown-state-version"
    assert "reads 0.1.0 and 0.2.x" in error.message
    if version is not None:
        assert repr(version) in error.message


def test_missing_version_is_refused() -> None:
    error = refused(b'{"log": "s.log", "generation": 1}')
    assert error.name == "unknown-state-version"
    assert "names no schema_version" in error.message


# --- damage ----------------------------------------------------------------------------------------------------------


def test_truncated_anywhere_is_refused() -> None:
    data = state({"text": "ü\n", "list": [1, {"a": None}], "number": 1.5})
    for size in range(len(data) - 1):  # the last newline alone is nobody's content
        assert refused(data[:size]).name == "damaged-state"


HEAD = b'{"schema_version": "0.2.0", "log": "s.log", "generation": 1'


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "not JSON"),
        (b"\0" * 100, "not JSON"),
        (b"[]", "not an object"),
        (b'"0.2.0"', "not an object"),
        (b"null", "not an object"),
        (HEAD + b"} {}", "not JSON"),
        (b"\xef\xbb\xbf" + HEAD + b"}", "not JSON"),
        ((HEAD + b"}").decode().encode("utf-16"), "not JSON"),
        (HEAD + b', "a": "\xff"}', "not JSON"),
        (HEAD + b', "a": "\xed\xa0\x80"}', "not JSON"),
        (HEAD + b", 'a': 1}", "not JSON"),
        (HEAD + b', "a": NaN}', "holds NaN"),
        (HEAD + b', "a": [-Infinity]}', "holds -Infinity"),
        (HEAD + b', "a": 1e999}', "too large"),
        (HEAD + b', "a": ' + b"9" * 5000 + b"}", "digits"),
        (HEAD + b', "a": ' + NESTED.encode() + b"}", "nested too deeply"),
        (HEAD + b', "a": 1, "a": 1}', "'a' stands twice"),
        (HEAD + b', "a": [{"b": 1, "c": 2, "b": 3}]}', "'b' stands twice"),
        (HEAD + b', "generation": 2}', "'generation' stands twice"),
        (HEAD + b', "a": 1, "\\u0061": 1}', "'a' stands twice"),
        (b'{"schema_version": "0.2.0", "generation": 1}', "log must be 's.log', and it names None"),
        (b'{"schema_version": "0.2.0", "log": "../t", "generation": 1}', "it names '../t'"),
        (b'{"schema_version": "0.2.0", "log": "s.log"}', "generation is None"),
        (b'{"schema_version": "0.2.0", "log": "s.log", "generation": 0}', "generation is 0"),
        (b'{"schema_version": "0.2.0", "log": "s.log", "generation": true}', "generation is True"),
        (b'{"schema_version": "0.2.0", "log": "s.log", "generation": 1.0}', "generation is 1.0"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_damage_is_refused(data: bytes, why: str) -> None:
    error = refused(data)
    assert error.name == "damaged-state"
    assert why in error.message


# --- the log ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "rest",
    [b"", b"x", b'{"generation":1,"record":3}', b"\0" * 50 + b"\n", b'\0\0\0"record":3}\n', b"\n", b"\xff\n"],
)
def test_last_line_that_is_not_whole_is_left_out(rest: bytes) -> None:
    whole = log(1, 1)
    assert read_log(whole + rest) == StoredLog(records=[1, 2], size=len(whole))


def test_log_without_a_whole_line() -> None:
    for data in (b"", b'{"gen', b"\0\0\n"):
        assert read_log(data) == StoredLog(records=[])


LINE = b'{"generation":1,"record":1}\n'


@pytest.mark.parametrize(
    ("line", "why"),
    [
        (b"\n", "line 2: it is not JSON"),
        (b"\0\0\0\n", "line 2: it is not JSON"),
        (b'{"generation":1,"rec\n', "line 2: it is not JSON"),
        (b'{"generation":1,"record":1}{"generation":1,"record":1}\n', "line 2: it is not JSON"),
        (b'{"generation":1,"record":NaN}\n', "line 2: it holds NaN"),
        (b'{"generation":1,"record":{"a":1,"a":1}}\n', "line 2: the key 'a' stands twice"),
        (b'{"generation":1}\n', "line 2 is none of berth's"),
        (b'{"generation":1,"record":1,"more":1}\n', "line 2 is none of berth's"),
        (b"[]\n", "line 2 is none of berth's"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_damaged_line_is_refused(line: bytes, why: str) -> None:
    for data in [LINE + line + LINE] + ([] if "not JSON" in why else [LINE + line]):
        with pytest.raises(FailedError) as caught:
            read_log(data)
        assert caught.value.name == "damaged-state"
        assert "'/d/s.log'" in caught.value.message
        assert why in caught.value.message


def test_two_lines_that_are_not_whole_are_damage() -> None:
    """Only one line is ever being written."""
    for rest in (b"x\ny", b"x\ny\n"):
        with pytest.raises(FailedError, match="line 2: it is not JSON"):
            read_log(LINE + rest)


def test_lines_of_an_earlier_document_do_not_count() -> None:
    data = log(4, 4)
    for rest in (b"", b"torn"):
        assert read_log(data + rest, 5) == StoredLog(records=[], size=len(data), stale=True)


@pytest.mark.parametrize(
    ("generations", "why"),
    [
        ((6,), "belong to generation 6"),
        ((4, 5), "several documents"),
        ((5, 6), "several documents"),
        ((0,), "belong to generation 0"),
        ((-1,), "belong to generation -1"),
    ],
)
def test_lines_of_another_document_are_refused(generations: tuple[int, ...], why: str) -> None:
    with pytest.raises(FailedError) as caught:
        read_log(log(*generations), 5)
    assert caught.value.name == "damaged-state"
    assert why in caught.value.message


@pytest.mark.parametrize("generation", ["5.0", "true", '"5"', "null"])
def test_generation_is_a_whole_number(generation: str) -> None:
    for number in (1, 5, 6):
        with pytest.raises(FailedError, match="generation"):
            read_log(f'{{"generation":{generation},"record":1}}\n'.encode(), number)
