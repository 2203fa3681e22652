"""The first step's loss of an iteration, made again from sealed facts and held against its record.

Until the first step the policy is the one that made the old log-probs: every ratio is 1, and the
loss follows from advantages, weights and log-probs. Later steps need forwards.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megarl.audit.again import Recomputed, terms
from megarl.experience.load import SealedIteration
from megarl.recipe import Recipe

TOLERANCE = 1e-4
"""Of the loss's scale (mean |advantage| by the loss's weights, and the KL term): the trainer sums
in float32, in another order."""
LOG_RATIO = "policy/first_log_ratio_abs_max"
"""How far the first step's log-ratios were from 0, as metrics.jsonl says; where the trainer's
forward does not repeat itself bit for bit, the loss may be off by as much."""


@dataclass(frozen=True)
class FirstLoss:
    """Loss of minibatch 0 before any step."""

    recorded: float
    recomputed: float
    tolerance: float

    @property
    def agrees(self) -> bool:
        return abs(self.recorded - self.recomputed) <= self.tolerance

    def __str__(self) -> str:
        return (
            f"loss of step 0: {self.recorded:.9g} recorded, the facts give "
            f"{self.recomputed:.9g} (tolerance {self.tolerance:.2g})"
        )


def first_loss(
    sealed: SealedIteration,
    again: Recomputed,
    recipe: Recipe,
    update: Mapping[str, Any],
    metrics: Mapping[str, Any],
) -> FirstLoss | str:
    """`update`: the iteration's line of updates.jsonl; `metrics`: its row, empty for none. Why
    nothing is compared, where it is not known."""
    if (reason := not_comparable(recipe)) is not None:
        return reason
    steps = [step for step in update["steps"] if isinstance(step, dict)]
    recorded = [step.get("loss") for step in steps if step.get("minibatch") == 0]
    if not recorded or not isinstance(recorded[0], int | float):
        return "no loss of step 0 is recorded"
    first = terms(sealed, again, recipe)[0]
    if first is None:
        return "minibatch 0 is empty"
    if first.kl is None:
        return "log-probs of the reference are not sealed for all its tokens"
    apart = metrics.get(LOG_RATIO)
    apart = float(apart) if isinstance(apart, int | float) else 0.0
    scale = first.scale + abs(first.kl)
    bound = (TOLERANCE + math.expm1(min(max(apart, 0.0), 1.0))) * scale
    return FirstLoss(float(recorded[0]), first.surrogate + first.kl, bound)


def not_comparable(recipe: Recipe) -> str | None:
    """Why the first loss does not follow from sealed facts; None where it does."""
    if recipe.algorithm.entropy_coefficient:
        return "algorithm.entropy_coefficient: entropy needs whole distributions, not sealed"
    return None
