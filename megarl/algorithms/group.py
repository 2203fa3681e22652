"""Group-relative statistics: each value against the others of its group. float64, all N at once.

Every function runs over the *global* values in canonical order, so its bits do not depend on the
number of ranks. A group whose *values* are all equal gives exactly 0: the mean of equal floats can
differ from them by an ulp, and such dust over a dusty deviation would be a number of order one.
"""

from __future__ import annotations

import numpy as np

STD_KINDS = ("sample", "population", "leave_one_out", "none")


def grpo_advantages(
    values: np.ndarray, group: np.ndarray, compared: np.ndarray, std: str, eps: float
) -> np.ndarray:
    """Group-relative advantages, float64 [N] (DeepSeekMath, arXiv:2402.03300, section 4.1.2).

        sample         (r_i − mean r) / (std r + eps), ddof 1
        population     the same with ddof 0
        leave_one_out  (r_i − mean r_others) / (std r_others + eps), ddof 1; the difference alone
                       where the others' values are all equal
        none           r_i − mean r        (Dr. GRPO, arXiv:2503.20783)

    `values` float64 [N], `group` int [N] whose each is, `compared` bool [N] which enter
    statistics; the others get 0, whatever they hold. A group with fewer than two compared values
    gets 0. `eps` is added to the deviation, outside the root.

    Raises `ValueError` for a compared value that is not finite, lengths that differ, or another
    `std`.
    """
    if std not in STD_KINDS:
        raise ValueError(f"algorithm.group_std is {std!r}; use {', '.join(STD_KINDS)}")
    scored, member, sizes = _compared(values, group, compared)
    result = np.zeros(len(values))
    if std == "leave_one_out":
        result[compared] = _leave_one_out(scored, member, sizes, eps)
        return result
    deviation = _deviation(scored, member, sizes)
    if std != "none":
        degrees = sizes - 1 if std == "sample" else sizes
        variance = np.bincount(member, deviation**2) / np.maximum(degrees, 1)
        deviation /= (np.sqrt(variance) + eps)[member]
    result[compared] = deviation
    return result


def rloo_advantages(values: np.ndarray, group: np.ndarray, compared: np.ndarray) -> np.ndarray:
    """RLOO's advantages, float64 [N]: r_i − mean_{j≠i} r_j (arXiv:2402.14740).

    Computed as G / (G − 1) · (r_i − mean r), which is the same. Else as `grpo_advantages`.
    """
    scored, member, sizes = _compared(values, group, compared)
    result = np.zeros(len(values))
    factor = sizes / np.maximum(sizes - 1, 1)
    result[compared] = _deviation(scored, member, sizes) * factor[member]
    return result


def _compared(
    values: np.ndarray, group: np.ndarray, compared: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(the compared values, the number of each one's group, sizes of the groups)."""
    if not values.shape == group.shape == compared.shape:
        raise ValueError(
            f"values {values.shape}, groups {group.shape} and compared {compared.shape} must be "
            "one column each"
        )
    scored = values[compared]
    if not np.isfinite(scored).all():
        rows = np.flatnonzero(compared & ~np.isfinite(values)).tolist()
        raise ValueError(f"rewards of rows {rows} are compared but are not finite")
    _, member, sizes = np.unique(group[compared], return_inverse=True, return_counts=True)
    return scored, member, sizes


def _deviation(scored: np.ndarray, member: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """Each value minus its group's mean; exactly 0 where the group's values are equal."""
    # bincount adds in row order: the same bits whatever the number of ranks.
    deviation = scored - (np.bincount(member, scored, minlength=len(sizes)) / sizes)[member]
    low, high = np.full(len(sizes), np.inf), np.full(len(sizes), -np.inf)
    np.minimum.at(low, member, scored)
    np.maximum.at(high, member, scored)
    deviation[(low == high)[member]] = 0.0
    return deviation


def _leave_one_out(
    scored: np.ndarray, member: np.ndarray, sizes: np.ndarray, eps: float
) -> np.ndarray:
    """Each value minus the others' mean, over the others' deviation; groups of a size at once.

    The others' deviation is taken from the others themselves. Got from the whole group's by
    subtraction it would be rounding where one value lies far off.
    """
    result = np.zeros(len(scored))
    order = np.argsort(member, kind="stable")
    starts = np.cumsum(sizes) - sizes
    for size in np.unique(sizes[sizes > 1]).tolist():
        places = order[starts[sizes == size][:, None] + np.arange(size)]  # [groups, size]
        values = scored[places]
        for at in range(size):
            mine, others = values[:, at], np.delete(values, at, axis=1)
            first = others[:, 0]
            # A test on the values, see above: equal others have no deviation to divide by.
            equal = (others == first[:, None]).all(axis=1)
            mean = np.where(equal, first, others.mean(axis=1))
            squares = ((others - mean[:, None]) ** 2).sum(axis=1)
            std = np.sqrt(squares / max(size - 2, 1))
            result[places[:, at]] = (mine - mean) / np.where(equal, 1.0, std + eps)
    return result
