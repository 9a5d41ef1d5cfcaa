"""What stands in a state file and in its log: bytes to values and back, strictly.

    {                                     the state file: one object, UTF-8, indented for people
      "schema_version": "0.2.0",
      "log": "<file>.log",                always, whether there is a log or not
      "generation": 3,                    counts the documents that have had this name
      ...                                 the fields of the document
    }
    {"generation":3,"record":...}         the log: one such line for each record, of the document it belongs to

Every reader must see one and the same value, so nothing is read that JSON leaves open (a key that stands twice) or
does not have (NaN). What is written has been read back and compared before it leaves this module.
"""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, NoReturn

from berth.errors import FailedError, MalformedError

#: What berth writes (design, "Ground").
SCHEMA_VERSION: Final = "0.2.0"
#: Written by the forerunner of `berth bind`: the same document, without a log.
_WITHOUT_LOG: Final = "0.1.0"
#: While the first number is 0 a new second one may change meanings, a new third one may not.
_WITH_LOG: Final = re.compile(r"0\.2\.(0|[1-9][0-9]*)")
_VERSIONS_READ: Final = "0.1.0 and 0.2.x"
_OUR_FIELDS: Final = ("schema_version", "log", "generation")

_SURROGATE: Final = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True, slots=True)
class StoredState:
    """A state file as it was read.

    Attributes:
        generation: Number of the document; 0 where the version has no log.
        document: Its fields, without ours.
    """

    generation: int
    document: dict[str, Any]


@dataclass(frozen=True, slots=True)
class StoredLog:
    """A log as it was read.

    Attributes:
        records: The records that belong to the document, oldest first.
        size: Bytes up to the end of the last whole line; what follows was never reported as recorded.
        stale: The lines belong to an earlier document, which has their records folded in.
    """

    records: list[Any]
    size: int = 0
    stale: bool = False


def damaged(path: str, why: str) -> FailedError:
    """Return the error for the file `path`, which is not what berth writes."""
    return FailedError(
        "damaged-state",
        f"the state file {path!r} is damaged: {why}. It is kept as it is, and nothing that needs it is done",
        "Look at the file, and put back a copy that is whole, or move it away together with what it describes.",
    )


def encode_state(document: Mapping[str, object], *, generation: int, log: str, path: str) -> bytes:
    """Return the content of a state file.

    Args:
        document: Its fields: what JSON can hold, sequences as lists. Strings may be any, with surrogateescape too.
        generation: Number of this document.
        log: Name of its log.
        path: Path of the state file, for messages.

    Raises:
        MalformedError: The document cannot be written so that it comes back the same, or has a field of our names.
    """
    for field in _OUR_FIELDS:
        if field in document:
            raise _not_json(path, f"the field {field!r} is berth's own")
    ours = dict(zip(_OUR_FIELDS, (SCHEMA_VERSION, log, generation), strict=True))
    return _dump({**ours, **document}, path, indent=2)


def decode_state(data: bytes, *, log: str, path: str) -> StoredState:
    """Return what the content `data` of the state file `path` says.

    Args:
        data: The whole content.
        log: The name that its log must have.
        path: Path of the state file, for messages.

    Raises:
        FailedError: It is damaged, or of a version that is not read.
    """
    try:
        document = _parse(data)
    except ValueError as error:
        raise damaged(path, str(error)) from error
    if not isinstance(document, dict):
        raise damaged(path, "it is not an object")
    version = document.pop("schema_version", None)
    if version == _WITHOUT_LOG:
        return StoredState(generation=0, document=document)
    if not isinstance(version, str) or not _WITH_LOG.fullmatch(version):
        raise _unknown_version(path, version)
    named, generation = document.pop("log", None), document.pop("generation", None)
    if named != log:
        raise damaged(path, f"its log must be {log!r}, and it names {named!r}; was it renamed or copied?")
    if type(generation) is not int or generation < 1:
        raise damaged(path, f"its generation is {generation!r}")
    return StoredState(generation=generation, document=document)


def encode_line(record: object, *, generation: int, path: str) -> bytes:
    """Return the line of the log that says `record`, with its newline.

    Raises:
        MalformedError: The record cannot be written so that it comes back the same.
    """
    return _dump({"generation": generation, "record": record}, path, indent=None)


def decode_log(data: bytes, *, generation: int, path: str) -> StoredLog:
    """Return what the content `data` of the log `path` says about the document `generation`.

    A last line without its newline, or that is no JSON, was being written when its writer ended: it is left out.

    Raises:
        FailedError: Another line is damaged, or the lines belong to a later document, or to several.
    """
    *lines, rest = data.split(b"\n")
    size = len(data) - len(rest)
    records, generations = [], set()
    for number, line in enumerate(lines, 1):
        try:
            entry = _parse(line)
        except _NotJsonError as error:
            if number == len(lines) and not rest:
                size -= len(line) + 1
                break
            raise damaged(path, f"line {number}: {error}") from error
        except ValueError as error:
            raise damaged(path, f"line {number}: {error}") from error
        if not isinstance(entry, dict) or entry.keys() != {"generation", "record"}:
            raise damaged(path, f"line {number} is none of berth's")
        generations.add(entry["generation"] if type(entry["generation"]) is int else None)
        records.append(entry["record"])
    if not generations or generations == {generation}:
        return StoredLog(records=records, size=size)
    (found, *more) = generations
    if more or found is None or not 1 <= found < generation:
        why = "its lines belong to several documents" if more else f"its lines belong to generation {found!r}"
        raise damaged(path, f"{why}, and the document has generation {generation}; was an old copy put back?")
    return StoredLog(records=[], size=size, stale=True)


class _NotJsonError(ValueError):
    """The text is no JSON at all; other errors are about JSON that we do not take."""


def _parse(data: bytes) -> Any:
    """Return the value of one JSON text.

    Raises:
        _NotJsonError: It is none.
        ValueError: It is one that has no single meaning.
    """
    try:
        return json.loads(data.decode(), object_pairs_hook=_object, parse_constant=_no_number, parse_float=_finite)
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise _NotJsonError(f"it is not JSON ({error})") from error
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        keys = [key for key, _value in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"the key {twice!r} stands twice in one object")
    return found


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"it holds {name}, which is no JSON")


def _finite(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError(f"the number {text[:40]} is too large")
    return value


def _dump(value: dict[str, object], path: str, *, indent: int | None) -> bytes:
    """Return `value` as JSON and a newline."""
    separators = (",", ":") if indent is None else None
    try:
        text = json.dumps(value, indent=indent, separators=separators, ensure_ascii=False, allow_nan=False)
        data = _encode(text)
        same = _parse(data) == value
    except (TypeError, ValueError, RecursionError) as error:
        raise _not_json(path, str(error)) from error
    if not same:
        raise _not_json(path, "it would not come back the same; keys are strings, and sequences are lists")
    return data + b"\n"


def _encode(text: str) -> bytes:
    """Return `text` as UTF-8, with surrogates as the escapes of JSON: they stand within strings only."""
    try:
        return text.encode()
    except UnicodeEncodeError:
        return _SURROGATE.sub(lambda found: f"\\u{ord(found[0]):04x}", text).encode()


def _not_json(path: str, why: str) -> MalformedError:
    return MalformedError("state-not-json", f"what was to be written to {path!r} cannot be written as JSON: {why}")


def _unknown_version(path: str, version: object) -> FailedError:
    said = "names no schema_version" if version is None else f"has schema_version {version!r}"
    return FailedError(
        "unknown-state-version",
        f"the state file {path!r} {said}, and this berth reads {_VERSIONS_READ}; it is kept as it is",
        "Use the version of berth that wrote it, or one that is newer.",
    )
