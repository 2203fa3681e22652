"""Which samples train: groups complete, scored and worth a gradient; one ledger over all samples.

A pure, global decision on the small table that every rank holds, so no rank can skip a collective
its peers enter. Two kinds of samples do not train: *refused* ones, which are themselves unusable
(aborted, not scorable, ids no tokenizer knows), and *dropped* ones, which are sound but whose
group is not used.

N samples in canonical order; a group is the samples of one draw index.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol

import numpy as np

from megarl.algorithms.reduction import Totals
from megarl.contracts.records import RewardStatus, Scores
from megarl.contracts.samples import End
from megarl.data.packing import UpdatePlan, plan_update
from megarl.data.table import SampleTable


class Verdict(StrEnum):
    """What became of a sample, and why."""

    TRAINED = "trained"
    ABORTED = "aborted"
    INVALID_TOKENS = "invalid_tokens"
    REWARD_TIMEOUT = "reward_timeout"
    REWARD_ERROR = "reward_error"
    INCOMPLETE_GROUP = "incomplete_group"
    GROUP_OF_ONE = "group_of_one"
    ZERO_VARIANCE = "zero_variance"


REFUSED = (
    Verdict.ABORTED,
    Verdict.INVALID_TOKENS,
    Verdict.REWARD_TIMEOUT,
    Verdict.REWARD_ERROR,
)
DROPPED = (Verdict.INCOMPLETE_GROUP, Verdict.GROUP_OF_ONE, Verdict.ZERO_VARIANCE)
VERDICTS = (Verdict.TRAINED, *REFUSED, *DROPPED)


class PlanRecipe(Protocol):
    """The sections of the recipe that planning reads (`megarl.recipe.Recipe`)."""

    algorithm: Any
    rollout: Any
    actor: Any


class LedgerError(RuntimeError):
    """Samples that are neither trained, dropped nor refused, or more than one of these."""


@dataclass(frozen=True)
class Selection:
    """The decision over one iteration's samples; arrays run over the N canonical rows."""

    draw_index: np.ndarray  # int32 [N], the group
    candidate: np.ndarray  # int32 [N]
    verdict: np.ndarray  # int8 [N], index into `VERDICTS`
    kept: np.ndarray  # bool [N], True where the sample trains
    group_size: np.ndarray  # int64 [N], rows of the sample's group that train
    counts: dict[str, int]
    """For metrics: `groups`, `groups_trained`, `groups_incomplete`, `groups_of_one`,
    `groups_zero_variance` (also where these are kept), `samples`, `samples_lost` (asked for, never
    made), and `samples_<verdict>` for every verdict."""

    def reason(self, row: int) -> Verdict:
        return VERDICTS[self.verdict[row]]


def select_groups(
    scores: Scores,
    end: np.ndarray,
    group_size: int,
    zero_variance: str,
    partial_groups: str,
    *,
    prompts: int | None = None,
    invalid: np.ndarray | None = None,
) -> Selection:
    """Decide which samples train.

    `scores` in canonical order, `end` int [N] an `End` per row, `prompts` how many groups were
    drawn (for groups that lost every candidate), `invalid` bool [N] rows with ids the tokenizer
    does not know. A row is sound when it is neither aborted nor invalid and its score is ok.

    - `partial_groups` "drop": a group with a missing or unsound candidate is dropped whole;
      "keep_scored": its sound rows train if they are at least two.
    - a single sound row never trains: it has nothing to be compared with.
    - `zero_variance` "drop": a group whose reward *values* are all equal is dropped; "keep": it
      trains with advantages of exactly 0.

    Raises `ValueError` for rows out of canonical order, twice, or beyond the group's size, and
    for an unknown policy.
    """
    _check(scores, end, group_size, zero_variance, partial_groups)
    verdict = _row_verdicts(scores, end, invalid)
    sound = verdict == 0
    _, member, present = np.unique(scores.draw_index, return_inverse=True, return_counts=True)
    groups = len(present)
    drawn = groups if prompts is None else prompts
    if drawn < groups:
        raise ValueError(f"samples of {groups} groups, but only {drawn} prompts were drawn")
    usable = np.bincount(member[sound], minlength=groups)
    incomplete, alone = usable < group_size, usable == 1
    equal = _all_equal(scores.total[sound], member[sound], groups) & (usable >= 2)

    def drop(reason: Verdict, chosen: np.ndarray) -> None:
        verdict[sound & chosen[member] & (verdict == 0)] = VERDICTS.index(reason)

    if partial_groups == "drop":
        drop(Verdict.INCOMPLETE_GROUP, incomplete)
    drop(Verdict.GROUP_OF_ONE, alone)
    if zero_variance == "drop":
        drop(Verdict.ZERO_VARIANCE, equal)

    kept = verdict == 0
    trained = np.bincount(member[kept], minlength=groups)
    tally = np.bincount(verdict, minlength=len(VERDICTS)).tolist()
    counts = {
        "groups": drawn,
        "groups_trained": int((trained > 0).sum()),
        "groups_incomplete": int(incomplete.sum()) + drawn - groups,
        "groups_of_one": int(alone.sum()),
        "groups_zero_variance": int(equal.sum()),
        "samples": len(verdict),
        "samples_lost": drawn * group_size - len(verdict),
        **{f"samples_{name}": tally[index] for index, name in enumerate(VERDICTS)},
    }
    draws, candidates = scores.draw_index, scores.candidate
    return Selection(draws, candidates, verdict, kept, trained[member], counts)


def _all_equal(values: np.ndarray, member: np.ndarray, groups: int) -> np.ndarray:
    """bool [groups]: all of a group's values are the same; `member` is each value's group."""
    low, high = np.full(groups, np.inf), np.full(groups, -np.inf)
    np.minimum.at(low, member, values)
    np.maximum.at(high, member, values)
    return low == high


def _check(
    scores: Scores, end: np.ndarray, group_size: int, zero_variance: str, partial_groups: str
) -> None:
    if zero_variance not in ("drop", "keep"):
        raise ValueError(f"algorithm.zero_variance is {zero_variance!r}; use drop or keep")
    if partial_groups not in ("drop", "keep_scored"):
        raise ValueError(f"algorithm.partial_groups is {partial_groups!r}; use drop or keep_scored")
    if len(end) != len(scores.draw_index):
        raise ValueError(f"{len(end)} ends for {len(scores.draw_index)} scores")
    pairs = np.stack([scores.draw_index, scores.candidate], axis=1).astype(np.int64)
    steps = np.diff(pairs, axis=0)
    rises = (steps[:, 0] > 0) | ((steps[:, 0] == 0) & (steps[:, 1] > 0))
    if not rises.all():
        first = int(np.flatnonzero(~rises)[0])
        raise ValueError(
            f"scores must rise in (draw index, candidate): {tuple(pairs[first].tolist())} is "
            f"followed by {tuple(pairs[first + 1].tolist())}"
        )
    beyond = (pairs[:, 1] < 0) | (pairs[:, 1] >= group_size)
    if beyond.any():
        first = tuple(pairs[np.flatnonzero(beyond)[0]].tolist())
        raise ValueError(f"candidate {first} lies beyond the group size of {group_size}")


def _row_verdicts(scores: Scores, end: np.ndarray, invalid: np.ndarray | None) -> np.ndarray:
    """int8 [N]: 0 where the row is sound, else the index of why it is refused."""
    verdict = np.zeros(len(scores.draw_index), dtype=np.int8)
    status = np.array([str(status) for status in scores.status], dtype=object)
    # The last one written wins: a fault of the sample itself says more than that of its score.
    verdict[status == RewardStatus.ERROR] = VERDICTS.index(Verdict.REWARD_ERROR)
    verdict[status == RewardStatus.TIMEOUT] = VERDICTS.index(Verdict.REWARD_TIMEOUT)
    if invalid is not None:
        verdict[np.asarray(invalid, dtype=bool)] = VERDICTS.index(Verdict.INVALID_TOKENS)
    verdict[np.asarray(end) == End.ABORTED] = VERDICTS.index(Verdict.ABORTED)
    return verdict


def ledger(selection: Selection, trained: np.ndarray | None = None) -> dict:
    """The iteration's account: sampled = trained + dropped + refused, the latter two by reason.

    `trained` bool [N] is what was really packed for the updates, when known.
    Raises `LedgerError` naming the first samples when the account does not close.
    """
    trained = selection.kept if trained is None else np.asarray(trained, dtype=bool)
    wrong = np.flatnonzero(trained != (selection.verdict == 0))
    if len(wrong):
        told = ", ".join(
            f"{selection.draw_index[row]}/{selection.candidate[row]} is {selection.reason(row)} "
            f"and {'was' if trained[row] else 'was not'} trained"
            for row in wrong[:3]
        )
        raise LedgerError(f"the ledger does not close for {len(wrong)} samples: {told}")
    tally = np.bincount(selection.verdict, minlength=len(VERDICTS)).tolist()
    by_reason = dict(zip(VERDICTS, tally, strict=True))
    account = {
        "sampled": selection.counts["samples"],
        "trained": int(trained.sum()),
        "dropped": {str(reason): by_reason[reason] for reason in DROPPED if by_reason[reason]},
        "refused": {str(reason): by_reason[reason] for reason in REFUSED if by_reason[reason]},
        "lost": selection.counts["samples_lost"],
    }
    out = sum(account["dropped"].values()) + sum(account["refused"].values())
    if account["sampled"] != account["trained"] + out:
        raise LedgerError(f"the ledger does not close: {account}")
    return account


def shares_by(selection: Selection, labels: Sequence[str]) -> dict[str, dict[str, float]]:
    """For each label (a source, a length bucket; one per row) the share of its rows by verdict."""
    tally: dict[str, Counter] = {}
    for label, verdict in zip(labels, selection.verdict.tolist(), strict=True):
        tally.setdefault(label, Counter())[str(VERDICTS[verdict])] += 1
    return {
        label: {name: n / counter.total() for name, n in sorted(counter.items())}
        for label, counter in sorted(tally.items())
    }


def split_minibatches(selection: Selection, minibatches: int) -> list[np.ndarray]:
    """Rows of each minibatch, int64 ascending; together the kept rows, groups kept whole.

    Balanced by samples: largest group first into the lightest minibatch, the earlier draw and
    the lower minibatch win ties. With fewer groups than minibatches the last ones are empty
    (they take no step and are counted); with as many or more, none is.
    """
    rows = np.flatnonzero(selection.kept)
    groups, sizes = np.unique(selection.draw_index[rows], return_counts=True)
    load = [0] * minibatches
    minibatch_of: dict[int, int] = {}
    for at in np.lexsort((groups, -sizes)).tolist():
        target = min(range(minibatches), key=lambda index: (load[index], index))
        minibatch_of[int(groups[at])] = target
        load[target] += int(sizes[at])
    owner = np.array([minibatch_of[int(group)] for group in selection.draw_index[rows]], dtype=int)
    return [rows[owner == index].astype(np.int64) for index in range(minibatches)]


@dataclass(frozen=True)
class IterationPlan:
    """What trains, in which minibatch and pack, and on which data-parallel part."""

    selection: Selection
    update: UpdatePlan
    totals: tuple[Totals, ...]
    """Per minibatch, over all ranks: the denominators of its loss."""
    account: dict
    """The ledger: sampled = trained + dropped + refused."""
    trained: np.ndarray
    """bool [N], rows that enter statistics and updates. `update` also packs a probe when there are
    none: sound rows whose log-probs are compared with the generator's and have no weight."""

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
) -> IterationPlan:
    """Every decision of the iteration's update; pure, so the same on every rank.

    `prompts` and `invalid` as in `select_groups`; `prompts` defaults to the recipe's number.
    Raises `LedgerError` when an account does not close, and as the functions it calls.
    """
    algorithm, rollout = recipe.algorithm, recipe.rollout
    selection = select_groups(
        table.scores,
        table.end,
        rollout.group_size,
        algorithm.zero_variance,
        algorithm.partial_groups,
        prompts=rollout.prompts_per_iteration if prompts is None else prompts,
        invalid=invalid,
    )
    minibatches = split_minibatches(selection, algorithm.minibatches)
    packed = minibatches if selection.kept.any() else _probe(selection, algorithm.minibatches)
    update = plan_update(
        table.lengths,
        packed,
        dp,
        recipe.actor.tokens_per_micro_batch,
        lambda row: f"sample {table.draw_index[row]}/{table.candidate[row]}",
    )
    totals = tuple(
        Totals(
            tokens=int(table.actions[rows].sum()), sequences=int((table.actions[rows] > 0).sum())
        )
        for rows in minibatches
    )
    trained = update.packed & selection.kept
    return IterationPlan(selection, update, totals, ledger(selection, trained), trained)


def _probe(selection: Selection, minibatches: int) -> list[np.ndarray]:
    """The sound rows of the first group that has some, as the first of otherwise empty
    minibatches: parity with the generator is a fact of every iteration, trained or not."""
    refused = [VERDICTS.index(verdict) for verdict in REFUSED]
    sound = np.flatnonzero(~np.isin(selection.verdict, refused))
    rows = sound[selection.draw_index[sound] == selection.draw_index[sound[:1]]]
    return [rows] + [sound[:0]] * (minibatches - 1)
