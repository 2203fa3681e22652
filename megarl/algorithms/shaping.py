"""Rewards before estimators see them: overlong shaping, the token an outcome sits on, KL."""

from __future__ import annotations

import numpy as np

from megarl.contracts.steps import Steps


def overlong_penalty(lengths: np.ndarray, longest: int, buffer_tokens: int) -> np.ndarray:
    """float64 [N] in [−1, 0], the soft overlong punishment (DAPO, arXiv:2503.14476, eq. 13).

        0                              |y| ≤ L_max − L_cache
        ((L_max − L_cache) − |y|) / L_cache    up to L_max
        −1                             above

    `lengths` int [N] response tokens, `longest` L_max, the recipe's longest response,
    `buffer_tokens` L_cache; 0 of these gives 0 everywhere.
    """
    if buffer_tokens == 0:
        return np.zeros(len(lengths))
    over = np.asarray(lengths, dtype=np.float64) - (longest - buffer_tokens)
    return -np.clip(over / buffer_tokens, 0.0, 1.0)


def shaped_totals(
    total: np.ndarray, lengths: np.ndarray, longest: int, buffer_tokens: int, penalty: float
) -> np.ndarray:
    """float64 [N]: totals plus `penalty` times `overlong_penalty`; NaN stays NaN.

    Without a buffer these are the very totals.
    """
    total = np.asarray(total, dtype=np.float64)
    if buffer_tokens == 0:
        return total
    return total + penalty * overlong_penalty(lengths, longest, buffer_tokens)


def last_actions(action_mask: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    """int64 [n], flat index of each row's last action token, −1 where it has none.

    `action_mask` bool [R] over the response tokens of n rows, `offsets` int64 [n+1].
    """
    return _action_until(action_mask, offsets, np.arange(len(offsets) - 1), offsets[1:] - 1)


def outcome_rewards(
    rewards: np.ndarray, action_mask: np.ndarray, offsets: np.ndarray
) -> np.ndarray:
    """Token rewards, float64 [R]: `rewards` [n], each on its row's last *action* token, else 0.

    By the mask, never by an id: an end-of-sequence token that the policy wrote is its last action,
    padding and tool output are none. A row without an action has no token to bear it.
    """
    token_rewards = np.zeros(len(action_mask))
    at = last_actions(action_mask, offsets)
    token_rewards[at[at >= 0]] = np.asarray(rewards, dtype=np.float64)[at >= 0]
    return token_rewards


def step_rewards(steps: Steps, action_mask: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    """Token rewards, float64 [R]: each step score on the action token its step ends at.

    A step that ends on a token that is no action (tool output) counts at the last action before
    it; one before the first action was nobody's doing and counts nowhere. Several on one token add
    up in their order. `steps` of the n rows. Raises `ValueError` for an index beyond a response.
    """
    row = steps.row
    at = offsets[row] + steps.token
    if (at >= offsets[row + 1]).any():
        first = int(np.flatnonzero(at >= offsets[row + 1])[0])
        raise ValueError(
            f"a step score at token {steps.token[first]} of a response of "
            f"{int(np.diff(offsets)[row[first]])} tokens"
        )
    place = _action_until(action_mask, offsets, row, at)
    return np.bincount(
        place[place >= 0], steps.value[place >= 0], minlength=len(action_mask)
    ).astype(np.float64)


def _action_until(
    action_mask: np.ndarray, offsets: np.ndarray, row: np.ndarray, at: np.ndarray
) -> np.ndarray:
    """int64, the last action token at or before flat index `at` within `row`, −1 where none is."""
    position = np.where(action_mask, np.arange(len(action_mask)), -1)
    latest = np.maximum.accumulate(position) if len(position) else position
    found = latest[at]
    return np.where(found >= offsets[row], found, -1)


def kl_penalty(
    old_log_probs: np.ndarray, ref_log_probs: np.ndarray, action_mask: np.ndarray
) -> np.ndarray:
    """float64 [R]: log π_old − log π_ref on action tokens, else 0. Sealed numbers, no gradient.

    β times this is taken off the token's reward (Ziegler et al., arXiv:1909.08593, eq. 2).
    """
    gap = old_log_probs.astype(np.float64) - ref_log_probs.astype(np.float64)
    return np.where(action_mask, gap, 0.0)
