"""Whitening over all trained action tokens of the iteration, on whatever rank they lie."""

from __future__ import annotations

import numpy as np

from megarl.algorithms.advantages import CreditBatch

KINDS = ("none", "full", "scale")
DUST = 1e-12
"""Values closer together than this share of the largest differ by rounding alone."""


def whiten(advantages: np.ndarray, batch: CreditBatch, kind: str) -> np.ndarray:
    """Advantages with deviation 1 over the iteration's trained action tokens, float64 [R].

        full   (A − mean) / std        scale   A / std        none   A

    std has ddof 1 and nothing is added to it. A single token is left as it is. Tokens that all
    have one value have no deviation: `full` gives exactly 0, `scale` leaves them as they are.
    Tokens that do not train keep their value and enter no statistic.

    Sums are taken of each sample first and then over samples in canonical order, in two passes, so
    the bits are the same in every layout. Collective, as `batch.everyone`.
    Raises `ValueError` for another kind.
    """
    if kind not in KINDS:
        raise ValueError(f"algorithm.whiten is {kind!r}; use {', '.join(KINDS)}")
    if kind == "none":
        return advantages
    mask, rows = batch.trained_mask, len(batch.own)
    sample, values = batch.trained_sample, advantages[mask]
    low, high = np.full(rows, np.inf), np.full(rows, -np.inf)
    np.minimum.at(low, sample, values)
    np.maximum.at(high, sample, values)
    counts = batch.sums(np.ones(len(mask)))
    columns = [counts, batch.sums(advantages), low, high]
    whole = batch.everyone(np.stack(columns, axis=1))[batch.trained]
    tokens = whole[:, 0].sum()
    mean = whole[:, 1].sum() / max(tokens, 1.0)
    squares = batch.sums((advantages - mean) ** 2)
    spread = batch.everyone(squares[:, None])[batch.trained].sum()
    if tokens < 2:
        return advantages
    lowest, highest = whole[:, 2].min(), whole[:, 3].max()
    equal = highest - lowest <= DUST * max(abs(lowest), abs(highest))
    std = 1.0 if equal else np.sqrt(spread / (tokens - 1))
    if kind == "scale":
        return np.where(mask, advantages / std, advantages)
    return np.where(mask, 0.0 if equal else (advantages - mean) / std, advantages)
