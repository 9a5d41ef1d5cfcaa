"""Deal cores to claims: whole ones, each to one claim alone, as evenly as the pools allow.

Cores that the same claims may have are one lot, so that the work depends on the number of different pools and not on
the size of the machine. Every claim is given one core first (a matching with augmenting paths, so that a claim with
little choice is not robbed by one with much), and the rest is levelled lot by lot.
"""

import heapq
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass

from berth.host.cpuset import CpuSet
from berth.host.topology import Core


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """Somebody who wants cores.

    Attributes:
        key: Who.
        pool: CPUs that it may have.
        cost: What one CPU counts for it; a claim with twice the cost of another gets half as many.
        held: CPUs that it has now, or None for one that only keeps others away.
    """

    key: Hashable
    pool: CpuSet
    cost: int = 1
    held: CpuSet | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """What a claim gets.

    Attributes:
        cpus: Its CPUs.
        splits_cores: Whether there were fewer cores than claims, so that cores had to be split between them.
    """

    cpus: CpuSet
    splits_cores: bool


@dataclass(slots=True)
class _Lot:
    """Units of one size, each a mask of CPUs, that the same claims may have."""

    claims: tuple[int, ...]
    node: int
    whole: bool
    units: list[int]


def deal(cores: Iterable[Core], claims: Sequence[Claim], *, spread: bool, whole_only: bool) -> dict[Hashable, Share]:
    """Return what each claim gets; claims for which there is no room are left out.

    Where the claims of one pool already hold what an even deal would give them, each keeps what it has. A claim that
    only keeps others away counts as long as every other still gets a core.

    Args:
        cores: Cores of the machine; a CPU whose core is not among them is dealt to nobody.
        claims: In the order in which they are served.
        spread: Level every claim over the nodes, instead of keeping it together.
        whole_only: Use only cores that lie in a pool with all of their CPUs, and never split one.
    """
    units = [(core.cpus.mask, -1 if core.node is None else core.node) for core in cores]
    units.sort(key=lambda unit: (unit[1], unit[0] & -unit[0]))
    found: dict[Hashable, Share] = {}
    for group in _groups(_lots(units, claims, spread=False, whole_only=whole_only), len(claims)):
        found |= _deal_group(units, [claims[at] for at in group], spread=spread, whole_only=whole_only)
    return found


def _deal_group(
    units: list[tuple[int, int]], claims: Sequence[Claim], *, spread: bool, whole_only: bool, cut: bool = False
) -> dict[Hashable, Share]:
    """Deal to claims that compete: in whole cores, else without those that only keep others away, else in CPUs.

    Claims that cannot all be served even then are left out together, with the CPUs that they compete for; `cut` says
    that this took a part of a core away.
    """
    wanting = [claim for claim in claims if claim.held is not None]
    if not wanting:
        return {}
    anyone = _union(claims)
    units = [unit for unit in units if unit[0] & anyone]
    stuck: set[int] = set()
    full: list[_Lot] = []
    for attempt in ("all", "wanting", "split"):
        if (attempt == "wanting" and len(wanting) == len(claims)) or (attempt == "split" and whole_only):
            continue
        some = claims if attempt == "all" else wanting
        given = _split(units) if attempt == "split" else units
        lots = _lots(given, some, spread=spread, whole_only=whole_only)
        first, stuck, full = _one_each(lots, len(some))
        if not stuck:
            return _level(lots, some, first, given, splits=cut or attempt == "split")
    blocked = sum(unit for lot in full for unit in lot.units)
    rest = [claim for at, claim in enumerate(wanting) if at not in stuck]
    left = [(mask & ~blocked, node) for mask, node in units if mask & ~blocked]
    cut = cut or any(mask & blocked and mask & ~blocked for mask, _ in units)
    return _deal_group(left, rest, spread=spread, whole_only=whole_only, cut=cut)


def _union(claims: Sequence[Claim]) -> int:
    found = 0
    for claim in claims:
        found |= claim.pool.mask
    return found


def _split(units: list[tuple[int, int]]) -> list[tuple[int, int]]:
    return [(1 << cpu, node) for mask, node in units for cpu in CpuSet(mask)]


def _lots(units: list[tuple[int, int]], claims: Sequence[Claim], *, spread: bool, whole_only: bool) -> list[_Lot]:
    """Return the lots: those that few claims may have first, of these whole cores first, of these large ones first."""
    by_pool: dict[int, list[int]] = {}
    for at, claim in enumerate(claims):
        by_pool.setdefault(claim.pool.mask, []).append(at)
    pools = list(by_pool)
    anyone = _union(claims)
    lots: dict[tuple[bool, tuple[int, ...], int, int], _Lot] = {}
    for mask, node in units:
        if not mask & anyone:
            continue
        inside = tuple(pool for pool in pools if mask & pool)
        whole = all(mask & pool == mask for pool in inside)
        if whole_only and not whole:
            inside = tuple(pool for pool in inside if mask & pool == mask)
            whole = True
        if inside:
            lot = lots.get(key := (whole, inside, mask.bit_count(), node if spread else 0))
            if lot is None:
                able = tuple(sorted(at for pool in inside for at in by_pool[pool]))
                lot = lots[key] = _Lot(able, node, whole, [])
            lot.units.append(mask)
    return sorted(lots.values(), key=lambda lot: (len(lot.claims), not lot.whole, -lot.units[0].bit_count()))


def _groups(lots: list[_Lot], number: int) -> list[list[int]]:
    """Return the claims that compete with each other, directly or through others, each group in order."""
    parent = list(range(number))

    def root(at: int) -> int:
        while parent[at] != at:
            parent[at] = at = parent[parent[at]]
        return at

    for lot in lots:
        for other in lot.claims[1:]:
            first, second = sorted((root(lot.claims[0]), root(other)))
            parent[second] = first
    groups: dict[int, list[int]] = {}
    for at in range(number):
        groups.setdefault(root(at), []).append(at)
    return list(groups.values())


def _one_each(lots: list[_Lot], number: int) -> tuple[list[int], set[int], list[_Lot]]:
    """Find a lot for one unit of each claim.

    Returns:
        The lot of each claim; the first claims that cannot all be served, if any; the lots these compete for.
    """
    able: list[list[int]] = [[] for _ in range(number)]
    for index in sorted(range(len(lots)), key=lambda index: not lots[index].whole):
        for at in lots[index].claims:
            able[at].append(index)
    taken: list[list[int]] = [[] for _ in lots]
    given = [-1] * number

    def place(at: int, seen: set[int]) -> bool:
        fresh = [index for index in able[at] if index not in seen]
        chosen = next((index for index in fresh if len(taken[index]) < len(lots[index].units)), None)
        for index in fresh if chosen is None else ():
            if index in seen:
                continue
            seen.add(index)
            mover = next((other for other in taken[index] if place(other, seen)), None)
            if mover is not None:
                taken[index].remove(mover)
                chosen = index
                break
        if chosen is None:
            return False
        taken[chosen].append(at)
        given[at] = chosen
        return True

    for at in range(number):
        seen: set[int] = set()
        if not place(at, seen):
            return given, {at, *(other for index in seen for other in taken[index])}, [lots[index] for index in seen]
    return given, set(), []


def _level(
    lots: list[_Lot], claims: Sequence[Claim], first: list[int], units: list[tuple[int, int]], *, splits: bool
) -> dict[Hashable, Share]:
    """Deal every unit: each to the claim that has least so far, neighbours together."""
    counts = [Counter({first[at]: 1}) for at in range(len(claims))]
    load = [claim.cost * lots[first[at]].units[0].bit_count() for at, claim in enumerate(claims)]
    for index, lot in enumerate(lots):
        size = lot.units[0].bit_count()
        queue = [(load[at], at) for at in lot.claims]
        heapq.heapify(queue)
        for _ in range(len(lot.units) - sum(counts[at][index] for at in lot.claims)):
            at = queue[0][1]
            counts[at][index] += 1
            load[at] += claims[at].cost * size
            heapq.heapreplace(queue, (load[at], at))
    masks = [0] * len(claims)
    for index, lot in enumerate(lots):
        begin = 0
        for at in lot.claims:
            end = begin + counts[at][index]
            masks[at] |= sum(lot.units[begin:end]) & claims[at].pool.mask
            begin = end
    if _good_already(claims, masks, units):
        masks = [claim.held.mask if claim.held else 0 for claim in claims]
    return {
        claim.key: Share(cpus=CpuSet(masks[at]), splits_cores=splits)
        for at, claim in enumerate(claims)
        if claim.held is not None
    }


def _good_already(claims: Sequence[Claim], masks: list[int], units: list[tuple[int, int]]) -> bool:
    """Return whether what the claims hold is as good as this deal: the same sizes on the same nodes, none shared."""
    if any(not claim.held or not claim.held <= claim.pool for claim in claims):
        return False
    held = [claim.held.mask for claim in claims if claim.held]
    there = sum(unit for unit, _ in units)
    if any(mask & ~there for mask in held):
        return False
    if any(sum(1 for mask in held if mask & unit) > 1 for unit, _ in units):
        return False
    for claim, mask in zip(claims, held, strict=True):
        if any(mask & unit not in (0, unit & claim.pool.mask) for unit, _ in units if mask & unit):
            return False
    return _shape(claims, held, units) == _shape(claims, masks, units)


def _shape(claims: Sequence[Claim], masks: list[int], units: list[tuple[int, int]]) -> list[tuple[object, ...]]:
    """Return how many CPUs there are on which node, for each claim, without saying which claim."""
    return sorted(
        (claim.cost, *sorted(Counter(node for unit, node in units for _ in range((unit & mask).bit_count())).items()))
        for claim, mask in zip(claims, masks, strict=True)
    )
