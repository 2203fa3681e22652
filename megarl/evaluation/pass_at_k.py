"""pass@k: the chance that at least one of k responses to a prompt is right."""

from __future__ import annotations

from math import comb


def pass_at_k(responses: int, right: int, k: int) -> float:
    """Unbiased estimate from `right` of `responses` independent ones: 1 − C(n−c, k) / C(n, k)
    (Chen et al. 2021, arXiv:2107.03374, equation 1), in whole numbers and rounded once.

    Raises `ValueError` unless 1 ≤ k ≤ responses and 0 ≤ right ≤ responses.
    """
    if not 1 <= k <= responses:
        raise ValueError(f"pass@{k} cannot be told from {responses} responses")
    if not 0 <= right <= responses:
        raise ValueError(f"{right} of {responses} responses cannot be right")
    every = comb(responses, k)
    return (every - comb(responses - right, k)) / every
