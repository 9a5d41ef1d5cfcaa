"""How processes are called in text: `ranks 0-15 (pids 100-115)`."""

from collections.abc import Callable, Iterable, Sequence

from berth.binding.view import Task


def name_tasks(tasks: Sequence[Task]) -> str:
    """Return a short name of some processes, at least one; runs of numbers are joined."""
    pids = [task.pid for task in tasks]
    ranks = [task.rank for task in tasks if task.rank is not None]
    one = len(tasks) == 1
    if len(ranks) == len(tasks) == len(set(ranks)):
        return f"rank{'' if one else 's'} {joined(ranks)} (pid{'' if one else 's'} {joined(pids)})"
    if one:
        return f"pid {pids[0]} ({tasks[0].process.comm})"
    return f"pids {joined(pids)}"


def joined(numbers: Iterable[int]) -> str:
    """Return numbers ascending, with runs of neighbours joined: `0-3,8`. Unlike a CPU list they have no limit."""
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and runs[-1][1] == number - 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def grouped(tasks: Iterable[Task], describe: Callable[[Task], str]) -> list[str]:
    """Return one line for each group of processes that are described alike."""
    groups: dict[str, list[Task]] = {}
    for task in tasks:
        groups.setdefault(describe(task), []).append(task)
    return [f"{name_tasks(group)}: {text}" for text, group in groups.items()]


def pids_of(tasks: Iterable[Task]) -> list[int]:
    """Return their pids, ascending, each once."""
    return sorted({task.pid for task in tasks})


def plural(number: int, noun: str) -> str:
    """Return `1 process`, `2 processes`."""
    ending = "es" if noun.endswith("s") else "s"
    return f"{number} {noun if number == 1 else noun + ending}"
