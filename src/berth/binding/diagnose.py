"""Find out what is wrong with how some processes are placed, from a snapshot alone."""

import hashlib
from collections.abc import Callable
from typing import Final

from berth.binding.finding import SCHEMA_VERSION, Finding, Findings
from berth.binding.look import look
from berth.binding.rules import limits, locality, masks, sharing
from berth.binding.snapshot import Snapshot, encode_snapshot
from berth.binding.view import View

#: The rules in the order in which their findings are best read: what is missing, what limits, what is wrong.
RULES: Final[tuple[Callable[[View], Finding | None], ...]] = (
    limits.information_missing,  # R010
    limits.cgroup_conflict,  # R007
    masks.not_bound,  # R001
    locality.wrong_side,  # R003
    locality.across_nodes,  # R002
    masks.range_too_wide,  # R004
    masks.range_too_narrow,  # R005
    sharing.pools_too_large,  # R006
    sharing.ranks_overlap,  # R008
    sharing.splits_cores,  # R009
    limits.quota_below_cpus,  # R011
    masks.mask_not_chosen,  # R012
    masks.children_pinned,  # R013
    masks.on_isolated_cpus,  # R014
    sharing.shared_with_strangers,  # R015
    locality.untrusted_nodes,  # R016
    locality.near_outside_cpuset,  # R017
    locality.far_pages,  # R018
    locality.sources_contradict,  # R019
    locality.nothing_near_known,  # R020
    limits.not_movable,  # R022
)


def diagnose(
    snapshot: Snapshot, *, snapshot_ref: str = "snapshot.json", snapshot_sha256: str | None = None
) -> Findings:
    """Return what is wrong, one finding for each cause.

    Args:
        snapshot: The host as it was.
        snapshot_ref: Relative name of its file.
        snapshot_sha256: Digest of its file; that of the file which berth would write, if left out.

    Raises:
        MalformedError: A CPU list in the snapshot is none.
    """
    return Findings(
        schema_version=SCHEMA_VERSION,
        snapshot_ref=snapshot_ref,
        snapshot_sha256=snapshot_sha256 or digest(snapshot),
        findings=find(look(snapshot)),
    )


def find(view: View) -> list[Finding]:
    """Return what is wrong in a view."""
    return [finding for rule in RULES if (finding := rule(view)) is not None]


def digest(snapshot: Snapshot) -> str:
    """Return the SHA-256 of the file that berth would write for a snapshot, in hexadecimal."""
    return hashlib.sha256(encode_snapshot(snapshot)).hexdigest()
