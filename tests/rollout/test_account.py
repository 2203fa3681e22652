"""The ledger, and that what trains depends on the samples alone.

Not covered: that a run writes the account down (tests/launch).
"""

from __future__ import annotations

import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.contracts.mesh import Mesh
from megarl.contracts.records import RewardRecord, RewardStatus, Scores
from megarl.contracts.samples import End
from megarl.data.exchange import gather_table
from megarl.rollout.account import Drawn, LedgerError, drop_rates, length_buckets
from megarl.rollout.groups import IterationPlan, plan_iteration, select_groups
from megarl.world import World
from tests.data.make_rules import make_rules
from tests.data.make_samples import make_record, make_samples

OK, TIMEOUT, ERROR = RewardStatus.OK, RewardStatus.TIMEOUT, RewardStatus.ERROR
SIZE = 3
LOST = "lost"
FATE = st.sampled_from([0.0, 0.5, 1.0, TIMEOUT, ERROR, LOST])
GROUPS = st.lists(st.lists(FATE, min_size=SIZE, max_size=SIZE), min_size=1, max_size=8)


def _records(groups: list[list]) -> list[RewardRecord]:
    return [
        make_record(draw, candidate, fate if isinstance(fate, float) else None, _status(fate))
        for draw, group in enumerate(groups)
        for candidate, fate in enumerate(group)
        if fate is not LOST
    ]


def _status(fate: object) -> RewardStatus:
    return fate if isinstance(fate, RewardStatus) else OK


def _drawn(groups: list[list], rounds: int = 1) -> Drawn:
    lost = sum(fate is LOST for group in groups for fate in group)
    sources = ["ab"[draw % 2] for draw in range(len(groups))]
    return Drawn(sources, rounds, {"aborted": lost} if lost else {})


def _recipe(zero: str, partial: str, minibatches: int, target: int) -> SimpleNamespace:
    return make_rules(
        group_size=SIZE,
        prompts=target,
        longest=8,
        minibatches=minibatches,
        zero_variance=zero,
        partial_groups=partial,
    )


@settings(max_examples=200, deadline=None)
@given(
    groups=GROUPS,
    zero=st.sampled_from(["drop", "keep"]),
    partial=st.sampled_from(["drop", "keep_scored"]),
    target=st.integers(0, 9),
    order=st.randoms(use_true_random=False),
)
def test_the_account_closes_in_any_order_of_arrival(groups, zero, partial, target, order):
    records = _records(groups)

    def decide() -> tuple:
        scores = Scores.from_records(records)
        end = np.full(len(records), End.TERMINATED)
        chosen = select_groups(scores, end, SIZE, zero, partial, prompts=len(groups), target=target)
        lengths = 1 + (scores.draw_index + scores.candidate) % 8
        return chosen, _drawn(groups).account(chosen, lengths, 8)

    selection, account = decide()
    order.shuffle(records)
    again, same = decide()
    assert np.array_equal(again.verdict, selection.verdict) and same == account
    assert selection.counts["groups_trained"] == min(target, selection.counts["groups_informative"])
    first = np.unique(selection.draw_index[selection.kept])
    surplus = [row for row in range(len(again.kept)) if again.reason(row) == "surplus"]
    assert all(selection.draw_index[row] > first.max(initial=-1) for row in surplus)
    for label in ("by_source", "by_length"):
        assert sum(sum(tally.values()) for tally in account[label].values()) == len(records)
        trained = sum(tally.get("trained", 0) for tally in account[label].values())
        assert trained == selection.kept.sum()


def _plan(case: int, size: int, rollout_tp: int) -> tuple:
    """The plan of one random iteration whose samples lie anywhere on `size` ranks."""
    world = World(Mesh(size, tp=1, rollout_tp=rollout_tp), torch.device("cpu"), 20.0)
    fates = random.Random(case)
    groups = [
        [fates.choice([0.0, 0.5, 1.0, 1.0, TIMEOUT, ERROR, LOST]) for _ in range(SIZE)]
        for _ in range(12)
    ]
    records = {(r.draw_index, r.candidate): r for r in _records(groups)}
    # Where a sample lies and in which order it came depends on the number of ranks too.
    places = random.Random(f"{case}/{size}/{rollout_tp}")
    mine = [key for key in records if places.randrange(world.mesh.replicas) == world.replica]
    places.shuffle(mine)
    samples = make_samples((d, c, 2, 1 + (d + c) % 8) for d, c in mine)
    table = gather_table(world, samples, [records[key] for key in mine])
    partial = ("drop", "keep_scored")[case % 2]
    recipe = _recipe("drop", partial, 2, 5)
    plan: IterationPlan = plan_iteration(
        table, recipe, world.mesh.dp, invalid=table.invalid, drawn=_drawn(groups)
    )
    chosen = [table.draw_index, table.candidate, plan.selection.verdict, plan.minibatch]
    return [column.tolist() for column in chosen], plan.account


def _plans(size: int, rollout_tp: int) -> list:
    return [_plan(case, size, rollout_tp) for case in range(12)]


@pytest.mark.dist
def test_the_training_set_is_the_same_on_any_number_of_ranks(ranks) -> None:
    (expected,) = ranks.run(1, _plans, 1, 1)
    assert any(account["trained"] for _, account in expected)
    assert any(account["dropped"].get("surplus") for _, account in expected)
    for size, rollout_tp in ((2, 1), (2, 2), (3, 1), (4, 1), (4, 2)):
        for told in ranks.run(size, _plans, size, rollout_tp):
            assert told == expected, (size, rollout_tp)


def test_losses_that_are_not_what_is_missing_do_not_close():
    scores = Scores.from_records(_records([[1.0, 0.0, LOST]]))
    chosen = select_groups(scores, np.zeros(2), SIZE, "drop", "drop", prompts=1)
    told = Drawn(["a"], 1, {"aborted": 1}).account(chosen, np.array([3, 4]), 8)
    assert told["lost_reasons"] == {"aborted": 1} and told["prompts"] == told["rounds"] == 1
    with pytest.raises(LedgerError, match="1 responses are missing of 1 groups, but 0 were lost"):
        Drawn(["a"]).account(chosen, np.array([3, 4]), 8)


def test_what_does_not_train_is_told_by_source_and_by_length():
    scores = Scores.from_records(_records([[1.0, 0.0, 1.0], [1.0, 1.0, 1.0], [1.0, 0.0, ERROR]]))
    chosen = select_groups(scores, np.zeros(9), SIZE, "drop", "drop")
    told = Drawn(["a", "b", "a"]).account(chosen, np.array([1, 2, 3, 4, 5, 6, 7, 8, 8]), 8)
    assert told["by_source"] == {
        "a": {"trained": 3, "reward_error": 1, "incomplete_group": 2},
        "b": {"zero_variance": 3},
    }
    assert told["by_length"] == {
        "1-2": {"trained": 2},
        "3-4": {"trained": 1, "zero_variance": 1},
        "5-6": {"zero_variance": 2},
        "7-8": {"reward_error": 1, "incomplete_group": 2},
    }
    assert drop_rates(told["by_source"]) == {"a": 0.5, "b": 1.0}
    assert drop_rates(told["by_length"])["3-4"] == 0.5


@pytest.mark.parametrize(
    "longest, names",
    [(32, ["1-8", "9-16", "17-24", "25-32"]), (3, ["1-1", "2-2", "3-3"]), (1, ["1-1"])],
)
def test_length_buckets_are_equal_parts_of_the_longest_response(longest, names):
    found, bucket = length_buckets(np.arange(1, longest + 1), longest)
    assert found == names
    for length, index in enumerate(bucket.tolist(), start=1):
        low, _, high = found[index].partition("-")
        assert int(low) <= length <= int(high)
