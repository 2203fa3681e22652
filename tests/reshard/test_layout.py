"""Layouts of trainer, generator and file: sizes, tiling, refusals.

Orders within fused parameters have hand numbers in tests/known_faults/test_reshard.py; that live
megatron-core and SGLang models have these parameters is checked where these are built.
"""

from __future__ import annotations

import pytest

from megarl.contracts.mesh import Mesh
from megarl.reshard.families.spec import MoESpec
from megarl.reshard.layout import (
    hf_placement,
    megatron_placement,
    padded_vocab,
    sglang_placement,
)
from megarl.reshard.placement import LayoutError, LogicalTensor, Padding, Piece, Placement, tiles
from tests.reshard.models import make_spec


def test_megatron_shapes_and_padding() -> None:
    placement = megatron_placement(make_spec(), Mesh(4, tp=2))
    assert placement.params[0] == placement.params[2]
    shapes = placement.params[1]
    assert shapes["embedding.word_embeddings.weight"] == (256, 24)  # 301 → 512 over two ranks
    assert shapes["decoder.layers.1.self_attention.linear_qkv.weight"] == (48, 24)
    assert shapes["decoder.layers.1.self_attention.linear_qkv.bias"] == (48,)
    assert shapes["decoder.layers.1.self_attention.linear_proj.weight"] == (24, 24)
    assert shapes["decoder.layers.1.mlp.linear_fc1.weight"] == (40, 24)
    assert shapes["decoder.layers.1.mlp.linear_fc2.weight"] == (24, 20)
    assert shapes["decoder.layers.1.pre_mlp_layernorm.weight"] == (24,)
    assert shapes["decoder.final_layernorm.weight"] == (24,)
    assert [pad for pad in placement.padding[1] if pad.param == "output_layer.weight"] == [
        Padding("output_layer.weight", 301 - 256, 0, 512 - 301, 24)
    ]
    assert placement.padding[0] == ()


def test_sglang_shapes_with_replicated_kv_heads() -> None:
    placement = sglang_placement(make_spec(kv_heads=2), Mesh(4, tp=1, rollout_tp=4))
    shapes = placement.params[3]
    assert shapes["model.embed_tokens.weight"] == (80, 24)  # 301 → 320 over four ranks
    assert shapes["model.layers.0.self_attn.qkv_proj.weight"] == ((2 + 1 + 1) * 6, 24)
    assert shapes["model.layers.0.mlp.gate_up_proj.weight"] == (20, 24)
    # Ranks 0 and 1 hold the first kv head, 2 and 3 the second.
    assert placement.copies["model.layers.0.self_attn.v_proj.bias"] == ((0, 1), (2, 3))
    assert placement.copies["model.norm.weight"] == ((0, 1, 2, 3),)


def test_a_tied_model_has_one_embedding_and_the_last_stage_a_copy() -> None:
    spec = make_spec(tied=True)
    one = megatron_placement(spec, Mesh(2, tp=2))
    assert "output_layer.weight" not in one.params[0] and "lm_head.weight" not in one.tensors
    two = megatron_placement(spec, Mesh(4, tp=2, pp=2))
    assert "output_layer.weight" in two.params[3]
    assert "embedding.word_embeddings.weight" not in two.params[3]
    assert two.copies["model.embed_tokens.weight"] == ((0, 2), (1, 3))
    assert "lm_head.weight" not in sglang_placement(spec, Mesh(2, tp=2)).params[0]


def test_stages_count_their_own_layers() -> None:
    placement = megatron_placement(make_spec(layers=4), Mesh(2, tp=1, pp=2))
    held = {piece.tensor: piece.param for piece in placement.pieces[1]}
    assert held["model.layers.2.mlp.down_proj.weight"] == "decoder.layers.0.mlp.linear_fc2.weight"
    assert "model.layers.1.mlp.down_proj.weight" not in held and "model.norm.weight" in held


def test_a_rank_beyond_the_vocabulary_holds_padding_only() -> None:
    placement = megatron_placement(make_spec(vocab=100), Mesh(4, tp=4))
    assert placement.params[3]["output_layer.weight"] == (128, 24)
    assert all(piece.param != "output_layer.weight" for piece in placement.pieces[3])


def test_the_file_lies_on_the_first_rank() -> None:
    placement = hf_placement(make_spec(), Mesh(2, tp=1))
    assert placement.params[0] == {n: t.shape for n, t in placement.tensors.items()}
    assert placement.params[1] == {} and placement.pieces[1] == ()


@pytest.mark.parametrize(
    "make, changes, mesh, named",
    [
        (megatron_placement, {"kv_heads": 2}, Mesh(4, tp=4), "kv heads 2 .*actor.tp=4"),
        (megatron_placement, {"ffn": 42}, Mesh(4, tp=4), "intermediate_size 42 .*actor.tp=4"),
        (megatron_placement, {"layers": 3}, Mesh(2, tp=1, pp=2), "3 layers .*actor.pp=2"),
        (sglang_placement, {"heads": 6, "kv_heads": 2}, Mesh(4, 1, 1, 4), "attention heads 6"),
        (sglang_placement, {"ffn": 42}, Mesh(4, 1, 1, 4), "42 .*rollout.tp=4"),
        (
            sglang_placement,
            {"heads": 12, "kv_heads": 6},
            Mesh(4, 1, 1, 4),
            "kv heads 6 and rollout.tp=4 do not divide one another",
        ),
    ],
)
def test_a_model_that_does_not_divide_is_refused(make, changes, mesh, named) -> None:
    with pytest.raises(LayoutError, match=named):
        make(make_spec(**changes), mesh)


@pytest.mark.parametrize(
    "make, mesh, named",
    [
        (megatron_placement, Mesh(3, tp=1, ep=3), "experts 4 .*actor.ep=3"),
        (megatron_placement, Mesh(4, tp=1, expert_tp=4), "moe_intermediate_size 6 .*expert_tp=4"),
        (sglang_placement, Mesh(3, 1, rollout_tp=3, rollout_ep=3), "8 .*rollout.tp=3"),
        (sglang_placement, Mesh(8, 1, rollout_tp=8, rollout_ep=8), "experts 4 .*rollout.ep=8"),
        (sglang_placement, Mesh(4, 1, rollout_tp=4), "moe_intermediate_size 6 .* / rollout.ep = 4"),
    ],
)
def test_experts_that_do_not_divide_are_refused(make, mesh, named) -> None:
    moe = MoESpec(experts=4, per_token=2, ffn=6, layers=(0, 1), normalize=True)
    spec = make_spec(family="qwen3_moe", qkv_bias=False, moe=moe)
    with pytest.raises(LayoutError, match=named):
        make(spec, mesh)


def test_experts_where_there_are_none_are_refused() -> None:
    with pytest.raises(LayoutError, match="no experts; leave out actor.ep"):
        megatron_placement(make_spec(), Mesh(2, tp=1, ep=2))
    with pytest.raises(LayoutError, match="no experts; leave out rollout.ep"):
        sglang_placement(make_spec(), Mesh(2, tp=1, rollout_tp=2, rollout_ep=2))


def test_a_value_head_lies_on_the_last_stage_and_generates_nothing() -> None:
    spec = make_spec(head="value", value_bias=True)
    mesh = Mesh(4, tp=2, pp=2)
    placement = megatron_placement(spec, mesh)
    assert placement.copies["score.weight"] == ((2, 3),)
    assert placement.params[3]["value_head.weight"] == (1, 24)
    assert placement.params[3]["value_head.bias"] == (1,)
    assert "lm_head.weight" not in placement.tensors
    with pytest.raises(LayoutError, match="value head generates nothing"):
        sglang_placement(spec, mesh)


def test_experts_by_hand() -> None:
    """Four experts of width 6 over ep 2 and expert tp 2: rank 3 holds the second halves of the
    experts 2 and 3; in the generator, with tp 4 and ep 2, of w13 rows [gate; up] of each."""
    moe = MoESpec(experts=4, per_token=2, ffn=6, layers=(0, 1), normalize=True)
    spec = make_spec(family="qwen3_moe", qkv_bias=False, moe=moe)
    mesh = Mesh(4, tp=2, ep=2, rollout_tp=4, rollout_ep=2)
    held = {
        (p.tensor, p.param): p[2:6] + p[7:]
        for p in megatron_placement(spec, mesh).pieces[3]
        if "experts.3." in p.tensor and "layers.1" in p.tensor
    }
    start, mine = "model.layers.1.mlp.experts.3.", "decoder.layers.1.mlp.experts.local_experts.1."
    assert held == {
        (f"{start}gate_proj.weight", f"{mine}linear_fc1.weight"): (3, 0, 3, 24, 0, 0),
        (f"{start}up_proj.weight", f"{mine}linear_fc1.weight"): (3, 0, 3, 24, 3, 0),
        (f"{start}down_proj.weight", f"{mine}linear_fc2.weight"): (0, 3, 24, 3, 0, 0),
    }
    there = sglang_placement(spec, mesh)
    fused = "model.layers.1.mlp.experts."
    assert there.params[3][f"{fused}w13_weight"] == (12, 24)
    assert there.params[3][f"{fused}w2_weight"] == (48, 3)
    held = {p.tensor: p[2:6] + p[7:] for p in there.pieces[3] if p.tensor.startswith(start)}
    assert held == {
        f"{start}gate_proj.weight": (3, 0, 3, 24, 6, 0),
        f"{start}up_proj.weight": (3, 0, 3, 24, 9, 0),
        f"{start}down_proj.weight": (0, 3, 24, 3, 24, 0),
    }


def test_stages_by_hand() -> None:
    """Layers 0-2 and 3 on two stages; and in virtual stages 0, 1 on rank 0 and 1, then 2 and 3."""
    spec = make_spec(layers=4)
    uneven = megatron_placement(spec, Mesh(2, tp=1, pp=2, stages=(3, 1)))
    name = "model.layers.{}.mlp.down_proj.weight"
    held = [
        {p.tensor: p.param for p in uneven.pieces[rank] if "down_proj" in p.tensor}
        for rank in (0, 1)
    ]
    assert held[0] == {
        name.format(n): f"decoder.layers.{n}.mlp.linear_fc2.weight" for n in range(3)
    }
    assert held[1] == {name.format(3): "decoder.layers.0.mlp.linear_fc2.weight"}
    virtual = megatron_placement(spec, Mesh(2, tp=1, pp=2, virtual=2))
    held = [
        {p.tensor: p.param for p in virtual.pieces[rank] if "down_proj" in p.tensor}
        for rank in (0, 1)
    ]
    for rank in (0, 1):
        assert held[rank] == {
            name.format(rank): "chunk0.decoder.layers.0.mlp.linear_fc2.weight",
            name.format(rank + 2): "chunk1.decoder.layers.0.mlp.linear_fc2.weight",
        }
    assert "chunk0.embedding.word_embeddings.weight" in virtual.params[0]
    assert "chunk1.output_layer.weight" in virtual.params[1]


def test_vocabulary_is_rounded_up() -> None:
    assert [padded_vocab(v, 64) for v in (1, 64, 65, 304)] == [64, 64, 128, 320]


@pytest.mark.parametrize(
    "boxes, right",
    [
        ([(0, 0, 2, 3)], True),
        ([(0, 0, 2, 1), (0, 1, 1, 2), (1, 1, 1, 2)], True),
        ([(0, 0, 2, 2)], False),
        ([(0, 0, 2, 3), (1, 1, 1, 1)], False),
        ([(0, 0, 1, 3), (0, 0, 1, 3)], False),
        ([(0, 0, 2, 2), (0, 1, 1, 1), (0, 2, 1, 1)], False),
        ([(0, 0, 3, 2)], False),
        ([(-1, 0, 3, 2)], False),
    ],
)
def test_tiling_is_exact(boxes, right) -> None:
    assert tiles(boxes, 2, 3) is right


def test_a_layout_that_leaves_a_hole_is_refused() -> None:
    tensor = LogicalTensor("w", (4, 2))
    piece = Piece(0, "w", 0, 0, 3, 2, "p", 0, 0)
    with pytest.raises(LayoutError, match=r"rank 0: p \[4, 2\] is not tiled"):
        Placement.of_pieces("test", {"w": tensor}, ((piece,),), ({"p": (4, 2)},), ((),))
    with pytest.raises(LayoutError, match="leaves"):
        lower = piece._replace(row=2)
        Placement.of_pieces("test", {"w": tensor}, ((lower,),), ({"p": (3, 2)},), ((),))
    partial = Placement.of_pieces("test", {"w": tensor}, ((piece,),), ({"p": (3, 2)},), ((),))
    with pytest.raises(LayoutError, match="do not make it up exactly"):
        _ = partial.copies
