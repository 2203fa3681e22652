"""Response lengths that both sides are made to produce, so that both generate the same tokens.

Plain Python: it is also imported by TRL's interpreter.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

LENGTHS_VARIABLE = "MEGARL_BENCH_LENGTHS"
"""Names the JSON list of lengths for a rank of megarl."""
SIGMA = 0.95
"""Of the log-normal: the longest of a few hundred draws is then about eight times the mean."""
LONGEST_OVER_MEAN = 8


def long_tailed(samples: int, mean: int, seed: int = 1) -> list[int]:
    """Log-normal lengths of about `mean`, the longest exactly eight times it, in random order."""
    longest = LONGEST_OVER_MEAN * mean
    draw = random.Random(seed)
    location = math.log(mean) - SIGMA**2 / 2
    drawn = [
        min(longest, max(1, round(draw.lognormvariate(location, SIGMA)))) for _ in range(samples)
    ]
    drawn[drawn.index(max(drawn))] = longest
    return drawn


def facts(lengths: Sequence[int]) -> dict[str, float]:
    """What a report says about them."""
    mean = sum(lengths) / len(lengths)
    return {
        "samples": len(lengths),
        "mean": round(mean, 2),
        "median": sorted(lengths)[len(lengths) // 2],
        "max": max(lengths),
        "max_over_mean": round(max(lengths) / mean, 2),
    }
