"""Guards over the plan and the packs: what is packed is what was sampled, once, and counted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np

from megarl.algorithms.shaping import shaped_totals
from megarl.contracts.samples import End
from megarl.data.packing import Pack, UpdatePlan, ragged_index
from megarl.data.prepare import Prepared
from megarl.data.table import SampleTable

if TYPE_CHECKING:
    from megarl.contracts.samples import Samples
    from megarl.data.guard_samples import Findings
    from megarl.rollout.groups import IterationPlan


class GroupRules(Protocol):
    """The declared rules of groups: the recipe's `algorithm` section."""

    @property
    def partial_groups(self) -> str: ...
    @property
    def zero_variance(self) -> str: ...
    @property
    def group_relative(self) -> bool: ...
    @property
    def needs_values(self) -> bool: ...
    @property
    def rewards(self) -> str: ...
    @property
    def overlong(self) -> OverlongRules: ...


class OverlongRules(Protocol):
    """What becomes of long and cut off responses: the section `algorithm.overlong`."""

    @property
    def buffer_tokens(self) -> int: ...
    @property
    def penalty(self) -> float: ...
    @property
    def mask_truncated(self) -> bool: ...


def check_packs(found: Findings, prepared: Prepared, plan: IterationPlan, dp_index: int) -> None:
    """The packs of data-parallel part `dp_index`, the actor's and the critic's, hold its rows, each
    once and as `plan` has them, token by token as sampled."""
    _check_packs(found, "packs", prepared, prepared.packs, plan.update.local_packs(dp_index))
    if prepared.critic_packs is not None:
        # Where the critic has no packs of its own, it learns on the actor's.
        planned = (plan.update if plan.critic is None else plan.critic).local_packs(dp_index)
        _check_packs(found, "critic's packs", prepared, prepared.critic_packs, planned)


def _check_packs(
    found: Findings,
    column: str,
    prepared: Prepared,
    held_packs: Sequence[Sequence[Pack]],
    planned: Sequence[Sequence[np.ndarray]],
) -> None:
    """`planned[minibatch][pack]` are rows of `prepared.samples`."""
    samples = prepared.samples
    times = np.zeros(len(samples), dtype=np.int64)
    if [len(part) for part in held_packs] != [len(part) for part in planned]:
        found.add(column, ["this rank"], "not as many packs as the plan has")
        return
    for number, (packs, rows_of) in enumerate(zip(held_packs, planned, strict=True)):
        for pack, rows in zip(packs, rows_of, strict=True):
            held = pack.rows.cpu().numpy()
            if not np.array_equal(held, rows):
                found.rows(
                    f"{column} of minibatch {number}",
                    samples,
                    np.isin(np.arange(len(samples)), np.setxor1d(held, rows)),
                    "another pack than the plan gives it",
                )
            known = held[(held >= 0) & (held < len(samples))]
            np.add.at(times, known, 1)
            if len(known) == len(held):
                _check_pack(found, samples, pack.to("cpu"))
    found.rows(column, samples, times != 1, "it must be in exactly one pack")


def _check_pack(found: Findings, samples: Samples, pack: Pack) -> None:
    rows, cu_seqlens = pack.rows.numpy(), pack.cu_seqlens.numpy().astype(np.int64)
    token_ids_T, target_A = pack.token_ids_T.numpy(), pack.target_A.numpy()
    starts = cu_seqlens[: len(rows)]
    lengths = samples.prompt_lengths[rows] + samples.response_lengths[rows]
    response_A = ragged_index(samples.response_offsets, rows)
    places = np.repeat(np.arange(len(rows)), samples.response_lengths[rows])
    if not (
        cu_seqlens[0] == 0
        and np.array_equal(np.diff(cu_seqlens[: len(rows) + 1]), lengths)
        and np.array_equal(pack.response_A.numpy(), response_A)
        and np.array_equal(pack.sequence_A.numpy(), places)
        and len(target_A) == len(pack.predictor_A) == len(pack.action_mask_A) == len(response_A)
    ):
        lone = np.isin(np.arange(len(samples)), rows)
        found.rows("packs", samples, lone, "its sequences are not these samples' tokens, in order")
        return
    within = response_A - samples.response_offsets[rows][places]
    at = starts[places] + samples.prompt_lengths[rows][places] + within
    wrong = {
        "predictor_A": (pack.predictor_A.numpy() != at - 1, "not the position before the token"),
        "target_A": (target_A != samples.response_ids[response_A], "not the sampled id"),
        "token_ids_T": (token_ids_T[at] != samples.response_ids[response_A], "not the sampled id"),
        "action_mask_A": (
            pack.action_mask_A.numpy() != samples.action_mask[response_A],
            "an action in the pack or in the sample, not in both",
        ),
    }
    for name, (bad_A, why) in wrong.items():
        bad_R = np.zeros(len(samples.response_ids), dtype=bool)
        bad_R[response_A[bad_A]] = True
        found.tokens(name, samples, bad_R, why)
    sequence = np.repeat(np.arange(len(rows)), lengths)
    position = np.arange(len(sequence)) - starts[sequence]
    prompt = np.flatnonzero(position < samples.prompt_lengths[rows][sequence])
    ids = samples.prompt_ids[ragged_index(samples.prompt_offsets, rows)]
    for name, wrong_T, why in (
        (
            "positions_T",
            np.flatnonzero(pack.positions_T.numpy()[: len(position)] != position),
            "positions are not counted from its own first token",
        ),
        ("token_ids_T", prompt[token_ids_T[prompt] != ids], "its prompt is not the one that ran"),
    ):
        bad = np.zeros(len(samples), dtype=bool)
        bad[rows[sequence[wrong_T]]] = True
        found.rows(name, samples, bad, why)


def check_plan(
    found: Findings,
    table: SampleTable,
    plan: IterationPlan,
    group_size: int,
    longest: int,
    rules: GroupRules,
) -> None:
    """The global decision: every row that trains once, groups by their rule, totals as summed; the
    critic's packs, where it has its own, hold the same rows in the same minibatches and parts.

    `longest` is how many tokens a response may have.
    """
    times, owners, number_of = _places(len(table), plan.update)
    for number in range(len(plan.update.packs)):
        told = plan.totals[number]
        actions = table.actions[(number_of == number) & plan.trained]
        for name, mine, wanted in (
            ("tokens", int(actions.sum()), told.tokens),
            ("sequences", int((actions > 0).sum()), told.sequences),
        ):
            if mine != wanted:
                why = f"{wanted}, its rows add up to {mine}"
                found.add(f"totals.{name}", [f"minibatch {number}"], why)
    found.rows(
        "minibatch", table, plan.trained & (times == 0), "it trains, but no minibatch has it"
    )
    found.rows("minibatch", table, times > 1, "in several minibatches or packs")
    found.rows("owner", table, owners != plan.update.owner, "packed by another part than its owner")
    if plan.trained.any():  # else a probe is packed, and taught nothing
        idle = (times > 0) & ~plan.trained
        found.rows("packs", table, idle, "it is packed and does not train")
    if plan.critic is not None:
        theirs = _places(len(table), plan.critic)
        bad = np.any([a != b for a, b in zip((times, owners, number_of), theirs, strict=True)], 0)
        found.rows("critic's packs", table, bad, "not in the minibatch and part of the actor's")
    shaping = (longest, rules.overlong.buffer_tokens, rules.overlong.penalty)
    rewards = shaped_totals(table.scores.total, table.response_length, *shaping)
    same = (plan.rewards == rewards) | (np.isnan(plan.rewards) & np.isnan(rewards))
    found.rows("reward.total", table, ~same, "not its score and what its length costs")
    _check_groups(found, table, plan, rewards, group_size, rules)


def _places(rows: int, update: UpdatePlan) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """int64 [N] each: how many packs a row is in, on which part, in which minibatch (−1: none)."""
    times = np.zeros(rows, dtype=np.int64)
    owners, numbers = np.full(rows, -1, dtype=np.int64), np.full(rows, -1, dtype=np.int64)
    for number, parts in enumerate(update.packs):
        for dp_index, packs in enumerate(parts):
            for held in packs:
                np.add.at(times, held, 1)
                owners[held], numbers[held] = dp_index, number
    return times, owners, numbers


def _check_groups(
    found: Findings,
    table: SampleTable,
    plan: IterationPlan,
    rewards: np.ndarray,
    group_size: int,
    rules: GroupRules,
) -> None:
    """Of every group that trains: sound samples only, complete as declared, unequal as declared."""
    trained = plan.trained
    ok = table.scores.ok & np.isfinite(table.scores.total)
    unscored = ~ok
    if rules.rewards == "process":
        unscored |= table.scores.steps.counts == 0
        found.rows("reward.step", table, trained & ok & unscored, "it trains without step scores")
    masked = (table.end == End.TRUNCATED) & rules.overlong.mask_truncated
    sound = ~unscored & (table.end != End.ABORTED) & ~table.invalid
    why = "it trains, but was cut off and algorithm.overlong.mask_truncated is on"
    for field, bad, told in (
        ("reward.total", ~ok, "it trains without a score"),
        ("end", table.end == End.ABORTED, "it trains, but was aborted"),
        ("end", masked, why),
        ("response_ids", table.invalid, "it trains with an unknown id"),
        ("compared", ~plan.compared, "it trains, but enters no statistics"),
    ):
        found.rows(field, table, trained & bad, told)
    _, member = np.unique(table.draw_index, return_inverse=True)
    groups = int(member.max()) + 1 if len(member) else 0
    size, compared, able, in_training = (
        np.bincount(member[rows], minlength=groups)
        for rows in (sound, plan.compared, sound & ~masked, trained)
    )
    needed = group_size if rules.partial_groups == "drop" else 1 + rules.group_relative
    wrong = (in_training > 0) & ((compared < needed) | (compared != size) | (in_training != able))
    rule = f"algorithm.partial_groups is {rules.partial_groups}, {needed} are needed"
    for group in np.flatnonzero(wrong)[:1]:
        rows = member == group
        why = f"{in_training[group]} of {size[group]} sound samples of its group train"
        if masked.any():
            why += f", {compared[group]} are compared"
        found.rows("group", table, rows & trained, f"{why}; {rule}")
    if rules.zero_variance == "drop" and rules.rewards == "outcome":
        low, high = np.full(groups, np.inf), np.full(groups, -np.inf)
        np.minimum.at(low, member[plan.compared], rewards[plan.compared])
        np.maximum.at(high, member[plan.compared], rewards[plan.compared])
        equal = ((low == high) & (compared > 1))[member] & trained
        why = "its group's rewards are all equal and algorithm.zero_variance is drop"
        found.rows("reward.total", table, equal, why)
