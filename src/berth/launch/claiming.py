"""Turn "two cores" into two claimed cores of this host."""

import time
from typing import Final

from berth.claims.claims import Claim, refusal, try_claim
from berth.host.cgroup import effective_cpuset
from berth.host.cpuset import CpuSet
from berth.host.discover import read_topology
from berth.launch.cores import check_cpus, choose_cores, usable_cores
from berth.launch.request import RunRequest

#: Another start that tries cores holds them for an instant; a core counts as taken after this many seconds.
_SETTLE_S: Final = 0.3
_POLL_S: Final = 0.01


def claim_cores(request: RunRequest) -> Claim | None:
    """Claim the cores that `request` asks for; None where it asks for none.

    Raises:
        MalformedError: More cores than there are, or CPUs outside the effective cpuset.
        ForbiddenError: They are claimed by others, who are named.
        AbilityError: This host has no lockable CPU nodes.
    """
    if request.cpus is not None:
        check_cpus(request.cpus, allowed=effective_cpuset().cpus)
        return _claim_exactly(request.cpus, shared=request.share_cores)
    if request.cores is not None:
        return _claim_some(request.cores, effective_cpuset().cpus, shared=request.share_cores)
    return None


def _claim_exactly(cpus: CpuSet, *, shared: bool) -> Claim:
    deadline = time.monotonic() + _SETTLE_S
    while isinstance(claimed := try_claim(cpus, shared=shared), CpuSet):
        if time.monotonic() > deadline:
            raise refusal(claimed, f"--cpus {cpus}: all or some of them")
        time.sleep(_POLL_S)
    return claimed


def _claim_some(count: int, allowed: CpuSet, *, shared: bool) -> Claim:
    topology = read_topology()
    deadline = time.monotonic() + _SETTLE_S
    busy = CpuSet()
    while True:
        cpus = choose_cores(topology, allowed=allowed, busy=busy, count=count)
        if cpus is not None:
            claimed = try_claim(cpus, shared=shared)
            if isinstance(claimed, Claim):
                return claimed
            busy |= claimed
        elif time.monotonic() > deadline:
            usable = CpuSet.of(cpu for core in usable_cores(topology, allowed) for cpu in core)
            raise refusal(busy, f"--cores {count}: too few cores of CPUs {usable} are free, and the others")
        else:
            busy = CpuSet()
            time.sleep(_POLL_S)
