"""Estimators of KL(π ‖ ref) per sampled token, for the loss (k1, k2, k3 of Schulman 2020)."""

from __future__ import annotations

import torch
from torch import Tensor

MOST_LOG_RATIO = 20.0
"""Bound on a log-ratio before `exp`: e^20 = 4.9e8 is finite in fp32 with room for sums."""


def kl_estimate(kind: str, log_probs_A: Tensor, ref_log_probs_A: Tensor) -> Tensor:
    """[A], differentiable in `log_probs_A`; ℓ = log π_θ − log ref of the token.

        k1  ℓ                     unbiased value, zero expected gradient
        k2  ℓ² / 2                biased value, the expected gradient of KL(π ‖ ref)
        k3  exp(−ℓ) + ℓ − 1       unbiased value, ≥ 0, expected gradient of KL(ref ‖ π)
                                  (DeepSeekMath, arXiv:2402.03300, equation 4)

    Added to a loss that is minimised, weighted like the surrogate. k1 and k2 are not clamped; in
    k3 ℓ is clamped from below at −20, where exp(−ℓ) would grow without bound: beyond that the
    value stays at 4.9e8 and the gradient is 0.

    Raises `ValueError` for an unknown kind.
    """
    log_ratio = log_probs_A - ref_log_probs_A.detach()
    if kind == "k1":
        return log_ratio
    if kind == "k2":
        return log_ratio**2 / 2
    if kind == "k3":
        log_ratio = log_ratio.clamp(min=-MOST_LOG_RATIO)
        return torch.expm1(-log_ratio) + log_ratio
    raise ValueError(f"algorithm.kl.estimator is {kind!r}; use k1, k2 or k3")
