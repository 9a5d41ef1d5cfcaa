import errno
import json
import os
import secrets
from pathlib import Path
from typing import Any

import pytest

from berth.epoch.capability import Accepted
from berth.epoch.epoch import Epoch, EpochRoot
from berth.errors import FailedError
from berth.launch import store
from berth.linux.locks import try_lock

pytestmark = pytest.mark.usefixtures("no_temporaries")

#: Who wrote a request.
BERTH = {"boot_id": "boot", "pid": 1, "start_ticks": 0}


def document(epoch: Epoch, **more: Any) -> dict[str, object]:
    return {"schema_version": "0.2.0", "epoch": epoch.id, "command": ["true", "\\xff ü"], "berth": BERTH, **more}


def published(root: EpochRoot, epoch: Epoch) -> Any:
    return json.loads(Path(store.record_path(root, epoch.id)).read_text(encoding="utf-8"))


# --- the request -----------------------------------------------------------------------------------------------------


def test_request_is_read_back(epoch: Epoch) -> None:
    assert store.read_request(epoch) is None
    store.write_request(epoch, document(epoch))
    assert store.read_request(epoch) == document(epoch)
    assert os.listdir(epoch.path) == ["request.json"]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b'{"epoch": "EPOCH", "command": [',
        b"\xff\xfe{}",
        b"null",
        b"[]",
        b"{}",
        b'{"epoch": "' + b"0" * 64 + b'"}',
        b'{"epoch": 7}',
        b"[" * 100_000,
        b'{"epoch": "EPOCH"} trailing',
    ],
)
@pytest.mark.parametrize("name", ["request.json", "record.json"])
def test_damaged_file_is_refused_and_kept(epoch: Epoch, content: bytes, name: str) -> None:
    content = content.replace(b"EPOCH", epoch.id.encode())
    (Path(epoch.path) / name).write_bytes(content)
    with pytest.raises(FailedError) as caught:
        (store.read_request if name == "request.json" else store.ready_record)(epoch)
    assert caught.value.name == "damaged-state"
    assert os.path.join(epoch.path, name) in caught.value.message
    assert (Path(epoch.path) / name).read_bytes() == content


def test_request_on_a_full_disk(small_tmpfs: Path) -> None:
    with (
        EpochRoot(str(small_tmpfs / "state"), accepted=Accepted(volatile=True)) as root,
        root.open_epoch(secrets.token_hex(32)) as epoch,
    ):
        with pytest.raises(FailedError) as caught:
            store.write_request(epoch, document(epoch, padding="x" * 200_000))
        assert caught.value.name == "request-not-written"
        assert os.strerror(errno.ENOSPC) in caught.value.message
        assert os.listdir(epoch.path) == []


# --- the keeper's lock -----------------------------------------------------------------------------------------------


def test_keeper_lock_is_held_until_the_last_has_closed_it(epoch: Epoch) -> None:
    first = store.lock_keeper(epoch)
    with pytest.raises(FailedError, match="held by another process"):
        store.lock_keeper(epoch)
    heir, other = os.dup(first), store.open_keeper_lock(epoch)
    os.close(first)
    assert not try_lock(other)
    os.close(heir)
    assert try_lock(other)
    os.close(other)


# --- the record ------------------------------------------------------------------------------------------------------


def test_record_is_published_whole(root: EpochRoot, epoch: Epoch) -> None:
    assert not store.is_published(root, epoch.id)
    path = store.publish(root, epoch, document(epoch))
    assert path == os.path.join(root.path, "records", f"{epoch.id}.json")
    assert published(root, epoch) == document(epoch)
    assert Path(path).read_text(encoding="utf-8").endswith("}\n")
    assert store.is_published(root, epoch.id)
    assert store.ready_record(epoch) is None
    assert os.listdir(epoch.path) == []


def test_existing_record_is_never_replaced(root: EpochRoot, epoch: Epoch) -> None:
    store.publish(root, epoch, document(epoch, turn=1))
    with pytest.raises(FailedError) as caught:
        store.publish(root, epoch, document(epoch, turn=2))
    assert caught.value.name == "record-exists"
    assert published(root, epoch)["turn"] == 1
    assert store.ready_record(epoch) == document(epoch, turn=2)


@pytest.mark.parametrize("kind", ["dangling link", "directory"])
def test_whatever_has_the_records_name_is_kept(root: EpochRoot, epoch: Epoch, kind: str) -> None:
    path = Path(store.record_path(root, epoch.id))
    path.parent.mkdir()
    if kind == "directory":
        path.mkdir()
    else:
        path.symlink_to("nowhere")
    assert store.is_published(root, epoch.id)
    with pytest.raises(FailedError) as caught:
        store.publish(root, epoch, document(epoch))
    assert caught.value.name == "record-exists"
    assert path.is_symlink() == (kind == "dangling link")
    assert store.ready_record(epoch) == document(epoch)


@pytest.mark.parametrize("kind", ["file", "link"])
def test_records_directory_that_is_none(root: EpochRoot, epoch: Epoch, tmp_path: Path, kind: str) -> None:
    (tmp_path / "elsewhere").mkdir()
    records = Path(root.path) / "records"
    if kind == "file":
        records.write_text("")
    else:
        records.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(FailedError) as caught:
        store.publish(root, epoch, document(epoch))
    assert caught.value.name == "record-not-published"
    assert os.strerror(errno.ENOTDIR) in caught.value.message
    assert os.listdir(tmp_path / "elsewhere") == []
    assert store.ready_record(epoch) == document(epoch)


def test_record_on_a_full_disk(small_tmpfs: Path) -> None:
    """Nothing half-written is left, and what was there before is as it was."""
    with (
        EpochRoot(str(small_tmpfs / "state"), accepted=Accepted(volatile=True)) as root,
        root.open_epoch(secrets.token_hex(32)) as epoch,
    ):
        store.write_request(epoch, document(epoch))
        with pytest.raises(FailedError) as caught:
            store.publish(root, epoch, document(epoch, padding="x" * 200_000))
        assert caught.value.name == "record-not-written"
        assert os.listdir(epoch.path) == ["request.json"]
        assert store.read_request(epoch) == document(epoch)
        assert not store.is_published(root, epoch.id)


# Publishes one record in the epoch argv[2] of the root argv[1].
PUBLISH = """
import os
from berth.epoch.capability import Accepted
from berth.epoch.epoch import EpochRoot
from berth.launch import store
root = EpochRoot(sys.argv[1])
epoch = root.open_epoch(sys.argv[2])
os.makedirs(os.path.join(sys.argv[1], "records"))
os.getpriority(os.PRIO_PROCESS, 0)
store.publish(root, epoch, {"epoch": epoch.id})
"""


def test_order_of_publication(strace, tmp_path: Path) -> None:
    """The record is on disk before it gets its name, and both directories are synced, the records' first."""
    epoch = "0" * 64
    state = tmp_path / "fresh"
    state.mkdir(mode=0o700)
    traced = strace(PUBLISH, state, epoch, trace="getpriority,fsync,renameat2,rename,renameat")
    begin = next(index for index, line in enumerate(traced.calls) if line.startswith("getpriority"))
    calls = traced.calls[begin + 1 :]
    assert len(calls) == 6
    assert [line.split("(")[0] for line in calls][3] == "renameat2"
    work = f"{state}/.standalone-work-{epoch}"
    assert f"<{work}/.record.json." in calls[0]
    assert f"<{work}>)" in calls[2]
    assert "RENAME_NOREPLACE) = 0" in calls[3]
    assert f"<{state}/records>)" in calls[4]
    assert f"<{work}>)" in calls[5]
