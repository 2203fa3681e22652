"""A sample among its siblings: their rewards, and the advantage that comes of them."""

from __future__ import annotations

from typing import Any

import numpy as np

from megarl.algorithms.group import grpo_advantages, rloo_advantages
from megarl.algorithms.shaping import shaped_totals
from megarl.audit.again import Recomputed, sealed_beta
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
    """Rows of the group whose rewards enter mean and std: those that train and those that were cut
    off and only compared, else the scored."""
    members = _members(sealed, row)
    verdicts = [verdict_of(sealed, int(member)) for member in members]
    if Verdict.TRAINED not in verdicts:
        return members[sealed.scores.ok[members]]
    return members[[verdict in (Verdict.TRAINED, Verdict.TRUNCATED) for verdict in verdicts]]


def _rewards(recipe: Recipe, sealed: SealedIteration) -> np.ndarray:
    """float64 [N]: totals as they are compared, with what length costs."""
    overlong = recipe.algorithm.overlong
    return shaped_totals(
        sealed.scores.total,
        sealed.samples.response_lengths,
        recipe.rollout.max_response_tokens,
        overlong.buffer_tokens,
        overlong.penalty,
    )


def siblings(recipe: Recipe, sealed: SealedIteration, row: int) -> dict[str, Any]:
    header = sealed.manifest.header
    draw = int(sealed.samples.draw_index[row])
    rewards = _rewards(recipe, sealed)[_compared(sealed, row)]
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
                "advantage": sealed_mean(sealed, member, "advantages"),
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


def _values(sealed: SealedIteration, row: int, name: str) -> np.ndarray:
    """float32: a derived column on the row's action tokens; none where there is no such column."""
    if sealed.derived is None or name not in sealed.derived.columns:
        return np.zeros(0, dtype=np.float32)
    span = tokens_of(sealed, row)
    return sealed.derived.columns[name][span][sealed.samples.action_mask[span]]


def sealed_mean(sealed: SealedIteration, row: int, name: str) -> float | None:
    """Mean of a derived column over the row's action tokens, None where it was given none; where
    all tokens have one value, that very value."""
    values = _values(sealed, row, name)
    if not len(values):
        return None
    same = (values == values[0]).all()
    return none_if_nan(values[0] if same else values.astype(np.float64).mean())


def advantage(
    recipe: Recipe, sealed: SealedIteration, row: int, again: Recomputed | None
) -> dict[str, Any]:
    """The advantage with its numbers: sealed, and computed again from the facts (`again`, None
    where they lead to none). Where responses are compared, also of a sample that did not train."""
    algorithm = recipe.algorithm
    trained = verdict_of(sealed, row) is Verdict.TRAINED
    values = _values(sealed, row, "advantages") if trained else np.zeros(0)
    result: dict[str, Any] = {
        "estimator": algorithm.advantage,
        "trained_on": sealed_mean(sealed, row, "advantages") if trained else None,
        "lowest": float(values.min()) if len(values) else None,
        "highest": float(values.max()) if len(values) else None,
        "recomputed": None,
        "equal": None,
        "reward": none_if_nan(_rewards(recipe, sealed)[row]),
        "group_std": algorithm.group_std,
        "eps": algorithm.advantage_eps,
        "gamma": algorithm.gamma,
        "lam": algorithm.gae.lam,
        "whiten": algorithm.whiten,
        "rewards": algorithm.rewards,
        "kl_beta": sealed_beta(sealed, recipe) if algorithm.kl_in_reward else None,
        "by_group_alone": _by_group_alone(recipe),
    }
    if result["by_group_alone"]:
        result["recomputed"] = _group_advantage(recipe, sealed, row)
    elif again is not None and trained:
        result["recomputed"] = none_if_nan(again.advantages[row])
    if again is not None and trained:
        span = tokens_of(sealed, row)
        mine, theirs = again.derived.advantages[span], sealed.derived.columns["advantages"][span]
        result["equal"] = mine.tobytes() == theirs.tobytes()
    return result


def _by_group_alone(recipe: Recipe) -> bool:
    """Whether the rewards of its group are all that a sample's advantage follows from."""
    algorithm = recipe.algorithm
    return (
        algorithm.advantage in ("grpo", "rloo")
        and algorithm.rewards == "outcome"
        and algorithm.whiten == "none"
        and not algorithm.kl_in_reward
    )


def _group_advantage(recipe: Recipe, sealed: SealedIteration, row: int) -> float | None:
    compared, algorithm = _compared(sealed, row), recipe.algorithm
    if row not in compared or len(compared) < 2:
        return None
    facts = (
        _rewards(recipe, sealed)[compared],
        np.zeros(len(compared), dtype=np.int64),
        np.ones(len(compared), dtype=bool),
    )
    if algorithm.advantage == "rloo":
        values = rloo_advantages(*facts)
    else:
        values = grpo_advantages(*facts, algorithm.group_std, algorithm.advantage_eps)
    return float(values[np.flatnonzero(compared == row)[0]])
