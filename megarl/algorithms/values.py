"""The critic's loss. A response tokens of one pack."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor

from megarl.data.pack import ValueBatch


class ValueSettings(Protocol):
    """The recipe's `critic` section, as far as the loss reads it."""

    value_clip: float | None


def critic_loss(
    values_A: Tensor, value_batch: ValueBatch, settings: ValueSettings
) -> tuple[Tensor, dict[str, Tensor]]:
    """One micro-batch's part of the clipped value loss, to be minimised (the form of OpenAI's
    baselines, ppo2; GAE's targets, arXiv:1506.02438).

        loss = Σ w · ½ max((V − R)², (clip(V, V_old − ε, V_old + ε) − R)²)     ε = value_clip
        loss = Σ w · ½ (V − R)²                                               value_clip empty

    `values_A` float32 [A], V(s_t) of the critic being trained, read where token t is predicted.
    Weights are the reduction's over the global minibatch, so sums over all packs of all ranks are
    the loss and its gradient. Where the clipped error is the larger one the gradient is 0: V has
    gone ε in the direction of R, or further.

    The sums are detached float64 scalars over the tokens of weight ≠ 0: `tokens`, `value_loss`
    (unweighted), `value_clipped` (tokens with the clipped error), `value`, `return`,
    `return_squared`, `value_error` (R − V), `value_error_squared`; and `loss`, reduced. Merge with
    `merge_sums`; `explained_variance` reads them.

    Raises `ValueError` for a value clip that is not positive.
    """
    clip = settings.value_clip
    if clip is not None and clip <= 0:
        raise ValueError(f"critic.value_clip is {clip}, it must be above 0, or empty for none")
    weights_A = value_batch.weights_A
    active_A = weights_A != 0
    values_A = torch.where(active_A, values_A, 0.0)
    old_A = torch.where(active_A, value_batch.values_A, 0.0)
    returns_A = torch.where(active_A, value_batch.returns_A, 0.0)
    error_A = (values_A - returns_A) ** 2
    clipped_A = torch.zeros_like(active_A)
    if clip is not None:
        step_A = values_A - old_A
        near_error_A = (old_A + step_A.clamp(-clip, clip) - returns_A) ** 2
        # Within reach V is its own clip: no ulp of `old + (V − old)` may count as clipped.
        clipped_A = (step_A.abs() > clip) & (near_error_A > error_A)
        error_A = torch.where(clipped_A, near_error_A, error_A)
    loss = (weights_A * error_A).sum() / 2
    with torch.no_grad():
        values, returns = values_A.double(), returns_A.double()
        missed = (returns - values) * active_A
        sums = {
            "tokens": active_A.double().sum(),
            "value_loss": error_A.double().sum() / 2,
            "value_clipped": clipped_A.double().sum(),
            "value": values.sum(),
            "return": returns.sum(),
            "return_squared": (returns**2).sum(),
            "value_error": missed.sum(),
            "value_error_squared": (missed**2).sum(),
            "loss": loss.detach().double(),
        }
    return loss, sums


def explained_variance(sums: Mapping[str, float]) -> float | None:
    """1 − Var(R − V) / Var(R) over the tokens of merged sums of `critic_loss`.

    1: the critic knows the returns; 0: no better than their mean; below 0: worse. None without
    tokens or where the returns do not vary.
    """
    tokens = sums.get("tokens")
    if not tokens:
        return None
    spread = sums["return_squared"] / tokens - (sums["return"] / tokens) ** 2
    # What is left of two equal squares is rounding, not variance.
    if spread <= 1e-12 * sums["return_squared"] / tokens:
        return None
    missed = sums["value_error_squared"] / tokens - (sums["value_error"] / tokens) ** 2
    return 1 - missed / spread
