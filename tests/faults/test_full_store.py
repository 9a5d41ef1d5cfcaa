"""The store below a file system is full: writes are accepted and fsync(2) fails, once, and then pretends it did not.

The image is sparse and lies on a small tmpfs. What is reported as done has to be there in full when the store has room
again and the caches are gone; what failed has changed nothing, or says that its outcome is uncertain.
"""

import errno
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from berth.durable.files import durable_write
from berth.errors import UncertainError
from faults.images import Image, Kind, mounted, mounted_tmpfs, skip_without
from faults.invariants import ViolationError, check_tree, read_tree

#: More than the store has left, so that no file system can put it anywhere.
TOO_MUCH = os.urandom(1 << 20) * 8
#: What the store has left, in KiB: room for the log, and for some of the small files.
LEFT_KIB = 2048
SMALL = 30_000


@pytest.fixture(params=["ext4", "xfs"])
def full(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Image]:
    """Return a mounted file system with a directory `work` and an old file in it, on a store with little room left."""
    kind: Kind = request.param
    skip_without(kind)
    skip_without("tmpfs")
    with mounted_tmpfs(tmp_path, size="400m") as store, mounted(kind, store) as image:
        (image.root / "work").mkdir()
        durable_write(str(image.root / "work" / "file"), b"old")
        image.sync()
        resize(store, f"{image.path.stat().st_blocks // 2 + LEFT_KIB}k")
        yield image


def test_file_that_cannot_be_synced_is_not_there(full: Image) -> None:
    work = full.root / "work"
    for _ in range(3):
        with pytest.raises(OSError, match="No space left") as caught:
            durable_write(str(work / "file"), TOO_MUCH)
        assert (caught.value.errno, caught.value.filename) == (errno.ENOSPC, str(work / "file"))
        check_tree(read_tree(work), [{"file": b"old"}])
    give_room_and_restart(full)
    check_tree(read_tree(work), [{"file": b"old"}])
    durable_write(str(work / "file"), b"new")
    check_tree(read_tree(work), [{"file": b"new"}])


def test_failed_sync_is_not_repeated(full: Image, strace: Callable[..., Any]) -> None:
    """The second one would succeed, and the file would hold something else once it is read from the disk."""
    traced = strace(
        "from berth.durable.files import durable_write\n"
        "try: durable_write(sys.argv[1], b'x' * int(sys.argv[2]))\n"
        "except OSError as error: print(error.errno)\n",
        full.root / "work" / "file",
        len(TOO_MUCH),
        trace="fsync,fdatasync,sync_file_range,rename,renameat,renameat2",
    )
    assert int(traced.output) == errno.ENOSPC
    (sync,) = traced.calls
    assert sync.startswith("fsync(")
    assert sync.endswith("= -1 ENOSPC (No space left on device)")


def test_repeated_sync_is_caught(full: Image) -> None:
    """The counterpart: who asks until fsync(2) succeeds has lost what he wrote."""
    path = full.root / "work" / "file"
    fd = os.open(path, os.O_WRONLY)
    os.write(fd, TOO_MUCH)
    answers: list[int | None] = []
    while 0 not in answers and len(answers) < 10:
        try:
            os.fsync(fd)
            answers.append(0)
        except OSError as error:
            answers.append(error.errno)
    os.close(fd)
    assert answers[0] == errno.ENOSPC
    assert answers[-1] == 0
    give_room_and_restart(full)
    with pytest.raises(ViolationError):
        check_tree(read_tree(path.parent), [{"file": TOO_MUCH}])


@pytest.mark.parametrize("end", ["unmounted", "cut"])
def test_what_was_reported_as_done_before_and_after_is_there(full: Image, end: str) -> None:
    work = full.root / "work"
    done, uncertain = write_until_full(work)
    if end == "cut":
        full.stop()
    give_room_and_restart(full)
    tree = {**uncertain, **read_tree(work)}  # what is uncertain may be absent, but it may not be something else
    check_tree(tree, [{"file": b"old", **done, **uncertain}], temporaries=True)


def write_until_full(work: Path) -> tuple[dict[str, bytes | None], dict[str, bytes | None]]:
    """Write small files until that has failed 20 times; return what was reported as done, and what as uncertain."""
    done: dict[str, bytes | None] = {}
    uncertain: dict[str, bytes | None] = {}
    failures = 0
    while failures < 20:
        name = f"small-{len(done) + failures}"
        data = (name.encode() * SMALL)[:SMALL]
        try:
            durable_write(str(work / name), data)
            done[name] = data
        except (OSError, UncertainError) as error:
            failures += 1
            if isinstance(error, UncertainError):
                uncertain[name] = data
    assert len(done) > 10, "the store was full from the beginning"
    return done, uncertain


def give_room_and_restart(image: Image) -> None:
    """Enlarge the store and mount the image anew, which drops what was only in memory."""
    resize(image.path.parent, "400m")
    image.restart()


def resize(store: Path, size: str) -> None:
    subprocess.run(["mount", "-o", f"remount,size={size}", store], check=True)
