"""Samples reach their owners by id, on real gloo ranks. Not covered: NCCL, more than one node."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from megarl.contracts.mesh import Mesh
from megarl.contracts.records import RewardStatus
from megarl.data.exchange import ExchangeError, exchange, gather_table
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
    return [make_record(d, c, d + c / 10 + wrong_total) for d, c, _, _ in shapes]


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
    mine, scores = exchange(world, samples, table, owner)

    whole = make_samples(_all_shapes(), holes=True)
    expected = whole.select(np.flatnonzero(owner == world.dp_index))
    for name in expected.__dataclass_fields__:
        assert np.array_equal(getattr(mine, name), getattr(expected, name)), name
    assert scores.draw_index.tolist() == mine.draw_index.tolist()
    assert scores.candidate.tolist() == mine.candidate.tolist()
    assert np.array_equal(scores.total, mine.draw_index + mine.candidate / 10)
    assert np.array_equal(scores.components["correct"], scores.total)

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
    mine, scores = exchange(world, make_samples([]), table, np.zeros(0, dtype=np.int64))
    return len(table) + len(mine) + len(scores.total)


@pytest.mark.dist
def test_an_iteration_without_samples_passes_through(ranks) -> None:
    assert ranks.run(2, _nothing) == [0, 0]


def _bad_table(case: str) -> str:
    world = _world(2, 1, 2 if case == "differ" else 1)
    shapes = [(world.rank, 0, 2, 2), (world.rank, 1, 2, 2)]
    version, records = "v0", None
    if case == "differ":
        shapes = [(0, 0, 2, 2 + world.rank)]
    elif case == "double" and world.rank == 1:
        shapes.append((0, 1, 2, 2))
    elif case == "unscored" and world.rank == 1:
        records = _records(shapes[:1])
    elif case == "unknown" and world.rank == 1:
        records = _records([*shapes, (9, 9, 1, 1)])
    elif case == "twice" and world.rank == 1:
        records = _records([*shapes, shapes[0]])
    elif case == "scorer" and world.rank == 1:
        records = [make_record(1, c, None, RewardStatus.ERROR, "s2") for c in (0, 1)]
    elif case == "version":
        version = f"v{world.rank}"
    records = _records(shapes) if records is None else records
    try:
        gather_table(world, make_samples(shapes, version), records)
    except ExchangeError as error:
        return str(error)
    return "joined"


@pytest.mark.dist
@pytest.mark.parametrize(
    "case, expected",
    [
        ("good", "joined"),
        ("double", "ranks 0 and 1 both made samples 0/1"),
        ("unscored", "rank 1: samples without a reward record: 1/1"),
        ("unknown", "rank 1: reward records without a sample: 9/9"),
        ("twice", "rank 1: two reward records for one sample"),
        ("scorer", "rank 1 scored with s2, others with s1"),
        ("version", "several policy versions in one iteration: ['v0', 'v1']"),
        ("differ", "ranks 0 and 1 of one replica hold different samples"),
    ],
)
def test_what_does_not_join_is_named_on_every_rank(ranks, case: str, expected: str) -> None:
    for told in ranks.run(2, _bad_table, case):
        assert expected in told


def _bad_exchange(case: str) -> str:
    world = _world(2, 1, 1)
    shapes = [(world.rank, 0, 2, 2), (world.rank, 1, 2, 2)]
    samples = make_samples(shapes)
    table = gather_table(world, samples, _records(shapes))
    if case == "missing" and world.rank == 1:
        samples = samples.select([0])
    elif case == "twice" and world.rank == 1:
        samples = make_samples([*shapes, (0, 1, 2, 2)])
    elif case == "unknown" and world.rank == 1:
        samples = make_samples([*shapes, (7, 3, 2, 2)])
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
        ("twice", "rank 0: 0/1 came twice"),
        ("unasked", "rank 0: 1/1 unasked"),
        ("unknown", "rank 1: samples that are not in the table: 7/3"),
    ],
)
def test_a_lost_or_doubled_sample_is_named_on_every_rank(ranks, case, expected) -> None:
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
