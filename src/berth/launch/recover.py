"""Finish what killed runs left: end their processes, record them, retire their epochs.

Every start does this before anything else. Whoever gets the lock of an active epoch whose run is gone is the only one
who finishes it.
"""

import os
import time
from dataclasses import dataclass
from typing import Final

from berth.epoch.epoch import Epoch, EpochRoot
from berth.errors import BerthError, FailedError
from berth.launch import store
from berth.launch.record import interrupted_record
from berth.linux.locks import wait_lock
from berth.linux.process import boot_id, check_own_proc, end_marked

#: A keeper whose berth was killed ends everything inside and exits; this is how long the next start waits for it.
KEEPER_TIMEOUT_S: Final = 5.0
_END_TIMEOUT_S: Final = 3.0


@dataclass(frozen=True, slots=True)
class Recovered:
    """One finished leftover: its epoch id and how many of its processes were ended, or the error that stopped it."""

    epoch: str
    processes_ended: int = 0
    error: BerthError | None = None


def recover(root: EpochRoot) -> list[Recovered]:
    """Finish every active epoch of `root` that nobody holds; one that cannot be finished stops none of the others.

    Raises:
        AbilityError: /proc cannot tell this process's own namespace's processes.
    """
    check_own_proc()
    found = []
    for name in root.active():
        try:
            epoch = root.adopt(name)
            if epoch is None:
                continue
            with epoch:
                found.append(Recovered(name, _finish(root, epoch)))
        except OSError as error:
            text = f"the work-state of the run {name} could not be finished: {error}"
            found.append(Recovered(name, error=FailedError("not-recovered", text)))
        except BerthError as error:
            found.append(Recovered(name, error=error))
    return found


def _finish(root: EpochRoot, epoch: Epoch) -> int:
    """End, record and retire; a kill at any point leaves the rest to the next start."""
    document = store.read_request(epoch)
    ended = _end_leftovers(epoch, document)
    if not store.is_published(root, epoch.id):
        if store.ready_record(epoch) is not None:
            store.publish_ready(root, epoch)
        else:
            record = interrupted_record(document, epoch.id, found_at=time.time(), processes_ended=ended)
            store.publish(root, epoch, record)
    epoch.retire()
    return ended


def _end_leftovers(epoch: Epoch, document: dict[str, object] | None) -> int:
    """Wait for the keeper, then end what still carries the run's mark; return how many that were."""
    lock = store.open_keeper_lock(epoch)
    try:
        keeper_gone = wait_lock(lock, KEEPER_TIMEOUT_S)
        berth = document.get("berth") if document else None
        if not isinstance(berth, dict) or berth.get("boot_id") != boot_id():
            return 0
        ended, left = end_marked(epoch.id, not_before_ticks=berth["start_ticks"], timeout_s=_END_TIMEOUT_S)
        if left or not (keeper_gone or wait_lock(lock, _END_TIMEOUT_S)):
            pids = ", ".join(str(stat.pid) for stat in left) or "its keeper"
            raise FailedError(
                "leftovers-live",
                f"processes of the killed run {epoch.id} cannot be ended: {pids}",
                "They belong to another user or hang in the kernel; the run stays active until they are gone.",
            )
        return ended
    finally:
        os.close(lock)
