"""Which samples train: groups complete, scored and worth a gradient.

A pure, global decision on the small table that every rank holds, so no rank can skip a collective
its peers enter. Two kinds of samples do not train: *refused* ones, which are themselves unusable
(aborted, not scorable, ids no tokenizer knows), and *dropped* ones, which are sound but whose
group is not used, or which were cut off where the recipe masks these.

N samples in canonical order; a group is the samples of one draw index.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from megarl.contracts.records import STATUSES, RewardStatus, Scores
from megarl.contracts.samples import End


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
    SURPLUS = "surplus"
    NO_STEPS = "no_steps"
    TRUNCATED = "truncated"


REFUSED = (
    Verdict.ABORTED,
    Verdict.INVALID_TOKENS,
    Verdict.REWARD_TIMEOUT,
    Verdict.REWARD_ERROR,
    Verdict.NO_STEPS,
)
DROPPED = (
    Verdict.INCOMPLETE_GROUP,
    Verdict.GROUP_OF_ONE,
    Verdict.ZERO_VARIANCE,
    Verdict.SURPLUS,
    Verdict.TRUNCATED,
)
VERDICTS = tuple(Verdict)
"""A verdict as a number, also in sealed files, is its place here: another one is added last."""
TRUNCATED = VERDICTS.index(Verdict.TRUNCATED)


@dataclass(frozen=True)
class Selection:
    """The decision over one iteration's samples; arrays run over the N canonical rows."""

    draw_index: np.ndarray  # int32 [N], the group
    candidate: np.ndarray  # int32 [N]
    verdict: np.ndarray  # int8 [N], index into `VERDICTS`
    kept: np.ndarray  # bool [N], True where the sample trains
    compared: np.ndarray
    """bool [N], rows that enter a group's statistics: those that train, and cut off ones that are
    compared and masked."""
    equal: np.ndarray
    """bool [N], rows of a group of two or more sound rows whose rewards are equal."""
    group_size: np.ndarray  # int64 [N], rows of the sample's group that train
    counts: dict[str, int]
    """For metrics: `groups`, `groups_informative` (fit to train), `groups_trained`,
    `groups_incomplete`, `groups_of_one`, `groups_zero_variance` (also where these are kept),
    `samples`, `samples_lost` (asked for, never made), and `samples_<verdict>` for every verdict.
    """

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
    target: int | None = None,
    group_relative: bool = True,
    process: bool = False,
    mask_truncated: bool = False,
) -> Selection:
    """Decide which samples train.

    `scores` in canonical order, their totals those that are trained on (after overlong shaping),
    `end` int [N] an `End` per row, `prompts` how many groups were drawn (for groups that lost every
    candidate), `invalid` bool [N] rows with ids the tokenizer does not know. A row is sound when it
    is neither aborted nor invalid and its score is ok; with `process`, which trains on step
    scores in place of totals, it also needs a step score.

    - `partial_groups` "drop": a group with a missing or unsound candidate is dropped whole;
      "keep_scored": its sound rows train.
    - `group_relative`: a single sound row never trains, it has nothing to be compared with.
    - `zero_variance` "drop": a group of two or more sound rows whose reward *values* (with
      `process` all their step scores) are equal is dropped; "keep": it trains.
    - `mask_truncated`: rows that were cut off are compared, and train nothing (DAPO,
      arXiv:2503.14476, section 3.4: overlong filtering).
    - `target`: of the groups with a row to train (informative) the first so many are used, in
      canonical order; the others are surplus. None: all are.

    Raises `ValueError` for rows out of canonical order, twice, or beyond the group's size, and
    for an unknown policy.
    """
    _check(scores, end, group_size, zero_variance, partial_groups)
    verdict = _row_verdicts(scores, end, invalid, process)
    sound = verdict == 0
    _, member, present = np.unique(scores.draw_index, return_inverse=True, return_counts=True)
    groups = len(present)
    drawn = _drawn(groups, prompts)
    usable = np.bincount(member[sound], minlength=groups)
    equal = _groups_of_equals(scores, sound, member, groups, process) & (usable >= 2)

    def drop(reason: Verdict, chosen: np.ndarray, among: np.ndarray) -> None:
        verdict[among & chosen[member]] = VERDICTS.index(reason)

    if partial_groups == "drop":
        drop(Verdict.INCOMPLETE_GROUP, usable < group_size, verdict == 0)
    if group_relative:
        drop(Verdict.GROUP_OF_ONE, usable == 1, verdict == 0)
    if zero_variance == "drop":
        drop(Verdict.ZERO_VARIANCE, equal, verdict == 0)
    if mask_truncated:
        verdict[(verdict == 0) & (np.asarray(end) == End.TRUNCATED)] = TRUNCATED
    informative = np.bincount(member[verdict == 0], minlength=groups) > 0
    if target is not None:
        surplus = informative & (np.cumsum(informative) > target)
        drop(Verdict.SURPLUS, surplus, (verdict == 0) | (verdict == TRUNCATED))
    kept = verdict == 0
    trained = np.bincount(member[kept], minlength=groups)
    counts = {
        "groups": drawn,
        "groups_informative": int(informative.sum()),
        "groups_trained": int((trained > 0).sum()),
        "groups_incomplete": int((usable < group_size).sum()) + drawn - groups,
        "groups_of_one": int((usable == 1).sum()),
        "groups_zero_variance": int(equal.sum()),
        **_sample_counts(verdict, drawn * group_size),
    }
    return Selection(
        draw_index=scores.draw_index,
        candidate=scores.candidate,
        verdict=verdict,
        kept=kept,
        compared=kept | (verdict == TRUNCATED),
        equal=equal[member],
        group_size=trained[member],
        counts=counts,
    )


def _drawn(groups: int, prompts: int | None) -> int:
    """How many groups were drawn, those that lost every candidate too."""
    if prompts is not None and prompts < groups:
        raise ValueError(f"samples of {groups} groups, but only {prompts} prompts were drawn")
    return groups if prompts is None else prompts


def _sample_counts(verdict: np.ndarray, asked: int) -> dict[str, int]:
    tally = np.bincount(verdict, minlength=len(VERDICTS)).tolist()
    told = {"samples": len(verdict), "samples_lost": asked - len(verdict)}
    return told | {f"samples_{name}": tally[index] for index, name in enumerate(VERDICTS)}


def _groups_of_equals(
    scores: Scores, sound: np.ndarray, member: np.ndarray, groups: int, process: bool
) -> np.ndarray:
    """bool [groups]: all that the group's sound rows are compared by is the same number."""
    if not process:
        return _all_equal(scores.total[sound], member[sound], groups)
    steps = scores.steps
    row = steps.row
    return _all_equal(steps.value[sound[row]], member[row[sound[row]]], groups)


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


def _row_verdicts(
    scores: Scores, end: np.ndarray, invalid: np.ndarray | None, process: bool
) -> np.ndarray:
    """int8 [N]: 0 where the row is sound, else the index of why it is refused."""
    verdict = np.zeros(len(scores.draw_index), dtype=np.int8)
    if process:
        verdict[scores.steps.counts == 0] = VERDICTS.index(Verdict.NO_STEPS)
    # The last one written wins: a fault of the sample itself says more than that of its score.
    for status, reason in (
        (RewardStatus.ERROR, Verdict.REWARD_ERROR),
        (RewardStatus.TIMEOUT, Verdict.REWARD_TIMEOUT),
    ):
        verdict[scores.status_code == STATUSES.index(status)] = VERDICTS.index(reason)
    if invalid is not None:
        verdict[np.asarray(invalid, dtype=bool)] = VERDICTS.index(Verdict.INVALID_TOKENS)
    verdict[np.asarray(end) == End.ABORTED] = VERDICTS.index(Verdict.ABORTED)
    return verdict
