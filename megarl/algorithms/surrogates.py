"""Objectives: what a response token's log-prob is worth, one loss per token, not reduced.

A response tokens of one pack.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from megarl.algorithms.importance import (
    ImportanceSettings,
    largest,
    mean_by_sequence,
    smallest,
)
from megarl.algorithms.kl import MOST_LOG_RATIO
from megarl.algorithms.own import is_own, load_own
from megarl.contracts.errors import InputError


class KlSettings(Protocol):
    estimator: str


class LossSettings(Protocol):
    """The `algorithm` section of the recipe, as far as the loss reads it."""

    objective: str
    clip_low: float
    clip_high: float
    dual_clip: float | None
    importance: ImportanceSettings
    entropy_coefficient: float
    kl: KlSettings
    kl_in_loss: bool


@dataclass(frozen=True)
class PolicyTokens:
    """What an objective sees of a pack's response tokens.

    Tokens that are not active have log-prob, old log-prob and advantage 0, without a gradient,
    and what an objective says of them is not used. A sequence's tokens lie together, all of them
    in this pack; packs hold different numbers of sequences, so a token's loss may depend on its
    own sequence only.
    """

    log_probs_A: Tensor  # float32, log π_θ, differentiable
    old_log_probs_A: Tensor  # float32, of the actor before any update of the iteration
    advantages_A: Tensor  # float32
    active_A: Tensor  # bool, tokens that train
    sequence_A: Tensor  # int64, which of the pack's sequences, ascending from 0

    @staticmethod
    def of(
        log_probs_A: Tensor,
        old_log_probs_A: Tensor,
        advantages_A: Tensor,
        active_A: Tensor,
        sequence_A: Tensor,
    ) -> PolicyTokens:
        """With 0 where not active: 0 · inf would be not-a-number."""
        return PolicyTokens(
            log_probs_A=only(log_probs_A, active_A),
            old_log_probs_A=only(old_log_probs_A.detach(), active_A),
            advantages_A=only(advantages_A.detach(), active_A),
            active_A=active_A,
            sequence_A=sequence_A,
        )

    @property
    def log_ratio_A(self) -> Tensor:
        """log π_θ − old, not clamped."""
        return self.log_probs_A - self.old_log_probs_A


Objective = Callable[[PolicyTokens, LossSettings], tuple[Tensor, dict[str, Tensor]]]
"""Loss of each token, [A] in the dtype of the log-probs, to be minimised and not reduced; and sums
over active tokens to report, detached scalars for `merge_sums`."""


def ppo_clip(tokens: PolicyTokens, settings: LossSettings) -> tuple[Tensor, dict[str, Tensor]]:
    """PPO's clipped surrogate (arXiv:1707.06347, equation 7).

        ρ_t = exp(clamp(log π_θ − old, ±20))
        loss_t = −min(ρ_t A_t, clip(ρ_t, 1 − clip_low, 1 + clip_high) A_t)
        loss_t = −max(min(…), dual_clip · A_t)   where A_t < 0, if dual_clip (arXiv:1912.09729)

    Two bounds as in DAPO's clip-higher (arXiv:2503.14476). Sums: the tokens whose gradient a bound
    cut off, `clip_low` (A < 0), `clip_high` (A > 0), `clip_dual` (A < 0).

    Raises `ValueError` for a dual clip of 1 or less.
    """
    dual_clip = settings.dual_clip
    if dual_clip is not None and dual_clip <= 1:
        raise ValueError(f"algorithm.dual_clip is {dual_clip}, it must be above 1")
    ratio_A, advantages_A = _exp(tokens.log_ratio_A), tokens.advantages_A
    gain_A, sums = _clipped_gain(ratio_A, tokens, settings)
    clipped_dual_A = torch.zeros_like(tokens.active_A)
    if dual_clip is not None:
        floor_A = dual_clip * advantages_A
        clipped_dual_A = (advantages_A < 0) & (gain_A < floor_A)
        gain_A = torch.where(clipped_dual_A, floor_A, gain_A)
    return -gain_A, sums | {"clip_dual": clipped_dual_A.double().sum()}


def gspo(tokens: PolicyTokens, settings: LossSettings) -> tuple[Tensor, dict[str, Tensor]]:
    """GSPO's clipped surrogate of one ratio per sequence (arXiv:2507.18071, equations 5 and 7).

        s_i = exp(clamp(mean_t (log π_θ − old), ±20))     over the action tokens of sequence i
        loss_t = −min(s_i A_t, clip(s_i, 1 − clip_low, 1 + clip_high) A_t)

    The gradient goes through the mean. Every token of a sequence has the sequence's ratio, and its
    own advantage: with one advantage per sequence and `reduction: sequence_mean` the loss is the
    paper's. The paper's bounds are 3e-4 and 4e-4: a mean of log-ratios stays near 0.

    Sums: the tokens whose gradient a bound cut off, `clip_low` (A < 0), `clip_high` (A > 0);
    `sequence_ratio_max` and `sequence_ratio_min`.
    """
    mean_A = mean_by_sequence(tokens.log_ratio_A.double(), tokens.active_A, tokens.sequence_A)
    ratio_A = _exp(mean_A)[tokens.sequence_A].to(tokens.log_probs_A.dtype)
    gain_A, sums = _clipped_gain(ratio_A, tokens, settings)
    sums["sequence_ratio_max"] = largest(ratio_A, tokens.active_A)
    sums["sequence_ratio_min"] = smallest(ratio_A, tokens.active_A)
    return -gain_A, sums


def cispo(tokens: PolicyTokens, settings: LossSettings) -> tuple[Tensor, dict[str, Tensor]]:
    """CISPO: REINFORCE with a bounded ratio as a constant weight (MiniMax-M1, arXiv:2506.13585,
    equations 4 and 5).

        loss_t = −sg(clip(ρ_t, 1 − clip_low, 1 + clip_high)) · A_t · log π_θ

    The gradient goes through log π_θ alone, so no token loses it; both bounds are relative to 1
    (the paper leaves out the lower one: clip_low near 1). The value is no surrogate: at ratio 1 it
    is −A_t log π_θ, not −A_t.

    Sums: tokens whose weight a bound changed, `clip_low` and `clip_high`, whatever the sign of A.
    """
    ratio_A = _exp(tokens.log_ratio_A.detach())
    weight_A = ratio_A.clamp(1 - settings.clip_low, 1 + settings.clip_high)
    sums = {
        "clip_low": (tokens.active_A & (ratio_A < 1 - settings.clip_low)).double().sum(),
        "clip_high": (tokens.active_A & (ratio_A > 1 + settings.clip_high)).double().sum(),
    }
    return -weight_A * tokens.advantages_A * tokens.log_probs_A, sums


KEY = "algorithm.objective"
OBJECTIVES: dict[str, Objective] = {"ppo_clip": ppo_clip, "gspo": gspo, "cispo": cispo}


def objective_of(name: str) -> Objective:
    """The built-in objective `name`, or an own function `import.path:function`.

    Raises `InputError` for an unknown name; the own function is imported when it is first called.
    """
    if is_own(name):
        return _Own(name)
    if name not in OBJECTIVES:
        raise InputError(
            f"{KEY} is {name!r}; use {', '.join(OBJECTIVES)}, or your function as "
            "import.path:function"
        )
    return OBJECTIVES[name]


@dataclass(frozen=True)
class _Own:
    """An own function with what it returns checked; its sums are named `own_…`."""

    name: str

    def __call__(
        self, tokens: PolicyTokens, settings: LossSettings
    ) -> tuple[Tensor, dict[str, Tensor]]:
        if len(tokens.log_probs_A) == 0:
            return tokens.log_probs_A, {}  # a pack without samples is no question to it
        told: Any = load_own(KEY, self.name)(tokens, settings)
        loss_A, sums = told if isinstance(told, tuple) else (told, {})
        asked = _shape_of(tokens.log_probs_A)
        if _shape_of(loss_A) != asked:
            raise ValueError(
                f"{KEY}: {self.name} returned {_shape_of(loss_A)}, not one loss per token, {asked}"
            )
        return loss_A, {f"own_{key}": torch.as_tensor(sums[key]).detach().double() for key in sums}


def only(values_A: Tensor, active_A: Tensor) -> Tensor:
    """`values_A` where active, else 0 with no gradient: 0 · inf would be not-a-number."""
    return torch.where(active_A, values_A, torch.zeros_like(values_A))


def _clipped_gain(
    ratio_A: Tensor, tokens: PolicyTokens, settings: LossSettings
) -> tuple[Tensor, dict[str, Tensor]]:
    """min(ρ A, clip(ρ) A), and how many tokens each bound took the gradient from."""
    low, high, advantages_A = 1 - settings.clip_low, 1 + settings.clip_high, tokens.advantages_A
    bounded_A = ratio_A.clamp(low, high) * advantages_A
    sums = {
        "clip_low": ((advantages_A < 0) & (ratio_A < low)).double().sum(),
        "clip_high": ((advantages_A > 0) & (ratio_A > high)).double().sum(),
    }
    return torch.minimum(ratio_A * advantages_A, bounded_A), sums


def _exp(log_ratio_A: Tensor) -> Tensor:
    return log_ratio_A.clamp(-MOST_LOG_RATIO, MOST_LOG_RATIO).exp()


def _shape_of(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{value.dtype}{list(value.shape)}"
    return f"a {type(value).__name__}"
