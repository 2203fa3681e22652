"""Which samples train, the ledger and the minibatches: pure decisions on the global table.

Not covered: how many retries a failed candidate gets (tests/rollout of the generator).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.algorithms.reduction import Totals
from megarl.contracts.records import RewardStatus, Scores
from megarl.contracts.samples import End, EndReason
from megarl.data.table import SampleTable
from megarl.rollout.groups import (
    DROPPED,
    REFUSED,
    LedgerError,
    Selection,
    Verdict,
    ledger,
    plan_iteration,
    select_groups,
    split_minibatches,
)
from tests.data.make_rules import make_rules
from tests.data.make_samples import make_record

OK, TIMEOUT, ERROR = RewardStatus.OK, RewardStatus.TIMEOUT, RewardStatus.ERROR
Group = Sequence[float | RewardStatus | None]
"""One group, by candidate: a reward, a failed status, or None for a lost candidate."""


def _scores(*groups: Group) -> Scores:
    records = []
    for draw_index, group in enumerate(groups):
        for candidate, told in enumerate(group):
            if isinstance(told, RewardStatus):
                records.append(make_record(draw_index, candidate, None, told))
            elif told is not None:
                records.append(make_record(draw_index, candidate, float(told)))
    return Scores.from_records(records)


def _select(*groups: Group, size: int = 4, zero="drop", partial="drop", **more) -> Selection:
    scores = _scores(*groups)
    end = more.pop("end", np.full(len(scores.total), End.TERMINATED))
    return select_groups(scores, end, size, zero, partial, **more)


def _reasons(selection: Selection) -> list[str]:
    return [str(selection.reason(row)) for row in range(len(selection.kept))]


def test_a_whole_group_with_different_rewards_trains() -> None:
    selection = _select([1, 0, 0, 1], [0, 0, 1, 0])
    assert selection.kept.all() and set(_reasons(selection)) == {"trained"}
    assert selection.group_size.tolist() == [4] * 8
    assert selection.counts["groups"] == selection.counts["groups_trained"] == 2


@pytest.mark.parametrize("failed, reason", [(TIMEOUT, "reward_timeout"), (ERROR, "reward_error")])
def test_a_failed_score_drops_its_group_by_default(failed, reason) -> None:
    selection = _select([1, failed, 0, 1], [0, 1, 0, 0])
    assert _reasons(selection)[:4] == ["incomplete_group", reason, *["incomplete_group"] * 2]
    assert selection.kept.tolist() == [False] * 4 + [True] * 4
    assert ledger(selection) == {
        "sampled": 8,
        "trained": 4,
        "dropped": {"incomplete_group": 3},
        "refused": {reason: 1},
        "lost": 0,
    }


def test_scored_siblings_train_when_the_recipe_keeps_them() -> None:
    selection = _select(
        [1, ERROR, 0, None], [1, None, None, ERROR], [ERROR] * 4, partial="keep_scored"
    )
    assert _reasons(selection) == [
        *("trained", "reward_error", "trained"),
        *("group_of_one", "reward_error"),
        *["reward_error"] * 4,
    ]
    assert selection.group_size.tolist() == [2, 2, 2, 0, 0, 0, 0, 0, 0]
    assert ledger(selection)["lost"] == 3
    assert selection.counts["groups_incomplete"] == 3 and selection.counts["groups_of_one"] == 1


def test_a_lost_candidate_or_group_counts() -> None:
    selection = _select([1, 0, None, 1], prompts=3)
    assert _reasons(selection) == ["incomplete_group"] * 3
    assert selection.counts["groups"] == 3 and selection.counts["groups_incomplete"] == 3
    assert ledger(selection)["lost"] == 9
    with pytest.raises(ValueError, match="only 1 prompts"):
        _select([1, 0, 0, 0], [1, 0, 0, 0], prompts=1)


def test_aborted_and_invalid_samples_are_refused_whatever_their_score() -> None:
    end = np.array([End.TERMINATED, End.ABORTED, End.TRUNCATED, End.TERMINATED])
    selection = _select([1, 0, 0, 1], end=end)
    assert _reasons(selection)[1] == "aborted" and not selection.kept.any()
    truncated = _select([1, 0, 0, 1], end=np.full(4, End.TRUNCATED))
    assert truncated.kept.all()
    invalid = np.array([False, False, False, True])
    selection = _select([1, 0, 0, ERROR], invalid=invalid, partial="keep_scored")
    assert _reasons(selection) == ["trained"] * 3 + ["invalid_tokens"]


def test_equal_reward_values_follow_the_one_policy() -> None:
    dropped = _select([1, 1, 1, 1], [0.1, 0.1, 0.1, 0.1], [1, 0, 1, 1])
    assert _reasons(dropped) == ["zero_variance"] * 8 + ["trained"] * 4
    kept = _select([1, 1, 1, 1], [1, 0, 1, 1], zero="keep")
    assert kept.kept.all() and kept.counts["groups_zero_variance"] == 1
    close = _select([1.0, 1.0 + 1e-15, 1.0, 1.0])
    assert close.kept.all()
    scored = _select([1, 1, ERROR, 1], partial="keep_scored")
    assert _reasons(scored) == ["zero_variance", "zero_variance", "reward_error", "zero_variance"]


def test_groups_beyond_the_target_are_surplus_in_canonical_order() -> None:
    groups = ([1, 0], [1, 1], [0, 1], [0, ERROR], [1, 0], [0, 1])
    selection = _select(*groups, size=2, target=2)
    surplus, error = ["surplus"] * 2, ["incomplete_group", "reward_error"]
    equal = ["zero_variance"] * 2
    assert _reasons(selection) == ["trained"] * 2 + equal + ["trained"] * 2 + error + surplus * 2
    assert selection.counts["groups_informative"] == 4 and selection.counts["groups_trained"] == 2
    account = ledger(selection)
    assert account["dropped"] == {"incomplete_group": 1, "zero_variance": 2, "surplus": 4}
    assert _select(*groups, size=2, target=4).kept.sum() == 8
    # What is kept by rule is informative too.
    kept = _select([1, 1], [1, ERROR], [1, 0], size=2, zero="keep", target=1)
    assert _reasons(kept)[:2] == ["trained"] * 2 and kept.counts["groups_informative"] == 2


def test_a_group_of_one_never_trains() -> None:
    for zero in ("drop", "keep"):
        selection = _select([1], [0], size=1, zero=zero)
        assert _reasons(selection) == ["group_of_one"] * 2
        assert selection.counts["groups_of_one"] == 2


def test_rows_out_of_order_or_beyond_the_group_are_refused() -> None:
    scores = _scores([1, 0], [1, 0])
    end = np.zeros(4)
    with pytest.raises(ValueError, match=r"\(0, 1\) is followed by \(0, 0\)"):
        select_groups(scores.select([1, 0, 2, 3]), end, 2, "drop", "drop")
    with pytest.raises(ValueError, match=r"\(0, 0\) is followed by \(0, 0\)"):
        select_groups(scores.select([0, 0, 2, 3]), end, 2, "drop", "drop")
    with pytest.raises(ValueError, match=r"candidate \(0, 1\) lies beyond the group size of 1"):
        select_groups(scores, end, 1, "drop", "drop")
    with pytest.raises(ValueError, match="3 ends for 4"):
        select_groups(scores, end[:3], 2, "drop", "drop")


@pytest.mark.parametrize("key, value", [("zero", "mask"), ("partial", "pad")])
def test_an_unknown_policy_is_refused(key, value) -> None:
    with pytest.raises(ValueError, match=f"'{value}'; use"):
        _select([1, 0, 0, 0], **{key: value})


def test_no_samples_at_all() -> None:
    selection = _select(prompts=2)
    assert ledger(selection) == dict(sampled=0, trained=0, dropped={}, refused={}, lost=8)
    assert [len(rows) for rows in split_minibatches(selection, 2)] == [0, 0]


VALUES = st.one_of(st.sampled_from([0.0, 1.0, TIMEOUT, ERROR, None]), st.floats(0, 1, width=16))
GROUPS = st.lists(st.lists(VALUES, min_size=3, max_size=3), max_size=10)


@settings(max_examples=200, deadline=None)
@given(
    groups=GROUPS,
    zero=st.sampled_from(["drop", "keep"]),
    partial=st.sampled_from(["drop", "keep_scored"]),
    minibatches=st.integers(1, 5),
)
def test_the_ledger_closes_and_minibatches_hold_whole_groups(groups, zero, partial, minibatches):
    selection = _select(*groups, size=3, zero=zero, partial=partial, prompts=len(groups))
    account = ledger(selection)
    sampled = sum(told is not None for group in groups for told in group)
    assert account["sampled"] == sampled and account["lost"] == 3 * len(groups) - sampled
    out = sum(account["dropped"].values()) + sum(account["refused"].values())
    assert account["trained"] + out == sampled
    assert set(account["dropped"]) <= set(DROPPED) and set(account["refused"]) <= set(REFUSED)

    # What trains, said another way.
    trained = {draw: sum(isinstance(v, float) for v in group) for draw, group in enumerate(groups)}
    for draw, group in enumerate(groups):
        scored = [value for value in group if isinstance(value, float)]
        whole = len(scored) == 3 or (partial == "keep_scored" and len(scored) >= 2)
        if not whole or (zero == "drop" and len(set(scored)) == 1):
            trained[draw] = 0
    kept = selection.draw_index[selection.kept].tolist()
    assert all(kept.count(draw) == n for draw, n in trained.items())

    parts = split_minibatches(selection, minibatches)
    assert len(parts) == minibatches and all(part.dtype == np.int64 for part in parts)
    rows = np.concatenate(parts)
    assert sorted(rows.tolist()) == np.flatnonzero(selection.kept).tolist()
    homes = [set(selection.draw_index[part].tolist()) for part in parts]
    assert sum(len(home) for home in homes) == len(set().union(*homes))
    assert all((np.diff(part) > 0).all() for part in parts)
    sizes = [len(part) for part in parts]
    assert max(sizes) - min(sizes) <= 3
    assert max(map(len, homes)) - min(map(len, homes)) <= 1
    alive = sum(n > 0 for n in trained.values())
    assert sum(size == 0 for size in sizes) == max(0, minibatches - alive)


def test_equal_groups_are_dealt_in_turn() -> None:
    selection = _select(*[[1, 0]] * 5, size=2)
    parts = split_minibatches(selection, 2)
    assert [part.tolist() for part in parts] == [[0, 1, 4, 5, 8, 9], [2, 3, 6, 7]]


def test_groups_of_unequal_size_are_dealt_by_count_and_then_by_samples() -> None:
    """Sizes 4, 2, 2, 2: by samples alone one minibatch would hold one group and the other three."""
    short = [1, 0, None, None]
    selection = _select([1, 0, 0, 1], short, short, short, partial="keep_scored")
    parts = split_minibatches(selection, 2)
    assert [selection.draw_index[part].tolist() for part in parts] == [
        [0, 0, 0, 0, 3, 3],
        [1, 1, 2, 2],
    ]


def test_a_ledger_that_does_not_close_names_the_samples() -> None:
    selection = _select([1, 0, 0, 1], [1, 1, 1, 1])
    with pytest.raises(LedgerError, match="0/2 is trained and was not trained"):
        ledger(selection, np.array([1, 1, 0, 1, 0, 0, 0, 0], bool))
    with pytest.raises(LedgerError, match="1/3 is zero_variance and was trained"):
        ledger(selection, np.array([1, 1, 1, 1, 0, 0, 0, 1], bool))
    with pytest.raises(LedgerError, match="does not close"):
        ledger(replace(selection, counts=selection.counts | {"samples": 9}))


def test_the_iterations_plan_joins_selection_minibatches_and_packs() -> None:
    scores = _scores([1, 0], [1, 1], [0, 1], [0, ERROR])
    lengths = np.array([4, 5, 6, 7, 8, 9, 3, 3])
    table = SampleTable(
        draw_index=scores.draw_index,
        candidate=scores.candidate,
        prompt_length=np.full(8, 2),
        response_length=lengths - 2,
        actions=lengths - 2,
        end_reason=np.full(8, EndReason.EOS),
        replica=np.zeros(8),
        started=np.zeros(8),
        finished=np.zeros(8),
        scores=scores,
        version_id="v",
    )
    recipe = make_rules(group_size=2, prompts=4, tokens=9, minibatches=3)
    plan = plan_iteration(table, recipe, 2)
    assert plan.update.owner.tolist() == [1, 0, -1, -1, 1, 0, -1, -1]
    assert plan.totals == (Totals(5, 2), Totals(13, 2), Totals(0, 0))
    assert [len(part) for part in plan.update.packs] == [2, 2, 2]
    assert plan.account["trained"] == 4 and plan.account["dropped"] == {
        "incomplete_group": 1,
        "zero_variance": 2,
    }
    recipe.actor.tokens_per_micro_batch = 8
    with pytest.raises(ValueError, match="sample 2/1 \\(9 tokens\\)"):
        plan_iteration(table, recipe, 2)


def test_an_iteration_that_trains_nothing_still_has_a_probe_for_parity() -> None:
    scores = _scores([1, 1], [1, 1])
    table = SampleTable(
        draw_index=scores.draw_index,
        candidate=scores.candidate,
        prompt_length=np.full(4, 2),
        response_length=np.full(4, 3),
        actions=np.full(4, 3),
        end_reason=np.full(4, EndReason.EOS),
        replica=np.zeros(4),
        started=np.zeros(4),
        finished=np.zeros(4),
        scores=scores,
        version_id="v",
    )
    recipe = make_rules(group_size=2, prompts=2, minibatches=2)
    plan = plan_iteration(table, recipe, 1)
    assert not plan.trained.any() and plan.account["trained"] == 0
    assert plan.totals == (Totals(0, 0), Totals(0, 0))
    assert np.flatnonzero(plan.update.packed).tolist() == [0, 1]


def test_every_verdict_is_trained_refused_or_dropped() -> None:
    assert {Verdict.TRAINED, *REFUSED, *DROPPED} == set(Verdict)
