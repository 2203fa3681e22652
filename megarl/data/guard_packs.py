"""Guards over the plan and the packs: what is packed is what was sampled, once, and counted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np

from megarl.contracts.samples import End
from megarl.data.packing import Pack, ragged_index
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


def check_packs(
    found: Findings, prepared: Prepared, planned: Sequence[Sequence[np.ndarray]]
) -> None:
    """This rank's packs hold its rows, each once and as planned, token by token as sampled.

    `planned[minibatch][pack]` are rows of `prepared.samples`.
    """
    samples = prepared.samples
    times = np.zeros(len(samples), dtype=np.int64)
    if [len(part) for part in prepared.packs] != [len(part) for part in planned]:
        found.add("packs", ["this rank"], "not as many packs as the plan has")
        return
    for number, (packs, rows_of) in enumerate(zip(prepared.packs, planned, strict=True)):
        for pack, rows in zip(packs, rows_of, strict=True):
            held = pack.rows.cpu().numpy()
            if not np.array_equal(held, rows):
                found.rows(
                    f"packs of minibatch {number}",
                    samples,
                    np.isin(np.arange(len(samples)), np.setxor1d(held, rows)),
                    "another pack than the plan gives it",
                )
            known = held[(held >= 0) & (held < len(samples))]
            np.add.at(times, known, 1)
            if len(known) == len(held):
                _check_pack(found, samples, pack.to("cpu"))
    found.rows("packs", samples, times != 1, "it must be in exactly one pack")


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
    found: Findings, table: SampleTable, plan: IterationPlan, group_size: int, rules: GroupRules
) -> None:
    """The global decision: every row that trains once, groups by their rule, totals as summed."""
    times = np.zeros(len(table), dtype=np.int64)
    owners = np.full(len(table), -1, dtype=np.int64)
    for number, parts in enumerate(plan.update.packs):
        here = np.zeros(len(table), dtype=bool)
        for dp_index, packs in enumerate(parts):
            for rows in packs:
                np.add.at(times, rows, 1)
                owners[rows], here[rows] = dp_index, True
        here &= plan.trained
        told, actions = plan.totals[number], table.actions[here]
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
    _check_groups(found, table, plan.trained, group_size, rules)


def _check_groups(
    found: Findings, table: SampleTable, trained: np.ndarray, group_size: int, rules: GroupRules
) -> None:
    """Of every group that trains: sound samples only, complete as declared, unequal as declared."""
    ok = table.scores.ok & np.isfinite(table.scores.total)
    sound = ok & (table.end != End.ABORTED) & ~table.invalid
    found.rows("reward.total", table, trained & ~ok, "it trains without a score")
    found.rows("end", table, trained & (table.end == End.ABORTED), "it trains, but was aborted")
    found.rows("response_ids", table, trained & table.invalid, "it trains with an unknown id")
    _, member = np.unique(table.draw_index, return_inverse=True)
    groups = int(member.max()) + 1 if len(member) else 0
    size, in_training = (np.bincount(member[kept], minlength=groups) for kept in (sound, trained))
    needed = group_size if rules.partial_groups == "drop" else 2
    wrong = (in_training > 0) & ((in_training < needed) | (in_training != size))
    rule = f"algorithm.partial_groups is {rules.partial_groups}, {needed} are needed"
    for group in np.flatnonzero(wrong)[:1]:
        rows = member == group
        why = f"{in_training[group]} of {size[group]} sound samples of its group train; {rule}"
        found.rows("group", table, rows & trained, why)
    if rules.zero_variance == "drop":
        low, high = np.full(groups, np.inf), np.full(groups, -np.inf)
        np.minimum.at(low, member[trained], table.scores.total[trained])
        np.maximum.at(high, member[trained], table.scores.total[trained])
        equal = (low == high)[member] & trained
        why = "its group's rewards are all equal and algorithm.zero_variance is drop"
        found.rows("reward.total", table, equal, why)
