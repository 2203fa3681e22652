"""Faults that guards must find in an iteration of ppo: its critic's values, packs and rules.

As in `planted_faults.py`.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from megarl.contracts.samples import EndReason
from tests.data.make_iteration import Iteration, put, spoilt
from tests.data.planted_faults import OTHER, producer, scored, shorter


def _critic_step(it: Iteration) -> None:
    it.critic_step += 1


def _no_values(it: Iteration) -> None:
    it.prepared = spoilt(it.prepared, values=None, last_values=None)


def _critic_pack_lost(it: Iteration) -> None:
    it.prepared = spoilt(it.prepared, critic_packs=it.prepared.critic_packs[:1])


def _critic_plan(it: Iteration) -> None:
    packs = it.plan.update.packs
    it.plan = spoilt(it.plan, critic=spoilt(it.plan.update, packs=packs[::-1]))


def _half_without_rule(it: Iteration) -> None:
    """A sound sample that does not train, and whose group does."""
    it.plan = spoilt(it.plan, trained=put(it.plan.trained, 0, False))


def _masked_rows(it: Iteration) -> None:
    it.table = spoilt(it.table, end_reason=put(it.table.end_reason, 0, EndReason.MAX_TOKENS))


def _shaped(it: Iteration) -> None:
    it.plan = spoilt(it.plan, rewards=put(it.plan.rewards, 0, 0.25))


CRITIC_FACTS: dict[str, tuple[Callable[[Iteration], None], str]] = {
    "values of another version": (
        producer("critic", OTHER.id),
        rf"values of run/3/p0/0.*made by version {OTHER.id}, .*expects those of critic@8\.0",
    ),
    "values of nobody": (producer("critic", None), "values of .*: made by nobody"),
    "values after a step": (
        _critic_step,
        "values of .*: taken after optimizer step 9, not by critic@8",
    ),
    "no values": (_no_values, "values of FIRST.*: none there, the critic learns from them"),
    "nan in values": (
        scored("values", np.nan),
        "values of FIRST response token 1: a value must be a finite number",
    ),
    "infinite in last": (
        scored("last_values", np.inf),
        "last_values of run/3/p./.: a value must be a finite number",
    ),
    "short values": (shorter("values"), r"values of FIRST.*: float32\[\d+\], float32"),
    "short last": (shorter("last_values"), r"last_values of FIRST.*: float32\[\d+\], float32"),
    "a pack of the critic is missing": (
        _critic_pack_lost,
        "critic's packs of this rank: not as many packs as the plan has",
    ),
    "other minibatches of the critic": (
        _critic_plan,
        "critic's packs of run/3/p0/0.*: not in the minibatch and part of the actor's",
    ),
    "a lone sample left out": (
        _half_without_rule,
        "group of run/3/p0/1: 1 of 2 sound samples of its group train, 2 are compared; algorithm."
        "partial_groups is keep_scored, 1 are needed",
    ),
    "another reward than its score": (
        _shaped,
        "reward.total of run/3/p0/0: not its score and what its length costs",
    ),
    "cut off and trained": (
        _masked_rows,
        "end of run/3/p0/0: it trains, but was cut off and algorithm.overlong.mask_truncated is on",
    ),
}
"""In an iteration of ppo, which masks responses that were cut off."""
