"""`findings.json`: what is wrong with how some processes are placed, and the evidence.

A finding is one cause, whatever the number of processes it concerns; its evidence names them in groups.
"""

from typing import Final, Literal

import msgspec

#: Version that is written.
SCHEMA_VERSION: Final = "0.2.0"

Severity = Literal["high", "medium", "low", "info"]
Impact = Literal["throughput", "latency", "stability", "isolation"]


class Finding(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One cause.

    Attributes:
        id: The rule that found it, R001 and so on; at most one finding of each rule stands in a document.
        impact: What suffers.
        evidence: What was seen, one line for each group of processes that it holds for.
        judgement: What it means, in at most three sentences.
        recommendations: What to do, the first first.
        risk: What doing that may cost.
        verification: How to see afterwards that it helped.
        pids: The processes it concerns, ascending; empty where it is about the host.
    """

    id: str
    title: str
    severity: Severity
    impact: list[Impact]
    evidence: list[str]
    judgement: str
    recommendations: list[str]
    risk: str
    verification: list[str]
    pids: list[int]


class Findings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The whole document.

    Attributes:
        snapshot_ref: Relative name of the snapshot it was decided from.
        snapshot_sha256: Digest of that file, in hexadecimal.
        findings: In the order in which they are best read.
    """

    schema_version: str
    snapshot_ref: str
    snapshot_sha256: str
    findings: list[Finding]


def encode_findings(findings: Findings) -> bytes:
    """Return the file's content."""
    return msgspec.json.format(msgspec.json.encode(findings), indent=1) + b"\n"
