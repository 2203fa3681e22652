"""Plans: complete, least bytes, bounded buckets; carried out here in one process, without ranks."""

from __future__ import annotations

import itertools
from collections import defaultdict

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.contracts.mesh import Mesh
from megarl.reshard.layout import hf_placement, megatron_placement, sglang_placement
from megarl.reshard.placement import LogicalTensor, Piece, Placement
from megarl.reshard.plan import Copy, PlanError, make_plan
from tests.reshard.models import make_shards, make_spec, make_whole, matrix, same_bits

specs = st.builds(
    make_spec,
    layers=st.sampled_from([2, 4]),
    hidden=st.integers(1, 9),
    heads=st.sampled_from([4, 8, 16]),
    kv_heads=st.just(4),
    head_dim=st.sampled_from([2, 4]),
    ffn=st.sampled_from([4, 12, 20]),
    vocab=st.integers(1, 700),
    tied=st.booleans(),
    qkv_bias=st.booleans(),
)


def carry_out(copies: list[Copy], sources: list[dict], targets: list[dict]) -> None:
    """The copies, one by one; writing an element twice is an error."""
    for copy in copies:
        block = matrix(sources[copy.source][copy.source_param])[
            copy.source_row : copy.source_row + copy.rows,
            copy.source_col : copy.source_col + copy.cols,
        ]
        into = matrix(targets[copy.target][copy.target_param])[
            copy.target_row : copy.target_row + copy.rows,
            copy.target_col : copy.target_col + copy.cols,
        ]
        assert block.shape == into.shape == (copy.rows, copy.cols)
        assert torch.isnan(into).all(), f"{copy} writes an element a second time"
        into.copy_(block)


def check(source: Placement, target: Placement) -> None:
    whole = make_whole(source)
    sources = [make_shards(source, rank, whole) for rank in range(source.world)]
    targets = [make_shards(target, rank) for rank in range(source.world)]
    plan = make_plan(source, target)
    carry_out(list(plan.copies), sources, targets)
    for rank in range(source.world):
        assert same_bits(targets[rank], make_shards(target, rank, whole))
    assert plan.elements_sent == plan.bound == bound_of(source, target)


def bound_of(source: Placement, target: Placement) -> int:
    """Elements that ranks want and do not hold, counted one by one."""

    def held(pieces: tuple[Piece, ...]) -> dict[str, set]:
        cells = defaultdict(set)
        for p in pieces:
            cells[p.tensor].update(
                itertools.product(range(p.row, p.row + p.rows), range(p.col, p.col + p.cols))
            )
        return cells

    total = 0
    for rank in range(source.world):
        have, want = held(source.pieces[rank]), held(target.pieces[rank])
        total += sum(len(cells - have[name]) for name, cells in want.items())
    return total


@pytest.mark.parametrize("rollout_tp", [1, 2, 4])
@pytest.mark.parametrize("tp", [1, 2, 4])
@given(spec=specs)
@settings(max_examples=6, deadline=None)
def test_trainer_to_generator_is_bit_equal_and_least(tp, rollout_tp, spec) -> None:
    mesh = Mesh(4, tp=tp, rollout_tp=rollout_tp)
    check(megatron_placement(spec, mesh), sglang_placement(spec, mesh))


@given(spec=specs, tp=st.sampled_from([1, 2, 4]), pp=st.sampled_from([1, 2]))
@settings(max_examples=15, deadline=None)
def test_trainer_to_file_and_back_is_bit_equal(spec, tp, pp) -> None:
    mesh = Mesh(tp * pp, tp=tp, pp=pp)
    check(megatron_placement(spec, mesh), hf_placement(spec, mesh))
    if pp == 1:
        check(hf_placement(spec, mesh), megatron_placement(spec, mesh))


def test_stages_and_replicated_kv_heads() -> None:
    spec = make_spec(layers=4, kv_heads=2)
    for mesh in (Mesh(4, tp=2, pp=2, rollout_tp=4), Mesh(8, tp=1, pp=4, rollout_tp=8)):
        check(megatron_placement(spec, mesh), sglang_placement(spec, mesh))
    tied = make_spec(tied=True)
    mesh = Mesh(4, tp=1, pp=2, rollout_tp=2)
    check(megatron_placement(tied, mesh), sglang_placement(tied, mesh))


def _strips(kind: str, cuts: list[tuple[int, list[int]]], rows: int, cols: int) -> Placement:
    """One tensor cut into row strips [cuts[i], cuts[i+1]), each held by the ranks named."""
    tensor = LogicalTensor("w", (rows, cols))
    pieces: list[list[Piece]] = [[], [], [], []]
    params: list[dict] = [{}, {}, {}, {}]
    ends = [cut[0] for cut in cuts[1:]] + [rows]
    for (row, ranks), end in zip(cuts, ends, strict=True):
        for rank in ranks:
            name = f"p{row}"
            pieces[rank].append(Piece(rank, "w", row, 0, end - row, cols, name, 0, 0))
            params[rank][name] = (end - row, cols)
    return Placement.of_pieces(kind, {"w": tensor}, pieces, params, ((),) * 4)


strips = st.lists(
    st.tuples(st.integers(1, 11), st.lists(st.integers(0, 3), min_size=1, max_size=4, unique=True)),
    max_size=5,
    unique_by=lambda cut: cut[0],
).map(lambda cuts: [(0, [0, 2])] + sorted(cuts))


@given(source=strips, target=strips, cols=st.integers(1, 4))
@settings(max_examples=60, deadline=None)
def test_any_two_ways_to_hold_a_tensor(source, target, cols) -> None:
    check(_strips("source", source, 12, cols), _strips("target", target, 12, cols))


@given(source=strips, target=strips, capacity=st.integers(1, 30))
@settings(max_examples=60, deadline=None)
def test_buckets_are_bounded_and_leave_nothing_out(source, target, capacity) -> None:
    a, b = _strips("source", source, 12, 4), _strips("target", target, 12, 4)
    plan = make_plan(a, b)
    buckets = plan.buckets(capacity)
    for bucket in buckets:
        assert bucket
        for side in ("source", "target"):
            load = defaultdict(int)
            for copy in bucket:
                load[getattr(copy, side)] += copy.elements
            assert max(load.values()) <= capacity
    whole = make_whole(a)
    sources = [make_shards(a, rank, whole) for rank in range(4)]
    targets = [make_shards(b, rank) for rank in range(4)]
    local = [copy for copy in plan.copies if copy.source == copy.target]
    carry_out(local + [copy for bucket in buckets for copy in bucket], sources, targets)
    assert all(same_bits(targets[r], make_shards(b, r, whole)) for r in range(4))


def test_one_bucket_where_all_fits() -> None:
    mesh = Mesh(4, tp=2, rollout_tp=1)
    plan = make_plan(megatron_placement(make_spec(), mesh), sglang_placement(make_spec(), mesh))
    assert len(plan.buckets(plan.elements_sent)) == 1


def test_the_sender_is_near_then_idle_then_low() -> None:
    everywhere = [(0, [0, 1, 2]), (6, [0, 1, 2])]
    source = _strips("source", everywhere, 12, 1)
    target = _strips("target", [(0, [3]), (6, [3])], 12, 1)
    assert [copy.source for copy in make_plan(source, target).copies] == [0, 1]
    assert [copy.source for copy in make_plan(source, target, 2).copies] == [2, 2]


def test_load_is_shared_by_the_holders() -> None:
    mesh = Mesh(4, tp=2, rollout_tp=1)
    plan = make_plan(megatron_placement(make_spec(), mesh), sglang_placement(make_spec(), mesh))
    load = defaultdict(int)
    for copy in plan.sent:
        load[copy.source] += copy.elements
    largest = max(copy.elements for copy in plan.sent)
    # tp shards of the vocabulary differ in size, data-parallel copies of a shard do not.
    assert abs(load[0] - load[2]) <= largest and abs(load[1] - load[3]) <= largest


def test_plans_are_cached_and_pure() -> None:
    mesh = Mesh(2, tp=2, rollout_tp=1)
    source, target = (make(make_spec(), mesh) for make in (megatron_placement, sglang_placement))
    assert make_plan(source, target) is make_plan(
        megatron_placement(make_spec(), mesh), sglang_placement(make_spec(), mesh)
    )
    make_plan.cache_clear()
    assert make_plan(source, target).copies == make_plan.__wrapped__(source, target).copies


def test_what_cannot_be_filled_is_refused_by_name() -> None:
    hole = [(0, [0]), (4, [1])]
    full, part = _strips("source", hole, 12, 1), _strips("source", hole, 8, 1)
    with pytest.raises(PlanError, match="w is LogicalTensor.*12.*and LogicalTensor.*8"):
        make_plan(full, part)
    lacking = Placement.of_pieces(
        "source",
        full.tensors,
        (full.pieces[0], (), (), ()),
        (full.params[0], {}, {}, {}),
        full.padding,
    )
    with pytest.raises(PlanError, match="w: the source layout does not hold all of rows 4 to 11"):
        make_plan(lacking, full)
    nobody = Placement.of_pieces("target", full.tensors, ((),) * 4, ({},) * 4, full.padding)
    with pytest.raises(PlanError, match="w: no rank of the target layout takes it"):
        make_plan(full, nobody)


def test_an_element_taken_twice_is_refused() -> None:
    once = _strips("source", [(0, [0])], 4, 1)
    pieces = (
        (Piece(0, "w", 0, 0, 4, 1, "a", 0, 0), Piece(0, "w", 2, 0, 2, 1, "b", 0, 0)),
        (),
        (),
        (),
    )
    twice = Placement.of_pieces(
        "target", once.tensors, pieces, ({"a": (4, 1), "b": (2, 1)}, {}, {}, {}), once.padding
    )
    with pytest.raises(PlanError, match="takes elements twice, into a and b"):
        make_plan(once, twice)
