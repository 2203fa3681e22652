"""Experts, virtual and uneven stages, sequence parallelism, value heads: saved in one layout, read
in another; and what lies in the files is the same whoever wrote it.

The oracles are those of `test_torch_dist.py`, and for the files torch's own reader and the HF file
that the model came from. Not covered: GPU; training with dense layers among those with experts.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch.distributed.checkpoint import FileSystemReader, TensorStorageMetadata

from tests.checkpoint.layouts import Layout, forget, load, save
from tests.checkpoint.matrices import matrix
from tests.models.support import VOCAB, gather_logical, write_hf_model

pytestmark = pytest.mark.dist

ONE, DP2, PP2 = Layout(1), Layout(2), Layout(2, pp=2)
SP_TP2 = Layout(2, tp=2, section={"sequence_parallel": True})
UNEVEN = Layout(2, pp=2, more={"stages": (3, 1)})
VIRTUAL = Layout(2, pp=2, more={"virtual": 2})
VIRTUAL_DP2 = Layout(4, pp=2, more={"virtual": 2})
VIRTUAL_TP2 = Layout(4, tp=2, pp=2, more={"virtual": 2})
UNEVEN_DP2 = Layout(4, pp=2, more={"stages": (1, 3)})
"""Of four layers."""

EP2 = Layout(2, more={"ep": 2})
CUT = Layout(2, more={"expert_tp": 2})
"""Experts cut over data-parallel ranks."""
COPIED = Layout(2, tp=2, more={"expert_tp": 1})
"""Experts copied over tensor-parallel ranks."""
EP2_TP2 = Layout(2, tp=2, more={"ep": 2, "expert_tp": 1})
EP2_DP4 = Layout(4, more={"ep": 2})
EP4_TP2 = Layout(4, tp=2, more={"ep": 4, "expert_tp": 1})
EP2_TP2_DP2 = Layout(4, tp=2, more={"ep": 2, "expert_tp": 1})
EP2_ETP2 = Layout(4, tp=2, more={"ep": 2})
COPIED_DP2 = Layout(4, tp=2, more={"expert_tp": 1})
EP2_PP2 = Layout(4, pp=2, more={"ep": 2})
TP2_EP2_PP2 = Layout(4, tp=2, pp=2, more={"ep": 2, "expert_tp": 1})


def unsharded(layout: Layout) -> Layout:
    return replace(layout, sharded=False)


def test_experts_dealt_copied_and_cut(ranks, tmp_path) -> None:
    write_hf_model(tmp_path, "mixtral", hidden_size=80, head_dim=20)
    matrix(ranks, tmp_path, tmp_path, EP2, [EP2, ONE, unsharded(CUT), COPIED, EP2_TP2])


def test_experts_whose_copies_lie_apart_from_the_rest(ranks, tmp_path) -> None:
    """An expert has two holders and the rest has two others; an expert's state is cut in two."""
    write_hf_model(tmp_path, "qwen3_moe", hidden_size=80, num_hidden_layers=3, num_experts=6)
    loaders = [EP2_TP2_DP2, DP2, ONE]
    cut, *_ = matrix(ranks, tmp_path, tmp_path, EP2_TP2_DP2, loaders)
    assert any("local_experts" in name for name in cut)
    assert any("local_experts" not in name for name in cut)


def test_latent_attention_and_the_bias_of_a_router(ranks, tmp_path) -> None:
    """A dense layer, one with experts and a shared one, a float32 buffer that no step changes."""
    write_hf_model(tmp_path, "deepseek_v3", hidden_size=80)
    layouts = [replace(one, dtype="bfloat16", section={"lr": 1e-2}) for one in (EP2, PP2)]
    matrix(ranks, tmp_path, tmp_path, layouts[0], layouts)
    loaders = [unsharded(COPIED), ONE]
    matrix(ranks, tmp_path / "float32", tmp_path, PP2, loaders)


def test_virtual_and_uneven_stages(ranks, tmp_path) -> None:
    write_hf_model(tmp_path, "qwen3", tied=True, hidden_size=80, num_hidden_layers=4)
    matrix(ranks, tmp_path, tmp_path, VIRTUAL, [VIRTUAL, SP_TP2, unsharded(UNEVEN), ONE])


@pytest.mark.parametrize(
    "task",
    [
        "TokenClassification",  # its head has a bias
        pytest.param("SequenceClassification", marks=pytest.mark.long),
    ],
)
def test_a_value_head(ranks, tmp_path, task: str) -> None:
    write_hf_model(tmp_path, "qwen2", task=task, tied=True, hidden_size=80)
    matrix(ranks, tmp_path, tmp_path, PP2, [PP2, SP_TP2, unsharded(DP2)])


def _saved_as_read(
    source: Path, folder: Path, layouts: list[Layout], experts: tuple[int, ...]
) -> list[Any]:
    """Each layout saves what it read of the HF file, and loads it again: the assembled weights.

    `experts`: the layers that have some, where not all do: no config that is read tells of such.
    """
    from megarl.models.build import destroy_mesh
    from megarl.reshard.families import read_spec

    spec = read_spec(source)
    if experts:
        spec = replace(spec, moe=replace(spec.moe, layers=experts))
    found = []
    for layout in layouts:
        actor = layout.actor(source, spec)
        save(actor, folder / str(layout))
        forget(actor)
        load(actor, folder / str(layout), 0)
        found.append(gather_logical(actor, actor.named_parameters()))
        destroy_mesh()
    return found


def stored(folder: Path) -> dict[str, torch.Tensor]:
    """Global tensor → its elements, by torch alone; rows of the vocabulary without padding."""
    reader = FileSystemReader(folder)
    entries = reader.read_metadata().state_dict_metadata
    tensors = {
        key: torch.full(tuple(entry.size), float("nan"), dtype=entry.properties.dtype)
        for key, entry in entries.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    dcp.load(tensors, storage_reader=reader, no_dist=True)
    for key in tensors:
        if key.endswith(("word_embeddings.weight", "output_layer.weight")):
            tensors[key] = tensors[key][:VOCAB]
    return tensors


def layer_by_hand(hf: dict[str, torch.Tensor], layer: int) -> dict[str, torch.Tensor]:
    """What megatron's format makes of a layer of the HF file, of 2 kv groups and 4 experts."""
    own, attention = f"model.layers.{layer}.", f"model.layers.{layer}.self_attn."
    q, k, v = (hf[f"{attention}{n}_proj.weight"].chunk(2) for n in "qkv")
    found = {
        "self_attention.linear_qkv.weight": torch.cat([q[0], k[0], v[0], q[1], k[1], v[1]]),
        "self_attention.linear_qkv.layer_norm_weight": hf[own + "input_layernorm.weight"],
        "self_attention.q_layernorm.weight": hf[attention + "q_norm.weight"],
        "self_attention.k_layernorm.weight": hf[attention + "k_norm.weight"],
        "self_attention.linear_proj.weight": hf[attention + "o_proj.weight"],
        "mlp.linear_fc1.layer_norm_weight": hf[own + "post_attention_layernorm.weight"],
    }
    if own + "mlp.gate.weight" not in hf:
        gate, up, down = (hf[f"{own}mlp.{n}_proj.weight"] for n in ("gate", "up", "down"))
        found["mlp.linear_fc1.weight"] = torch.cat([gate, up])
        return found | {"mlp.linear_fc2.weight": down}
    experts = [
        [hf[f"{own}mlp.experts.{e}.{n}_proj.weight"] for n in ("gate", "up", "down")]
        for e in range(4)
    ]
    return found | {
        "mlp.router.weight": hf[own + "mlp.gate.weight"],
        "mlp.experts.experts.linear_fc1.weight": torch.stack(
            [torch.cat([gate, up]) for gate, up, _ in experts]
        ),
        "mlp.experts.experts.linear_fc2.weight": torch.stack([down for *_, down in experts]),
    }


def by_hand(hf: dict[str, torch.Tensor], stacked: bool) -> dict[str, torch.Tensor]:
    """Of four layers, `stacked` or each by itself."""
    layers = [layer_by_hand(hf, layer) for layer in range(4)]
    found = {
        "embedding.word_embeddings.weight": hf["model.embed_tokens.weight"],
        "decoder.final_layernorm.weight": hf["model.norm.weight"],
        "output_layer.weight": hf["lm_head.weight"],
    }
    if stacked:
        names = layers[0]
        return found | {
            f"decoder.layers.{name}": torch.stack([layer[name] for layer in layers])
            for name in names
        }
    return found | {
        f"decoder.layers.{number}.{name}": tensor
        for number, layer in enumerate(layers)
        for name, tensor in layer.items()
    }


VIRTUAL_EXPERTS = Layout(2, pp=2, more={"virtual": 2})
FILES = {  # name → family, its further numbers, layers with experts where not all have, layouts
    "dense": ("qwen3", {}, (), [VIRTUAL, UNEVEN, SP_TP2, unsharded(DP2)]),
    "experts": ("qwen3_moe", {}, (), [EP2, CUT, COPIED, EP2_TP2, VIRTUAL_EXPERTS]),
    "some": ("qwen3_moe", {"mlp_only_layers": [1]}, (0, 2, 3), [EP2_TP2, UNEVEN, VIRTUAL_EXPERTS]),
}


@pytest.mark.parametrize("name", list(FILES))
def test_files_tell_nothing_of_the_layout(ranks, tmp_path, name: str) -> None:
    family, numbers, experts, layouts = FILES[name]
    write_hf_model(tmp_path, family, num_hidden_layers=4, **numbers)
    config = json.loads((tmp_path / "config.json").read_text())
    if "mlp_only_layers" in config:
        (tmp_path / "config.json").write_text(json.dumps(config | {"mlp_only_layers": []}))
    (tmp_path / "saved").mkdir()
    found = ranks.run(2, _saved_as_read, tmp_path, tmp_path / "saved", layouts, experts)[0]
    hf = load_file(tmp_path / "model.safetensors")
    weights = by_hand(hf, stacked=name == "dense")
    state = {f"optimizer.state.{m}.{key}" for m in ("exp_avg", "exp_avg_sq") for key in weights}
    for layout, loaded in zip(layouts, found, strict=True):
        tensors = stored(tmp_path / "saved" / str(layout))
        assert tensors.keys() == weights.keys() | state, layout
        for key, tensor in weights.items():
            assert torch.equal(tensors[key], tensor), (layout, key)
        assert not any(bool(tensors[key].any()) for key in state)
        assert loaded.keys() == hf.keys()
        for tensor_name, tensor in hf.items():
            matrix_of = tensor.double().view(len(tensor), -1)
            assert torch.equal(loaded[tensor_name], matrix_of), (layout, tensor_name)


DENSE = [ONE, SP_TP2, UNEVEN, VIRTUAL, VIRTUAL_DP2, VIRTUAL_TP2, UNEVEN_DP2]
EXPERTS = [
    *(ONE, DP2, EP2, CUT, COPIED, EP2_TP2, EP2_DP4, EP4_TP2, EP2_TP2_DP2, EP2_ETP2, COPIED_DP2),
    *(EP2_PP2, TP2_EP2_PP2),
]


def around(ranks: Any, tmp_path: Path, source: Path, layouts: list[Layout]) -> None:
    """Each saves, itself and three others load: the files are the same whoever wrote them."""
    for number, saver in enumerate(layouts):
        loaders = [layouts[(number + step) % len(layouts)] for step in (0, 1, 3, 5)]
        matrix(ranks, tmp_path / f"{number}", source, saver, loaders)


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("family, tied", [("qwen3", True), ("qwen2", False)])
def test_every_dense_layout(ranks, tmp_path, family: str, tied: bool) -> None:
    write_hf_model(tmp_path, family, tied=tied, hidden_size=80, num_hidden_layers=4)
    layouts = DENSE + [unsharded(layout) for layout in (SP_TP2, VIRTUAL_DP2, UNEVEN_DP2)]
    around(ranks, tmp_path, tmp_path, layouts)


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_every_layout_of_experts(ranks, tmp_path, family: str) -> None:
    numbers = {"head_dim": 20} if family == "mixtral" else {}
    write_hf_model(tmp_path, family, hidden_size=80, **numbers)
    layouts = EXPERTS + [unsharded(layout) for layout in (EP2, COPIED, EP2_TP2_DP2, EP2_PP2)]
    around(ranks, tmp_path, tmp_path, layouts)


@pytest.mark.long
@pytest.mark.timeout(900)
def test_masters_of_bfloat16_experts_come_back(ranks, tmp_path) -> None:
    write_hf_model(tmp_path, "qwen3_moe", hidden_size=80)
    layouts = [ONE, CUT, EP2_DP4, EP2_TP2_DP2, EP2_PP2, unsharded(EP2), unsharded(COPIED_DP2)]
    layouts = [replace(one, dtype="bfloat16", section={"lr": 1e-2}) for one in layouts]
    around(ranks, tmp_path, tmp_path, layouts)
