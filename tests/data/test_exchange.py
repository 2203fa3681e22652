"""Samples reach their owners by id, on real gloo ranks. Not covered: NCCL, more than one node."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from megarl.contracts.mesh import Mesh
from megarl.contracts.records import RewardStatus
from megarl.contracts.samples import Samples
from megarl.data.arrivals import Arrival, Scope
from megarl.data.exchange import ExchangeError, exchange, gather_arrivals, gather_table
from megarl.data.join import JoinCounts
from megarl.world import World
from tests.data.make_samples import make_record, make_sample, make_samples

GROUPS, GROUP = 4, 3


def _all_shapes() -> list[tuple[int, int, int, int]]:
    return [
        (draw, candidate, 2 + draw, 1 + (draw + 2 * candidate) % 5)
        for draw in range(GROUPS)
        for candidate in range(GROUP)
    ]


def _world(size: int, tp: int, rollout_tp: int) -> World:
    return World(Mesh(size, tp=tp, rollout_tp=rollout_tp), torch.device("cpu"), 20.0)


def _mine(world: World) -> list[tuple[int, int, int, int]]:
    """Shuffled over replicas and out of order; the last of several replicas made nothing."""
    busy = max(1, world.mesh.replicas - 1)
    shapes = _all_shapes()
    mine = [shape for at, shape in enumerate(shapes) if at * 7 % busy == world.replica]
    return mine[::-1]


def _records(shapes, wrong_total: float = 0.0) -> list:
    """Candidate c has c step scores, all on its first token."""
    return [
        replace(make_record(d, c, d + c / 10 + wrong_total), step_rewards=((0, d + 0.5),) * c)
        for d, c, _, _ in shapes
    ]


def _owner(table, dp: int, empty: int | None) -> np.ndarray:
    owner = np.arange(len(table)) * 5 % (dp + 1) - 1  # −1 trains nowhere
    if empty is not None:
        owner[owner == empty] = -1
    return owner


def _exchange_all(size: int, tp: int, rollout_tp: int, empty: int | None) -> list:
    world = _world(size, tp, rollout_tp)
    shapes = _mine(world)
    samples = make_samples(shapes, holes=True)
    # A rank that leads no replica may know nothing of rewards and has a clock of its own.
    if not world.leads_replica:
        samples = replace(samples, started=samples.started + 50)
    records = _records(shapes) if world.leads_replica else []
    table = gather_table(world, samples, records)
    owner = _owner(table, world.mesh.dp, empty)
    owned = exchange(world, samples, table, owner)
    mine, scores = owned.samples, owned.scores
    assert owned.joined == table.joined == JoinCounts()

    whole = make_samples(_all_shapes(), holes=True)
    expected = whole.select(np.flatnonzero(owner == world.dp_index))
    for name in expected.__dataclass_fields__:
        assert np.array_equal(getattr(mine, name), getattr(expected, name)), name
    assert scores.draw_index.tolist() == mine.draw_index.tolist()
    assert scores.candidate.tolist() == mine.candidate.tolist()
    assert np.array_equal(scores.total, mine.draw_index + mine.candidate / 10)
    assert np.array_equal(scores.components["correct"], scores.total)
    assert np.array_equal(scores.steps.counts, mine.candidate)
    assert np.array_equal(scores.steps.value, np.repeat(mine.draw_index + 0.5, mine.candidate))

    assert np.array_equal(table.draw_index, whole.draw_index)
    assert np.array_equal(table.prompt_length, whole.prompt_lengths)
    assert np.array_equal(table.response_length, whole.response_lengths)
    assert table.actions.tolist() == [int(sample.action_mask.sum()) for sample in whole]
    assert np.array_equal(table.end, whole.end) and np.array_equal(table.started, whole.started)
    return [len(mine), owner.tolist(), table.replica.tolist()]


@pytest.mark.dist
@pytest.mark.parametrize(
    "size, tp, rollout_tp, empty",
    [(2, 1, 1, None), (2, 2, 1, None), (2, 1, 2, 1), (4, 2, 1, None), (4, 1, 2, 0), (4, 2, 4, 1)],
)
def test_every_owner_gets_its_samples_in_canonical_order(ranks, size, tp, rollout_tp, empty):
    told = ranks.run(size, _exchange_all, size, tp, rollout_tp, empty)
    assert len({str(t[1:]) for t in told}) == 1
    assert sum(t[0] for t in told) == tp * sum(owner >= 0 for owner in told[0][1])


def _nothing() -> int:
    world = _world(2, 1, 1)
    table = gather_table(world, make_samples([]), [])
    owned = exchange(world, make_samples([]), table, np.zeros(0, dtype=np.int64))
    return len(table) + len(owned.samples) + len(owned.scores)


@pytest.mark.dist
def test_an_iteration_without_samples_passes_through(ranks) -> None:
    assert ranks.run(2, _nothing) == [0, 0]


def _bad_table(case: str) -> str:
    world = _world(2, 1, 2 if case == "differ" else 1)
    shapes = [(world.rank, 0, 2, 2), (world.rank, 1, 2, 2)]
    version, records, scope = "v0", None, None
    if case == "differ":
        shapes = [(0, 0, 2, 2 + world.rank)]
    elif case in ("length", "reward") and world.rank == 1:
        shapes.append((0, 1, 2, 2 + (case == "length")))
        records = [
            make_record(d, c, 9.0 if d == 0 and case == "reward" else d + c / 10)
            for d, c, _, _ in shapes
        ]
    elif case == "steps" and world.rank == 1:
        shapes.append((0, 1, 2, 2))
        records = _records(shapes)
        records[-1] = replace(records[-1], step_rewards=((0, 9.0),))
    elif case == "unscored" and world.rank == 1:
        records = _records(shapes[:1])
    elif case == "unknown" and world.rank == 1:
        records = _records([*shapes, (9, 9, 1, 1)])
    elif case == "twice" and world.rank == 1:
        records = [*_records(shapes), make_record(*shapes[0][:2], 7.0)]
    elif case == "scorer" and world.rank == 1:
        records = [make_record(1, c, None, RewardStatus.ERROR, "s2") for c in (0, 1)]
    elif case == "version":
        version = f"v{world.rank}"
    elif case == "iteration":
        scope = Scope("run", 6 + world.rank, "v0")
    elif case == "old scorer" and world.rank == 1:
        scope = Scope("", 0, "v0", "s2")
    records = _records(shapes) if records is None else records
    samples = make_samples(shapes, version)
    if case == "tokens" and world.rank == 1:
        ids, mask = samples.response_ids.copy(), samples.action_mask.copy()
        ids[0], mask[-1] = 5, False
        samples = replace(
            samples, draw_index=samples.draw_index * 0, response_ids=ids, action_mask=mask
        )
        records = _records([(0, 0, 2, 2), (0, 1, 2, 2)])
    try:
        gather_table(world, samples, records, scope)
    except ExchangeError as error:
        return str(error)
    return "joined"


@pytest.mark.dist
@pytest.mark.parametrize(
    "case, expected",
    [
        ("good", "joined"),
        ("length", "two different rollout results of sample 0/1: response_length is 2 and 3"),
        ("reward", "two different reward results of sample 0/1: total is 0.1 and 9.0"),
        ("steps", "two different reward results of sample 0/1: step values is 0.5 and 9.0 at"),
        ("tokens", "ranks [0, 1] made different samples 0/0: prompt_ids, response_ids, "),
        ("unscored", "rank 1: samples without a reward record: 1/1"),
        ("unknown", "rank 1: reward records without a sample: 9/9"),
        ("twice", "rank 1: two different reward results of sample 1/0: total is 1.0 and 7.0"),
        ("scorer", "rank 1 scored with s2, others with s1"),
        ("old scorer", "1/0, 1/1 (late: reward 1/0 of version s1, expected s2; reward 1/1 of"),
        ("version", "several policy versions in one iteration: ['v0', 'v1']"),
        ("iteration", "rank 1 awaits attempt 0 of iteration 7 of run 'run', rank 0 attempt 0 of"),
        ("differ", "ranks 0 and 1 of one replica hold different samples"),
    ],
)
def test_what_does_not_join_is_named_on_every_rank(ranks, case: str, expected: str) -> None:
    for told in ranks.run(2, _bad_table, case):
        assert expected in told


def _repeated() -> list:
    """Two replicas, all kinds of repeats and late results on the second."""
    world = _world(2, 1, 1)
    scope = Scope("run", 3, "v1", "s1", attempt=1)
    shapes = [(world.rank, 0, 2, 2), (world.rank, 1, 2, 3)]
    samples, records = make_samples(shapes, "v1", holes=True), _records(shapes)
    arrivals = [Arrival(scope, samples, records)]
    if world.rank == 1:
        later = replace(samples, started=samples.started + 9, finished=samples.finished + 9)
        slow = [replace(record, seconds=5.0) for record in records]
        arrivals.insert(0, Arrival(scope, later.select([1]), slow))
        for old in (
            replace(scope, attempt=0),
            replace(scope, iteration=2),
            replace(scope, run_id="other"),
        ):
            arrivals.insert(0, Arrival(old, samples, _records(shapes, 1.0)))
        arrivals.insert(0, Arrival(scope, make_samples(shapes, "v0"), _records(shapes, 1.0)))
        # The other replica made this one too.
        extra = [(0, 1, 2, 3)]
        arrivals.append(Arrival(scope, make_samples(extra, "v1", holes=True), _records(extra)))
    gathered = gather_arrivals(world, scope, arrivals)
    table = gathered.table
    assert table.draw_index.tolist() == [0, 0, 1, 1] and table.replica.tolist() == [0, 0, 1, 1]
    assert table.finished.tolist() == [1.0, 101.0, 1001.0, 1101.0]
    assert table.scores.total.tolist() == [0.0, 0.1, 1.0, 1.1]
    assert table.scores.seconds.tolist() == [0.0] * 4
    assert gathered.samples.keys.tolist() == samples.keys.tolist()
    assert [(r.draw_index, r.candidate) for r in gathered.records] == [s[:2] for s in shapes]
    # After the table was gathered: one that the other replica made, one that nobody knows.
    held = gathered.samples
    if world.rank == 1:
        more = make_samples([(0, 0, 2, 2), (7, 3, 2, 2)], "v1", holes=True)
        held = Samples.concat([more, held])
    owned = exchange(world, held, table, np.array([0, 1, 1, -1]))
    assert owned.samples.keys.tolist() == table.keys[[[0], [1, 2]][world.rank]].tolist()
    return [table.joined, owned.joined]


@pytest.mark.dist
def test_what_comes_again_or_late_changes_nothing_and_is_counted(ranks) -> None:
    told = ranks.run(2, _repeated)
    assert told[0] == told[1]
    table, owned = told[0]
    # Again: a sample and two records on rank 1, one of each on both. Late: 4 × 2 of each role.
    assert table.account == {"duplicates": 5, "late": 16}
    assert table.duplicate_names[:2] == ("rollout 1/1", "reward 1/0")
    assert table.late_names[0] == "rollout 1/0 of version v0, expected v1"
    assert owned.account == {"duplicates": 6, "late": 17}
    assert "rollout 0/0" in owned.duplicate_names


def _bad_exchange(case: str) -> str:
    world = _world(2, 1, 1)
    shapes = [(world.rank, 0, 2, 2), (world.rank, 1, 2, 2)]
    samples = make_samples(shapes)
    table = gather_table(world, samples, _records(shapes))
    if case == "missing" and world.rank == 1:
        samples = samples.select([0])
    elif case == "other" and world.rank == 1:
        samples = make_samples([*shapes, (0, 1, 2, 3)])
    elif case == "changed" and world.rank == 1:
        samples = replace(samples, seed=samples.seed + np.array([0, 1]))
    owner = np.array([0, 0, 0, 1])
    if case == "unasked" and world.rank == 1:
        owner = np.array([0, 0, 0, 0])
    try:
        exchange(world, samples, table, owner)
    except ExchangeError as error:
        return str(error)
    return "joined"


@pytest.mark.dist
@pytest.mark.parametrize(
    "case, expected",
    [
        ("missing", "rank 1: 1/1 missing"),
        ("other", "rank 1: 0/1 changed since they were gathered"),
        ("unasked", "rank 0: 1/1 unasked"),
        ("changed", "rank 1: 1/1 changed since they were gathered"),
    ],
)
def test_a_lost_or_changed_sample_is_named_on_every_rank(ranks, case, expected) -> None:
    for told in ranks.run(2, _bad_exchange, case):
        assert expected in told


def test_a_sample_the_table_does_not_know_is_named() -> None:
    from megarl.contracts.records import Scores
    from megarl.data.table import SampleTable

    sample = make_sample(3, 1, 2, 2)
    columns = {
        name: np.zeros(1, dtype=np.int64)
        for name in ("prompt_length", "response_length", "actions", "end_reason", "replica")
    }
    table = SampleTable(
        draw_index=np.array([sample.draw_index]),
        candidate=np.array([sample.candidate]),
        started=np.zeros(1),
        finished=np.zeros(1),
        scores=Scores.from_records([make_record(3, 1, 1.0)]),
        version_id="v0",
        **columns,
    )
    assert table.rows_of(np.array([3]), np.array([1])).tolist() == [0]
    with pytest.raises(KeyError, match="3/2, 4/0"):
        table.rows_of(np.array([3, 3, 4]), np.array([1, 2, 0]))
