"""One iteration's plan: which samples train, in which minibatch and pack; fixed once, globally.

Pure functions of the table that every rank holds. What trains is decided in `selection.py`, the
ledger over it is `account.py`.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from megarl.algorithms.reduction import Totals
from megarl.algorithms.shaping import shaped_totals
from megarl.data.packing import UpdatePlan, plan_own_packs, plan_update
from megarl.data.table import SampleTable
from megarl.rollout.account import Drawn, LedgerError, ledger
from megarl.rollout.selection import (
    DROPPED,
    REFUSED,
    VERDICTS,
    Selection,
    Verdict,
    select_groups,
)

__all__ = [
    "DROPPED",
    "REFUSED",
    "VERDICTS",
    "Drawn",
    "IterationPlan",
    "LedgerError",
    "PlanRecipe",
    "Selection",
    "Verdict",
    "ledger",
    "plan_iteration",
    "select",
    "select_groups",
    "split_minibatches",
]


class PlanRecipe(Protocol):
    """The sections of the recipe that planning reads (`megarl.recipe.Recipe`)."""

    algorithm: Any
    rollout: Any
    actor: Any
    critic: Any


def select(
    table: SampleTable,
    recipe: PlanRecipe,
    *,
    prompts: int | None = None,
    invalid: np.ndarray | None = None,
    target: int | None = None,
) -> tuple[Selection, np.ndarray]:
    """`select_groups` by the recipe's rules, and float64 [N] the totals they were applied to."""
    algorithm, rollout = recipe.algorithm, recipe.rollout
    rewards = shaped_totals(
        table.scores.total,
        table.response_length,
        rollout.max_response_tokens,
        algorithm.overlong.buffer_tokens,
        algorithm.overlong.penalty,
    )
    selection = select_groups(
        replace(table.scores, total=rewards),
        table.end,
        rollout.group_size,
        algorithm.zero_variance,
        algorithm.partial_groups,
        prompts=prompts,
        invalid=invalid,
        target=target,
        group_relative=algorithm.group_relative,
        process=algorithm.rewards == "process",
        mask_truncated=algorithm.overlong.mask_truncated,
    )
    return selection, rewards


def split_minibatches(
    selection: Selection, minibatches: int, groups: str = "whole"
) -> list[np.ndarray]:
    """Rows of each minibatch, int64 ascending; together the kept rows.

    `whole`: groups stay together. Group counts differ by at most one, sample counts by at most the
    largest group: groups are dealt round by round, the largest first, in each round to the lightest
    minibatch that has none of the round yet; the earlier draw and the lower minibatch win ties.
    With fewer groups than minibatches the last ones are empty (they take no step and are counted).

    `split`: samples are dealt in turn, in canonical order, so siblings go to different minibatches
    and sample counts differ by at most one.

    Raises `ValueError` for another kind.
    """
    rows = np.flatnonzero(selection.kept).astype(np.int64)
    if groups == "split":
        return [rows[index::minibatches] for index in range(minibatches)]
    if groups != "whole":
        raise ValueError(f"algorithm.minibatch_groups is {groups!r}; use whole or split")
    names, member, sizes = np.unique(
        selection.draw_index[rows], return_inverse=True, return_counts=True
    )
    heap = [(0, 0, index) for index in range(minibatches)]  # groups, samples, minibatch
    home = np.zeros(len(names), dtype=np.int64)
    for at in np.lexsort((names, -sizes)).tolist():
        dealt, samples, index = heap[0]
        home[at] = index
        heapq.heapreplace(heap, (dealt + 1, samples + int(sizes[at]), index))
    owner = home[member]
    return [rows[owner == index] for index in range(minibatches)]


@dataclass(frozen=True)
class IterationPlan:
    """What trains, in which minibatch and pack, and on which data-parallel part."""

    selection: Selection
    update: UpdatePlan
    totals: tuple[Totals, ...]
    """Per minibatch, over all ranks: the denominators of its loss."""
    account: dict
    """The ledger, see `account.py`."""
    trained: np.ndarray
    """bool [N], rows that enter updates. `update` also packs a probe when there are
    none: sound rows whose log-probs are compared with the generator's and have no weight."""
    compared: np.ndarray
    """bool [N], rows that enter a group's statistics: the trained, and masked cut off ones."""
    rewards: np.ndarray
    """float64 [N], outcome totals after overlong shaping; NaN where a row is not scored."""
    sources: tuple[str, ...] = ()
    """Of each drawn prompt, by draw index; empty where nobody said."""
    critic: UpdatePlan | None = None
    """The critic's own packs of the same minibatches and owners; None: it takes the actor's."""

    @property
    def minibatch(self) -> np.ndarray:
        """int32 [N], the minibatch that trains each row, −1 where none does."""
        number = np.full(len(self.trained), -1, dtype=np.int32)
        for index, parts in enumerate(self.update.packs):
            for rows in (rows for packs in parts for rows in packs):
                number[rows] = index
        return np.where(self.trained, number, np.int32(-1))


def plan_iteration(
    table: SampleTable,
    recipe: PlanRecipe,
    dp: int,
    *,
    prompts: int | None = None,
    invalid: np.ndarray | None = None,
    drawn: Drawn | None = None,
    even_length: int | None = None,
    critic_even_length: int | None = None,
) -> IterationPlan:
    """Every decision of the iteration's update; pure, so the same on every rank.

    Every epoch over the iteration takes the same minibatches and packs, in the same order.
    `prompts` and `invalid` as in `select_groups`; `prompts` defaults to the recipe's number.
    `drawn`, for the ledger, says more of how the samples came about, `prompts` then too.
    `even_length` is the model's, as in `plan_packs`, `critic_even_length` the critic's.
    Raises `LedgerError` when an account does not close, and as the functions it calls.
    """
    algorithm, rollout = recipe.algorithm, recipe.rollout
    target = rollout.prompts_per_iteration
    if drawn is not None:
        prompts = len(drawn.sources)
    elif prompts is None:
        prompts = target
    selection, rewards = select(table, recipe, prompts=prompts, invalid=invalid, target=target)
    minibatches = split_minibatches(selection, algorithm.minibatches, algorithm.minibatch_groups)
    packed = minibatches if selection.kept.any() else _probe(selection, algorithm.minibatches)
    update = plan_update(
        table.lengths,
        packed,
        dp,
        recipe.actor.tokens_per_micro_batch,
        lambda row: f"sample {table.draw_index[row]}/{table.candidate[row]}",
        even_length,
    )
    totals = tuple(
        Totals(
            tokens=int(table.actions[rows].sum()), sequences=int((table.actions[rows] > 0).sum())
        )
        for rows in minibatches
    )
    trained = update.packed & selection.kept
    account = ledger(selection, trained)
    if drawn is not None:
        account |= drawn.account(selection, table.response_length, rollout.max_response_tokens)
    return IterationPlan(
        selection,
        update,
        totals,
        account,
        trained,
        selection.compared,
        rewards,
        () if drawn is None else tuple(drawn.sources),
        _critic_packs(update, table, recipe, critic_even_length),
    )


def _critic_packs(
    update: UpdatePlan, table: SampleTable, recipe: PlanRecipe, even_length: int | None
) -> UpdatePlan | None:
    if not recipe.algorithm.needs_values or recipe.critic.tokens_per_micro_batch is None:
        return None
    budget = recipe.critic.tokens_per_micro_batch
    return plan_own_packs(update, table.lengths, budget, even_length)


def _probe(selection: Selection, minibatches: int) -> list[np.ndarray]:
    """The sound rows of the first group that has some, as the first of otherwise empty
    minibatches: parity with the generator is a fact of every iteration, trained or not."""
    refused = [VERDICTS.index(verdict) for verdict in REFUSED]
    sound = np.flatnonzero(~np.isin(selection.verdict, refused))
    rows = sound[selection.draw_index[sound] == selection.draw_index[sound[:1]]]
    return [rows] + [sound[:0]] * (minibatches - 1)
