"""Any order of arrival, any loss and duplication, any number of ranks: one table, one training set,
the same advantages. Replicas are simulated by the pure halves of the exchange; a few cases run on
real gloo ranks.

Not covered: a rank that dies on the way (tests/launch), arrivals between two collectives of NCCL.
"""

from __future__ import annotations

from dataclasses import replace
from random import Random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.algorithms.advantages import grpo_advantages
from megarl.contracts.ids import pair_keys
from megarl.contracts.mesh import Mesh
from megarl.contracts.records import RewardStatus, Scores
from megarl.contracts.samples import Samples
from megarl.data.arrivals import Arrival, rows_that_stay
from megarl.data.exchange import exchange, gather_arrivals, join_arrived, report_of, table_of
from megarl.data.join import JoinCounts, JoinError
from megarl.data.table import SampleTable
from megarl.rollout.groups import IterationPlan, plan_iteration
from megarl.world import World
from tests.data.deliveries import SCOPE, Truth, deliver, draw_truth
from tests.data.make_rules import make_rules
from tests.data.make_samples import make_samples

GROUPS, GROUP = 4, 3
RECIPE = make_rules(
    group_size=GROUP, prompts=GROUPS, tokens=24, minibatches=2, partial_groups="keep_scored"
)
FACTS = [n for n in Samples.__dataclass_fields__ if n not in ("started", "finished")]


def _gather(arrivals: list[list[Arrival]]) -> SampleTable:
    """What every rank of a world with one rank per replica holds after the gather."""
    reports = [report_of(SCOPE, each, leads=True)[0] for each in arrivals]
    assert not [report.problem for report in reports if report.problem]
    return table_of(SCOPE, dict(enumerate(reports)))


def _plan(table: SampleTable, dp: int) -> tuple[IterationPlan, np.ndarray]:
    plan = plan_iteration(table, RECIPE, dp, invalid=table.invalid)
    advantages = grpo_advantages(table.scores.total, table.draw_index, plan.trained, "sample", 1e-6)
    return plan, advantages


def _told(table: SampleTable) -> list:
    """All of a table but clocks, which replica made a row, and counts."""
    names = ("draw_index", "candidate", "prompt_length", "response_length", "actions")
    columns = [getattr(table, name) for name in (*names, "end_reason", "contents")]
    scores = table.scores
    columns += [scores.total, *(scores.components[name] for name in sorted(scores.components))]
    return [column.tobytes() for column in columns] + [scores.status, scores.detail]


def _by_hand(truth: Truth) -> dict[int, float]:
    """Advantages by key, group by group: the oracle."""
    wanted = {}
    for draw in range(GROUPS):
        group = [r for r in truth.records if r.draw_index == draw and r.total is not None]
        rewards = np.array([record.total for record in group])
        if len(group) < 2 or len(set(rewards.tolist())) < 2:
            continue
        for record, reward in zip(group, rewards, strict=True):
            key = int(pair_keys(record.draw_index, record.candidate))
            wanted[key] = (reward - rewards.mean()) / (rewards.std(ddof=1) + 1e-6)
    return wanted


@settings(max_examples=60, deadline=None)
@given(random=st.randoms(use_true_random=False), replicas=st.integers(1, 4))
def test_any_order_loss_and_duplication_gives_the_same_training_set(random, replicas) -> None:
    truth = draw_truth(random, GROUPS, GROUP)
    arrivals, planted = deliver(random, truth, replicas)
    plain = _gather([[Arrival(SCOPE, truth.samples, truth.records)]])
    table = _gather(arrivals)
    assert _told(table) == _told(plain)
    assert table.joined.account == {"duplicates": planted.duplicates, "late": planted.late}
    assert plain.joined == JoinCounts()

    plan, advantages = _plan(table, dp=replicas)
    expected, single = _plan(plain, dp=1)
    assert advantages.tobytes() == single.tobytes()
    assert np.array_equal(plan.trained, expected.trained)
    trained = table.keys[plan.trained].tolist()
    oracle = _by_hand(truth)
    assert trained == sorted(oracle)
    assert advantages[plan.trained] == pytest.approx([oracle[key] for key in trained], abs=1e-9)

    # Every owner gets its rows once, whatever order and however often their parts come.
    kept = [report_of(SCOPE, each, leads=False)[1] for each in arrivals]
    seen = []
    for dp_index in range(replicas):
        own = np.flatnonzero(plan.update.owner == dp_index)
        parts = [s.select(np.flatnonzero(np.isin(s.keys, table.keys[own]))) for s in kept]
        parts += [part for part in parts if random.random() < 0.3]
        random.shuffle(parts)
        joined, wrong = join_arrived(table, own, parts)
        assert not wrong
        assert joined.counts.duplicates == sum(map(len, parts)) - len(own)
        mine = Samples.concat(rows_that_stay(parts, joined)).canonical()
        assert _same(mine, truth.samples.select(own))
        seen += mine.keys.tolist()
    assert sorted(seen) == table.keys[plan.update.packed].tolist()


def _same(left: Samples, right: Samples) -> bool:
    return all(np.array_equal(getattr(left, name), getattr(right, name)) for name in FACTS)


@settings(max_examples=40, deadline=None)
@given(random=st.randoms(use_true_random=False), replicas=st.integers(1, 4), data=st.data())
def test_a_contradiction_is_named_in_any_order_and_wherever_it_comes(random, replicas, data):
    truth = draw_truth(random, GROUPS, GROUP)
    arrivals, _ = deliver(random, truth, replicas)
    row = data.draw(st.integers(0, len(truth.samples) - 1))
    field = data.draw(st.sampled_from(["response_ids", "rollout_log_probs", "seed", "total"]))
    sample, record = truth.samples.select([row]), truth.records[row]
    if field == "total":
        record = replace(record, total=5.0, status=RewardStatus.OK)
    else:
        change = {"rollout_log_probs": np.float32(-0.5)}.get(field, 1)
        sample = replace(sample, **{field: getattr(sample, field) + change})
    odd = Arrival(SCOPE, sample, [record])
    home = arrivals[data.draw(st.integers(0, replicas - 1))]
    home.insert(data.draw(st.integers(0, len(home))), odd)
    reports = [report_of(SCOPE, each, leads=True)[0] for each in arrivals]
    told = "; ".join(report.problem for report in reports if report.problem)
    if not told:
        with pytest.raises(JoinError) as caught:
            table_of(SCOPE, dict(enumerate(reports)))
        told = str(caught.value)
        if field != "total":
            assert caught.value.field == "contents"
            told = told.replace("contents", field)
    name = f"{truth.samples.draw_index[row]}/{truth.samples.candidate[row]}"
    assert f"of sample {name}: {field} is" in told


@settings(max_examples=25, deadline=None)
@given(random=st.randoms(use_true_random=False), replicas=st.integers(1, 4))
def test_a_lost_reward_is_named_and_a_lost_sample_with_its_reward_is_not_there(random, replicas):
    truth = draw_truth(random, GROUPS, GROUP)
    lost = random.randrange(len(truth.samples))
    records = truth.records[:lost] + truth.records[lost + 1 :]
    report, _, _ = report_of(SCOPE, [Arrival(SCOPE, truth.samples, records)], leads=True)
    name = f"{truth.samples.draw_index[lost]}/{truth.samples.candidate[lost]}"
    assert report.problem == f"samples without a reward record: {name}"
    rows = [row for row in range(len(truth.samples)) if row != lost]
    rest = Truth(truth.samples.select(rows), records)
    if rows:
        table = _gather(deliver(random, rest, replicas)[0])
        assert table.keys.tolist() == rest.samples.keys.tolist()


def _on_ranks(size: int, tp: int, rollout_tp: int, seed: int) -> list:
    """One real iteration's joins; what must not depend on the number of ranks."""
    world = World(Mesh(size, tp=tp, rollout_tp=rollout_tp), torch.device("cpu"), 20.0)
    random = Random(seed)
    truth = draw_truth(random, GROUPS, GROUP)
    arrivals, planted = deliver(Random(seed * 10 + size), truth, world.mesh.replicas)
    mine = arrivals[world.replica]
    if not world.leads_replica:
        mine = [replace(arrival, records=()) for arrival in mine]
    gathered = gather_arrivals(world, SCOPE, mine)
    table = gathered.table
    plan, advantages = _plan(table, world.mesh.dp)
    owned = exchange(world, gathered.samples, table, plan.update.owner)
    assert owned.joined.account == {"duplicates": planted.duplicates, "late": planted.late}
    own = np.flatnonzero(plan.update.owner == world.dp_index)
    assert _same(owned.samples, truth.samples.select(own))
    assert np.array_equal(owned.scores.total, table.scores.total[own], equal_nan=True)
    if world.leads_replica:
        held = [(record.draw_index, record.candidate) for record in gathered.records]
        assert held == [(s.draw_index, s.candidate) for s in gathered.samples]
    shared = [_told(table), advantages.tobytes(), plan.trained.tolist()]
    return [shared, owned.samples.keys.tolist() if world.leads_owners else []]


@pytest.mark.dist
@pytest.mark.parametrize("seed", [1, 2])
def test_one_to_four_ranks_train_on_the_same(ranks, seed) -> None:
    seen = []
    for mesh in ((1, 1, 1), (2, 1, 1), (2, 1, 2), (3, 1, 1), (4, 2, 2), (4, 1, 1)):
        told = ranks.run(mesh[0], _on_ranks, *mesh, seed)
        packed = sorted(key for _, keys in told for key in keys)
        seen += [(shared, packed) for shared, _ in told]
    assert all(each == seen[0] for each in seen)


def test_an_arrival_of_a_later_attempt_says_that_this_rank_is_behind() -> None:
    ahead = replace(SCOPE, attempt=2)
    samples = make_samples([(0, 0, 2, 2)], SCOPE.version_id)
    report, _, _ = report_of(SCOPE, [Arrival(ahead, samples)], leads=True)
    assert "results of attempt 2 of iteration 7, where attempt 1 is running" in report.problem


def test_columns_of_the_table_are_a_few_numbers_a_sample() -> None:
    """Metadata only: no tokens and no words; a detail is a number and once in a dictionary."""
    shapes = [(draw, candidate, 20, 30) for draw in range(500) for candidate in range(8)]
    truth = make_samples(shapes, SCOPE.version_id)
    records = draw_truth(Random(0), 500, 8).records
    records = {(r.draw_index, r.candidate): r for r in records}
    present = [r for r in range(len(truth)) if (r // 8, r % 8) in records]
    report, _, _ = report_of(
        SCOPE, [Arrival(SCOPE, truth.select(present), list(records.values()))], leads=True
    )
    assert not report.problem
    assert isinstance(report.scores, Scores) and report.scores.details == ("",)
    columns = [*report.columns.values(), report.scores.total, report.scores.status_code]
    columns += [report.scores.detail_code, report.scores.seconds]
    columns += list(report.scores.components.values())
    assert sum(column.nbytes for column in columns) <= 80 * len(present)
