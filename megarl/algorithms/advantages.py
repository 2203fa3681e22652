"""Built-in estimators: from rewards to one advantage per action token, before whitening.

An estimator is a function of a `CreditBatch` and the recipe's `algorithm` section. It gives
advantages, float64 [R], or (advantages, returns), the latter for a critic to learn. An own one is
named by its import path::

    def mine(batch: CreditBatch, settings) -> np.ndarray: ...

N samples of the iteration in canonical order, n of them this rank's with R response tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, Protocol

import numpy as np

from megarl.algorithms.gae import gae, returns_to_go
from megarl.algorithms.group import grpo_advantages, rloo_advantages
from megarl.algorithms.shaping import step_rewards
from megarl.contracts.steps import Steps
from megarl.data.everyone import Everyone

_STEPS = fields(Steps)


class GaeSettings(Protocol):
    lam: float
    truncation: str


class CreditSettings(Protocol):
    """The `algorithm` section of the recipe, as far as credit reads it."""

    advantage: str
    group_std: str
    advantage_eps: float
    rewards: str
    gamma: float
    gae: GaeSettings
    whiten: str
    needs_values: bool
    kl_in_reward: bool


@dataclass(frozen=True)
class CreditBatch:
    """This rank's samples, and what statistics need of all of them.

    Its arrays are read-only views: they are shared with the table and the sealed experience.
    """

    offsets: np.ndarray  # int64 [n+1], where each sample's response tokens begin
    action_mask: np.ndarray  # bool [R]
    terminated: np.ndarray  # bool [n], the policy ended it; else it was cut off
    token_rewards: np.ndarray
    """float64 [R]: the outcome, or step scores, and the KL penalty, on action tokens."""
    old_log_probs: np.ndarray  # float32 [R]
    ref_log_probs: np.ndarray | None  # float32 [R]
    values: np.ndarray | None  # float64 [R], V(s_t) where token t is predicted
    last_values: np.ndarray | None  # float64 [n], V at the last response token
    own: np.ndarray  # int64 [n], rows of the N that these samples are
    group: np.ndarray  # int [N], whose prompt
    compared: np.ndarray  # bool [N], rows that enter a group's statistics
    trained: np.ndarray  # bool [N], rows that train
    rewards: np.ndarray
    """float64 [N]: shaped totals less the sequence's KL penalty; NaN where not known."""
    steps: Steps
    """Step scores of the N rows."""
    everyone: Everyone
    """This rank's float64 [n, k] → everybody's [N, k]. Collective: ask alike on every rank, also
    where n is 0."""

    def __post_init__(self) -> None:
        for name, view in self._mapped(_read_only).items():
            object.__setattr__(self, name, view)

    def arrays(self) -> dict[str, np.ndarray]:
        """Every array by its name; those of the steps are `steps.value` and so on."""
        columns = {field.name: getattr(self, field.name) for field in fields(self)}
        columns |= {f"steps.{field.name}": getattr(self.steps, field.name) for field in _STEPS}
        return {name: column for name, column in columns.items() if isinstance(column, np.ndarray)}

    def copy(self) -> CreditBatch:
        """The same with arrays of its own, read-only too: not every writer heeds that flag
        (`np.add.at`, `torch.from_numpy`), and foreign code must not reach the facts."""
        return replace(self, **self._mapped(np.copy))

    def _mapped(self, change: Callable[[np.ndarray], np.ndarray]) -> dict[str, Any]:
        changed = {name: change(array) for name, array in self.arrays().items()}
        steps = Steps(*(changed.pop(f"steps.{field.name}") for field in _STEPS))
        return changed | {"steps": steps}

    @cached_property
    def sample(self) -> np.ndarray:
        """int64 [R], the sample (of n) that each response token belongs to."""
        return _read_only(np.repeat(np.arange(len(self.own)), np.diff(self.offsets)))

    @cached_property
    def trained_mask(self) -> np.ndarray:
        """bool [R], action tokens of samples that train."""
        return _read_only(self.action_mask & self.trained[self.own][self.sample])

    @cached_property
    def trained_sample(self) -> np.ndarray:
        """int64 [tokens of `trained_mask`], the sample of each."""
        return _read_only(self.sample[self.trained_mask])

    def sums(self, column: np.ndarray) -> np.ndarray:
        """float64 [n]: of a column [R], each sample's trained action tokens, in their order."""
        values = column[self.trained_mask]
        sums = np.bincount(self.trained_sample, values, minlength=len(self.own))
        return sums.astype(np.float64)  # of no token at all it would be integers

    def on_tokens(self, advantages: np.ndarray) -> np.ndarray:
        """float64 [R]: this rank's rows of one value per sample [N], on their action tokens."""
        return np.where(self.action_mask, advantages[self.own][self.sample], 0.0)


Estimate = np.ndarray | tuple[np.ndarray, np.ndarray]
Estimator = Callable[[CreditBatch, Any], Estimate]


def grpo(batch: CreditBatch, settings: CreditSettings) -> np.ndarray:
    """`grpo_advantages` of the rewards on every action token (outcome supervision). With step
    scores (process supervision, arXiv:2402.03300, section 4.1.3) these are compared with all of
    their group's, and a token gets the sum of those that end at it or later."""
    std, eps = settings.group_std, settings.advantage_eps
    if settings.rewards == "outcome":
        advantages = grpo_advantages(batch.rewards, batch.group, batch.compared, std, eps)
        return batch.on_tokens(advantages)
    steps, row = batch.steps, batch.steps.row
    relative = grpo_advantages(steps.value, batch.group[row], batch.compared[row], std, eps)
    mine = Steps(steps.offsets, steps.token, relative).select(batch.own)
    rewards = step_rewards(mine, batch.action_mask, batch.offsets)
    return returns_to_go(rewards, batch.action_mask, batch.offsets, 1.0)


def rloo(batch: CreditBatch, settings: CreditSettings) -> np.ndarray:
    """`rloo_advantages` of the rewards, on every action token (arXiv:2402.14740)."""
    _needs_outcome(settings)
    return batch.on_tokens(rloo_advantages(batch.rewards, batch.group, batch.compared))


def reinforce_baseline(batch: CreditBatch, settings: CreditSettings) -> np.ndarray:
    """Reward minus the group's mean, on every action token, to be whitened over the iteration
    (REINFORCE++-baseline, arXiv:2501.03262)."""
    _needs_outcome(settings)
    advantages = grpo_advantages(batch.rewards, batch.group, batch.compared, "none", 0.0)
    return batch.on_tokens(advantages)


def reinforce(batch: CreditBatch, settings: CreditSettings) -> np.ndarray:
    """Discounted sum of the token rewards from each action on, to be whitened over the iteration
    (REINFORCE++, arXiv:2501.03262)."""
    return returns_to_go(batch.token_rewards, batch.action_mask, batch.offsets, settings.gamma)


def gae_estimate(batch: CreditBatch, settings: CreditSettings) -> tuple[np.ndarray, np.ndarray]:
    """Generalised advantages and returns R_t = A_t + V(s_t), 0 where a token is no action.

    A response that was cut off goes on with the value at its last token's own position, or with
    nothing (`gae.truncation: terminal`). Raises `ValueError` without the values this needs.
    """
    truncation = settings.gae.truncation
    if truncation not in ("bootstrap", "terminal"):
        raise ValueError(f"algorithm.gae.truncation is {truncation!r}; use bootstrap or terminal")
    if batch.values is None or (truncation == "bootstrap" and batch.last_values is None):
        raise ValueError("gae needs the critic's values, and those after the last token to go on")
    following = np.zeros(len(batch.own))
    if truncation == "bootstrap":
        following = np.where(batch.terminated, 0.0, batch.last_values)
    advantages = gae(
        batch.token_rewards,
        batch.values,
        following,
        batch.action_mask,
        batch.offsets,
        settings.gamma,
        settings.gae.lam,
    )
    return advantages, np.where(batch.action_mask, advantages + batch.values, 0.0)


ESTIMATORS: dict[str, Estimator] = {
    "grpo": grpo,
    "rloo": rloo,
    "reinforce": reinforce,
    "reinforce_baseline": reinforce_baseline,
    "gae": gae_estimate,
}
SUMS_TOKEN_REWARDS = ("reinforce", "gae")
"""Estimators whose token rewards are kept beside the advantages."""


def per_token(advantages: np.ndarray, response_lengths: np.ndarray) -> np.ndarray:
    """One value per sample [N] on each of its response tokens, float32 [R]: the one cast."""
    return np.repeat(np.asarray(advantages, dtype=np.float64), response_lengths).astype(np.float32)


def _read_only(array: np.ndarray) -> np.ndarray:
    """A view that raises when it is written to; `array` itself stays as it is."""
    view = array.view()
    view.flags.writeable = False
    return view


def _needs_outcome(settings: CreditSettings) -> None:
    if settings.rewards != "outcome":
        raise ValueError(
            f"algorithm.rewards is {settings.rewards}: {settings.advantage} compares totals; use "
            "grpo, reinforce or gae with step scores"
        )
