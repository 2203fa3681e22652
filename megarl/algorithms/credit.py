"""Credit: from sealed facts to what the losses need. Recomputable from the experience alone.

    token rewards − β (log π_old − log π_ref)  →  estimator  →  whitening  →  float32

Statistics run over the *global* table of samples in canonical order, in float64, from sums per
sample; a rank then takes its own rows. So the bits are the same on any number of ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from megarl.algorithms.advantages import (
    SUMS_TOKEN_REWARDS,
    CreditBatch,
    CreditSettings,
    Estimate,
)
from megarl.algorithms.credit_numbers import numbers_of
from megarl.algorithms.own import is_own
from megarl.algorithms.registry import KEY, estimator_of, in_place, shape_of
from megarl.algorithms.shaping import kl_penalty, outcome_rewards, step_rewards
from megarl.algorithms.whiten import whiten
from megarl.contracts.ids import name_pairs
from megarl.contracts.records import Derived, Experience
from megarl.contracts.samples import End
from megarl.data.everyone import Everyone
from megarl.data.table import SampleTable


class CreditPlan(Protocol):
    """What `IterationPlan` says of the N rows."""

    trained: np.ndarray
    compared: np.ndarray
    rewards: np.ndarray


@dataclass(frozen=True)
class Credit:
    """What came of it; `advantages` and `numbers` are the same on every rank."""

    derived: Derived
    """Of this rank's tokens."""
    advantages: np.ndarray
    """float64 [N], mean over the sample's action tokens (0 without one), NaN where not trained."""
    numbers: dict[str, float]
    """For metrics, over trained action tokens: see `credit_numbers.py`."""


def credit(
    experience: Experience,
    recipe_hash: str,
    table: SampleTable,
    plan: CreditPlan,
    settings: CreditSettings,
    everyone: Everyone,
    beta: float,
) -> Credit:
    """Advantages and returns of this rank's tokens, and numbers over all. Collective.

    `settings` is the recipe's `algorithm` section, `beta` the KL weight in effect (`kl.beta`, or a
    controller's), `everyone` of the experience's samples (`data/everyone.py`).

    Raises `ValueError`, on every rank alike: a trained sample that nobody holds or whose advantages
    are not finite, a reward that is compared and not finite, a missing reference or critic. An own
    function that changes an array of its batch, or gives columns of another shape, ends only the
    rank it does so on.
    """
    batch = _batch(experience, table, plan, settings, everyone, beta)
    _check_held(batch, table)
    advantages, returns = _estimate(batch, settings)
    mask = batch.trained_mask
    said_by = f"{KEY} {settings.advantage} gave"
    _check_finite(np.where(mask, advantages, 0.0), batch, table, f"{said_by} advantages")
    advantages = np.where(mask, whiten(advantages, batch, settings.whiten), 0.0)
    if returns is not None:
        returns = np.where(mask, returns, 0.0)
        _check_finite(returns, batch, table, f"{said_by} returns")
    mean, numbers = numbers_of(batch, advantages, returns)
    shaped = batch.token_rewards if settings.advantage in SUMS_TOKEN_REWARDS else None
    derived = Derived(
        experience_hash=experience.hash,
        recipe_hash=recipe_hash,
        advantages=advantages.astype(np.float32),
        shaped_rewards=None if shaped is None else shaped.astype(np.float32),
        returns=None if returns is None else returns.astype(np.float32),
        kl_beta=float(beta),
    )
    return Credit(derived, mean, numbers)


def _batch(
    experience: Experience,
    table: SampleTable,
    plan: CreditPlan,
    settings: CreditSettings,
    everyone: Everyone,
    beta: float,
) -> CreditBatch:
    samples, mask = experience.samples, experience.samples.action_mask
    offsets, rows = samples.response_offsets, len(samples)
    own = table.rows_of(samples.draw_index, samples.candidate)
    if settings.rewards == "process":
        token_rewards = step_rewards(table.scores.steps.select(own), mask, offsets)
    elif settings.rewards == "outcome":
        token_rewards = outcome_rewards(plan.rewards[own], mask, offsets)
    else:
        raise ValueError(f"algorithm.rewards is {settings.rewards!r}; use outcome or process")
    rewards = plan.rewards
    if settings.kl_in_reward:
        if experience.ref_log_probs is None:
            raise ValueError("a KL penalty in the reward needs reference log-probs; none are here")
        penalty = beta * kl_penalty(experience.old_log_probs, experience.ref_log_probs, mask)
        token_rewards = token_rewards - penalty
        sample = np.repeat(np.arange(rows), samples.response_lengths)
        per_sample = np.bincount(sample, penalty, minlength=rows).astype(np.float64)
        rewards = rewards - everyone(per_sample[:, None])[:, 0]
    values, last_values = (
        None if column is None else column.astype(np.float64)
        for column in (experience.values, experience.last_values)
    )
    return CreditBatch(
        offsets=offsets,
        action_mask=mask,
        terminated=samples.end == End.TERMINATED,
        token_rewards=token_rewards,
        old_log_probs=experience.old_log_probs,
        ref_log_probs=experience.ref_log_probs,
        values=values,
        last_values=last_values,
        own=own,
        group=table.draw_index,
        compared=plan.compared,
        trained=plan.trained,
        rewards=rewards,
        steps=table.scores.steps,
        everyone=everyone,
    )


def _estimate(batch: CreditBatch, settings: CreditSettings) -> tuple[np.ndarray, np.ndarray | None]:
    """(advantages, returns or None), each found to be float64 [R]."""
    name, tokens = settings.advantage, len(batch.action_mask)
    # Numbers for metrics and whitening come from `batch`: foreign code gets arrays of its own.
    seen = batch.copy() if is_own(name) else batch
    try:
        estimate: Estimate = estimator_of(name)(seen, settings)
    except ValueError as error:
        if is_own(name) and (told := in_place(error)):
            raise ValueError(f"{KEY} {name} {told}") from error
        raise
    columns = estimate if isinstance(estimate, tuple) else (estimate,)
    if isinstance(estimate, tuple) and len(columns) != 2:
        raise ValueError(f"{KEY} {name} gave {len(columns)} columns, not advantages and returns")
    for what, column in zip(("advantages", "returns"), columns, strict=False):
        shape = shape_of(column)
        if shape != f"float64[{tokens}]":
            raise ValueError(f"{KEY} {name} gave {what} {shape}, not float64[{tokens}]")
    return columns[0], columns[1] if len(columns) == 2 else None


def _check_held(batch: CreditBatch, table: SampleTable) -> None:
    held = batch.everyone(np.ones((len(batch.own), 1)))[:, 0]
    lost = batch.trained & np.isnan(held)
    if lost.any():
        names = name_pairs(table.keys[lost])
        raise ValueError(f"samples that train, but that no rank holds: {names}")


def _check_finite(column: np.ndarray, batch: CreditBatch, table: SampleTable, what: str) -> None:
    """`column` [R] is finite on every rank."""
    sums = np.bincount(batch.sample, ~np.isfinite(column), minlength=len(batch.own))
    odd = batch.everyone(sums.astype(np.float64)[:, None])[:, 0] > 0
    if odd.any():
        raise ValueError(f"{what} that are not finite, of samples {name_pairs(table.keys[odd])}")
