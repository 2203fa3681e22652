"""Plans of every layout: experts, uneven and virtual stages, one rank's own part, many ranks.

Carried out in one process, without ranks; not covered: what real ranks send (`test_exchange.py`).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.contracts.mesh import Mesh
from megarl.reshard.families.spec import MoESpec
from megarl.reshard.layout import hf_placement, megatron_placement, sglang_placement
from megarl.reshard.placement import tiles
from megarl.reshard.plan import make_plan
from tests.reshard.models import make_shards, make_spec, make_whole, same_bits
from tests.reshard.test_plan import bound_of, carry_out, check


def _moe(spec, experts: int = 4, ffn: int = 8, **changes):
    """`spec` with experts in its layers but the first; the q/k norms of Qwen3."""
    numbers = dict(experts=experts, per_token=2, ffn=ffn, normalize=True)
    layers = tuple(range(1, spec.layers))
    moe = MoESpec(layers=layers, **(numbers | changes))
    return replace(spec, family="qwen3_moe", qkv_bias=False, qk_norm=True, moe=moe)


MOE_MESHES = [
    Mesh(4, tp=1, ep=2, rollout_tp=2),
    Mesh(4, tp=2, ep=2, expert_tp=1, rollout_tp=4, rollout_ep=2),
    Mesh(4, tp=2, ep=4, expert_tp=1, rollout_tp=4, rollout_ep=4),
    Mesh(4, tp=1, ep=1, expert_tp=2, rollout_tp=1),
    Mesh(8, tp=2, pp=2, ep=2, expert_tp=1, rollout_tp=4, rollout_ep=2),
    Mesh(8, tp=4, ep=2, rollout_tp=2, rollout_ep=1),
]


@pytest.mark.parametrize("mesh", MOE_MESHES, ids=lambda mesh: str(mesh.described))
@given(layers=st.sampled_from([2, 4]), tied=st.booleans(), vocab=st.integers(1, 300))
@settings(max_examples=3, deadline=None)
def test_experts_move_bit_equal_and_least(mesh, layers, tied, vocab) -> None:
    spec = _moe(make_spec(layers=layers, hidden=5, tied=tied, vocab=vocab))
    check(megatron_placement(spec, mesh), sglang_placement(spec, mesh))
    check(megatron_placement(spec, mesh), hf_placement(spec, mesh))


@pytest.mark.parametrize(
    "sizes",
    [
        {"pp": 2, "stages": (3, 1)},
        {"pp": 2, "virtual": 2},
        {"pp": 2, "virtual": 2, "stages": (1, 2, 2, 1)},
        {"pp": 4, "stages": (1, 1, 3, 1)},
        {"pp": 2, "tp": 2, "virtual": 3, "stages": (1,) * 6},
    ],
    ids=str,
)
@pytest.mark.parametrize("tied", [False, True])
def test_uneven_and_virtual_stages_move_bit_equal_and_least(sizes, tied) -> None:
    layers = sum(sizes.get("stages", (4,)))
    spec = make_spec(layers=layers, hidden=5, tied=tied)
    mesh = Mesh(4, **({"tp": 1, "rollout_tp": 2} | sizes))
    check(megatron_placement(spec, mesh), sglang_placement(spec, mesh))


@given(data=st.data())
@settings(max_examples=12, deadline=None)
def test_there_and_back_is_the_identity(data) -> None:
    """Between any two layouts of the trainer on one world."""
    tied = data.draw(st.booleans())
    spec = _moe(make_spec(layers=4, hidden=3, tied=tied, vocab=data.draw(st.integers(1, 200))))
    meshes = [
        Mesh(4, tp=2, ep=2, expert_tp=1),
        Mesh(4, tp=1, pp=2, stages=(3, 1)),
        Mesh(4, tp=1, pp=2, virtual=2),
        Mesh(4, tp=4),
        Mesh(4, tp=1, ep=4),
    ]
    a, b = (megatron_placement(spec, data.draw(st.sampled_from(meshes))) for _ in range(2))
    whole = make_whole(a)
    sources = [make_shards(a, rank, whole) for rank in range(4)]
    between = [make_shards(b, rank) for rank in range(4)]
    again = [make_shards(a, rank) for rank in range(4)]
    if a is not b:
        carry_out(list(make_plan(a, b).copies), sources, between)
        carry_out(list(make_plan(b, a).copies), between, again)
        assert all(same_bits(again[rank], sources[rank]) for rank in range(4))


@pytest.mark.parametrize("capacity", [1, 7, 60, 10**6])
@pytest.mark.parametrize(
    "mesh",
    [
        Mesh(4, tp=2, pp=2, rollout_tp=2),
        Mesh(4, tp=1, pp=2, rollout_tp=4),
        Mesh(4, tp=2, ep=2, expert_tp=1, rollout_tp=4, rollout_ep=2),
    ],
    ids=lambda mesh: str(mesh.described),
)
def test_one_rank_plans_its_own_part_of_the_whole(mesh, capacity) -> None:
    spec = make_spec(hidden=6, vocab=40)
    spec = _moe(spec) if mesh.ep > 1 else spec
    plan = make_plan(megatron_placement(spec, mesh), sglang_placement(spec, mesh), 2)
    whole = plan.buckets(capacity)
    for bucket in whole:
        for side in ("source", "target"):
            load = Counter()
            for copy in bucket:
                load[getattr(copy, side)] += copy.elements
            assert max(load.values()) <= capacity
    for rank in range(4):
        mine = [
            sorted(copy for copy in bucket if rank in (copy.source, copy.target))
            for bucket in whole
        ]
        assert [sorted(bucket) for bucket in plan.buckets(capacity, rank)] == mine
        own = sorted(copy for copy in plan.copies if rank in (copy.source, copy.target))
        assert sorted(plan.of(rank)) == own
    assert sum(copy.elements for bucket in whole for copy in bucket) == plan.elements_sent


@pytest.mark.parametrize(
    "mesh",
    [
        Mesh(16, tp=2, rollout_tp=4),
        Mesh(16, tp=1, rollout_tp=1),
        Mesh(16, tp=4, ep=4, expert_tp=1, rollout_tp=8, rollout_ep=8),
        Mesh(16, tp=2, pp=2, rollout_tp=2),
        Mesh(16, tp=4, pp=2, ep=2, expert_tp=1, rollout_tp=4, rollout_ep=1),
    ],
    ids=lambda mesh: str(mesh.described),
)
@pytest.mark.parametrize("ranks_per_node", [None, 4])
def test_sixteen_ranks_by_full_enumeration(mesh, ranks_per_node) -> None:
    """Exactly once, least bytes, and senders as even as these layouts allow. In the one with
    rollout.ep, ranks of two expert blocks of four already hold half of what their takers want, so
    these have half as much to send."""
    spec = make_spec(layers=8, hidden=4, heads=16, kv_heads=8, head_dim=2, ffn=16, vocab=8)
    spec = _moe(spec, experts=8) if mesh.ep > 1 else spec
    source, target = megatron_placement(spec, mesh), sglang_placement(spec, mesh)
    plan = make_plan(source, target, ranks_per_node)
    wanted = Counter()
    for copy in plan.copies:
        wanted[copy.target, copy.tensor] += copy.elements
    for rank in range(16):
        for piece in target.pieces[rank]:
            wanted[rank, piece.tensor] -= piece.rows * piece.cols
    assert not any(wanted.values())
    whole = make_whole(source)
    sources = [make_shards(source, rank, whole) for rank in range(16)]
    targets = [make_shards(target, rank) for rank in range(16)]
    carry_out(list(plan.copies), sources, targets)
    assert all(same_bits(targets[r], make_shards(target, r, whole)) for r in range(16))
    assert plan.elements_sent == plan.bound == bound_of(source, target)
    assert plan.load == [
        sum(copy.elements for copy in plan.sent if copy.source == rank) for rank in range(16)
    ]
    if plan.elements_sent and mesh.rollout_ep == 1:
        assert max(plan.load) <= 1.2 * sum(plan.load) / 16


LARGE = {
    "llama-3-70b": (
        dict(family="llama", layers=80, hidden=8192, heads=64, kv_heads=8, ffn=28672, vocab=128256),
        None,
        Mesh(512, tp=8, pp=8, rollout_tp=8),
    ),
    "qwen3-235b-a22b": (
        dict(
            family="qwen3_moe", layers=94, hidden=4096, heads=64, kv_heads=4, ffn=12288,
            vocab=151936, qk_norm=True,
        ),
        MoESpec(
            experts=128, per_token=8, ffn=1536, layers=tuple(range(94)), normalize=True
        ),
        Mesh(
            512, tp=4, pp=8, ep=8, expert_tp=1, stages=(12,) * 6 + (11, 11),
            rollout_tp=16, rollout_ep=16,
        ),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", LARGE)
def test_five_hundred_ranks_are_planned_by_what_lies_alike(name) -> None:
    """Each kind of tensor is proven once; one rank's part is complete. No tensor is made."""
    numbers, moe, mesh = LARGE[name]
    spec = make_spec(**numbers, head_dim=128, qkv_bias=False, moe=moe)
    source, target = megatron_placement(spec, mesh), sglang_placement(spec, mesh)
    plan = make_plan(source, target, 8)
    assert sum(len(share.members) for share in plan.shares) == len(target.tensors)
    for share in plan.shares:
        boxes = defaultdict(list)
        for cell in share.cells:
            box = (cell.row - cell.taker.row, cell.col - cell.taker.col, cell.rows, cell.cols)
            boxes[cell.taker].append(box)
        assert boxes.keys() == set(share.target.seats)
        assert all(tiles(boxes[taker], taker.rows, taker.cols) for taker in boxes)
    assert plan.elements_sent == plan.bound
    assert max(plan.load) <= 1.2 * plan.elements_sent / 512
    rank, capacity = 137, 1 << 24
    wanted = Counter()
    for piece in target.pieces[rank]:
        wanted[piece.tensor] += piece.rows * piece.cols
    for copy in plan.of(rank):
        if copy.target == rank:
            wanted[copy.tensor] -= copy.elements
    assert not any(wanted.values())
    buckets = plan.buckets(capacity, rank)
    sent = [sum(c.elements for c in bucket if c.source == rank) for bucket in buckets]
    got = [sum(c.elements for c in bucket if c.target == rank) for bucket in buckets]
    assert max(sent) <= capacity and max(got) <= capacity and sum(sent) == plan.load[rank]
