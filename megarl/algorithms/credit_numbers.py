"""Numbers about one iteration's credit, for metrics: the same bits on every rank and layout."""

from __future__ import annotations

import numpy as np

from megarl.algorithms.advantages import CreditBatch
from megarl.algorithms.shaping import kl_penalty


def numbers_of(
    batch: CreditBatch, advantages: np.ndarray, returns: np.ndarray | None
) -> tuple[np.ndarray, dict[str, float]]:
    """(mean advantage of each sample, float64 [N], NaN where not trained; numbers). Collective.

    Over trained action tokens: `advantage/mean`, `/std` (ddof 0), `/abs_max`; with returns
    `return/mean`, `/std`; with values too `value/mean` and `value/explained_variance`,
    1 − Var(R − V) / Var R (left out where R does not vary); with a reference `reference/kl`,
    Σ (log π_old − log π_ref) / tokens, and `reference/kl_sequence`, the same sum over
    `reference/sequences`, the trained samples with an action. None of them without such a token.
    """
    mask, rows = batch.trained_mask, len(batch.own)
    columns = _columns(batch, advantages, returns)
    sample = batch.trained_sample
    size = np.abs(advantages[mask])
    largest = np.zeros(rows)
    np.maximum.at(largest, sample, size)
    counts = batch.sums(np.ones(len(mask)))
    sums = [batch.sums(column) for column in columns.values()]
    means = _means(batch, advantages, counts)
    whole = batch.everyone(np.stack([counts, means, largest, *sums], axis=1))
    mean_of_sample = np.where(batch.trained, whole[:, 1], np.nan)
    used = whole[batch.trained]
    tokens = float(used[:, 0].sum())
    mean = dict(zip(columns, used[:, 3:].sum(axis=0) / max(tokens, 1.0), strict=True))
    squares = [batch.sums((column - mean[name]) ** 2) for name, column in columns.items()]
    spread = batch.everyone(np.stack(squares, axis=1))[batch.trained]
    if not tokens:
        return mean_of_sample, {}
    variance = dict(zip(columns, spread.sum(axis=0) / tokens, strict=True))
    sequences = float((used[:, 0] > 0).sum())
    numbers = _named(mean, variance, tokens, sequences)
    return mean_of_sample, numbers | {"advantage/abs_max": float(used[:, 2].max())}


def _columns(
    batch: CreditBatch, advantages: np.ndarray, returns: np.ndarray | None
) -> dict[str, np.ndarray]:
    """float64 [R] each, what is summed."""
    columns = {"advantage": advantages}
    if returns is not None:
        columns["return"] = returns
    if batch.values is not None:
        columns["value"] = batch.values
        if returns is not None:
            columns["error"] = returns - batch.values
    if batch.ref_log_probs is not None:
        columns["kl"] = kl_penalty(batch.old_log_probs, batch.ref_log_probs, batch.action_mask)
    return columns


def _named(
    mean: dict[str, float], variance: dict[str, float], tokens: float, sequences: float
) -> dict[str, float]:
    numbers = {}
    for name in ("advantage", "return"):
        if name in mean:
            numbers[f"{name}/mean"] = float(mean[name])
            numbers[f"{name}/std"] = float(np.sqrt(variance[name]))
    if "value" in mean:
        numbers["value/mean"] = float(mean["value"])
    if "error" in mean and variance["return"] > 0:
        numbers["value/explained_variance"] = float(1 - variance["error"] / variance["return"])
    if "kl" in mean:
        numbers["reference/kl"] = float(mean["kl"])
        numbers["reference/kl_sequence"] = float(mean["kl"] * tokens / sequences)
        numbers["reference/sequences"] = sequences
    return numbers


def _means(batch: CreditBatch, advantages: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """float64 [n]: mean over a sample's trained action tokens, 0 without one. Equal values have
    themselves as mean, to the bit."""
    mask, rows = batch.trained_mask, len(batch.own)
    sample, values = batch.trained_sample, advantages[mask]
    low, high = np.full(rows, np.inf), np.full(rows, -np.inf)
    np.minimum.at(low, sample, values)
    np.maximum.at(high, sample, values)
    mean = batch.sums(advantages) / np.maximum(counts, 1.0)
    return np.where(low == high, low, mean)
