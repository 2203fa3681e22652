"""Pipeline stages: padding and recompute change nothing, every copy is loaded, any depth divides.

The step itself against torch on a tied model is in `test_step.py`, a stage that fails in
`test_agreement.py`, stages of unequal depth and virtual ones in `test_layouts.py`. Not covered: GPU
(NCCL sends, memory saved by recompute).
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.models.runs import several
from tests.models.support import (
    actor_section,
    local_packs,
    make_actor,
    make_samples,
    make_world,
    micro_batch,
    policy_gradient,
    relative,
    torch_step,
    write_hf_model,
)

pytestmark = pytest.mark.dist
OPTIONS = {"distributed_optimizer": False, "weight_decay": 0.1, "clip_grad": 0.7}
PIPELINE = OPTIONS | {"pp": 2}
STEPS = {
    "plain": (1, 40, PIPELINE),
    "padded": (1, 40, PIPELINE | {"padding": 37}),
    "recomputed": (1, 40, PIPELINE | {"recompute": "full"}),
    "one pack": (1, 1000, PIPELINE),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("model")


@pytest.fixture(scope="module")
def by_torch(folder) -> dict[str, Any]:
    """An untied model: the last stage's output layer is a parameter of its own."""
    return torch_step(write_hf_model(folder, "llama"), actor_section(**OPTIONS))


@pytest.fixture(scope="module")
def steps(ranks, folder, by_torch) -> dict[str, dict]:
    calls = [(folder, *step) for step in STEPS.values()]
    return dict(zip(STEPS, ranks.run(2, several, calls)[0], strict=True))


def _is_the_step_of(run: dict[str, Any], by_torch: dict[str, Any]) -> None:
    assert run["result"].stepped
    assert (run["log_probs"] - by_torch["log_probs"]).abs().max() <= 3e-5
    assert torch.equal(run["log_probs"], run["in_update"]), "the first ratio is not 1"
    assert run["result"].grad_norm == pytest.approx(by_torch["norm"], rel=1e-5)
    assert run["loss"] == pytest.approx(by_torch["loss"], abs=1e-6)
    assert run["loss_after"] == pytest.approx(by_torch["loss_after"], abs=1e-4)
    if "gradients" in run:
        assert relative(run["gradients"], by_torch["gradients"]) <= 1e-5


@pytest.mark.parametrize("name", list(STEPS))
def test_an_untied_model_steps_as_in_torch(steps, by_torch, name: str) -> None:
    _is_the_step_of(steps[name], by_torch)
    assert (steps[name]["packs"] > 2) == (name != "one pack")


def test_recompute_changes_no_bit(ranks, steps, folder) -> None:
    plain, again = steps["plain"], steps["recomputed"]
    for name in ("log_probs", "in_update"):
        assert torch.equal(plain[name], again[name])
    assert plain["loss"] == again["loss"] and plain["loss_after"] == again["loss_after"]
    for name, gradient in plain["gradients"].items():
        assert torch.equal(gradient, again["gradients"][name]), name
    calls = [(folder, 2, 40, OPTIONS | {"recompute": kind}) for kind in ("none", "full")]
    plain, again = ranks.run(2, several, calls)[0]
    for name, gradient in plain["gradients"].items():
        assert torch.equal(gradient, again["gradients"][name]), name


def _layer_forwards(folder: Path) -> list[int]:
    """How often a layer of this rank runs in a step, without and with recompute."""
    from megarl.models.build import destroy_mesh

    world, samples = make_world(1, 2), make_samples(5, 12)
    packs = local_packs(samples, world.mesh, world.rank, 40, padding=0)
    told = []
    for recompute in ("none", "full"):
        actor = make_actor(folder, world, recompute=recompute)
        (layer,) = actor.model.decoder.layers
        seen: list[None] = []
        layer.register_forward_hook(lambda *_, seen=seen: seen.append(None))
        actor.log_probs(packs)
        assert len(seen) == len(packs), "recompute is for updates only"
        actor.update([micro_batch(pack, samples) for pack in packs], policy_gradient)
        told.append((len(seen) - len(packs)) / len(packs))
    destroy_mesh()
    return told


def test_recompute_runs_every_layer_twice(ranks, folder, by_torch) -> None:
    assert ranks.run(2, _layer_forwards, folder) == [[1.0, 2.0]] * 2


def test_padding_changes_no_number(steps) -> None:
    """Other shapes may round otherwise (the padding itself adds nothing: the next test)."""
    plain, padded = steps["plain"], steps["padded"]
    assert (plain["log_probs"] - padded["log_probs"]).abs().max() <= 2e-6
    assert (plain["entropy"] - padded["entropy"]).abs().max() <= 2e-6
    assert padded["loss"] == pytest.approx(plain["loss"], abs=1e-7)
    assert relative(padded["gradients"], plain["gradients"]) <= 1e-6


def _with_padding_of(folder: Path, token: int) -> dict[str, Any]:
    """One update with padding that repeats `token`: everything it leaves, on this rank."""
    from megarl.models.build import destroy_mesh

    world, samples = make_world(1, 2), make_samples(5, 12)
    actor = make_actor(folder, world)
    real = [len(p.token_ids_T) for p in local_packs(samples, world.mesh, world.rank, 40)]
    packs = []
    for pack, tokens in zip(
        local_packs(samples, world.mesh, world.rank, 40, padding=21), real, strict=True
    ):
        ids = pack.token_ids_T.clone()
        ids[tokens:] = token
        packs.append(dataclasses.replace(pack, token_ids_T=ids))
    scores = actor.log_probs(packs)
    result = actor.update([micro_batch(pack, samples) for pack in packs], policy_gradient)
    told = {
        "log_probs": torch.cat([score.log_probs_A for score in scores]),
        "norm": torch.tensor(result.grad_norm),
        **{name: param.detach().clone() for name, param in actor.named_parameters().items()},
    }
    destroy_mesh()
    return told


def test_what_stands_in_the_padding_changes_no_bit(ranks, folder, by_torch) -> None:
    zeros, others = (ranks.run(2, _with_padding_of, folder, token) for token in (0, 99))
    for mine, theirs in zip(zeros, others, strict=True):
        assert mine.keys() == theirs.keys()
        assert all(torch.equal(mine[name], theirs[name]) for name in mine)


def _export(folder: Path, out: Path, tp: int, pp: int) -> str:
    """The manifest hash of a freshly built actor, exported to `out`."""
    from megarl.checkpoint.hf_folder import export_folder
    from megarl.models.build import destroy_mesh
    from megarl.reshard.digest import Digester
    from megarl.reshard.layout import megatron_placement
    from megarl.reshard.transfer import weight_manifest

    world = make_world(tp, pp)
    actor = make_actor(folder, world)
    placement, params = megatron_placement(actor.spec, world.mesh), actor.named_parameters()
    export_folder(out, folder, placement, params, actor.spec, world, torch.float32)
    digester = Digester(placement, world.rank, params, torch.float32)
    manifest = weight_manifest(placement, digester, torch.float32, world)
    destroy_mesh()
    return manifest.hash


@pytest.mark.parametrize("tied", [True, False])
def test_a_pipeline_loads_and_exports_the_same_weights(ranks, tmp_path, tied: bool) -> None:
    write_hf_model(tmp_path / "source", tied=tied)
    source = load_file(tmp_path / "source" / "model.safetensors")
    hashes = set()
    for world, tp, pp in ((1, 1, 1), (2, 1, 2), (4, 2, 2)):
        out = tmp_path / f"{tp}{pp}"
        hashes |= set(ranks.run(world, _export, tmp_path / "source", out, tp, pp))
        exported: dict[str, Tensor] = {}
        for file in out.glob("*.safetensors"):
            exported |= load_file(file)
        assert exported.keys() == source.keys()
        assert all(torch.equal(exported[name], source[name]) for name in source)
    assert len(hashes) == 1


def _refusals(folder: Path) -> list[str]:
    from megarl.models.build import build_model, destroy_mesh, initialize_mesh
    from megarl.reshard.families import read_spec

    world, samples = make_world(1, 2), make_samples(5, 12)
    initialize_mesh(world.mesh)
    spec = dataclasses.replace(read_spec(folder), layers=3)
    told = []
    with pytest.raises(ValueError) as error:
        build_model(spec, folder, world.mesh, world.rank, torch.float32, torch.device("cpu"))
    told.append(str(error.value))
    actor = make_actor(folder, world)
    packs = local_packs(samples, world.mesh, world.rank, 40)
    with pytest.raises(ValueError) as error:
        actor.log_probs(packs)
    told.append(str(error.value))
    destroy_mesh()
    return told


def test_layers_that_do_not_divide_and_packs_of_several_lengths_are_refused(
    ranks, folder, by_torch
) -> None:
    for stages, packs in ranks.run(2, _refusals, folder):
        assert "3 layers do not divide by actor.pp=2" in stages
        assert "pad them to one length" in packs


def _sides(folder: Path, empty: bool) -> list[float]:
    """Norm and loss after an update in which one data-parallel part may have no sample."""
    from megarl.data.packing import build_pack
    from megarl.models.build import destroy_mesh

    world, samples = make_world(1, 2), make_samples(5, 4)
    actor = make_actor(folder, world)
    rows = ([0, 1, 2, 3], []) if empty else ([0, 1], [2, 3])
    pack = build_pack(samples, rows[world.dp_index])
    result = actor.update([micro_batch(pack, samples)], policy_gradient)
    destroy_mesh()
    return [result.grad_norm, sum(world.gather(result.loss))]


def test_a_part_without_samples_runs_through_the_pipeline(ranks, folder, by_torch) -> None:
    one_sided, shared = (ranks.run(4, _sides, folder, empty) for empty in (True, False))
    for mine, wanted in zip(one_sided, shared, strict=True):
        assert mine == pytest.approx(wanted, rel=1e-5)


LONG = {  # (ranks, tp, section)
    "pp4": (4, 1, PIPELINE | {"pp": 4}),
    "pp4 sharded": (4, 1, PIPELINE | {"pp": 4, "distributed_optimizer": True}),
    "pp2": (2, 1, PIPELINE),
    "pp2 recomputed": (2, 1, PIPELINE | {"recompute": "full"}),
    "tp2 pp2": (4, 2, PIPELINE),
    "tp2 pp2 sharded, recomputed": (
        4,
        2,
        PIPELINE | {"distributed_optimizer": True, "recompute": "full"},
    ),
    "pp2 dp2": (4, 1, PIPELINE),
    "pp2 dp2 sharded": (4, 1, PIPELINE | {"distributed_optimizer": True}),
}


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("family", ["llama", "qwen2"])
@pytest.mark.parametrize("tied", [True, False])
def test_four_layers_in_every_pipeline(ranks, tmp_path, family: str, tied: bool) -> None:
    model = write_hf_model(tmp_path, family, tied=tied, num_hidden_layers=4)
    by_torch = torch_step(model, actor_section(**OPTIONS))
    for world in (2, 4):
        names = [name for name, layout in LONG.items() if layout[0] == world]
        for budget in (30, 1000):  # more and fewer micro-batches than stages
            calls = [(tmp_path, LONG[name][1], budget, LONG[name][2]) for name in names]
            for run in ranks.run(world, several, calls)[0]:
                _is_the_step_of(run, by_torch)


@pytest.mark.long
@pytest.mark.timeout(900)
def test_bfloat16_in_a_pipeline(ranks, folder, by_torch) -> None:
    options = {"dtype": "bfloat16", "lr": 1e-4, "pp": 2}
    for world, tp in ((2, 1), (4, 2)):
        calls = [
            (folder, tp, 60, options | {"distributed_optimizer": sharded})
            for sharded in (True, False)
        ]
        for run in ranks.run(world, several, calls)[0]:
            assert (run["log_probs"] - by_torch["log_probs"]).abs().mean() < 0.05
            assert torch.equal(run["log_probs"], run["in_update"])
            assert run["result"].stepped and run["loss_after"] < run["loss"]
