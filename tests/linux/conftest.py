"""Commands under a keeper, and the promise that nothing of them is left when a test ends."""

import os
import secrets
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from berth.linux.process import end_marked, marked
from berth.linux.spawn import Command, Event, Keeper

_TIMEOUT_S = 30.0


@dataclass
class Launcher:
    """Starts commands under keepers; all carry one mark."""

    mark: str
    keepers: list[Keeper] = field(default_factory=list)

    def command(self, *argv: str, **place: Any) -> Command:
        """Return a command that runs `argv` with the PATH of the tests and `place`."""
        environment = {"PATH": os.environ["PATH"], **place.pop("environment", {})}
        return Command(argv=argv, environment=environment, mark=self.mark, **place)

    def start(self, *argv: str, **place: Any) -> Keeper:
        """Start a keeper and return it with its command at the gate."""
        held = place.pop("held", ())
        keeper = Keeper.start(self.command(*argv, **place), held=held)
        self.keepers.append(keeper)
        return keeper

    def begin(self, *argv: str, **place: Any) -> Keeper:
        """Start a keeper, let its command begin, and return it."""
        keeper = self.start(*argv, **place)
        self.expect(keeper, "ready")
        keeper.go()
        self.expect(keeper, "started")
        return keeper

    def expect(self, keeper: Keeper, kind: str) -> tuple[int, ...]:
        """Return the values of the next event, which must be of this kind."""
        event = keeper.next_event(_TIMEOUT_S)
        assert event is not None, f"no {kind!r} came"
        assert event.kind == kind, event
        return event.values

    def events(self, keeper: Keeper) -> list[Event]:
        """Return the events up to the end."""
        found: list[Event] = []
        while not found or found[-1].kind not in ("ended", "lost"):
            event = keeper.next_event(_TIMEOUT_S)
            assert event is not None, found
            found.append(event)
        return found

    def left(self) -> list[int]:
        """Return the pids that carry the mark."""
        return [stat.pid for stat in marked(self.mark, not_before_ticks=0)]


@pytest.fixture
def launcher() -> Iterator[Launcher]:
    """Return a launcher; when the test is over, nothing of its commands may be left."""
    launcher = Launcher(secrets.token_hex(32))
    yield launcher
    for keeper in launcher.keepers:
        keeper.close()
    left = launcher.left()
    end_marked(launcher.mark, not_before_ticks=0, timeout_s=10)
    assert left == []


@pytest.fixture
def until() -> Callable[..., None]:
    """Return a function that waits until a condition holds, and fails after a number of seconds."""

    def wait(condition: Callable[[], object], timeout_s: float = 10.0) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline, "it did not happen in time"
            time.sleep(0.002)

    return wait
