"""How far a mean over held-out prompts can be from that over all prompts like them.

Prompts are the sample: responses to one prompt hang together (clusters: Miller 2024,
arXiv:2411.00640). Of scores in [0, 1] the interval is Wilson's (1927, J. Am. Stat. Assoc. 22,
209-212)

    (p + z²/2n ± z √(p (1 − p) / n + z²/4n²)) / (1 + z²/n)

with n the number of prompts, however many responses each has. Means in [0, 1] vary by p (1 − p) at
most, which they do where each is 0 or 1, so the interval is wide enough also where all responses to
a prompt are alike; where they are not it is wider than need be. The variance that the prompts show
could make it narrower, but few prompts show too little of it: where ten prompts happen to agree
they show none. Of other scores the interval is the normal one, p ± z SE with ddof 1, and there is
none where the prompts agree.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over prompts, and its interval."""

    value: float
    low: float | None
    """None, as `high`, where a single prompt tells nothing of the others, and where prompts with
    scores beyond 0 to 1 all agree."""
    high: float | None
    prompts: int
    """That have a value."""
    responses: int
    """Behind these values."""


def estimate(values: Sequence[float], responses: int, confidence: float) -> Estimate | None:
    """The mean of `values`, one a prompt, that come of so many responses; None of no prompt.

    `confidence`: chance that the interval covers the mean over all prompts, in (0, 1).
    """
    if not len(values):
        return None
    column = np.asarray(values, dtype=np.float64)
    mean = float(column.mean())
    low, high = interval(column, confidence)
    return Estimate(mean, low, high, len(column), responses)


def interval(values: np.ndarray, confidence: float) -> tuple[float | None, float | None]:
    """(low, high) of the mean of `values` float64 [prompts]; (None, None) where it has none."""
    z = NormalDist().inv_cdf(0.5 + confidence / 2)
    count, mean = len(values), float(values.mean())
    least, most = float(values.min()), float(values.max())
    if count < 2:
        return None, None
    if least >= 0.0 and most <= 1.0:
        return wilson(least if least == most else mean, count, z)
    if least == most:
        return None, None
    half = z * math.sqrt(float(values.var(ddof=1)) / count)
    return mean - half, mean + half


def wilson(share: float, size: float, z: float) -> tuple[float, float]:
    """Wilson's interval of a share in [0, 1] of `size` independent trials, at ±z deviations."""
    shrink = 1 + z * z / size
    centre = share + z * z / (2 * size)
    half = z * math.sqrt(share * (1 - share) / size + z * z / (4 * size * size))
    # The share lies within by the formula; at 0 and 1 rounding must not put it outside.
    low = 0.0 if share == 0.0 else max(0.0, (centre - half) / shrink)
    high = 1.0 if share == 1.0 else min(1.0, (centre + half) / shrink)
    return min(low, share), max(high, share)
