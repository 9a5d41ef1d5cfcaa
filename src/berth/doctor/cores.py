"""Which cores may be used here, and can they be claimed? Read as `berth run --cores` reads them, claimed as it does."""

import os
from typing import Final

from berth.claims.claims import Claim, holders, try_claim
from berth.doctor.abilities import DOES_NOT, LESS, WORKS, Ability
from berth.errors import BerthError
from berth.host.cgroup import EffectiveCpuset, effective_cpuset
from berth.host.cpuset import CpuSet
from berth.host.discover import read_online
from berth.linux.process import command_line

#: How many claims are told one by one.
_SHOWN: Final = 8


def cpuset() -> Ability:
    """Read the effective cpuset of this process, and its own mask."""
    name = "cpuset"
    try:
        found = effective_cpuset()
    except BerthError as error:
        return Ability(name=name, level=DOES_NOT, why=error.message, mend=error.fix)
    mask = CpuSet.of(os.sched_getaffinity(0))
    why = f"CPUs {found.cpus or 'none'}, {_hierarchy(found)}"
    if not found.cpus:
        mend = f"Give the cgroup CPUs: write a list such as 0-3 to its cpuset.cpus, next to {found.source}."
        return Ability(name=name, level=DOES_NOT, why=why, mend=mend)
    if found.cpus - mask:
        why = f"{why}; the mask of this process is narrower, CPUs {mask}, and a run without --cores and --cpus keeps it"
        return Ability(name=name, level=LESS, why=why, mend=f"Widen it for this shell: `taskset -cp {found.cpus} $$`.")
    return Ability(name=name, level=WORKS, why=why)


def claims() -> Ability:
    """Lock and release the node of every online CPU, shared and without waiting, and see who holds claims."""
    name = "claims"
    held: dict[tuple[str, tuple[int, ...]], list[int]] = {}
    try:
        online = read_online()
        for cpu in online:
            by = holders(cpu)
            claimed = try_claim(CpuSet.of([cpu]), shared=True)
            if isinstance(claimed, Claim):
                claimed.release()
                if by:
                    held.setdefault(("shared by", by), []).append(cpu)
            else:
                held.setdefault(("by", by), []).append(cpu)
    except BerthError as error:
        return Ability(name=name, level=DOES_NOT, why=error.message, mend=error.fix)
    why = f"every node of the CPUs {online} answered to a lock; claimed right now: {_told(held)}"
    return Ability(name=name, level=WORKS, why=why)


def _hierarchy(found: EffectiveCpuset) -> str:
    where = "no cgroup limit" if found.version == "none" else f"cgroup {found.version}"
    return f"{where}: {found.reason[:1].lower()}{found.reason[1:].rstrip('.')}"


def _told(held: dict[tuple[str, tuple[int, ...]], list[int]]) -> str:
    shown = [f"{_cpus(cpus)} {how} {_who(pids)}" for (how, pids), cpus in list(held.items())[:_SHOWN]]
    if len(held) > _SHOWN:
        shown.append(f"and more by {len(held) - _SHOWN} others")
    return "; ".join(shown) or "none"


def _cpus(cpus: list[int]) -> str:
    return f"CPU{'s' if len(cpus) > 1 else ''} {CpuSet.of(cpus)}"


def _who(pids: tuple[int, ...]) -> str:
    return ", ".join(f"pid {pid} ({command_line(pid)})" for pid in pids) or "a process that /proc does not show"
