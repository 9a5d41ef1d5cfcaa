"""Claims on CPU cores: kernel locks on the cores' own sysfs nodes, host-wide and gone with their holder.

A claim is a flock(2) on /sys/devices/system/cpu/cpuN/uevent, opened read-only: every user sees the same file, nothing
has to be set up, and death frees it. An exclusive claim excludes all others; shared claims go together.

A claim is an agreement between users of berth, not a wall: a process that does not ask is not stopped, and a container
with a sysfs of its own is not seen.
"""

import contextlib
import os
from collections.abc import Iterable
from dataclasses import dataclass

from berth.errors import AbilityError, ForbiddenError
from berth.host.cpuset import CpuSet
from berth.linux.locks import lock_holders, try_lock
from berth.linux.process import command_line


@dataclass(frozen=True, slots=True)
class Claim:
    """CPUs that are claimed for as long as the descriptors stay open, here or in a process that inherited them."""

    cpus: CpuSet
    shared: bool
    fds: tuple[int, ...]

    def release(self) -> None:
        """Close this process's descriptors; the claim falls when nobody else holds them."""
        for fd in self.fds:
            os.close(fd)


def cpu_node(cpu: int) -> str:
    """Return the sysfs file that stands for CPU `cpu` (Linux Documentation/ABI/testing/sysfs-devices-system-cpu)."""
    return f"/sys/devices/system/cpu/cpu{cpu}/uevent"


def try_claim(cpus: CpuSet, *, shared: bool = False) -> Claim | CpuSet:
    """Claim all of `cpus` or none; return the claim, or the CPUs that somebody else holds.

    Raises:
        AbilityError: This host shows no lockable node for a CPU.
    """
    fds: list[int] = []
    taken: list[int] = []
    with contextlib.ExitStack() as opened:
        for cpu in cpus:
            fds.append(_open_node(cpu))
            opened.callback(os.close, fds[-1])
            if not try_lock(fds[-1], shared=shared):
                taken.append(cpu)
        if taken:
            return CpuSet.of(taken)
        opened.pop_all()
    return Claim(cpus, shared, tuple(fds))


def refusal(taken: CpuSet, wanted: str) -> ForbiddenError:
    """Return the error that says which CPUs are held, and by whom, where `wanted` was asked for."""
    by_holders: dict[tuple[int, ...], list[int]] = {}
    for cpu in taken:
        by_holders.setdefault(holders(cpu), []).append(cpu)
    held = "; ".join(f"CPUs {CpuSet.of(cpus)} by {_describe(pids)}" for pids, cpus in by_holders.items())
    return ForbiddenError(
        "cores-claimed",
        f"{wanted} cannot be claimed: {held}",
        "Wait for them to end, ask for fewer or other CPUs, or share them on both sides with --share-cores.",
    )


def holders(cpu: int) -> tuple[int, ...]:
    """Return the pids that claimed CPU `cpu`: empty where it is free.

    A claimer that was killed is still named while its keeper holds the claim and ends what is inside.
    """
    fd = _open_node(cpu)
    try:
        return lock_holders(fd)
    finally:
        os.close(fd)


def _describe(pids: Iterable[int]) -> str:
    return ", ".join(f"pid {pid} ({command_line(pid)})" for pid in pids) or "a process that /proc does not show"


def _open_node(cpu: int) -> int:
    try:
        return os.open(cpu_node(cpu), os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise AbilityError(
            "no-claims",
            f"CPU {cpu} cannot be claimed: {cpu_node(cpu)}: {error.strerror}",
            "berth needs a readable /sys to claim cores. Run without --cores and --cpus, or mount sysfs.",
        ) from error
