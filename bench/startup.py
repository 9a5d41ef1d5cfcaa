"""P14: how long `berth --help` takes, against an interpreter that does nothing (`python -c pass`).

Both are started in turn in one run, so that the machine's other work falls on both. The goal is a ratio of at most 5
with bytecode compiled at installation, and msgspec not imported.
"""

import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path

WARM_UPS = 10
SAMPLES = 100
GOAL = 5.0
RESULT = Path(__file__).parent / "results" / "startup.json"


def main() -> int:
    """Measure, print the ratio, keep the raw samples; 1 where the goal is missed."""
    directory = Path(sys.executable).parent
    commands = {
        "berth --help": [str(directory / "berth"), "--help"],
        "python -c pass": [sys.executable, "-c", "pass"],
    }
    samples: dict[str, list[float]] = {name: [] for name in commands}
    for number in range(WARM_UPS + SAMPLES):
        for name, words in commands.items():
            elapsed_ms = milliseconds(words)
            if number >= WARM_UPS:
                samples[name].append(elapsed_ms)
    loads_msgspec = imports_msgspec(directory)
    medians = {name: statistics.median(values) for name, values in samples.items()}
    ratio = medians["berth --help"] / medians["python -c pass"]
    for name, values in samples.items():
        p95 = statistics.quantiles(values, n=20)[18]
        print(f"{name:16} median {medians[name]:6.1f} ms   P95 {p95:6.1f} ms")
    print(f"ratio {ratio:.2f} (goal {GOAL:.0f})   msgspec imported: {'yes' if loads_msgspec else 'no'}")
    document = {
        "bench": "P14",
        "machine": {"cpus": os.cpu_count(), "kernel": platform.release(), "python": platform.python_version()},
        "click": importlib.metadata.version("click"),
        "warm_ups": WARM_UPS,
        "ratio": round(ratio, 3),
        "goal": GOAL,
        "msgspec_imported": loads_msgspec,
        "samples_ms": {name: [round(value, 3) for value in values] for name, values in samples.items()},
    }
    RESULT.write_text(json.dumps(document, indent=1) + "\n")
    return 0 if ratio <= GOAL and not loads_msgspec else 1


def milliseconds(words: list[str]) -> float:
    begun = time.perf_counter()
    subprocess.run(words, stdout=subprocess.DEVNULL, check=True)
    return 1000 * (time.perf_counter() - begun)


def imports_msgspec(directory: Path) -> bool:
    words = [sys.executable, "-X", "importtime", str(directory / "berth"), "--help"]
    return "msgspec" in subprocess.run(words, capture_output=True, text=True, check=True).stderr


if __name__ == "__main__":
    sys.exit(main())
