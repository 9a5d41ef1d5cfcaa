"""How long planning takes: 16 ranks on 2,048 CPUs in 8 nodes, two threads a core, 64 threads a rank.

Pure computation, from the snapshot as a value to the plan as a value, diagnosis and digest included. The goal is a
median below 100 ms for each policy, and for the moment after the plan was applied, when nothing is left to do.
"""

import json
import os
import platform
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from berth.binding.options import PlanOptions
from berth.binding.plan import make_plan
from berth.binding.plan_document import Policy
from berth.binding.snapshot import Snapshot
from binding.builder import played, regular

WARM_UPS = 5
SAMPLES = 60
GOAL_MS = 100.0
RANKS = 16
THREADS = 64
POLICIES: tuple[Policy, ...] = ("near", "spread", "exclusive")
RESULT = Path(__file__).parent / "results" / "plan.json"


def main() -> int:
    """Measure, print the medians, keep the raw samples; 1 where the goal is missed."""
    snapshot = machine()
    options = {policy: PlanOptions(policy=policy) for policy in POLICIES}
    work = {policy: (snapshot, options[policy]) for policy in POLICIES}
    work["near, applied"] = (played(snapshot, make_plan(snapshot, options["near"])), options["near"])
    samples: dict[str, list[float]] = {name: [] for name in work}
    for number in range(WARM_UPS + SAMPLES):
        for name, (given, how) in work.items():
            begun = time.perf_counter()
            make_plan(given, how)
            if number >= WARM_UPS:
                samples[name].append(1000 * (time.perf_counter() - begun))
    medians = {name: statistics.median(values) for name, values in samples.items()}
    for name, values in samples.items():
        p95 = statistics.quantiles(values, n=20)[18]
        print(f"{name:14} median {medians[name]:6.1f} ms   P95 {p95:6.1f} ms   (goal {GOAL_MS:.0f})")
    document = {
        "bench": "plan",
        "machine": {"cpus": os.cpu_count(), "kernel": platform.release(), "python": platform.python_version()},
        "warm_ups": WARM_UPS,
        "goal_ms": GOAL_MS,
        "medians_ms": {name: round(value, 3) for name, value in medians.items()},
        "samples_ms": {name: [round(value, 3) for value in values] for name, values in samples.items()},
    }
    RESULT.write_text(json.dumps(document, indent=1) + "\n")
    return 0 if all(median < GOAL_MS for median in medians.values()) else 1


def machine() -> Snapshot:
    """Return the snapshot: every rank on an NPU of its own, two of them near each node, nothing bound."""
    host = regular(nodes=8, cores=128, smt=2)
    for number in range(RANKS):
        host.npu(number, str(host.nodes[number // 2]))
    for rank in range(RANKS):
        host.process(10_000 + 100 * rank, rank=rank, npu=rank, threads=THREADS)
    return host.snapshot()


if __name__ == "__main__":
    sys.exit(main())
