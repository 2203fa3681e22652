"""Importance weights of what was generated against what the trainer gives the same tokens.

The generator's log-probs differ from the training actor's of the same weights by rounding and
kernels (and by the dtype, where they differ). Weighting a token's policy term by

    r_t = exp(clamp(old_t − rollout_t, ±20))

makes the expectation that of the training actor's distribution again (truncated importance
sampling, Ionides 2008, as used for this gap by Yao et al. 2025; masking: IcePop). The weights are
constants: of sealed log-probs, without a gradient, the same in every epoch. They multiply the
policy term alone, not KL or entropy, and change no denominator.

A response tokens of one pack.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor

from megarl.algorithms.kl import MOST_LOG_RATIO

LEVELS = ("none", "token", "sequence", "sequence_mean")
MODES = ("truncate", "mask")


class ImportanceSettings(Protocol):
    """The recipe's `algorithm.importance`."""

    level: str
    mode: str
    low: float
    high: float


def importance_ratios(
    old_log_probs_A: Tensor,
    rollout_log_probs_A: Tensor,
    active_A: Tensor,
    sequence_A: Tensor,
    level: str,
) -> Tensor:
    """float64 [A]: the ratio each token is weighted by, before any bound; 1 where not active.

        token          exp(x_t)                 x_t = old_t − rollout_t
        sequence       exp(Σ_t x_t)             the product of its sequence's ratios
        sequence_mean  exp(mean_t x_t)          their geometric mean

    Sums and means run over the active tokens of a sequence, which lies whole in one pack; what is
    given to `exp` is clamped to ±20. Log-probs of tokens that are not active are not looked at.

    Raises `ValueError` for an unknown level.
    """
    log_ratio_A = old_log_probs_A.detach().double() - rollout_log_probs_A.detach().double()
    log_ratio_A = torch.where(active_A, log_ratio_A, 0.0)
    if level == "sequence":
        log_ratio_A = sum_by_sequence(log_ratio_A, sequence_A)[sequence_A]
    elif level == "sequence_mean":
        log_ratio_A = mean_by_sequence(log_ratio_A, active_A, sequence_A)[sequence_A]
    elif level != "token":
        raise ValueError(
            f"algorithm.importance.level is {level!r}; use none, token, sequence or sequence_mean"
        )
    ratio_A = log_ratio_A.clamp(-MOST_LOG_RATIO, MOST_LOG_RATIO).exp()
    return torch.where(active_A, ratio_A, 1.0)


def importance_weights(
    old_log_probs_A: Tensor,
    rollout_log_probs_A: Tensor,
    active_A: Tensor,
    sequence_A: Tensor,
    settings: ImportanceSettings,
) -> Tensor | None:
    """float32 [A], one cast of float64: the factor of each token's policy term; None at level none.

        truncate  min(r, high)
        mask      r where low ≤ r ≤ high, else 0

    It is 1 where a token is not active.
    """
    if settings.level == "none":
        return None
    ratio_A = importance_ratios(
        old_log_probs_A, rollout_log_probs_A, active_A, sequence_A, settings.level
    )
    return _bounded(ratio_A, active_A, settings).float()


def importance_sums(
    old_log_probs_A: Tensor,
    rollout_log_probs_A: Tensor,
    active_A: Tensor,
    sequence_A: Tensor,
    settings: ImportanceSettings,
) -> dict[str, Tensor]:
    """float64 scalars over the active tokens, for `merge_sums`; empty at level none.

    `importance` and `importance_squared`: Σ w and Σ w² of the weights in use; `importance_max` and
    `importance_min` of them; `importance_ratio_max` and `importance_ratio_min` of the ratios
    before the bounds; `importance_high`: tokens whose ratio is above high (truncated or masked);
    `importance_low`: tokens that are masked for a ratio below low.
    """
    if settings.level == "none":
        return {}
    ratio_A = importance_ratios(
        old_log_probs_A, rollout_log_probs_A, active_A, sequence_A, settings.level
    )
    weight_A = _bounded(ratio_A, active_A, settings)
    below_A = ratio_A < settings.low if settings.mode == "mask" else torch.zeros_like(active_A)
    return {
        "importance": (weight_A * active_A).sum(),
        "importance_squared": (weight_A**2 * active_A).sum(),
        "importance_max": largest(weight_A, active_A),
        "importance_min": smallest(weight_A, active_A),
        "importance_ratio_max": largest(ratio_A, active_A),
        "importance_ratio_min": smallest(ratio_A, active_A),
        "importance_high": (active_A & (ratio_A > settings.high)).double().sum(),
        "importance_low": (active_A & below_A).double().sum(),
    }


def effective_share(sums: Mapping[str, float]) -> float | None:
    """Kish's effective sample size over the number of tokens, (Σ w)² / (n Σ w²), in (0, 1].

    0 where every weight is 0 (all masked); None without tokens or importance weights.
    """
    tokens, squared = sums.get("tokens"), sums.get("importance_squared")
    if not tokens or squared is None:
        return None
    return sums["importance"] ** 2 / (tokens * squared) if squared else 0.0


def sum_by_sequence(values_A: Tensor, sequence_A: Tensor) -> Tensor:
    """[A] → [A]: Σ over sequence s at place s, 0 beyond the last; differentiable in `values_A`.

    A sequence has a token or more, so no pack has more sequences than tokens: [A] is room enough,
    and its size is known without waiting for the device.
    """
    return torch.zeros_like(values_A).index_add(0, sequence_A, values_A)


def mean_by_sequence(values_A: Tensor, active_A: Tensor, sequence_A: Tensor) -> Tensor:
    """[A] → [A]: the mean over the active tokens of sequence s at place s, 0 where it has none."""
    values_A = torch.where(active_A, values_A, 0.0)
    tokens_A = sum_by_sequence(active_A.to(values_A.dtype), sequence_A)
    return sum_by_sequence(values_A, sequence_A) / tokens_A.clamp(min=1)


def largest(values_A: Tensor, active_A: Tensor) -> Tensor:
    """float64 scalar: the largest of non-negative active values, 0 when there are none."""
    values_A = torch.where(active_A, values_A.detach().double(), 0.0)
    return values_A.max() if len(values_A) else values_A.sum()


def smallest(values_A: Tensor, active_A: Tensor) -> Tensor:
    """float64 scalar: the smallest active value, infinity when there are none."""
    values_A = torch.where(active_A, values_A.detach().double(), torch.inf)
    return values_A.min() if len(values_A) else values_A.new_full((), torch.inf)


def _bounded(ratio_A: Tensor, active_A: Tensor, settings: ImportanceSettings) -> Tensor:
    if settings.mode == "truncate":
        return torch.where(active_A, ratio_A.clamp(max=settings.high), 1.0)
    if settings.mode == "mask":
        inside_A = (ratio_A >= settings.low) & (ratio_A <= settings.high)
        return torch.where(active_A, torch.where(inside_A, ratio_A, 0.0), 1.0)
    raise ValueError(f"algorithm.importance.mode is {settings.mode!r}; use truncate or mask")
