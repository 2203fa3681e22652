"""Classes of faults of weight hand-over and conversion, each with the right numbers.

Not covered here: the generator's version and prefix cache, the optimizer's masters, logits (other
files of this folder).
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megarl.contracts.mesh import Mesh
from megarl.reshard.layout import (
    hf_placement,
    megatron_placement,
    padded_vocab,
    sglang_placement,
)
from megarl.reshard.plan import make_plan
from megarl.reshard.transfer import Resharder
from megarl.world import World
from tests.reshard.models import make_shards, make_spec, make_whole, same_bits
from tests.reshard.test_plan import carry_out

TINY = dict(layers=1, hidden=1, heads=4, kv_heads=2, head_dim=1, ffn=4, vocab=7)
LAYER = "model.layers.0"


def _numbered(
    tp: int, make=megatron_placement, starts: tuple[int, int, int] = (0, 4, 6), **changes
) -> list[dict[str, Tensor]]:
    """Shards by rank of a model whose rows are numbered; query, key, value begin at `starts`."""
    placement = make(make_spec(**TINY | changes), Mesh(tp, tp=tp, rollout_tp=tp))
    whole = {name: torch.zeros(t.shape) for name, t in placement.tensors.items()}
    for kind in ("weight", "bias"):
        for first, part in zip(starts, "qkv", strict=True):
            tensor = whole[f"{LAYER}.self_attn.{part}_proj.{kind}"]
            tensor.copy_((torch.arange(tensor.shape[0]) + first).view(tensor.shape))
    for first, part in ((0, "gate"), (10, "up")):
        whole[f"{LAYER}.mlp.{part}_proj.weight"].copy_(torch.arange(4.0)[:, None] + first)
    return [make_shards(placement, rank, whole) for rank in range(tp)]


@pytest.mark.parametrize("kind", ["weight", "bias"])
def test_query_key_value_rows_lie_group_by_group(kind) -> None:
    name = f"decoder.layers.0.self_attention.linear_qkv.{kind}"
    assert _numbered(1)[0][name].flatten().tolist() == [0, 1, 4, 6, 2, 3, 5, 7]
    shards = [params[name].flatten().tolist() for params in _numbered(2)]
    assert shards == [[0, 1, 4, 6], [2, 3, 5, 7]]
    theirs = f"{LAYER}.self_attn.qkv_proj.{kind}"
    fused = [p[theirs].flatten().tolist() for p in _numbered(2, sglang_placement)]
    assert fused == [[0, 1, 4, 6], [2, 3, 5, 7]]
    assert _numbered(1, sglang_placement)[0][theirs].flatten().tolist() == list(range(8))
    replicated = [p[theirs].flatten().tolist() for p in _numbered(4, sglang_placement)]
    assert replicated == [[0, 4, 6], [1, 4, 6], [2, 5, 7], [3, 5, 7]]


@pytest.mark.parametrize("kind", ["weight", "bias"])
def test_a_rank_with_several_groups_holds_consecutive_ones(kind) -> None:
    sizes = {"heads": 8, "kv_heads": 4, "starts": (0, 10, 20)}
    name = f"decoder.layers.0.self_attention.linear_qkv.{kind}"
    assert [params[name].flatten().tolist() for params in _numbered(2, **sizes)] == [
        [0, 1, 10, 20, 2, 3, 11, 21],
        [4, 5, 12, 22, 6, 7, 13, 23],
    ]
    theirs = f"{LAYER}.self_attn.qkv_proj.{kind}"
    shards = _numbered(2, sglang_placement, **sizes)
    assert [params[theirs].flatten().tolist() for params in shards] == [
        [0, 1, 2, 3, 10, 11, 20, 21],
        [4, 5, 6, 7, 12, 13, 22, 23],
    ]


@pytest.mark.parametrize(
    "make, name",
    [
        (megatron_placement, "decoder.layers.0.mlp.linear_fc1.weight"),
        (sglang_placement, f"{LAYER}.mlp.gate_up_proj.weight"),
    ],
)
def test_gate_and_up_halves_are_cut_per_rank(make, name) -> None:
    shards = {
        tp: [params[name].flatten().tolist() for params in _numbered(tp, make, kv_heads=4)]
        for tp in (1, 2, 4)
    }
    assert shards[1] == [[0, 1, 2, 3, 10, 11, 12, 13]]
    assert shards[2] == [[0, 1, 10, 11], [2, 3, 12, 13]]
    assert shards[4] == [[0, 10], [1, 11], [2, 12], [3, 13]]


@pytest.mark.parametrize(
    "vocab, tp, rows",
    [
        (50257, 1, 50304),
        (50257, 2, 50432),
        (151936, 2, 152064),
        (151936, 8, 152576),
        (32000, 8, 32768),
    ],
)
def test_vocabulary_padding(vocab, tp, rows) -> None:
    assert padded_vocab(vocab, 128 * tp) == rows
    spec = make_spec(hidden=1, heads=8, kv_heads=8, head_dim=2, ffn=8, layers=1, vocab=vocab)
    mesh = Mesh(tp, tp=tp)
    placement = megatron_placement(spec, mesh)
    held = sum(params["output_layer.weight"][0] for params in placement.params)
    assert held == rows
    whole = make_whole(placement)
    file = hf_placement(spec, mesh)
    back = [make_shards(file, rank) for rank in range(tp)]
    shards = [make_shards(placement, rank, whole) for rank in range(tp)]
    carry_out(list(make_plan(placement, file).copies), shards, back)
    assert back[0]["lm_head.weight"].shape[0] == vocab and same_bits(back[0], whole)


def _tied_embedding() -> bool:
    mesh = Mesh(2, tp=1, pp=2)
    world = World(mesh, torch.device("cpu"), timeout=30)
    spec = make_spec(tied=True)
    source, target = megatron_placement(spec, mesh), sglang_placement(spec, mesh)
    whole = make_whole(source)
    whole["model.embed_tokens.weight"].fill_(7.0)
    shards, live = make_shards(source, world.rank, whole), make_shards(target, world.rank)
    resharder = Resharder(source, target, shards, live, torch.float32, 1 << 20, world)
    manifest = resharder.manifest()
    resharder.transfer()
    resharder.verify(manifest)
    # The tied head reads the embedding's rows; biases and norms arrived as well.
    assert set(live["model.embed_tokens.weight"][: spec.vocab].flatten().tolist()) == {7.0}
    return dist.get_world_size() == 2 and same_bits(live, make_shards(target, world.rank, whole))


@pytest.mark.dist
def test_a_tied_head_follows_the_embedding_over_stages(ranks) -> None:
    assert ranks.run(2, _tied_embedding) == [True, True]
