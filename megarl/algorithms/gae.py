"""Sums along a response: discounted returns and generalised advantages, over action tokens only.

Tokens that are no action (tool output) are no time step: they take no discount, have no value and
get no credit; what is carried over a hole is the state of the next action. Vectorised over samples,
elementwise, so a row's numbers do not depend on which rows are beside it. float64.

n samples, R response tokens.
"""

from __future__ import annotations

import numpy as np


def returns_to_go(
    token_rewards: np.ndarray, action_mask: np.ndarray, offsets: np.ndarray, gamma: float
) -> np.ndarray:
    """G_t = r_t + γ G_{t+1}, float64 [R] (REINFORCE++, arXiv:2501.03262); 0 where no action.

    `token_rewards` float64 [R], `action_mask` bool [R], `offsets` int64 [n+1].
    """
    return _from_behind(np.where(action_mask, token_rewards, 0.0), action_mask, offsets, gamma)


def gae(
    token_rewards: np.ndarray,
    values: np.ndarray,
    following: np.ndarray,
    action_mask: np.ndarray,
    offsets: np.ndarray,
    gamma: float,
    lam: float,
) -> np.ndarray:
    """Generalised advantages, float64 [R] (arXiv:1506.02438, eq. 16); 0 where no action.

        δ_t = r_t + γ V(s_{t+1}) − V(s_t)        A_t = δ_t + γ λ A_{t+1},  A_{T+1} = 0

    t runs over a response's action tokens. `values` float64 [R], V(s_t) read where token t is
    predicted. `following` float64 [n] is V(s_{T+1}) after the last action: 0 after a response that
    terminated (`d` = 1), the value that a cut off one is bootstrapped with.
    """
    rows = np.flatnonzero(action_mask)
    after = np.zeros(len(values))
    if len(rows):
        sample = np.searchsorted(offsets, rows, side="right") - 1
        is_last = np.append(sample[1:] != sample[:-1], True)
        after[rows[:-1]] = values[rows[1:]]
        after[rows[is_last]] = following[sample[is_last]]
    delta = np.where(action_mask, token_rewards + gamma * after - values, 0.0)
    return _from_behind(delta, action_mask, offsets, gamma * lam)


def _from_behind(
    terms: np.ndarray, action_mask: np.ndarray, offsets: np.ndarray, factor: float
) -> np.ndarray:
    """x_t = terms_t + factor · x_{t+1} over each row's action tokens, float64 [R], else 0."""
    result = np.zeros(len(terms))
    tokens = np.flatnonzero(action_mask)
    counts = np.bincount(
        np.searchsorted(offsets, tokens, side="right") - 1, minlength=len(offsets) - 1
    )
    ends = np.cumsum(counts)
    longest = np.argsort(-counts, kind="stable")
    # How many rows, the longest first, have an action so far from their end.
    reaching = np.searchsorted(-counts[longest], -np.arange(counts.max(initial=0)), side="left")
    carried = np.zeros(len(counts))
    for back, rows in enumerate(reaching.tolist()):
        at = tokens[ends[longest[:rows]] - 1 - back]
        carried[:rows] = terms[at] + factor * carried[:rows]
        result[at] = carried[:rows]
    return result
