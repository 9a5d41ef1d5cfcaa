"""Do two clients of one store keep their promises to each other? Run it on two mounts of the store.

    python tests/faults/cross_client.py ROOT_A ROOT_B [--rounds N] [--patience S] [--json]

ROOT_A and ROOT_B are the same directory, reached through two clients, such as two NFS mounts of one export that do not
share a cache (mount option `nosharecache`). Two mounts with the same device number are one client and are refused.

A probe of a state root sees one client only. This does what it cannot: two processes, one on each root, rename to the
same name at the same time, publish for each other, and lock against each other. Everything happens in one private
directory, which is removed at the end.

Exit codes: 0 every promise held, 1 one was violated, 2 it could not be tried: bad arguments, or an error of a root.
What held here may still fail in a longer run, or when a server restarts.
"""

import argparse
import contextlib
import json
import os
import secrets
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Final

from client import Report, is_directory, is_there, make, read, run_both, source_name, target_name

from berth.errors import SIGNAL_BASE, BerthError, MalformedError

PREFIX: Final = ".berth-cross-client-"
PROMISES: Final = {
    "one-winner": "of two clients that rename to one name, exactly one succeeds",
    "nothing-lost": "the loser keeps what it had, and the name holds what the winner had",
    "visible": "what one client publishes, the other sees",
    "file-lock": "a lock on a file keeps the other client out, and falls when it is released",
}
_DIRECTORY: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_POLL_S: Final = 0.01


@dataclass
class Tally:
    """How a promise was kept.

    Attributes:
        tried: How often it was put to the test.
        violated: How often it was broken.
        first: What was seen the first time.
    """

    tried: int = 0
    violated: int = 0
    first: str = ""

    def note(self, broken: bool, what: str) -> None:
        """Count one test of the promise."""
        self.tried += 1
        self.violated += broken
        if broken and not self.first:
            self.first = what


@dataclass
class Account:
    """What two clients were seen to do.

    Attributes:
        roots: The two roots.
        rounds: How many races there were.
        promises: How each was kept, by the names of PROMISES.
        directory_lock: Whether a lock on a directory keeps the other client out; no promise, `words` says why.
        slowest_view_s: How long one client needed at most to see what the other had published.
    """

    roots: tuple[str, str]
    rounds: int
    promises: dict[str, Tally] = field(default_factory=lambda: {name: Tally() for name in PROMISES})
    directory_lock: bool = False
    slowest_view_s: float = 0.0

    @property
    def held(self) -> bool:
        """Whether no promise was broken."""
        return not any(tally.violated for tally in self.promises.values())

    def words(self) -> Iterator[str]:
        """Say it in lines for people."""
        for name, tally in self.promises.items():
            verdict = f"VIOLATED {tally.violated} of {tally.tried}" if tally.violated else f"held {tally.tried} times"
            yield f"{verdict:>24}  {PROMISES[name]}{f' ({tally.first})' if tally.first else ''}"
        if not self.directory_lock:
            yield "Note: locks on directories stay on each client. berth holds a running epoch by one: give each host a"
            yield "state root of its own, or the next start on one retires what still runs on the other."
        if self.held:
            yield f"The two clients kept their promises in {self.rounds} rounds."
        else:
            yield "The two clients do not keep their promises: do not let two hosts use this store for work-state."


def examine(roots: tuple[str, str], *, rounds: int, patience_s: float) -> Account:
    """Put the two clients to the test.

    Args:
        roots: One directory, reached through two clients.
        rounds: How many races to hold.
        patience_s: How long something may take to be seen by the other client.

    Raises:
        MalformedError: The roots are not what they have to be, or one of them failed.
    """
    _check_roots(roots)
    account = Account(roots, rounds)
    name = f"{PREFIX}{secrets.token_hex(16)}"
    with contextlib.ExitStack() as undo:
        undo.callback(_remove, roots, name)
        try:
            os.mkdir(os.path.join(roots[0], name), 0o700)
            fds = _open_both(roots, name, patience_s, undo)
            reports = run_both(fds, rounds=rounds, patience_s=patience_s)
            _judge_races(account, fds, [report.told for report in reports])
            _judge_turns(account, reports)
        except OSError as error:
            raise MalformedError(
                "cannot-try",
                f"{roots[0]!r} and {roots[1]!r} could not be put to the test: {error}",
                "Check that both may be written and have room, and look at the logs of client and server.",
            ) from error
    return account


def _check_roots(roots: tuple[str, str]) -> None:
    for root in roots:
        if not os.path.isdir(root):
            raise MalformedError("not-a-directory", f"{root!r} is not a directory", "Give two mounted directories.")
    if os.stat(roots[0]).st_dev == os.stat(roots[1]).st_dev:
        raise MalformedError(
            "same-mount",
            f"{roots[0]!r} and {roots[1]!r} have the same device number: they are one client of their store",
            "Mount the store twice so that nothing is shared, for NFS with the option nosharecache.",
        )


def _open_both(roots: tuple[str, str], name: str, patience_s: float, undo: contextlib.ExitStack) -> tuple[int, int]:
    """Open the private directory through both roots, once a file that was made in one is found in the other."""
    first = os.open(os.path.join(roots[0], name), _DIRECTORY)
    undo.callback(os.close, first)
    make(first, "token", content=name)
    deadline = time.monotonic() + patience_s
    while time.monotonic() <= deadline:
        with contextlib.suppress(FileNotFoundError):
            second = os.open(os.path.join(roots[1], name), _DIRECTORY)
            if read(second, "token") == name:
                undo.callback(os.close, second)
                return first, second
            os.close(second)
        time.sleep(_POLL_S)
    raise MalformedError(
        "not-the-same-store",
        f"what is written in {roots[0]!r} does not appear in {roots[1]!r} within {patience_s:g} s",
        "Give one directory of one store, reached through two mounts, or wait longer with --patience.",
    )


def _judge_races(account: Account, fds: tuple[int, int], told: list[list[str]]) -> None:
    for round_, answers in enumerate(zip(*told, strict=True)):
        seen = f"round {round_}: client 1 was told: {answers[0]}, client 2: {answers[1]}"
        winners = [number for number, answer in enumerate(answers) if answer == "won"]
        losers = [number for number, answer in enumerate(answers) if answer != "won"]
        account.promises["one-winner"].note(len(winners) != 1 or answers[losers[0]] != "EEXIST", seen)
        missing = [
            source_name(round_, number)
            for number in losers
            if not _is_whole(fds[number], round_, source_name(round_, number), number)
        ]
        if winners and not any(_is_whole(fds[number], round_, target_name(round_), number) for number in winners):
            missing.append(target_name(round_))
        if len(winners) > 1:
            missing.append("what one of them had")
        account.promises["nothing-lost"].note(bool(missing), f"{seen}; lost: {', '.join(missing)}")


def _is_whole(fd: int, round_: int, name: str, owner: int) -> bool:
    """Say whether the entry `name` is what the client `owner` made for this round."""
    if is_directory(round_):
        return is_there(fd, name)
    return read(fd, name) == source_name(round_, owner)


def _judge_turns(account: Account, reports: list[Report]) -> None:
    for turn, times in enumerate(zip(*(report.seen_after_s for report in reports), strict=True)):
        account.promises["visible"].note(None in times, f"turn {turn}: not seen in time")
        account.slowest_view_s = max(account.slowest_view_s, *(seconds or 0.0 for seconds in times))
    for turn, pair in enumerate(zip(*(report.refused_and_stuck for report in reports), strict=True)):
        refused = all(refused for refused, _ in pair)
        what = "cannot be had after its release" if refused else "held by both"
        account.promises["file-lock"].note(not refused or any(stuck for _, stuck in pair), f"turn {turn}: {what}")
    account.directory_lock = all(report.directory_refused for report in reports)


def _remove(roots: tuple[str, str], name: str) -> None:
    for root in roots:  # one client may still show what the other has removed
        shutil.rmtree(os.path.join(root, name), ignore_errors=True)
    if os.path.lexists(os.path.join(roots[0], name)):
        print(f"{os.path.join(roots[0], name)} cannot be removed; remove it by hand", file=sys.stderr)


def main() -> int:
    """Run the command line and return its exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("roots", nargs=2, metavar="ROOT", help="the same directory, through two clients")
    parser.add_argument("--rounds", type=int, default=200, help="how many races to hold (200)")
    parser.add_argument("--patience", type=float, default=5.0, metavar="S", help="seconds until something is seen (5)")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    options = parser.parse_args()
    if options.rounds < 1:
        parser.error("--rounds must be at least 1")
    signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(SIGNAL_BASE + number))  # so that it cleans up
    roots = (os.path.abspath(options.roots[0]), os.path.abspath(options.roots[1]))
    try:
        account = examine(roots, rounds=options.rounds, patience_s=options.patience)
    except BerthError as error:
        if options.json:
            print(json.dumps({"error": error.as_dict(2)}))
        else:
            print(f"{error.message}\n{error.fix}", file=sys.stderr)
        return 2
    if options.json:
        print(json.dumps(asdict(account) | {"verdict": "held" if account.held else "violated"}))
    else:
        print(*account.words(), sep="\n")
    return 0 if account.held else 1


if __name__ == "__main__":
    sys.exit(main())
