"""The loss of one micro-batch of the actor, and what it reports.

An objective (`surrogates.py`) gives a loss per token. Weights (`reduction.token_weights`),
importance weights, KL and entropy are the same for all objectives. Everything here is a sum over
tokens with given weights; nothing here divides by what a pack happens to hold. A token of weight 0
is no action: it adds nothing to the loss, the gradient or a count, even where its log-prob is not a
number.

A response tokens of one pack.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Protocol

import torch
from torch import Tensor

from megarl.algorithms.importance import importance_sums, largest, smallest
from megarl.algorithms.kl import MOST_LOG_RATIO, kl_estimate
from megarl.algorithms.surrogates import (
    OBJECTIVES,
    LossSettings,
    Objective,
    PolicyTokens,
    objective_of,
    only,
)
from megarl.data.packing import MicroBatch

__all__ = [
    "OBJECTIVES",
    "LossSettings",
    "Objective",
    "PolicyTokens",
    "actor_loss",
    "entropy_bonus",
    "merge_sums",
    "objective_of",
    "policy_term",
]


class TokenScores(Protocol):
    """What a forward of the current policy gives for the tokens of a pack."""

    log_probs_A: Tensor  # float32, differentiable
    entropy_A: Tensor  # float32, differentiable


def policy_term(
    tokens: PolicyTokens,
    weights_A: Tensor,
    importance_A: Tensor | None,
    settings: LossSettings,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Σ weight · importance · objective, to be minimised, and sums over the active tokens.

    The sums are detached float64 scalars: `tokens`, `policy_loss` (Σ objective, without weights and
    importance), `ratio`, `ratio_max`, `ratio_min`, `ratio_above_2` and `ratio_below_half` (tokens),
    `log_ratio_abs_max` (before the clamp), `approx_kl` (ρ − 1 − log ρ, Schulman's k3 for
    KL(old ‖ π)), all of single tokens' ratios whatever the objective; and those of the objective.
    """
    active_A = tokens.active_A
    loss_A, sums = objective_of(settings.objective)(tokens, settings)
    loss_A = only(loss_A, active_A)
    factor_A = weights_A if importance_A is None else weights_A * only(importance_A, active_A)
    with torch.no_grad():
        log_ratio_A = tokens.log_ratio_A.clamp(-MOST_LOG_RATIO, MOST_LOG_RATIO)
        ratio_A = log_ratio_A.exp()
        sums = sums | {
            "tokens": active_A.double().sum(),
            "policy_loss": _total(loss_A, active_A),
            "ratio": _total(ratio_A, active_A),
            "ratio_max": largest(ratio_A, active_A),
            "ratio_min": smallest(ratio_A, active_A),
            "ratio_above_2": (active_A & (ratio_A > 2)).double().sum(),
            "ratio_below_half": (active_A & (ratio_A < 0.5)).double().sum(),
            "log_ratio_abs_max": largest(tokens.log_ratio_A.abs(), active_A),
            "approx_kl": _total(torch.expm1(log_ratio_A) - log_ratio_A, active_A),
        }
    return (factor_A * loss_A).sum(), sums


def entropy_bonus(entropy_A: Tensor, weights_A: Tensor) -> Tensor:
    """Σ weight · H(π_θ) at the tokens' positions, with gradient; subtracted from the loss."""
    return (weights_A * only(entropy_A, weights_A != 0)).sum()


def actor_loss(
    scores: TokenScores, micro_batch: MicroBatch, settings: LossSettings, beta: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """One micro-batch's part of the actor's loss.

        loss = Σ w · importance · objective + β Σ w · KL(π_θ ‖ ref) − c Σ w · H(π_θ)

    With `ppo_clip` and KL in the loss it is GRPO's (DeepSeekMath, arXiv:2402.03300, equation 3).
    The KL term is there where `settings.kl_in_loss`; `beta` is the β in effect in this iteration.
    Sums over all micro-batches of all ranks are the loss and its gradient. `settings` is the
    recipe's `algorithm` section. An empty pack gives 0 with a graph, so that its rank enters the
    same backward.

    The sums are detached float64 scalars: those of `policy_term`, `importance_sums`, and
    `entropy`, `ref_kl` (when there are reference log-probs), `loss`. Merge those of several packs
    with `merge_sums`; a mean over tokens is `sums[name] / sums["tokens"]` for all but `loss`,
    already reduced, and the names that end in `_max` or `_min`.

    Raises `ValueError` when KL is asked for without reference log-probs.
    """
    weights_A, sequence_A = micro_batch.weights_A, micro_batch.pack.sequence_A
    active_A = weights_A != 0
    old_A = micro_batch.old_log_probs_A
    tokens = PolicyTokens.of(
        scores.log_probs_A, old_A, micro_batch.advantages_A, active_A, sequence_A
    )
    loss, sums = policy_term(tokens, weights_A, micro_batch.importance_A, settings)
    if micro_batch.importance_A is not None:
        rollout_A = micro_batch.rollout_log_probs_A
        sums |= importance_sums(old_A, rollout_A, active_A, sequence_A, settings.importance)
    beta = beta if settings.kl_in_loss else 0.0
    if micro_batch.ref_log_probs_A is not None:
        ref_A = only(micro_batch.ref_log_probs_A, active_A)
        kl_A = kl_estimate(settings.kl.estimator, tokens.log_probs_A, ref_A)
        sums["ref_kl"] = _total(kl_A, active_A)
        if beta:
            loss = loss + beta * (weights_A * kl_A).sum()
    elif beta:
        raise ValueError(f"KL is weighted by {beta}, but the samples have no reference log-probs")
    sums["entropy"] = _total(only(scores.entropy_A, active_A), active_A)
    if settings.entropy_coefficient:
        bonus = entropy_bonus(scores.entropy_A, weights_A)
        loss = loss - settings.entropy_coefficient * bonus
    sums["loss"] = loss.detach().double()
    return loss, sums


def merge_sums(parts: Iterable[Mapping[str, float | Tensor]]) -> dict[str, float]:
    """Sums of several packs or ranks as one: names ending in `_max` take the largest, those in
    `_min` the smallest, all others are added in the given order.

    A name that only some parts have is merged over those; a smallest of nothing (infinity) is left
    out; not-a-number in any part gives not-a-number.
    """
    merged: dict[str, float] = {}
    for part in parts:
        for name, value in part.items():
            value = float(value)
            if name.endswith("_min") and value == math.inf:
                continue
            if name not in merged:
                merged[name] = value
            elif not name.endswith(("_max", "_min")):
                merged[name] += value
            elif math.isnan(value) or math.isnan(merged[name]):
                merged[name] = math.nan
            else:
                merged[name] = (max if name.endswith("_max") else min)(merged[name], value)
    return merged


def _total(values_A: Tensor, active_A: Tensor) -> Tensor:
    return (values_A.detach().double() * active_A).sum()
