"""Estimators of KL(π ‖ ref) per sampled token, for the loss (k1, k2, k3 of Schulman 2020)."""

from __future__ import annotations

import torch
from torch import Tensor

MOST_LOG_RATIO = 20.0
"""Bound on a log-ratio before `exp`: e^20 = 4.9e8 is finite in fp32 with room for sums."""


def kl_estimate(kind: str, log_probs_A: Tensor, ref_log_probs_A: Tensor) -> Tensor:
    """[A], differentiable in `log_probs_A`; ℓ = log π_θ − log ref of the token.

        kind  per token              mean over tokens of π_θ    expected gradient on such tokens
        k1    ℓ                      KL(π ‖ ref)                0: no pull at all
        k2    ℓ² / 2                 above or below it          that of KL(π ‖ ref)
        k3    exp(−ℓ) + ℓ − 1        KL(π ‖ ref), never < 0     that of KL(ref ‖ π)

    (k3: DeepSeekMath, arXiv:2402.03300, equation 4.) Differentiating an estimate of the value is
    not estimating the gradient: E[∇ℓ] is 0 whatever ref is. On two actions, π = (.5, .5),
    ref = (.8, .2), where KL is 0.2231 with slope −0.3466, the three have means 0.2231, 0.2651,
    0.2231 and slopes 0, −0.3466, −0.3. All this holds for tokens of π_θ itself, up to the first
    update of an iteration; after it tokens are those of the policy that generated them.

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
