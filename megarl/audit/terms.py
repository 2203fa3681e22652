"""Terms of the losses before the first step, from sealed facts and what was derived of them.

Until an iteration's first step the actor is the one that made the old log-probs and the critic the
one that made the values: every ratio is 1, every value the sealed one. R response tokens of the
iteration's samples.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from megarl.algorithms.importance import importance_weights
from megarl.algorithms.kl import kl_estimate
from megarl.algorithms.objectives import PolicyTokens, policy_term
from megarl.algorithms.reduction import Totals, token_weights
from megarl.audit.again import Recomputed
from megarl.data.packing import ragged_index
from megarl.experience.load import SealedIteration
from megarl.recipe import Recipe

OF_RATIO = ("ppo_clip", "gspo")
"""Objectives that read log-probs as ratios alone."""


@dataclass(frozen=True)
class Terms:
    """Loss terms of one minibatch, as its tokens have them until the first step."""

    surrogate: float | None
    """Σ w · importance · objective, the recipe's; None where that depends on log-probs that are not
    sealed for a token (one that did not train)."""
    kl: float | None
    """β Σ w KL of a KL term in the loss; None where log-probs of a token are not sealed."""
    scale: float
    """Σ w · importance · |objective|: the surrogate's, were all tokens' of one sign."""


def token_kl(sealed: SealedIteration, estimator: str) -> np.ndarray | None:
    """float32 [R]: KL(old ‖ ref) per token, NaN where log-probs are not sealed; None without a
    reference."""
    if sealed.ref_log_probs is None:
        return None
    old, ref = torch.tensor(sealed.old_log_probs), torch.tensor(sealed.ref_log_probs)
    return kl_estimate(estimator, old, ref).numpy()


def terms(sealed: SealedIteration, again: Recomputed, recipe: Recipe) -> list[Terms | None]:
    """Per minibatch; None for an empty one. The entropy bonus is not among them: it needs whole
    distributions, of which only the sampled token's log-prob is sealed.

    Raises `InputError` for an own objective that cannot be imported.
    """
    kl = token_kl(sealed, recipe.algorithm.kl.estimator)
    return [
        None if part is None else _terms(sealed, again, recipe, kl, part)
        for part in _minibatches(sealed, again, recipe)
    ]


@dataclass(frozen=True)
class _Tokens:
    """The response tokens of one minibatch, whichever ranks and packs they were on."""

    at: np.ndarray  # int64, places in columns over R
    weights: Tensor  # float64
    sequence: Tensor  # int64, the minibatch's sequence that each is of

    @property
    def active(self) -> Tensor:
        return self.weights != 0


def _minibatches(
    sealed: SealedIteration, again: Recomputed, recipe: Recipe
) -> Iterator[_Tokens | None]:
    for index, totals in enumerate(again.plan.totals):
        yield None if totals.tokens == 0 else _tokens(sealed, again, recipe, index, totals)


def _tokens(
    sealed: SealedIteration, again: Recomputed, recipe: Recipe, index: int, totals: Totals
) -> _Tokens:
    rows = np.flatnonzero(again.plan.minibatch == index)
    at = ragged_index(sealed.samples.response_offsets, rows)
    lengths = sealed.samples.response_lengths[rows]
    sequence = torch.from_numpy(np.repeat(np.arange(len(rows)), lengths))
    weights = token_weights(
        recipe.algorithm.reduction,
        torch.tensor(sealed.samples.action_mask[at]),
        sequence,
        totals,
        recipe.rollout.max_response_tokens,
    )
    return _Tokens(at, weights.double(), sequence)


def _terms(
    sealed: SealedIteration,
    again: Recomputed,
    recipe: Recipe,
    kl: np.ndarray | None,
    tokens: _Tokens,
) -> Terms:
    algorithm, at = recipe.algorithm, tokens.at
    old = torch.tensor(sealed.old_log_probs[at])
    # A ratio is 1 whatever the log-probs are.
    of_ratio = algorithm.objective in OF_RATIO and algorithm.importance.level == "none"
    is_known = of_ratio or not bool(old[tokens.active].isnan().any())
    old = old.nan_to_num()
    advantages = torch.tensor(again.derived.advantages[at])
    importance = importance_weights(
        old,
        torch.tensor(sealed.samples.rollout_log_probs[at]),
        tokens.active,
        tokens.sequence,
        algorithm.importance,
    )
    seen = PolicyTokens.of(old, old, advantages, tokens.active, tokens.sequence)
    surrogate, _ = policy_term(seen, tokens.weights, importance, algorithm)
    factor = tokens.weights if importance is None else tokens.weights * importance
    one_sign = [
        float(policy_term(seen, torch.where(chosen, factor, 0.0), None, algorithm)[0])
        for chosen in (advantages >= 0, advantages < 0)
    ]
    term: float | None = 0.0
    beta = again.derived.kl_beta
    if algorithm.kl_in_loss and beta:
        active = tokens.active.numpy()
        known = kl is not None and not np.isnan(kl[at][active]).any()
        sums = float((tokens.weights.numpy()[active] * kl[at][active]).sum()) if known else None
        term = None if sums is None else beta * sums
    return Terms(float(surrogate) if is_known else None, term, sum(map(abs, one_sign)))


def value_losses(
    sealed: SealedIteration, again: Recomputed, recipe: Recipe
) -> list[float | None] | None:
    """Σ w ½ (V − R)² per minibatch, float64, None for an empty one: the critic's loss before its
    first step, where no clip acts. None where there is no critic."""
    if sealed.values is None or again.derived.returns is None:
        return None
    error = sealed.values.astype(np.float64) - again.derived.returns
    losses: list[float | None] = []
    for tokens in _minibatches(sealed, again, recipe):
        if tokens is None:
            losses.append(None)
            continue
        active = tokens.active.numpy()
        squares = error[tokens.at][active] ** 2
        losses.append(float((tokens.weights.numpy()[active] * squares).sum() / 2))
    return losses
