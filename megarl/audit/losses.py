"""An iteration's first losses, made again from sealed facts and held against their record.

Until the first step the policy is the one that made the old log-probs: every ratio is 1, and the
loss follows from advantages, weights and log-probs. So it is with the critic's, from its sealed
values. Later steps need forwards.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megarl.audit.again import Recomputed
from megarl.audit.terms import terms, value_losses
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
    role: str = "actor"

    @property
    def agrees(self) -> bool:
        return abs(self.recorded - self.recomputed) <= self.tolerance

    def __str__(self) -> str:
        whose = "" if self.role == "actor" else f"the {self.role}'s "
        return (
            f"{whose}loss of step 0: {self.recorded:.9g} recorded, the facts give "
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
    recorded = _recorded(update["steps"])
    if recorded is None:
        return "no loss of step 0 is recorded"
    first = terms(sealed, again, recipe)[0]
    if first is None:
        return "minibatch 0 is empty"
    if first.kl is None:
        return "log-probs of the reference are not sealed for all its tokens"
    if first.surrogate is None:
        return "log-probs of the actor are not sealed for all its tokens"
    apart = metrics.get(LOG_RATIO)
    apart = float(apart) if isinstance(apart, int | float) else 0.0
    scale = first.scale + abs(first.kl)
    bound = (TOLERANCE + math.expm1(min(max(apart, 0.0), 1.0))) * scale
    return FirstLoss(recorded, first.surrogate + first.kl, bound)


def first_value_loss(
    sealed: SealedIteration, again: Recomputed, recipe: Recipe, update: Mapping[str, Any]
) -> FirstLoss | None:
    """The critic's; None where there is none, or it is not recorded. Its terms have one sign."""
    losses, recorded = value_losses(sealed, again, recipe), _recorded(update.get("critic"))
    if losses is None or losses[0] is None or recorded is None:
        return None
    return FirstLoss(recorded, losses[0], TOLERANCE * losses[0], "critic")


def _recorded(steps: object) -> float | None:
    """The loss of the first step, minibatch 0 of the first pass."""
    told = [step for step in steps if isinstance(step, dict)] if isinstance(steps, list) else []
    if not told or told[0].get("minibatch") != 0 or told[0].get("epoch", 0) != 0:
        return None
    loss = told[0].get("loss")
    return float(loss) if isinstance(loss, int | float) else None


def not_comparable(recipe: Recipe) -> str | None:
    """Why the first loss does not follow from sealed facts; None where it does."""
    if recipe.algorithm.entropy_coefficient:
        return "algorithm.entropy_coefficient: entropy needs whole distributions, not sealed"
    return None
