"""From rewards and log-probs to advantages and returns, by the papers, row by row, in float64.

Written for the tests alone and from the formulas: plain loops, nothing of `megarl`. Columns of a
row run over its response tokens; what is no action has 0.

    GRPO          arXiv:2402.03300, section 4.1      Dr. GRPO      arXiv:2503.20783
    RLOO          arXiv:2402.14740, equation 2       REINFORCE++   arXiv:2501.03262
    GAE           arXiv:1506.02438, equation 16      overlong      arXiv:2503.14476, equation 13
    KL in reward  arXiv:1909.08593, equation 2
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tests.reference.rules import GROUP_SIZE, MOST_TOKENS, Row, Rules


@dataclass(frozen=True)
class Credit:
    """Per row a float64 column, None where the row does not train."""

    advantages: list[np.ndarray | None]
    returns: list[np.ndarray | None]
    trained: list[bool]


def shaped(row: Row, rules: Rules) -> float:
    """The reward less DAPO's overlong penalty."""
    length, start = len(row.response), MOST_TOKENS - rules.buffer_tokens
    over = max(0, length - start) / rules.buffer_tokens if rules.buffer_tokens else 0.0
    return row.reward - rules.penalty * min(over, 1.0)


def siblings(rows: Sequence[Row], row: Row) -> list[Row]:
    """All scored responses to the row's prompt, itself among them."""
    return [other for other in rows if other.group == row.group and other.reward is not None]


def compared(rows: Sequence[Row], rules: Rules) -> list[bool]:
    """Which rows enter statistics."""
    kept = []
    for row in rows:
        fit = row.reward is not None
        if fit and rules.compares:
            group = siblings(rows, row)
            fit = len(group) >= (GROUP_SIZE if rules.drop_partial else 2)
            if rules.process:
                rewards = {value for other in group for _, value in other.steps}
            else:
                rewards = {shaped(other, rules) for other in group}
            fit = fit and not (rules.drop_equal and len(rewards) == 1)
        kept.append(fit)
    return kept


def deviation(value: float, own: int, values: Sequence[float], rules: Rules) -> float:
    """One value of a group against all of it, after `group_std`; `own` is its place."""
    values = np.asarray(values, dtype=np.float64)
    others = np.delete(values, own)
    if values.max() == values.min():
        return 0.0
    if rules.group_std == "leave_one_out":
        difference = value - others.mean()
        spread = others.std(ddof=1) if others.max() != others.min() else None
    else:
        difference = value - values.mean()
        ddof = {"sample": 1, "population": 0, "none": None}[rules.group_std]
        spread = None if ddof is None else values.std(ddof=ddof)
    return difference if spread is None else difference / (spread + rules.advantage_eps)


def outcome_advantage(
    at: int, rows: Sequence[Row], rewards: Sequence[float], rules: Rules
) -> float:
    """One number for row `at` by what its siblings got."""
    places = [n for n, other in enumerate(rows) if other.group == rows[at].group]
    own, rewards = places.index(at), [rewards[n] for n in places]
    if rules.advantage == "grpo":
        return deviation(rewards[own], own, rewards, rules)
    if max(rewards) == min(rewards):
        return 0.0
    if rules.advantage == "rloo":
        return rewards[own] - float(np.mean(np.delete(rewards, own)))
    if rules.advantage == "reinforce_baseline":
        return rewards[own] - float(np.mean(rewards))
    raise AssertionError(rules.advantage)


def process_advantages(row: Row, rows: Sequence[Row], rules: Rules) -> np.ndarray:
    """GRPO with process supervision: a token gets the sum of the normalised scores of the steps
    that end at it or later."""
    group = siblings(rows, row)
    values = [value for other in group for _, value in other.steps]
    places = [(other.candidate, token) for other in group for token, _ in other.steps]
    column = np.zeros(len(row.response))
    for token, value in row.steps:
        own = places.index((row.candidate, token))
        column[: token + 1] += deviation(value, own, values, rules)
    return column * row.acts


def token_rewards(row: Row, old: np.ndarray, ref: np.ndarray | None, rules: Rules) -> np.ndarray:
    """The outcome on the last action, or each step's score on the last action up to its token,
    less β (old − ref)."""
    column = np.zeros(len(row.response))
    if rules.process:
        for token, value in row.steps:
            column[row.actions[row.actions <= token][-1:]] += value
    elif len(row.actions):
        column[row.actions[-1]] = shaped(row, rules)
    return column - kl_penalty(row, old, ref, rules)


def kl_penalty(row: Row, old: np.ndarray, ref: np.ndarray | None, rules: Rules) -> np.ndarray:
    """β (log π_old − log π_ref) of every action."""
    if not rules.kl_in_reward:
        return np.zeros(len(row.response))
    return rules.beta * (old.astype(np.float64) - ref.astype(np.float64)) * row.acts


def rewards_to_go(row: Row, rewards: np.ndarray, rules: Rules) -> np.ndarray:
    """REINFORCE: G_t = r_t + γ G_{t+1} over actions."""
    column, ahead = np.zeros(len(rewards)), 0.0
    for token in row.actions[::-1]:
        ahead = rewards[token] + rules.gamma * ahead
        column[token] = ahead
    return column


def gae(
    row: Row, rewards: np.ndarray, values: np.ndarray, last_value: float, rules: Rules
) -> np.ndarray:
    """A_t = Σ_l (γλ)^l δ_{t+l}, δ_t = r_t + γ V(s_{t+1}) − V(s_t), over actions."""
    values = values.astype(np.float64)
    column, ahead = np.zeros(len(rewards)), 0.0
    follows = float(last_value) if row.truncated and rules.bootstrap else 0.0
    for token in row.actions[::-1]:
        delta = rewards[token] + rules.gamma * follows - values[token]
        ahead = delta + rules.gamma * rules.lam * ahead
        column[token] = ahead
        follows = values[token]
    return column


def whitened(columns: list, rows: Sequence[Row], how: str) -> list:
    """Over all actions of all rows that train."""
    if how == "none":
        return columns
    pairs = [(c, r) for c, r in zip(columns, rows, strict=True) if c is not None]
    everything = np.concatenate([column[row.acts] for column, row in pairs])
    shift = everything.mean() if how == "full" else 0.0
    spread = everything.std(ddof=1)
    return [
        None if c is None else (c - shift) / spread * r.acts
        for c, r in zip(columns, rows, strict=True)
    ]


def credit(
    rows: Sequence[Row],
    rules: Rules,
    old: Sequence[np.ndarray],
    ref: Sequence[np.ndarray] | None,
    values: Sequence[np.ndarray] | None,
    last_values: Sequence[float] | None,
) -> Credit:
    """Advantages and returns of all rows, before any is cast."""
    known = compared(rows, rules)
    places = [at for at, fit in enumerate(known) if fit]
    entering = [rows[at] for at in places]
    refs = [None] * len(rows) if ref is None else ref
    # What is compared is the whole response's reward: less its KL, where that is in the reward.
    rewards = [
        shaped(rows[at], rules) - float(kl_penalty(rows[at], old[at], refs[at], rules).sum())
        for at in places
    ]
    trained = [
        fit and not (rules.mask_truncated and rows[at].truncated) for at, fit in enumerate(known)
    ]
    advantages, returns = [None] * len(rows), [None] * len(rows)
    for at, row in enumerate(rows):
        if not trained[at]:
            continue
        if rules.advantage in ("gae", "reinforce"):
            tokens = token_rewards(row, old[at], refs[at], rules)
            if rules.advantage == "gae":
                column = gae(row, tokens, values[at], last_values[at], rules)
                returns[at] = (column + values[at].astype(np.float64)) * row.acts
            else:
                column = rewards_to_go(row, tokens, rules)
        elif rules.process:
            column = process_advantages(row, entering, rules)
        else:
            column = outcome_advantage(places.index(at), entering, rewards, rules) * row.acts
        advantages[at] = column
    return Credit(whitened(advantages, rows, rules.whiten), returns, trained)
