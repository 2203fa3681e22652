"""Advantages from outcome rewards. Statistics are float64, summed once in canonical order.

N samples in canonical order, R response tokens of some samples.
"""

from __future__ import annotations

import numpy as np


def grpo_advantages(
    total: np.ndarray, group: np.ndarray, ok: np.ndarray, normalize_std: bool, eps: float
) -> np.ndarray:
    """Group-relative advantages, float64 [N] (GRPO: DeepSeekMath, arXiv:2402.03300, section 4.1).

        A_i = (r_i − mean r) / (std r + eps)        normalize_std
        A_i =  r_i − mean r                         otherwise (Dr. GRPO, arXiv:2503.20783)

    `total` float64 [N] rewards, `group` int [N] the prompt each sample belongs to, `ok` bool [N]
    which rewards are real scores. Conventions: mean and std run over the *scored* samples of a
    group; std is the sample's (ddof 1) and eps is added to it, outside the root; an unscored
    sample (`ok` False, whatever its total) enters no statistic and gets 0; a group with fewer
    than two scored samples gets 0; a group whose reward *values* are equal gets exactly 0.

    Raises `ValueError` when a scored reward is not finite or lengths differ.
    """
    total = np.asarray(total, dtype=np.float64)
    ok = np.asarray(ok, dtype=bool)
    group = np.asarray(group)
    if not total.shape == group.shape == ok.shape:
        raise ValueError(
            f"rewards {total.shape}, groups {group.shape} and ok {ok.shape} must be one column each"
        )
    if not np.isfinite(total[ok]).all():
        rows = np.flatnonzero(ok & ~np.isfinite(total)).tolist()
        raise ValueError(f"rewards of rows {rows} count as scored but are not finite")
    advantages = np.zeros(len(total))
    if not ok.any():
        return advantages

    scored = total[ok]
    _, member, sizes = np.unique(group[ok], return_inverse=True, return_counts=True)
    # bincount adds in row order: the same bits whatever the number of ranks.
    deviation = scored - (np.bincount(member, scored) / sizes)[member]
    # A test on the values: the mean of equal floats can differ from them by an ulp, and such
    # dust over a dusty std would be an advantage of order one.
    low, high = np.full(len(sizes), np.inf), np.full(len(sizes), -np.inf)
    np.minimum.at(low, member, scored)
    np.maximum.at(high, member, scored)
    deviation[(low == high)[member]] = 0.0
    if normalize_std:
        variance = np.bincount(member, deviation**2) / np.maximum(sizes - 1, 1)
        deviation /= (np.sqrt(variance) + eps)[member]
    advantages[ok] = deviation
    return advantages


def per_token(advantages: np.ndarray, response_lengths: np.ndarray) -> np.ndarray:
    """One value per sample [N] on each of its response tokens, float32 [R]: the one cast."""
    return np.repeat(np.asarray(advantages, dtype=np.float64), response_lengths).astype(np.float32)
