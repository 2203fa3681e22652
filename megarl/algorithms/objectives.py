"""The loss of one micro-batch and what it reports. A response tokens of one pack.

Everything here is a sum over tokens with given weights (`reduction.token_weights`); nothing here
divides. A token of weight 0 is no action: it adds nothing to the loss, the gradient or a count,
even where its log-prob is not a number.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Protocol

import torch
from torch import Tensor

from megarl.algorithms.kl import MOST_LOG_RATIO, kl_estimate
from megarl.data.packing import MicroBatch


class TokenScores(Protocol):
    """What a forward of the current policy gives for the tokens of a pack."""

    log_probs_A: Tensor  # float32, differentiable
    entropy_A: Tensor  # float32, differentiable


class KlSettings(Protocol):
    beta: float
    estimator: str


class LossSettings(Protocol):
    """The `algorithm` section of the recipe, as far as the loss reads it."""

    clip_low: float
    clip_high: float
    dual_clip: float | None
    entropy_coefficient: float
    kl: KlSettings


def policy_loss(
    log_probs_A: Tensor,
    old_log_probs_A: Tensor,
    advantages_A: Tensor,
    weights_A: Tensor,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """PPO's clipped surrogate, to be minimised (arXiv:1707.06347, equation 7).

        ρ = exp(clamp(log π_θ − old, ±20))
        loss = −min(ρ A, clip(ρ, 1 − clip_low, 1 + clip_high) A)
        loss = −max(min(…), dual_clip · A)   where A < 0, if dual_clip (arXiv:1912.09729)

    Two bounds as in DAPO's clip-higher (arXiv:2503.14476). Returns (Σ weight · loss, sums); the
    sums are detached float64 scalars over the tokens of weight ≠ 0: `tokens`, `policy_loss`
    (unweighted), `ratio`, `ratio_max`, `log_ratio_abs_max` (before the clamp), `approx_kl`
    (ρ − 1 − log ρ, Schulman's k3 for KL(old ‖ π)), and the counts of tokens whose gradient a bound
    cut off: `clip_low` (A < 0), `clip_high` (A > 0), `clip_dual` (A < 0).

    Raises `ValueError` for a dual clip of 1 or less.
    """
    if dual_clip is not None and dual_clip <= 1:
        raise ValueError(f"algorithm.dual_clip is {dual_clip}, it must be above 1")
    active_A = weights_A != 0
    advantages_A = _only(advantages_A, active_A)
    raw_A = _only(log_probs_A - old_log_probs_A.detach(), active_A)
    log_ratio_A = raw_A.clamp(-MOST_LOG_RATIO, MOST_LOG_RATIO)
    ratio_A = log_ratio_A.exp()
    bounded_A = ratio_A.clamp(1 - clip_low, 1 + clip_high) * advantages_A
    objective_A = torch.minimum(ratio_A * advantages_A, bounded_A)
    negative_A = advantages_A < 0
    clipped_dual_A = torch.zeros_like(active_A)
    if dual_clip is not None:
        floor_A = dual_clip * advantages_A
        clipped_dual_A = negative_A & (objective_A < floor_A)
        objective_A = torch.where(negative_A, torch.maximum(objective_A, floor_A), objective_A)

    with torch.no_grad():
        sums = {
            "tokens": active_A.double().sum(),
            "policy_loss": -_total(objective_A, active_A),
            "ratio": _total(ratio_A, active_A),
            "ratio_max": _most(ratio_A * active_A),
            "log_ratio_abs_max": _most(raw_A.abs()),
            "approx_kl": _total(torch.expm1(log_ratio_A) - log_ratio_A, active_A),
            "clip_low": (negative_A & (ratio_A < 1 - clip_low)).double().sum(),
            "clip_high": ((advantages_A > 0) & (ratio_A > 1 + clip_high)).double().sum(),
            "clip_dual": clipped_dual_A.double().sum(),
        }
    return -(weights_A * objective_A).sum(), sums


def entropy_bonus(entropy_A: Tensor, weights_A: Tensor) -> Tensor:
    """Σ weight · H(π_θ) at the tokens' positions, with gradient; subtracted from the loss."""
    return (weights_A * _only(entropy_A, weights_A != 0)).sum()


def grpo_loss(
    scores: TokenScores, micro_batch: MicroBatch, settings: LossSettings
) -> tuple[Tensor, dict[str, Tensor]]:
    """One micro-batch's part of the GRPO loss (DeepSeekMath, arXiv:2402.03300, equation 3).

        loss = Σ w · surrogate + β Σ w · KL(π_θ ‖ ref) − c Σ w · H(π_θ)

    Sums over all micro-batches of all ranks are the loss and its gradient. `settings` is the
    recipe's `algorithm` section. An empty pack gives 0 with a graph, so that its rank enters the
    same backward.

    The sums are detached float64 scalars, those of `policy_loss` and `entropy`, `ref_kl` (when
    there are reference log-probs), `loss`. Merge those of several packs with `merge_sums`; a mean
    over tokens is `sums[name] / sums["tokens"]` for all but `loss`, already reduced, and the
    names that end in `_max`.

    Raises `ValueError` when KL is asked for without reference log-probs.
    """
    weights_A = micro_batch.weights_A
    active_A = weights_A != 0
    loss, sums = policy_loss(
        scores.log_probs_A,
        micro_batch.old_log_probs_A,
        micro_batch.advantages_A,
        weights_A,
        settings.clip_low,
        settings.clip_high,
        settings.dual_clip,
    )
    if micro_batch.ref_log_probs_A is not None:
        kl_A = kl_estimate(
            settings.kl.estimator,
            _only(scores.log_probs_A, active_A),
            _only(micro_batch.ref_log_probs_A, active_A),
        )
        sums["ref_kl"] = _total(kl_A, active_A)
        if settings.kl.beta:
            loss = loss + settings.kl.beta * (weights_A * kl_A).sum()
    elif settings.kl.beta:
        raise ValueError(
            f"algorithm.kl.beta is {settings.kl.beta}, but the samples have no reference log-probs"
        )
    sums["entropy"] = _total(_only(scores.entropy_A, active_A), active_A)
    if settings.entropy_coefficient:
        bonus = entropy_bonus(scores.entropy_A, weights_A)
        loss = loss - settings.entropy_coefficient * bonus
    sums["loss"] = loss.detach().double()
    return loss, sums


def merge_sums(parts: Iterable[Mapping[str, float | Tensor]]) -> dict[str, float]:
    """Sums of several packs or ranks as one: names ending in `_max` take the largest.

    Adds in the given order. A name that only some parts have is merged over those; not-a-number
    in any part gives not-a-number.
    """
    merged: dict[str, float] = {}
    for part in parts:
        for name, value in part.items():
            value = float(value)
            if name not in merged:
                merged[name] = value
            elif not name.endswith("_max"):
                merged[name] += value
            elif math.isnan(value) or value > merged[name]:
                merged[name] = value
    return merged


def _only(values_A: Tensor, active_A: Tensor) -> Tensor:
    """`values_A` where active, else 0 with no gradient: 0 · inf would be not-a-number."""
    return torch.where(active_A, values_A, torch.zeros_like(values_A))


def _total(values_A: Tensor, active_A: Tensor) -> Tensor:
    return (values_A.detach().double() * active_A).sum()


def _most(values_A: Tensor) -> Tensor:
    """The largest of non-negative values; 0 when there are none."""
    values_A = values_A.detach().double()
    return values_A.max() if len(values_A) else values_A.sum()
