"""Chance that can be repeated: one seed per test, printed, and taken from BERTH_TEST_SEED where that is set."""

import os
import random


def seeded() -> random.Random:
    """Return a generator and print its seed, which pytest shows where the test fails."""
    seed = int(os.environ.get("BERTH_TEST_SEED") or random.SystemRandom().randrange(1 << 32))
    print(f"BERTH_TEST_SEED={seed}")
    return random.Random(seed)
