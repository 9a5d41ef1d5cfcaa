"""The file system shuts itself down under a step, as it does when its disk fails, and the process lives on to hear it.

The moment is fixed: after the change and right before the fsync(2) that makes it durable. The step may not report
success, because what it changed will not be there.
"""

from pathlib import Path
from typing import Any

import pytest

from faults.images import SHUTDOWN, WITHOUT_LOG, Kind, mounted, skip_without
from faults.invariants import check_next_start, check_progress, read_tree
from faults.scenarios import ACTIVE, RETIRED, RETIREMENT

# Works in the root argv[1]; before the fsync of the directory that the step argv[2] changes, it shuts down.
WORK = f"""
import fcntl, os
from berth.epoch.epoch import EpochRoot

def shut_down_before_sync_of(directory):
    def shut_down_and_sync(fd):
        if os.path.samestat(os.fstat(fd), os.stat(directory)):
            fcntl.ioctl(root.fd, {SHUTDOWN}, {WITHOUT_LOG!r})
        sync(fd)
    os.fsync = shut_down_and_sync

sync, step = os.fsync, sys.argv[2]
root = EpochRoot(sys.argv[1])
if step == "open": shut_down_before_sync_of(root.path)
epoch = root.open_epoch({"e" * 64!r})
print("opened", flush=True)
if step == "write": shut_down_before_sync_of(epoch.path)
epoch.write("file", b"content")
print("wrote", flush=True)
if step == "retire": shut_down_before_sync_of(root.path)
epoch.retire({RETIREMENT!r})
print("retired", flush=True)
"""
STATES = (
    {},
    {ACTIVE: None},
    {ACTIVE: None, f"{ACTIVE}/file": b"content"},
    {RETIRED: None, f"{RETIRED}/file": b"content"},
)


@pytest.mark.parametrize(
    ("kind", "step"),
    [
        ("ext4", "open"),
        ("ext4", "write"),
        ("ext4", "retire"),
        ("xfs", "open"),
        ("xfs", "write"),
        ("xfs", "retire"),
    ],
)
def test_step_reports_no_success(tmp_path: Path, kind: Kind, step: str, children: Any) -> None:
    skip_without(kind)
    with mounted(kind, tmp_path) as image:
        root = image.root / "state"
        root.mkdir(mode=0o700)
        image.sync()
        child = children.start(WORK, root, step, stderr=-1)
        printed, told = child.communicate()
        image.restart()
        check_progress(read_tree(root), STATES, len(printed.splitlines()))
        assert child.returncode == 1
        assert "Input/output error" in told
        check_next_start(root)
