import errno
import json
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from berth.durable.files import (
    durable_create,
    durable_link,
    durable_makedirs,
    durable_rename_noreplace,
    durable_replace,
    durable_unlink,
    durable_write,
    fsync_directory,
    list_names,
)

# Runs one function of the module and prints what it raised, as JSON.
ONE_CALL = """
import json, os
from berth.durable import files
from berth.errors import UncertainError
function, arguments = getattr(files, sys.argv[1]), json.loads(sys.argv[2])
if function in (files.durable_write, files.durable_create):
    arguments[1] = arguments[1].encode()
try:
    function(*arguments)
except (OSError, UncertainError) as error:
    print(json.dumps([type(error).__name__, error.errno, error.filename, error.filename2]))
else:
    print("null")
"""


def call(strace: Callable[..., Any], function: str, *arguments: object, **options: Any) -> tuple[Any, list[str]]:
    """Run one durable function under strace; return what it raised and the calls it made."""
    trace = options.pop("trace", "fsync,renameat2,?rename,?renameat")
    traced = strace(ONE_CALL, function, json.dumps([str(a) for a in arguments]), trace=trace, **options)
    return json.loads(traced.output), traced.calls


def snapshot(root: Path) -> dict[str, object]:
    """Return every entry below `root` with its type, inode and content."""
    found: dict[str, object] = {}
    for path in sorted(root.rglob("*")):
        status = path.lstat()
        content = path.read_bytes() if stat.S_ISREG(status.st_mode) else None
        found[str(path.relative_to(root))] = (stat.S_IFMT(status.st_mode), status.st_ino, content)
    return found


@pytest.fixture
def work(tmp_path: Path) -> Path:
    """Return an empty directory; strace's log lies beside it."""
    path = tmp_path / "work"
    path.mkdir()
    return path


# --- write -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("data", [b"", b"\0", b"line\n" * 100_000])
@pytest.mark.parametrize("old", [None, b"a much older and longer content"])
def test_write(work: Path, data: bytes, old: bytes | None) -> None:
    target = work / "file"
    if old is not None:
        target.write_bytes(old)
        target.chmod(0o644)
    durable_write(str(target), data)
    assert target.read_bytes() == data
    assert stat.S_IMODE(target.stat().st_mode) == 0o600
    assert os.listdir(work) == ["file"]


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o277])
def test_write_mode_is_exact_under_any_umask(work: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        durable_write(str(work / "file"), b"x", mode=0o644)
    finally:
        os.umask(before)
    assert stat.S_IMODE((work / "file").stat().st_mode) == 0o644


def test_write_relative_to_a_descriptor(work: Path) -> None:
    fd = os.open(work, os.O_RDONLY)
    try:
        durable_write("file", b"x", dir_fd=fd)
    finally:
        os.close(fd)
    assert (work / "file").read_bytes() == b"x"


def test_write_name_that_is_not_utf8(work: Path) -> None:
    name = os.fsencode(work) + b"/\xff\xfe\n"
    durable_write(os.fsdecode(name), b"x")
    assert os.listdir(os.fsencode(work)) == [b"\xff\xfe\n"]


def test_write_longest_name(work: Path) -> None:
    durable_write(str(work / ("n" * 255)), b"x")
    assert os.listdir(work) == ["n" * 255]


def test_write_syncs_the_file_then_the_directory(strace, work: Path) -> None:
    raised, calls = call(strace, "durable_write", work / "file", "x")
    assert raised is None
    assert [line.split("(")[0] for line in calls] == ["fsync", "renameat", "fsync"] or [
        line.split("(")[0] for line in calls
    ] == ["fsync", "rename", "fsync"]
    assert f"<{work}/.file." in calls[0]
    assert f"<{work}>" in calls[2]


def test_reader_sees_old_or_new(children, work: Path) -> None:
    target = work / "file"
    contents = (b"a" * 5_000, b"b" * 60_000)
    durable_write(str(target), contents[0])
    writer = children.start(
        "from berth.durable.files import durable_write\n"
        "print(flush=True)\n"
        "for turn in range(60): durable_write(sys.argv[1], (b'b' * 60_000, b'a' * 5_000)[turn % 2])\n",
        target,
    )
    writer.stdout.readline()
    seen = set()
    while writer.poll() is None:
        content = target.read_bytes()
        assert content in contents
        seen.add(content[:1])
    assert writer.returncode == 0
    assert seen == {b"a", b"b"}


@pytest.mark.parametrize("old", [None, "old"])
@pytest.mark.parametrize(
    "inject", ["fsync:error=EIO:when=1", "write:error=ENOSPC:when=1", "rename,renameat:error=EDQUOT"]
)
def test_failed_write_leaves_the_old_file_and_no_temporary(strace, work: Path, old: str | None, inject: str) -> None:
    target = work / "file"
    if old is not None:
        target.write_text(old)
    before = snapshot(work)
    raised, _ = call(strace, "durable_write", target, "new", trace="fsync,write,rename,renameat", inject=[inject])
    assert raised is not None
    assert raised[0] != "UncertainError"
    assert errno.errorcode[raised[1]] in inject
    assert snapshot(work) == before


def test_write_without_synced_directory_is_uncertain(strace, work: Path) -> None:
    target = work / "file"
    target.write_text("old")
    raised, _ = call(strace, "durable_write", target, "new", inject=["fsync:error=EIO:when=2"])
    assert raised == ["UncertainError", errno.EIO, str(target), str(target)]
    assert target.read_text() == "new"
    assert os.listdir(work) == ["file"]


def test_write_on_a_full_disk(small_tmpfs: Path) -> None:
    target = small_tmpfs / "file"
    durable_write(str(target), b"old")
    with pytest.raises(OSError, match="No space") as caught:
        durable_write(str(target), b"x" * 200_000)
    assert (caught.value.errno, caught.value.filename) == (errno.ENOSPC, str(target))
    assert target.read_bytes() == b"old"
    assert os.listdir(small_tmpfs) == ["file"]


def test_write_never_follows_a_link(work: Path) -> None:
    (work / "victim").write_text("untouched")
    (work / "link").symlink_to("victim")
    durable_write(str(work / "link"), b"new")
    assert (work / "victim").read_text() == "untouched"
    assert not (work / "link").is_symlink()


def test_write_onto_a_directory_is_refused(work: Path) -> None:
    (work / "directory").mkdir()
    with pytest.raises(IsADirectoryError):
        durable_write(str(work / "directory"), b"x")
    assert os.listdir(work) == ["directory"]


# --- rename without replacing ----------------------------------------------------------------------------------------


def make(path: Path, kind: str) -> None:
    match kind:
        case "file":
            path.write_text(f"content of {path.name}")
        case "empty directory":
            path.mkdir()
        case "full directory":
            path.mkdir()
            (path / "inside").write_text(f"content in {path.name}")
        case "dangling link":
            path.symlink_to("nowhere")


KINDS = ["file", "empty directory", "full directory", "dangling link"]


@pytest.mark.parametrize("kind", KINDS)
def test_rename_to_a_free_name(work: Path, kind: str) -> None:
    make(work / "source", kind)
    before = snapshot(work)
    durable_rename_noreplace(str(work / "source"), str(work / "destination"))
    assert snapshot(work) == {name.replace("source", "destination"): what for name, what in before.items()}


@pytest.mark.parametrize("source", KINDS)
@pytest.mark.parametrize("destination", KINDS)
def test_existing_name_is_never_replaced(work: Path, source: str, destination: str) -> None:
    make(work / "source", source)
    make(work / "destination", destination)
    before = snapshot(work)
    with pytest.raises(FileExistsError) as caught:
        durable_rename_noreplace(str(work / "source"), str(work / "destination"))
    assert (caught.value.filename, caught.value.filename2) == (str(work / "source"), str(work / "destination"))
    assert snapshot(work) == before


def test_own_hard_link_is_an_existing_name(work: Path) -> None:
    make(work / "source", "file")
    os.link(work / "source", work / "destination")
    with pytest.raises(FileExistsError):
        durable_rename_noreplace(str(work / "source"), str(work / "destination"))
    assert sorted(os.listdir(work)) == ["destination", "source"]


def test_refused_rename_syncs_nothing(strace, work: Path) -> None:
    make(work / "source", "file")
    make(work / "destination", "file")
    raised, calls = call(strace, "durable_rename_noreplace", work / "source", work / "destination")
    assert raised[0] == "FileExistsError"
    assert len(calls) == 1
    assert "RENAME_NOREPLACE) = -1 EEXIST" in calls[0]


def test_rename_in_one_directory_is_one_sync(strace, work: Path) -> None:
    make(work / "source", "full directory")
    raised, calls = call(strace, "durable_rename_noreplace", work / "source", work / "destination")
    assert raised is None
    assert len(calls) == 2
    assert calls[0].startswith("renameat2(")
    assert calls[0].endswith("RENAME_NOREPLACE) = 0")
    assert calls[1].startswith("fsync(")
    assert f"<{work}>)" in calls[1]


def test_rename_across_directories_syncs_the_destination_first(strace, work: Path) -> None:
    (work / "from").mkdir()
    (work / "to").mkdir()
    make(work / "from" / "source", "file")
    raised, calls = call(strace, "durable_rename_noreplace", work / "from" / "source", work / "to" / "destination")
    assert raised is None
    assert [line.split("(")[0] for line in calls] == ["renameat2", "fsync", "fsync"]
    assert f"<{work}/to>)" in calls[1]
    assert f"<{work}/from>)" in calls[2]


def test_two_paths_to_one_directory_are_one_sync(strace, work: Path) -> None:
    (work / "directory").mkdir()
    (work / "alias").symlink_to("directory")
    make(work / "directory" / "source", "file")
    raised, calls = call(
        strace, "durable_rename_noreplace", work / "directory" / "source", work / "alias" / "destination"
    )
    assert raised is None
    assert [line.split("(")[0] for line in calls] == ["renameat2", "fsync"]


def test_rename_relative_to_descriptors(work: Path) -> None:
    (work / "from").mkdir()
    (work / "to").mkdir()
    make(work / "from" / "a", "file")
    source, destination = os.open(work / "from", os.O_RDONLY), os.open(work / "to", os.O_RDONLY)
    try:
        durable_rename_noreplace("a", "b", src_dir_fd=source, dst_dir_fd=destination)
    finally:
        os.close(source)
        os.close(destination)
    assert (work / "to" / "b").read_text() == "content of a"


def test_kernel_without_the_call(strace, work: Path) -> None:
    make(work / "source", "file")
    before = snapshot(work)
    raised, calls = call(
        strace, "durable_rename_noreplace", work / "source", work / "destination", inject=["renameat2:error=ENOSYS"]
    )
    assert raised == ["OSError", errno.EOPNOTSUPP, str(work / "source"), str(work / "destination")]
    assert len(calls) == 1
    assert snapshot(work) == before


@pytest.mark.parametrize("when", [1, 2])
def test_rename_without_synced_directories_is_uncertain(strace, work: Path, when: int) -> None:
    (work / "to").mkdir()
    make(work / "source", "file")
    source, destination = work / "source", work / "to" / "destination"
    raised, calls = call(
        strace, "durable_rename_noreplace", source, destination, inject=[f"fsync:error=EIO:when={when}"]
    )
    assert raised == ["UncertainError", errno.EIO, str(source), str(destination)]
    assert len(calls) == 1 + when
    assert destination.read_text() == "content of source"
    assert not source.exists()


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "/", "a\0b", "a/"])
@pytest.mark.parametrize("side", ["source", "destination"])
def test_entry_name_of_a_descriptor_is_one_name(work: Path, name: str, side: str) -> None:
    make(work / "a", "file")
    make(work / "victim", "file")
    before = snapshot(work)
    fd = os.open(work, os.O_RDONLY)
    names = {"source": "victim", "destination": "free", side: name}
    try:
        with pytest.raises(ValueError, match="name of a directory entry"):
            durable_rename_noreplace(names["source"], names["destination"], src_dir_fd=fd, dst_dir_fd=fd)
    finally:
        os.close(fd)
    assert snapshot(work) == before


@pytest.mark.parametrize("last", ["", ".", "..", "a\0b"])
@pytest.mark.parametrize("side", ["source", "destination"])
@pytest.mark.parametrize("function", [durable_rename_noreplace, durable_replace])
def test_path_ends_in_a_name(work: Path, last: str, side: str, function: Callable[..., None]) -> None:
    """After a trailing slash the kernel would rename, and the wrong directory would be synced."""
    make(work / "directory", "full directory")
    (work / "parent").mkdir()
    before = snapshot(work)
    paths = {"source": str(work / "directory"), "destination": str(work / "free")}
    paths[side] = os.path.join(paths[side], last)
    with pytest.raises(ValueError, match="name of a directory entry"):
        function(paths["source"], paths["destination"])
    assert snapshot(work) == before


def test_rename_of_names_that_are_not_utf8(work: Path) -> None:
    base = os.fsencode(work)
    with open(base + b"/\xff", "wb") as file:
        file.write(b"x")
    durable_rename_noreplace(os.fsdecode(base + b"/\xff"), os.fsdecode(base + b"/\xfe-rf\n"))
    assert os.listdir(base) == [b"\xfe-rf\n"]


# Each of eight processes renames its own source to one name, `rounds` times; prints the winners of every round.
RACE = """
import json, multiprocessing, os, time
from berth.durable.files import durable_rename_noreplace
directory, rounds, method = sys.argv[1], int(sys.argv[2]), sys.argv[3]

def checked(source, destination):
    if os.path.lexists(destination):
        raise FileExistsError
    time.sleep(0.0005)
    os.rename(source, destination)

def race(number, barrier, winners):
    rename = checked if method == "check" else durable_rename_noreplace
    for turn in range(rounds):
        source = os.path.join(directory, f"{turn}-{number}")
        open(source, "w").close()
        barrier.wait()
        try:
            rename(source, os.path.join(directory, f"{turn}-won"))
        except FileExistsError:
            continue
        winners[turn * 8 + number] = 1

context = multiprocessing.get_context("fork")
barrier, winners = context.Barrier(8), context.RawArray("b", rounds * 8)
racers = [context.Process(target=race, args=(number, barrier, winners)) for number in range(8)]
for racer in racers: racer.start()
for racer in racers: racer.join()
assert all(racer.exitcode == 0 for racer in racers)
print(json.dumps([sum(winners[turn * 8 : turn * 8 + 8]) for turn in range(rounds)]))
"""


def test_race_has_one_winner(children, work: Path) -> None:
    winners = json.loads(children.run(RACE, work, 100, "noreplace"))
    assert winners == [1] * 100
    assert len(os.listdir(work)) == 100 * 8  # Every loser still has its source.


def test_race_of_check_and_rename_has_several_winners(children, work: Path) -> None:
    """The race above can be lost at all: a check followed by a rename loses it."""
    winners = json.loads(children.run(RACE, work, 20, "check"))
    assert max(winners) > 1


# --- replace, directories, listing -----------------------------------------------------------------------------------


def test_replace(strace, work: Path) -> None:
    make(work / "source", "file")
    make(work / "destination", "file")
    raised, calls = call(strace, "durable_replace", work / "source", work / "destination")
    assert raised is None
    assert os.listdir(work) == ["destination"]
    assert (work / "destination").read_text() == "content of source"
    assert [line.split("(")[0] for line in calls][1:] == ["fsync"]


def test_refused_replace_changes_nothing(work: Path) -> None:
    make(work / "source", "file")
    make(work / "destination", "full directory")
    before = snapshot(work)
    with pytest.raises(OSError, match="directory"):
        durable_replace(str(work / "source"), str(work / "destination"))
    assert snapshot(work) == before


def test_makedirs_syncs_the_parent_of_every_new_name(strace, work: Path) -> None:
    raised, calls = call(strace, "durable_makedirs", work / "a" / "b" / "c")
    assert raised is None
    assert [line.split("<")[1].split(">")[0] for line in calls] == [str(work), f"{work}/a", f"{work}/a/b"]
    assert stat.S_IMODE((work / "a" / "b").stat().st_mode) == 0o700
    assert call(strace, "durable_makedirs", work / "a" / "b" / "c") == (None, [])


def test_makedirs_reports_a_failed_sync(strace, work: Path) -> None:
    raised, _ = call(strace, "durable_makedirs", work / "a" / "b", inject=["fsync:error=EIO:when=2"])
    assert raised == ["OSError", errno.EIO, str(work / "a"), None]


@pytest.mark.parametrize("kind", ["file", "dangling link"])
@pytest.mark.parametrize("below", ["", "x", "x/y"])
def test_makedirs_where_something_else_stands(work: Path, kind: str, below: str) -> None:
    make(work / "name", kind)
    with pytest.raises(NotADirectoryError) as caught:
        durable_makedirs(os.path.join(work, "name", below))
    assert (caught.value.errno, caught.value.filename) == (errno.ENOTDIR, str(work / "name"))
    assert os.listdir(work) == ["name"]


def test_makedirs_at_the_same_time(children, work: Path) -> None:
    code = "from berth.durable.files import durable_makedirs\nsys.stdin.read()\ndurable_makedirs(sys.argv[1])\n"
    makers = [children.start(code, work / "a" / "b" / "c" / "d") for _ in range(6)]
    for maker in makers:
        maker.stdin.close()
    assert [maker.wait() for maker in makers] == [0] * 6
    assert (work / "a" / "b" / "c" / "d").is_dir()


def test_fsync_of_a_directory_that_is_missing(work: Path) -> None:
    with pytest.raises(FileNotFoundError) as caught:
        fsync_directory(str(work / "missing"))
    assert caught.value.filename == str(work / "missing")


def test_names_are_read_anew(work: Path) -> None:
    fd = os.open(work, os.O_RDONLY)
    try:
        assert list_names(fd) == []
        for name in (b"b", b"a", b"\xff"):
            open(os.fsencode(work) + b"/" + name, "w").close()
        assert list_names(fd) == ["a", "b", os.fsdecode(b"\xff")]
        assert list_names(fd) == list_names(fd)
    finally:
        os.close(fd)


@pytest.mark.parametrize("answer", ["EIO", "EINVAL", "EACCES", "EXDEV"])
def test_error_of_a_rename_on_a_local_disk_is_an_answer(strace, work: Path, answer: str) -> None:
    make(work / "source", "file")
    raised, calls = call(
        strace, "durable_rename_noreplace", work / "source", work / "destination", inject=[f"renameat2:error={answer}"]
    )
    assert raised[1:] == [getattr(errno, answer), str(work / "source"), str(work / "destination")]
    assert raised[0] != "UncertainError"
    assert len(calls) == 1


# --- second names, and names that go ---------------------------------------------------------------------------------


def test_link_is_a_second_name_and_one_sync(strace, work: Path) -> None:
    (work / "to").mkdir()
    make(work / "source", "file")
    raised, calls = call(
        strace, "durable_link", work / "source", work / "to" / "destination", trace="fsync,linkat,?link"
    )
    assert raised is None
    assert [line.split("(")[0] for line in calls] == ["linkat", "fsync"]
    assert f"<{work}/to>)" in calls[1]
    assert (work / "source").samefile(work / "to" / "destination")


@pytest.mark.parametrize("destination", KINDS)
def test_link_never_replaces(strace, work: Path, destination: str) -> None:
    make(work / "source", "file")
    make(work / "destination", destination)
    before = snapshot(work)
    raised, calls = call(strace, "durable_link", work / "source", work / "destination", trace="fsync,linkat,?link")
    assert raised == ["FileExistsError", errno.EEXIST, str(work / "source"), str(work / "destination")]
    assert len(calls) == 1
    assert snapshot(work) == before


def test_link_does_not_follow_the_last_link(work: Path) -> None:
    make(work / "source", "dangling link")
    durable_link(str(work / "source"), str(work / "destination"))
    assert os.readlink(work / "destination") == "nowhere"


def test_link_without_synced_directory_is_uncertain(strace, work: Path) -> None:
    make(work / "source", "file")
    raised, _ = call(
        strace, "durable_link", work / "source", work / "destination", trace="fsync", inject=["fsync:error=EIO"]
    )
    assert raised == ["UncertainError", errno.EIO, str(work / "source"), str(work / "destination")]
    assert (work / "destination").exists()


def test_unlink_is_one_sync(strace, work: Path) -> None:
    make(work / "file", "file")
    raised, calls = call(strace, "durable_unlink", work / "file", trace="fsync,unlinkat,?unlink")
    assert raised is None
    assert [line.split("(")[0] for line in calls] == ["unlink", "fsync"]
    assert not (work / "file").exists()


@pytest.mark.parametrize(("kind", "answer"), [("empty directory", errno.EISDIR), (None, errno.ENOENT)])
def test_unlink_of_what_is_no_file_is_refused_and_syncs_nothing(
    strace, work: Path, kind: str | None, answer: int
) -> None:
    if kind:
        make(work / "name", kind)
    raised, calls = call(strace, "durable_unlink", work / "name", trace="fsync,unlinkat,?unlink")
    assert raised[1:] == [answer, str(work / "name"), None]
    assert len(calls) == 1


def test_unlink_without_synced_directory_is_uncertain(strace, work: Path) -> None:
    make(work / "file", "file")
    raised, _ = call(strace, "durable_unlink", work / "file", trace="fsync", inject=["fsync:error=EIO"])
    assert raised[:3] == ["UncertainError", errno.EIO, str(work / "file")]
    assert not (work / "file").exists()


@pytest.mark.parametrize("path", ["", "a/", ".", "a/..", "a\0b"])
def test_link_and_unlink_want_a_name(work: Path, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(work)
    make(work / "victim", "file")
    for change in (lambda: durable_unlink(path), lambda: durable_link("victim", path)):
        with pytest.raises(ValueError, match="name of a directory entry"):
            change()
    assert os.listdir(work) == ["victim"]


@pytest.mark.parametrize("name", ["a" * 255, "\u3042" * 85, "\udcff" * 255])
def test_file_of_the_longest_name_is_written(work: Path, name: str) -> None:
    durable_write(str(work / name), b"content")
    assert os.listdir(work) == [name]


def test_directory_that_was_not_synced_is_made_anew(strace, work: Path) -> None:
    path = work / "new"
    raised, _ = call(strace, "durable_makedirs", path, trace="fsync", inject=["fsync:error=EIO"])
    assert raised[1] == errno.EIO
    assert not path.exists()
    raised, calls = call(strace, "durable_makedirs", path)
    assert raised is None
    assert sum(line.startswith("fsync(") for line in calls) == 1


def test_new_file_is_whole_durable_and_of_the_mode_that_is_asked_for(strace, work: Path) -> None:
    raised, calls = call(strace, "durable_create", work / "new", "content")
    assert raised is None
    assert [line.split("(")[0] for line in calls] == ["fsync", "renameat2", "fsync"]
    assert ((work / "new").read_text(), stat.S_IMODE((work / "new").stat().st_mode)) == ("content", 0o600)


@pytest.mark.parametrize("kind", KINDS)
def test_new_file_never_replaces_and_leaves_no_temporary(work: Path, kind: str) -> None:
    make(work / "taken", kind)
    before = snapshot(work)
    with pytest.raises(FileExistsError):
        durable_create(str(work / "taken"), b"content")
    assert snapshot(work) == before
