"""Every kind of file system gets the right verdict, and where it qualifies a retirement works and never replaces."""

import contextlib
import errno
import os
import secrets
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from berth.epoch import names
from berth.epoch.capability import Accepted
from berth.epoch.epoch import Epoch, EpochRoot
from berth.epoch.probe import probe
from berth.errors import UncertainError
from faults.fuse import mounted_fuse, skip_without_fuse
from faults.images import mounted, mounted_overlay, mounted_tmpfs, skip_without

QUALIFIED = "qualified"
#: It drops or refuses the flag.
REPLACES = "no-noreplace"
#: Other clients may do what no probe here sees.
SHARED = "network-root"
#: It keeps nothing over a power cut.
VOLATILE = "volatile-root"
#: The probe itself met an error.
FAILED = "probe-failed"


def verdict(path: Path, *, trust_network: bool = False, allow_volatile: bool = False) -> str:
    """Return QUALIFIED, or the name of the error that the probe refuses the directory with."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        found = probe(fd, str(path), accepted=Accepted(network=trust_network, volatile=allow_volatile))
    finally:
        os.close(fd)
    return found.refusal.name if found.refusal else QUALIFIED


def open_root(path: Path, *, trust_network: bool = False, allow_volatile: bool = False) -> EpochRoot:
    """Open the directory as a state root, which probes it."""
    return EpochRoot(str(path), accepted=Accepted(network=trust_network, volatile=allow_volatile))


# --- the file systems ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """One file system and what the probe has to say of it.

    Attributes:
        name: What it is.
        mounted: Mounts it below a directory and returns where.
        verdict: With nothing accepted.
        trusted: With `trust_network`.
        allowed: With `allow_volatile`.
    """

    name: str
    mounted: Callable[[Path], contextlib.AbstractContextManager[Path]]
    verdict: str
    trusted: str
    allowed: str

    @property
    def accepted(self) -> dict[str, bool]:
        """What has to be accepted for it to qualify."""
        return {"trust_network": self.verdict == SHARED, "allow_volatile": self.verdict == VOLATILE}


@contextlib.contextmanager
def image(kind: Any, directory: Path) -> Iterator[Path]:
    skip_without(kind)
    with mounted(kind, directory) as made:
        yield made.root


@contextlib.contextmanager
def tmpfs(directory: Path) -> Iterator[Path]:
    skip_without("tmpfs")
    with mounted_tmpfs(directory) as root:
        yield root


@contextlib.contextmanager
def overlay(directory: Path, *options: str) -> Iterator[Path]:
    skip_without("overlay")
    with mounted_overlay(directory, options=options) as made:
        yield made.root


def volatile_overlay(directory: Path) -> contextlib.AbstractContextManager[Path]:
    return overlay(directory, "volatile")


@contextlib.contextmanager
def fuse(mode: Any, directory: Path, **options: Any) -> Iterator[Path]:
    skip_without_fuse()
    with mounted_fuse(mode, directory / "store", directory / "root", **options) as mount:
        yield mount.root


ROWS = [
    *(Row(kind, partial(image, kind), QUALIFIED, QUALIFIED, QUALIFIED) for kind in ("ext4", "xfs", "btrfs")),
    Row("overlay", overlay, QUALIFIED, QUALIFIED, QUALIFIED),
    Row("overlay volatile", volatile_overlay, VOLATILE, VOLATILE, QUALIFIED),
    Row("tmpfs", tmpfs, VOLATILE, VOLATILE, QUALIFIED),
    Row("fuse honours", partial(fuse, "honours"), SHARED, QUALIFIED, SHARED),
    # No probe through one client sees that another gets in between; hence the question who else is there.
    Row("fuse checks-first", partial(fuse, "checks-first"), SHARED, QUALIFIED, SHARED),
    *(
        Row(f"fuse {mode}", partial(fuse, mode), REPLACES, REPLACES, REPLACES)
        for mode in ("rejects", "unknown", "ignores", "ignores-stale")
    ),
    Row("fuse fail-fsyncdir", partial(fuse, "honours", fail_fsyncdir=True), FAILED, FAILED, FAILED),
]
#: Those that qualify once the right thing is accepted.
FIT = [row for row in ROWS if row.verdict in (QUALIFIED, SHARED, VOLATILE)]


@pytest.fixture
def state(row: Row, tmp_path: Path) -> Iterator[Path]:
    """Return an empty directory on the file system of `row`."""
    with row.mounted(tmp_path) as root:
        path = root / "state"
        path.mkdir(mode=0o700)
        yield path


def named(row: Row) -> str:
    return row.name.replace(" ", "-")


# --- verdicts --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("row", ROWS, ids=named)
def test_verdict_is_right_and_nothing_is_left(row: Row, state: Path) -> None:
    for accepted, expected in (
        ({}, row.verdict),
        ({"trust_network": True}, row.trusted),
        ({"allow_volatile": True}, row.allowed),
    ):
        assert verdict(state, **accepted) == expected, accepted
        assert os.listdir(state) == [], accepted


# --- retirements -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("row", FIT, ids=named)
def test_retirement_moves_the_tree_and_never_onto_another(row: Row, state: Path) -> None:
    retirement = names.retirement_id(1, 2)
    with open_root(state, **row.accepted) as root, new_epoch(root) as epoch, new_epoch(root) as hindered:
        before = snapshot(Path(epoch.path))
        assert epoch.retire(retirement) == names.retired_name(epoch.id, retirement)
        assert snapshot(state / names.retired_name(epoch.id, retirement)) == before
        assert not Path(epoch.path).exists()

        fill(state / names.retired_name(hindered.id, retirement), "in the way")
        before = snapshot(state)
        with pytest.raises(FileExistsError):
            hindered.retire(retirement)
        assert snapshot(state) == before
        assert (root.active(), len(root.retired())) == ([hindered.id], 2)


@pytest.mark.parametrize("row", FIT, ids=named)
def test_publication_moves_a_file_and_never_onto_another(row: Row, state: Path) -> None:
    (state / "published").mkdir()
    published = os.open(state / "published", os.O_RDONLY | os.O_DIRECTORY)
    try:
        with open_root(state, **row.accepted) as root, new_epoch(root) as epoch:
            epoch.write("result", b"first")
            epoch.publish("result", dir_fd=published, as_name="result")
            assert (state / "published" / "result").read_bytes() == b"first"
            epoch.write("result", b"second")
            before = snapshot(state)
            with pytest.raises(FileExistsError):
                epoch.publish("result", dir_fd=published, as_name="result")
            assert snapshot(state) == before
    finally:
        os.close(published)


@pytest.mark.parametrize("redirects", [False, True])
def test_epoch_born_in_a_lower_layer_is_retired_whole_or_not_at_all(tmp_path: Path, redirects: bool) -> None:
    """A container image may hold one. Overlayfs can rename it only where it may leave a redirection behind.

    The probe passes in both cases, because what it renames was born in the upper layer.
    """
    skip_without("overlay")
    epoch = secrets.token_hex(32)
    lower = tmp_path / "lower" / "state"
    lower.mkdir(parents=True, mode=0o700)
    fill(lower / names.active_name(epoch), "from the image")
    in_image = snapshot(tmp_path / "lower")
    with mounted_overlay(tmp_path, options=["redirect_dir=on" if redirects else "redirect_dir=off"]) as layers:
        state = layers.root / "state"
        assert verdict(state) == QUALIFIED
        with open_root(state) as root:
            before = snapshot(state)
            adopted = root.adopt(epoch)
            assert adopted is not None
            with adopted:
                if redirects:
                    retired = adopted.retire()
                    assert snapshot(state / retired) == snapshot(lower / names.active_name(epoch))
                    assert root.active() == []
                else:
                    with pytest.raises(OSError, match="cross-device") as caught:
                        adopted.retire()
                    assert caught.value.errno == errno.EXDEV
                    assert snapshot(state) == before
                    assert (root.active(), root.retired()) == ([epoch], [])
        assert snapshot(tmp_path / "lower") == in_image


@pytest.mark.parametrize("how", ["EIO", "EINTR"])
def test_retirement_whose_answer_is_lost_is_done_once_and_not_called_a_success(tmp_path: Path, how: str) -> None:
    skip_without_fuse()
    options: dict[str, Any] = {"lose_reply": 1, "lose_reply_prefix": names.RETIRED_PREFIX, "lose_reply_how": how}
    with mounted_fuse("honours", tmp_path / "store", tmp_path / "root", **options) as mount:
        mount.root.chmod(0o700)
        with open_root(mount.root, trust_network=True) as root, new_epoch(root) as epoch:
            before = snapshot(Path(epoch.path))
            with pytest.raises(UncertainError):
                epoch.retire()
            assert root.active() == []
            [(retired, retirement)] = root.retired()
            assert retired == epoch.id
            assert snapshot(mount.root / names.retired_name(retired, retirement)) == before


def new_epoch(root: EpochRoot) -> Epoch:
    epoch = root.open_epoch(secrets.token_hex(32))
    fill(Path(epoch.path), epoch.id)
    return epoch


def fill(path: Path, text: str) -> None:
    """Make a small tree at `path` whose bytes are its own."""
    (path / "directory" / "below").mkdir(parents=True, exist_ok=True)
    (path / "file").write_text(text)
    (path / "directory" / "file").write_text(f"{text}, further down")


def snapshot(path: Path) -> dict[str, tuple[int, bytes]]:
    """Return the permissions and the content of everything below `path`."""
    found = {}
    for entry in sorted(path.rglob("*")):
        mode = entry.lstat().st_mode
        found[str(entry.relative_to(path))] = (mode, entry.read_bytes() if stat.S_ISREG(mode) else b"")
    return found
