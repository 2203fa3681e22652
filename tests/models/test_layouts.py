"""Sequence parallelism, uneven and virtual stages of a model with q/k norms: every gradient, the
norm and the step of HF's model under torch's AdamW, and one set of bits for scoring and update.

Even pipelines and tensor parallelism alone: `test_step.py`, `test_pipeline.py`; experts:
`test_experts.py`. Not covered: GPU.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.models.runs import several
from tests.models.support import (
    actor_section,
    local_packs,
    make_actor,
    make_samples,
    make_world,
    relative,
    torch_step,
    write_hf_model,
)

pytestmark = pytest.mark.dist
OPTIONS = {"distributed_optimizer": False, "weight_decay": 0.1, "clip_grad": 0.7}
SEQUENCE = OPTIONS | {"sequence_parallel": True}
SHARDED = {"distributed_optimizer": True}
VIRTUAL = OPTIONS | {"pp": 2, "mesh": {"virtual": 2}}
LAYOUTS = {  # name → (ranks, tp, tokens per micro-batch, section); four layers
    "tp2": (2, 2, 40, OPTIONS),
    "sp tp2": (2, 2, 40, SEQUENCE),
    "sp tp2 sharded": (2, 2, 40, SEQUENCE | SHARDED),
    "pp2 uneven": (2, 1, 40, OPTIONS | {"pp": 2, "mesh": {"stages": (3, 1)}}),
    "virtual": (2, 1, 40, VIRTUAL),
    "virtual, one pack": (2, 1, 1000, VIRTUAL),
    "virtual, three packs": (2, 1, 55, VIRTUAL),
    "virtual sharded": (2, 1, 40, VIRTUAL | SHARDED),
    "virtual sp tp2": (4, 2, 40, VIRTUAL | SEQUENCE),
}
LONG = {
    "sp tp2 recomputed": (2, 2, 40, SEQUENCE | {"recompute": "full"}),
    "sp tp2 dp2": (4, 2, 30, SEQUENCE),
    "sp tp2 pp2": (4, 2, 40, SEQUENCE | {"pp": 2}),
    "sp tp2 pp2 uneven": (4, 2, 40, SEQUENCE | {"pp": 2, "mesh": {"stages": (1, 3)}}),
    "virtual recomputed": (2, 1, 40, VIRTUAL | {"recompute": "full"}),
    "virtual dp2": (4, 1, 30, VIRTUAL),
    "virtual dp2 sharded": (4, 1, 30, VIRTUAL | SHARDED),
    "virtual sp tp2 sharded recomputed": (
        4,
        2,
        40,
        VIRTUAL | SEQUENCE | SHARDED | {"recompute": "full"},
    ),
}
DEEP = {  # six layers
    "virtual uneven": (
        2,
        1,
        40,
        OPTIONS | {"pp": 2, "mesh": {"virtual": 2, "stages": (1, 2, 2, 1)}},
    ),
    "virtual 3": (2, 1, 40, OPTIONS | {"pp": 2, "mesh": {"virtual": 3}}),
    "pp4 uneven": (4, 1, 40, OPTIONS | {"pp": 4, "mesh": {"stages": (1, 2, 2, 1)}}),
}


def run_all(ranks: Any, folder: Path, layouts: dict[str, tuple]) -> dict[str, dict]:
    told: dict[str, dict] = {}
    for world in sorted({layout[0] for layout in layouts.values()}):
        names = [name for name, layout in layouts.items() if layout[0] == world]
        calls = [(folder, *layouts[name][1:]) for name in names]
        told |= dict(zip(names, ranks.run(world, several, calls)[0], strict=True))
    return told


def is_the_step_of(run: dict[str, Any], by_torch: dict[str, Any], name: str) -> None:
    assert run["result"].stepped
    assert (run["log_probs"] - by_torch["log_probs"]).abs().max() <= 3e-5, name
    assert torch.equal(run["log_probs"], run["in_update"]), (name, "the first ratio is not 1")
    assert run["result"].grad_norm == pytest.approx(by_torch["norm"], rel=1e-5), name
    assert run["loss"] == pytest.approx(by_torch["loss"], abs=1e-6), name
    assert run["loss_after"] == pytest.approx(by_torch["loss_after"], abs=1e-4), name
    if "gradients" in run:
        assert run["gradients"].keys() == by_torch["gradients"].keys()
        for tensor, gradient in by_torch["gradients"].items():
            found = relative({tensor: run["gradients"][tensor]}, {tensor: gradient})
            assert found <= 1e-5, (name, tensor)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("model")


@pytest.fixture(scope="module")
def by_torch(folder) -> dict[str, Any]:
    model = write_hf_model(folder, "qwen3", tied=True, num_hidden_layers=4)
    return torch_step(model, actor_section(**OPTIONS))


@pytest.fixture(scope="module")
def runs(ranks, folder, by_torch) -> dict[str, dict]:
    return run_all(ranks, folder, LAYOUTS)


@pytest.mark.parametrize("name", list(LAYOUTS))
def test_a_step_is_torch_adamw_on_the_hf_model(runs, by_torch, name: str) -> None:
    is_the_step_of(runs[name], by_torch, name)


def test_the_virtual_schedule_saw_full_and_broken_rounds(runs) -> None:
    packs = {name: runs[name]["packs"] for name in LAYOUTS if name.startswith("virtual")}
    assert packs["virtual, one pack"] == 1 and packs["virtual, three packs"] == 3
    assert packs["virtual"] % 2 == 0


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("family, tied", [("qwen3", True), ("qwen2", False), ("llama", False)])
def test_all_layouts_of_all_dense_families(ranks, tmp_path, family: str, tied: bool) -> None:
    for depth, layouts in ((4, LAYOUTS | LONG), (6, DEEP)):
        folder = tmp_path / str(depth)
        model = write_hf_model(folder, family, tied=tied, num_hidden_layers=depth)
        expected = torch_step(model, actor_section(**OPTIONS))
        for name, run in run_all(ranks, folder, layouts).items():
            is_the_step_of(run, expected, name)


@pytest.mark.long
@pytest.mark.timeout(900)
def test_bfloat16_keeps_its_bits_in_every_layout(ranks, folder, by_torch) -> None:
    narrow = {"dtype": "bfloat16", "lr": 1e-4}
    layouts = {
        name: (world, tp, budget, section | narrow)
        for name, (world, tp, budget, section) in (LAYOUTS | LONG).items()
    }
    for name, run in run_all(ranks, folder, layouts).items():
        assert (run["log_probs"] - by_torch["log_probs"]).abs().mean() < 0.1, name
        assert torch.equal(run["log_probs"], run["in_update"]), name
        assert run["result"].stepped and run["loss_after"] < run["loss"], name


def _names(folder: Path) -> list[str]:
    from megarl.models.build import destroy_mesh

    actor = make_actor(folder, make_world(1, 2, virtual=2))
    destroy_mesh()
    return list(actor.named_parameters())


def test_chunks_give_their_number_to_their_parameters(ranks, folder, by_torch) -> None:
    """Four chunks of a layer: the first and third on stage 0, the others on stage 1."""
    first, last = ranks.run(2, _names, folder)
    for names in (first, last):
        layers = {name.split(".self_attention")[0] for name in names if "linear_qkv" in name}
        assert layers == {"chunk0.decoder.layers.0", "chunk1.decoder.layers.0"}
    assert "chunk0.embedding.word_embeddings.weight" in first
    assert {"chunk1.decoder.final_layernorm.weight", "chunk1.output_layer.weight"} <= set(last)
    assert not any("output_layer" in name or "final" in name for name in first)


def _refusals(folder: Path) -> list[str]:
    from megarl.models.build import destroy_mesh, initialize_mesh

    told = []
    samples = make_samples(5, 12)
    world = make_world(2)
    actor = make_actor(folder, world, sequence_parallel=True)
    packs = local_packs(samples, world.mesh, world.rank, 40)
    odd = [pack for pack in packs if len(pack.token_ids_T) % 2]
    assert odd, "an odd length must be among them"
    with pytest.raises(ValueError) as error:
        actor.log_probs(odd)
    told.append(str(error.value))
    for other in ({"ep": 2, "expert_tp": 1}, {"expert_tp": 1}):
        with pytest.raises(RuntimeError) as mismatch:
            initialize_mesh(dataclasses.replace(world.mesh, **other))
        told.append(str(mismatch.value))
    destroy_mesh()
    with pytest.raises(ValueError) as error:
        make_actor(folder, make_world(1, ep=2))
    told.append(str(error.value))
    destroy_mesh()
    return told


def test_what_does_not_fit_is_refused_in_one_line(ranks, folder, by_torch) -> None:
    for lengths, ep, etp, experts in ranks.run(2, _refusals, folder):
        assert "do not divide by actor.tp=2 under sequence parallelism" in lengths
        assert "ep=1, expert_tp=2, not with" in ep and "ep=1, expert_tp=2, not with" in etp
        assert "actor.ep=2" in experts and "has no experts" in experts
