"""What is refused before it is read, for both files of a state file."""

import os
import shutil
import stat
from pathlib import Path

import pytest

from berth.durable.record_log import LOG_LIMIT
from berth.durable.state import STATE_LIMIT, State, StateFile
from berth.errors import FailedError, ForbiddenError
from durable.witness import OTHER_ID, contents, raised, read


def spoil(path: Path, kind: str) -> None:
    """Make of the file at `path` something that is not surely berth's own."""
    match kind:
        case "symbolic link":
            path.rename(path.with_name("elsewhere"))
            path.symlink_to("elsewhere")
        case "dangling link":
            path.unlink()
            path.symlink_to("nowhere")
        case "hard link":
            os.link(path, path.with_name("second name"))
        case "fifo":
            path.unlink()
            os.mkfifo(path)
        case "directory":
            path.unlink()
            path.mkdir()
        case "device":
            path.unlink()
            os.mknod(path, stat.S_IFCHR | 0o600, os.makedev(1, 3))
        case "group writable":
            path.chmod(0o620)
        case "world writable":
            path.chmod(0o602)
        case "foreign":
            os.chown(path, OTHER_ID, OTHER_ID)
        case "oversized":
            os.truncate(path, (STATE_LIMIT if path.suffix != ".log" else LOG_LIMIT) + 1)
        case "damaged":
            path.write_bytes(b"x\n" + path.read_bytes())


SPOILT = {
    "symbolic link": ("linked-file", "symbolic link"),
    "dangling link": ("linked-file", "symbolic link"),
    "hard link": ("linked-file", "2 names"),
    "fifo": ("special-file", "not a regular file"),
    "directory": ("special-file", "not a regular file"),
    "group writable": ("writable-file", "mode 0620"),
    "world writable": ("writable-file", "mode 0602"),
    "oversized": ("oversized-file", "67108864 bytes"),
    "damaged": ("damaged-state", "not JSON"),
}
ROOTS = {
    "device": ("special-file", "not a regular file"),
    "foreign": ("foreign-file", f"uid {OTHER_ID} owns it"),
}


def check_refusal(work: Path, name: str, kind: str, expected: tuple[str, str]) -> None:
    spoil(work / name, kind)
    before = contents(work) if kind != "oversized" else None
    with pytest.raises((ForbiddenError, FailedError)) as caught:
        read(work)
    assert caught.value.name == expected[0]
    assert expected[1] in caught.value.message
    assert repr(str(work / name)) in caught.value.message
    assert caught.value.fix
    assert before is None or contents(work) == before


@pytest.mark.parametrize("kind", SPOILT)
@pytest.mark.parametrize("name", ["s", "s.log"])
def test_what_is_not_surely_ours_is_refused(work: Path, state: StateFile, name: str, kind: str) -> None:
    check_refusal(work, name, kind, SPOILT[kind])


@pytest.mark.parametrize("kind", ROOTS)
@pytest.mark.parametrize("name", ["s", "s.log"])
def test_foreign_and_device_files_are_refused(work: Path, as_root, state: StateFile, name: str, kind: str) -> None:
    check_refusal(work, name, kind, ROOTS[kind])


@pytest.mark.parametrize("kind", [*SPOILT, "foreign"])
def test_spoilt_log_is_neither_written_nor_removed(work: Path, state: StateFile, kind: str) -> None:
    """It was sound when the state file was opened."""
    if kind == "foreign" and os.geteuid() != 0:
        pytest.skip("needs root")
    with StateFile.open(str(work / "s")) as writer:
        spoil(work / "s.log", kind)
        before = {name: status[:2] for name, status in contents(work).items()}
        expected = SPOILT.get(kind, ROOTS.get(kind))
        assert expected is not None
        assert raised(writer.append, 3)[1:] == [expected[0]]
        assert raised(writer.fold, {})[1:] == [expected[0]]
        assert {name: status[:2] for name, status in contents(work).items()} == before
        shutil.rmtree(work / "s.log") if kind == "directory" else (work / "s.log").unlink()
        writer.append(3)  # nothing uncertain happened
        assert writer.read() == State({"a": 1}, [3])


def test_largest_file_that_is_read(work: Path, state: StateFile) -> None:
    for name, limit in (("s", STATE_LIMIT), ("s.log", LOG_LIMIT)):
        with open(work / name, "ab") as file:
            file.write(b" " * (limit - file.tell()))  # white space after the document; a torn line of the log
    assert read(work) == State({"a": 1}, ["one", "two"])


def test_nothing_is_written_that_would_be_too_large_to_be_read(work: Path, state: StateFile) -> None:
    before = contents(work)
    text = "x" * STATE_LIMIT
    assert raised(state.fold, {"a": text}) == ["FailedError", "oversized-file"]
    assert raised(state.append, text) == ["ForbiddenError", "log-full"]
    assert contents(work) == before
    state.append("three")


OWNERS = """
import json, os
from berth.durable.state import StateFile
from berth.errors import BerthError
for name in sys.argv[2:]:
    try:
        with StateFile.open(os.path.join(sys.argv[1], name)) as state: print(json.dumps(state.read().records))
    except BerthError as error: print(error.name)
"""


def test_owner_is_root_or_the_caller(readable_children, other_user, open_directory: Path) -> None:
    for name, owner in (("root", 0), ("caller", OTHER_ID), ("third", 12345)):
        with StateFile.create(str(open_directory / name), {}) as state:
            state.append(owner)
        for path in (open_directory / name, open_directory / f"{name}.log"):
            path.chmod(0o644)
            os.chown(path, owner, owner)
    output = readable_children.run(OWNERS, open_directory, "root", "caller", "third", prefix=other_user)
    assert output.split() == ["[0]", f"[{OTHER_ID}]", "foreign-file"]


def test_fresh_file_is_refused_while_another_user_owns_its_log(as_root, work: Path, state: StateFile) -> None:
    state.fold({})
    (work / "s.log").write_bytes(b'{"generation":2,"record":"planted"}\n')
    os.chown(work / "s.log", OTHER_ID, OTHER_ID)
    assert raised(state.read) == ["ForbiddenError", "foreign-file"]
    assert raised(state.append, 1) == ["ForbiddenError", "foreign-file"]
