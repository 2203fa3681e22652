"""Selection where responses are not compared, cut off ones are masked, or steps are scored; what
overlong shaping does to decisions; minibatches of single samples.

Not covered: groups compared by totals alone (test_groups.py).
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.algorithms.reduction import Totals
from megarl.rollout.groups import Selection, ledger, select, split_minibatches
from tests.algorithms.make_credit import Row, make_facts, plan_of
from tests.data.make_rules import make_rules

MASK = {"overlong": {"mask_truncated": True}}


def _told(rows: list[Row], size: int, target: int | None = None, **algorithm) -> list[str]:
    return _reasons(_selected(rows, size, target, **algorithm)[0])


def _selected(rows, size, target=None, **algorithm) -> tuple[Selection, np.ndarray]:
    rules = make_rules(group_size=size, prompts=9, longest=8, **algorithm)
    return select(make_facts(rows).table, rules, target=target)


def _reasons(selection: Selection) -> list[str]:
    return [str(selection.reason(row)) for row in range(len(selection.kept))]


def test_a_lone_response_trains_where_nothing_is_compared() -> None:
    alone = [Row(0, 0, 1.0), Row(1, 0, 0.0)]
    assert _told(alone, 1, advantage="reinforce") == ["trained"] * 2
    assert _told(alone, 1, name="ppo") == ["trained"] * 2
    assert _told(alone, 1) == ["group_of_one"] * 2
    # Of three, two could not be scored: the third trains, or its group does not by the recipe.
    broken = [Row(0, 0, 1.0), Row(0, 1, None), Row(0, 2, None)]
    assert _told(broken, 3, name="ppo") == ["trained", *["reward_error"] * 2]
    dropped = _told(broken, 3, name="ppo", partial_groups="drop")
    assert dropped == ["incomplete_group", *["reward_error"] * 2]
    equal = [Row(0, 0, 1.0), Row(0, 1, 1.0), Row(1, 0, 1.0)]
    assert _told(equal, 2, name="ppo") == ["trained"] * 3
    assert _told(equal, 2, name="ppo", zero_variance="drop") == ["zero_variance"] * 2 + ["trained"]


def test_cut_off_responses_are_compared_and_train_nothing() -> None:
    rows = [
        *(Row(0, 0, 1.0), Row(0, 1, 0.0, cut=True), Row(0, 2, 1.0)),
        *(Row(1, 0, 1.0, cut=True), Row(1, 1, 0.0, cut=True), Row(1, 2, 0.0, cut=True)),
        *(Row(2, 0, 1.0, cut=True), Row(2, 1, 1.0), Row(2, 2, 1.0)),
        *(Row(3, 0, 1.0, cut=True), Row(3, 1, None), Row(3, 2, 0.0)),
    ]
    selection, _ = _selected(rows, 3, **MASK)
    assert _reasons(selection) == [
        *("trained", "truncated", "trained"),
        *["truncated"] * 3,
        *["zero_variance"] * 3,
        *("incomplete_group", "reward_error", "incomplete_group"),
    ]
    assert np.flatnonzero(selection.compared).tolist() == [0, 1, 2, 3, 4, 5]
    # A group of which nothing is left to train says nothing.
    assert selection.counts["groups_informative"] == selection.counts["groups_trained"] == 1
    assert selection.counts["samples_truncated"] == 4
    account = ledger(selection)
    assert account["trained"] == 2 and account["dropped"]["truncated"] == 4
    assert _told(rows[:3], 3) == ["trained"] * 3
    plan = plan_of(make_facts(rows), 3, **MASK)
    assert plan.totals == (Totals(4, 2),) and plan.trained.sum() == 2
    assert np.array_equal(plan.compared, selection.compared)


def test_surplus_groups_are_surplus_whole() -> None:
    rows = [
        Row(d, c, float(c), cut=(d, c) in ((0, 0), (0, 1), (2, 1)))
        for d in range(3)
        for c in (0, 1)
    ]
    assert _told(rows, 2, target=1, **MASK) == [
        *["truncated"] * 2,
        *["trained"] * 2,
        *["surplus"] * 2,
    ]


def test_decisions_are_on_totals_after_overlong_shaping() -> None:
    """Equal scores, one response of 7 of 8 tokens with a buffer of 2: half the penalty."""
    rows = [Row(0, 0, 1.0), Row(0, 1, 1.0, (1,) * 7)]
    assert _told(rows, 2) == ["zero_variance"] * 2
    selection, rewards = _selected(rows, 2, overlong={"buffer_tokens": 2, "penalty": 3.0})
    assert selection.kept.all() and rewards.tolist() == [1.0, -0.5]
    unequal = [Row(0, 0, 0.5), Row(0, 1, 1.0, (1,) * 7)]
    assert _told(unequal, 2, overlong={"buffer_tokens": 2}) == ["zero_variance"] * 2


def test_decisions_are_on_step_scores_where_these_are_trained_on() -> None:
    rows = [
        *(Row(0, 0, 1.0, steps=[(0, 0.5)]), Row(0, 1, 0.0, steps=[(0, 0.5), (1, 0.5)])),
        *(Row(1, 0, 1.0, steps=[(0, 0.5)]), Row(1, 1, 1.0, steps=[(1, 0.0)])),
        *(Row(2, 0, 1.0, steps=[(0, 0.5)]), Row(2, 1, 0.0)),
        *(Row(3, 0, 1.0, steps=[(0, 0.5)]), Row(3, 1, None)),
    ]
    selection, _ = _selected(rows, 2, rewards="process")
    assert _reasons(selection) == [
        *["zero_variance"] * 2,
        *["trained"] * 2,
        *("incomplete_group", "no_steps"),
        *("incomplete_group", "reward_error"),
    ]
    assert ledger(selection)["refused"] == {"reward_error": 1, "no_steps": 1}
    assert selection.counts["samples_no_steps"] == 1
    assert _told(rows[:4], 2) == ["trained"] * 2 + ["zero_variance"] * 2


REWARD = st.one_of(st.none(), st.sampled_from([0.0, 1.0]))
SAMPLE = st.tuples(REWARD, st.booleans(), st.lists(st.sampled_from([0.0, 1.0]), max_size=2))


@settings(max_examples=200, deadline=None)
@given(
    groups=st.lists(st.lists(SAMPLE, min_size=3, max_size=3), min_size=1, max_size=6),
    advantage=st.sampled_from(["grpo", "reinforce"]),
    rewards=st.sampled_from(["outcome", "process"]),
    mask=st.booleans(),
    target=st.one_of(st.none(), st.integers(1, 3)),
    minibatches=st.integers(1, 4),
)
def test_the_ledger_closes_and_split_minibatches_are_even(
    groups, advantage, rewards, mask, target, minibatches
) -> None:
    rows = [
        Row(draw, candidate, reward, cut=cut, steps=list(enumerate(steps)))
        for draw, group in enumerate(groups)
        for candidate, (reward, cut, steps) in enumerate(group)
    ]
    keys = {"advantage": advantage, "rewards": rewards, "overlong": {"mask_truncated": mask}}
    selection, _ = _selected(rows, 3, target, **keys)
    account = ledger(selection)
    out = sum(account["dropped"].values()) + sum(account["refused"].values())
    assert account["trained"] + out == len(rows)
    cut = np.array([row.cut for row in rows])
    assert not (mask and (selection.kept & cut).any())
    assert (selection.compared >= selection.kept).all()
    if advantage == "grpo":
        draws = selection.draw_index[selection.compared]
        assert all((draws == draw).sum() >= 2 for draw in draws)
    parts = split_minibatches(selection, minibatches, "split")
    sizes = [len(part) for part in parts]
    assert max(sizes) - min(sizes) <= 1
    assert sorted(np.concatenate(parts).tolist()) == np.flatnonzero(selection.kept).tolist()
    assert all((np.diff(part) > 0).all() and part.dtype == np.int64 for part in parts)


def test_another_kind_of_minibatch_is_refused() -> None:
    selection, _ = _selected([Row(0, 0, 1.0), Row(0, 1, 0.0)], 2)
    assert [part.tolist() for part in split_minibatches(selection, 2)] == [[0, 1], []]
    assert [part.tolist() for part in split_minibatches(selection, 2, "split")] == [[0], [1]]
    with pytest.raises(ValueError, match="'halves'; use whole or split"):
        split_minibatches(selection, 2, "halves")
