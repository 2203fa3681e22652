"""A sample among its siblings: their rewards, and the advantage that comes of comparing them."""

from __future__ import annotations

from typing import Any

import numpy as np

from megarl.algorithms.advantages import grpo_advantages
from megarl.audit.text import none_if_nan
from megarl.experience.load import SealedIteration
from megarl.recipe import Recipe
from megarl.rollout.selection import VERDICTS, Verdict


def verdict_of(sealed: SealedIteration, row: int) -> Verdict | None:
    """None where nothing was decided any more."""
    return None if sealed.derived is None else VERDICTS[sealed.derived.verdict[row]]


def tokens_of(sealed: SealedIteration, row: int) -> slice:
    """Where the row's response tokens lie in flat columns."""
    offsets = sealed.samples.response_offsets
    return slice(int(offsets[row]), int(offsets[row + 1]))


def _members(sealed: SealedIteration, row: int) -> np.ndarray:
    return np.flatnonzero(sealed.samples.draw_index == sealed.samples.draw_index[row])


def _compared(sealed: SealedIteration, row: int) -> np.ndarray:
    """Rows of the group whose rewards enter mean and std: those that train, else the scored."""
    members = _members(sealed, row)
    trained = [verdict_of(sealed, int(member)) is Verdict.TRAINED for member in members]
    return members[trained] if any(trained) else members[sealed.scores.ok[members]]


def siblings(sealed: SealedIteration, row: int) -> dict[str, Any]:
    header = sealed.manifest.header
    draw = int(sealed.samples.draw_index[row])
    rewards = sealed.scores.total[_compared(sealed, row)]
    others = []
    for member in _members(sealed, row).tolist():
        verdict = verdict_of(sealed, member)
        sibling = sealed.samples[member]
        others.append(
            {
                "candidate": sibling.candidate,
                "reward": none_if_nan(sealed.scores.total[member]),
                "status": str(sealed.records[member].status),
                "end": sibling.end.name.lower(),
                "tokens": len(sibling.response_ids),
                "verdict": None if verdict is None else str(verdict),
                "advantage": sealed_advantage(sealed, member),
            }
        )
    return {
        "group_id": sealed.identities.group_id(draw),
        "asked_for": header.sampling.n,
        "compared": len(rewards),
        "mean": float(np.mean(rewards)) if len(rewards) else None,
        "std": float(np.std(rewards, ddof=1)) if len(rewards) > 1 else None,
        "siblings": others,
    }


def sealed_advantage(sealed: SealedIteration, row: int) -> float | None:
    """The value on the row's action tokens, None where it was given none (or several)."""
    if sealed.derived is None or "advantages" not in sealed.derived.columns:
        return None
    span = tokens_of(sealed, row)
    values = sealed.derived.columns["advantages"][span][sealed.samples.action_mask[span]]
    return none_if_nan(values[0]) if len(set(values.tolist())) == 1 else None


def advantage(recipe: Recipe, sealed: SealedIteration, row: int) -> dict[str, Any]:
    """The group-relative advantage with its numbers: sealed, and computed again from the facts."""
    algorithm, compared = recipe.algorithm, _compared(sealed, row)
    trained = verdict_of(sealed, row) is Verdict.TRAINED
    result: dict[str, Any] = {
        "trained_on": sealed_advantage(sealed, row) if trained else None,
        "recomputed": None,
        "equal": None,
        "reward": none_if_nan(sealed.scores.total[row]),
        "normalize_std": algorithm.normalize_std,
        "eps": algorithm.advantage_eps,
    }
    if row in compared and len(compared) > 1:
        everyone = np.ones(len(compared), dtype=bool)
        values = grpo_advantages(
            sealed.scores.total[compared],
            np.zeros(len(compared), dtype=np.int64),
            everyone,
            algorithm.normalize_std,
            algorithm.advantage_eps,
        )
        value = float(values[np.flatnonzero(compared == row)[0]])
        result["recomputed"] = value
        if result["trained_on"] is not None:
            result["equal"] = float(np.float32(value)) == result["trained_on"]
    return result
