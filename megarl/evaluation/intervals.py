"""How far a mean over held-out prompts can be from that over all prompts like them.

Prompts are the sample: responses to one prompt hang together, so the standard error is that of the
prompts' means (clustered: Miller 2024, arXiv:2411.00640). Of scores in [0, 1] the interval is
Wilson's (1927, J. Am. Stat. Assoc. 22, 209-212)

    (p + z²/2n ± z √(p (1 − p) / n + z²/4n²)) / (1 + z²/n)

with the effective sample size n = p (1 − p) / SE², as is done for clustered samples (Korn and
Graubard 1998, Survey Methodology 24, 193-201). SE² is the prompts' variance (ddof 0) over their
number, by which n is the number of prompts where each has one response that is right or wrong: the
plain interval. Where every response is right or wrong n is at most the number of responses (of
pass@k a kth of it), for prompts that happen to agree are not worth more than independent draws. It
has a width at 0 and 1, too. Of other scores it is the normal one, p ± z SE with ddof 1.
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
    """None, as `high`, where a single prompt tells nothing of the others."""
    high: float | None
    prompts: int
    """That have a value."""
    responses: int
    """Behind these values."""


def estimate(
    values: Sequence[float], responses: int, confidence: float, *, binary: bool, draw: int = 1
) -> Estimate | None:
    """The mean of `values`, one a prompt, that come of so many responses; None of no prompt.

    `confidence`: chance that the interval covers the mean over all prompts, in (0, 1). `binary`:
    whether each response is right or wrong. `draw`: responses that one trial takes, k of pass@k.
    """
    if not len(values):
        return None
    column = np.asarray(values, dtype=np.float64)
    mean = float(column.mean())
    low, high = interval(column, responses / draw, confidence, binary)
    return Estimate(mean, low, high, len(column), responses)


def interval(
    values: np.ndarray, trials: float, confidence: float, binary: bool
) -> tuple[float | None, float | None]:
    """(low, high) of the mean of `values` float64 [prompts], of so many trials in all."""
    z = NormalDist().inv_cdf(0.5 + confidence / 2)
    count, mean = len(values), float(values.mean())
    if values.min() < 0.0 or values.max() > 1.0:
        if count < 2:
            return None, None
        half = z * math.sqrt(float(values.var(ddof=1)) / count)
        return mean - half, mean + half
    if values.min() == values.max():
        return wilson(float(values[0]), trials, z)
    size = mean * (1 - mean) * count / float(values.var())
    return wilson(mean, min(size, trials) if binary else size, z)


def wilson(share: float, size: float, z: float) -> tuple[float, float]:
    """Wilson's interval of a share in [0, 1] of `size` independent trials, at ±z deviations."""
    shrink = 1 + z * z / size
    centre = share + z * z / (2 * size)
    half = z * math.sqrt(share * (1 - share) / size + z * z / (4 * size * size))
    # The share lies within by the formula; at 0 and 1 rounding must not put it outside.
    low = 0.0 if share == 0.0 else max(0.0, (centre - half) / shrink)
    high = 1.0 if share == 1.0 else min(1.0, (centre + half) / shrink)
    return min(low, share), max(high, share)
