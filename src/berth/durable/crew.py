"""Walkers that remove one tree together.

Removing names of one directory is serialised by the kernel, so walkers work only on different directories: whoever has
nothing to do takes over sub-directories of the directory that another one is in. Both take names from one list, and
who is done first waits, helping whoever offers something meanwhile.
"""

import contextlib
import os
import threading
from collections import deque
from typing import Final

from berth.durable.removal import Limits, Offer
from berth.durable.walk import Walk

#: Offers taken over while waiting for another one, at most: each holds a descriptor.
_MOST_NESTED: Final = 8


class _Crew:
    """Walkers of one tree, each in a thread of its own.

    Attributes:
        removed: Entries that were removed for offers.
        failure: What ended a helper, or None.
    """

    def __init__(self, limits: Limits) -> None:
        self.removed = 0
        self.failure: BaseException | None = None
        self._limits = limits
        self._changed = threading.Condition()
        self._offers: deque[Offer] = deque()
        self._waiting = 0
        self._over = False

    def has_idle(self, nested: int) -> bool:
        """Say whether somebody waits for work and may be given some by a walker nested so deep."""
        return self._waiting > len(self._offers) and nested < _MOST_NESTED

    def offer(self, walk: Walk, pending: list[str]) -> Offer:
        """Offer the sub-directories `pending` of the directory that `walk` is in."""
        offer = Offer(os.dup(walk.fd), pending, way=walk.way, nested=walk.nested + 1)
        with self._changed:
            self._offers.append(offer)
            self._changed.notify_all()
        return offer

    def settle(self, offer: Offer) -> None:
        """Take `offer` back, or wait until whoever took it is through, helping others meanwhile."""
        with self._changed:
            if offer in self._offers:
                self._offers.remove(offer)
                os.close(offer.fd)
                return
        while True:
            with self._changed:
                self._waiting += 1
                try:
                    self._changed.wait_for(lambda: offer.done or self._offers or self._limits.cancelled)
                finally:
                    self._waiting -= 1
                if offer.done or self._limits.cancelled:
                    return
            self._help()

    def help_until_over(self) -> None:
        """Take over offers until there will be none any more: the body of a helper's thread."""
        while True:
            with self._changed:
                self._waiting += 1
                self._changed.wait_for(lambda: self._over or self._offers)
                self._waiting -= 1
                if not self._offers:
                    return
            self._help()

    def end(self, *, cancel: bool = False) -> None:
        """Let the helpers end once nothing is on offer; at once with `cancel`."""
        with self._changed:
            self._over = True
            self._limits.cancelled = self._limits.cancelled or cancel
            self._changed.notify_all()

    def _help(self) -> None:
        """Take the next offer over, if it is still there, until it is through."""
        offer, walk = None, None
        try:
            with self._changed:
                offer = self._offers.popleft() if self._offers else None
            if offer is None:
                return
            walk = Walk(
                offer.fd,
                offer.pending,
                self._limits,
                crew=self,
                way=offer.way,
                shared_base=True,
                nested=offer.nested,
            )
            with walk:
                walk.run()
        except BaseException as error:  # noqa: BLE001  raised again where the tree's own walker is
            self.failure = self.failure or error
            self._limits.cancelled = True
        finally:
            with self._changed:
                if offer is not None:
                    self.removed += walk.removed if walk else 0
                    offer.kept = walk.kept if walk else {"."}
                    offer.done = True
                self._changed.notify_all()


def remove_together(base_fd: int, name: str, limits: Limits, *, workers: int) -> tuple[int, bool]:
    """Remove the directory `name` of `base_fd`, which is closed, with `workers` threads.

    Returns:
        How many entries were removed, and whether some were passed by.

    Raises:
        As `Walk.run`, whichever thread it happened in.
    """
    crew = _Crew(limits)
    helpers: list[threading.Thread] = []
    finished = False
    with Walk(base_fd, [name], limits, crew=crew) as walk:
        try:
            for _ in range(workers - 1):
                helper = threading.Thread(target=crew.help_until_over, daemon=True)
                with contextlib.suppress(RuntimeError):  # the limit of processes is reached: fewer walkers do as well
                    helper.start()
                    helpers.append(helper)
            walk.run()
            finished = True
        finally:
            crew.end(cancel=not finished)
            for helper in helpers:
                helper.join()
    if crew.failure is not None:
        raise crew.failure
    return walk.removed + crew.removed, bool(walk.kept)
