"""The reference: refreshed from the actor, and its weights in host memory while it does not score.

What it scores is in `test_build.py`. Not covered: a GPU (device and host are the same memory here).
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.models.support import (
    actor_section,
    local_packs,
    make_actor,
    make_samples,
    make_world,
    micro_batch,
    policy_gradient,
    write_hf_model,
)

pytestmark = pytest.mark.dist
LAYOUTS = {  # name → (ranks, tp, mesh, section)
    "dp2 sharded": (2, 1, {}, {}),
    "sp tp2": (2, 2, {}, {"sequence_parallel": True}),
    "pp2 tied": (2, 1, {"pp": 2}, {}),
    "bfloat16": (2, 1, {}, {"dtype": "bfloat16"}),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("model")
    write_hf_model(path, "qwen2", tied=True)
    return path


def _roles(folder: Path, tp: int, mesh: dict, section: dict) -> tuple[Any, Any, list, list]:
    from megarl.models.roles import Reference

    world, samples = make_world(tp, **mesh), make_samples(5, 12)
    dtype = section.get("dtype", "float32")
    actor = make_actor(folder, world, **section)
    numbers = SimpleNamespace(dtype=dtype)
    settings = actor_section(**{k: v for k, v in section.items() if k != "dtype"})
    reference = Reference(actor.spec, folder, world, numbers, settings, 0.8)
    (packs,) = actor.padded([local_packs(samples, world.mesh, world.rank, 60)])
    return actor, reference, packs, [micro_batch(pack, samples) for pack in packs]


def _scores(role: Any, packs: list) -> torch.Tensor:
    return torch.cat([scores.log_probs_A for scores in role.log_probs(packs)])


def _refreshed(folder: Path, tp: int, mesh: dict, section: dict) -> dict[str, Any]:
    from megarl.models.build import destroy_mesh

    actor, reference, packs, batches = _roles(folder, tp, mesh, section)
    told: dict[str, Any] = {"at first": reference.optimizer_step}
    first = _scores(reference, packs)
    for _ in range(2):
        actor.update(batches, policy_gradient)
    told["stale"] = not torch.equal(_scores(reference, packs), _scores(actor, packs))
    reference.refresh_from(actor)
    taken = _scores(actor, packs)
    told["step"] = reference.optimizer_step
    told["same scores"] = torch.equal(_scores(reference, packs), taken)
    told["moved"] = not torch.equal(first, taken)
    actor.update(batches, policy_gradient)
    told["own weights"] = torch.equal(_scores(reference, packs), taken)
    told["and the actor's"] = not torch.equal(_scores(actor, packs), taken)
    reference.refresh_from(actor)
    told["again"] = torch.equal(_scores(reference, packs), _scores(actor, packs))
    mine, theirs = reference.named_parameters(), actor.named_parameters()
    told["no aliases"] = not {t.data_ptr() for t in mine.values()} & {
        t.data_ptr() for t in theirs.values()
    }
    destroy_mesh()
    return told


@pytest.mark.parametrize("name", list(LAYOUTS))
def test_a_refresh_takes_the_actors_bits_and_keeps_them(ranks, folder, name: str) -> None:
    world, *layout = LAYOUTS[name]
    for told in ranks.run(world, _refreshed, folder, *layout):
        assert (told.pop("at first"), told.pop("step")) == (0, 2)
        assert all(told.values()), told


def _offloaded(folder: Path, tp: int, mesh: dict, section: dict) -> dict[str, Any]:
    from megarl.models.build import destroy_mesh
    from megarl.platforms import platform_of
    from megarl.platforms.offload import Offloads, OptimizerOffload, WeightOffload
    from megarl.rollout.hybrid import TrainingOnly

    actor, reference, packs, batches = _roles(folder, tp, mesh, section)
    platform = platform_of("cpu")
    weights = WeightOffload(reference, platform)
    optimizer = OptimizerOffload(actor.trainer, platform)
    both = Offloads([optimizer, weights])
    held = reference.named_parameters()
    before = {name: tensor.detach().clone() for name, tensor in held.items()}
    wanted = _scores(reference, packs)
    told: dict[str, Any] = {"in at first": not both.is_out}
    both.out()
    both.out()  # again does nothing
    told["out"] = weights.is_out and optimizer.is_out and both.is_out
    told["nothing left"] = not any(t.untyped_storage().nbytes() for t in held.values())
    with pytest.raises(RuntimeError) as error:
        reference.refresh_from(actor)
    told["refusal"] = "host memory" in str(error.value)
    stage = TrainingOnly(lambda: None, optimizer, weights)
    scores = []
    for _ in range(2):
        with stage.scoring():
            told["optimizer stays out"] = optimizer.is_out and not weights.is_out
            scores.append(_scores(reference, packs))
        told["out after scoring"] = weights.is_out
        with stage.training():
            told["training needs no reference"] = weights.is_out and not optimizer.is_out
            actor.update(batches, policy_gradient)
    told["same scores"] = all(torch.equal(each, wanted) for each in scores)
    both.back()
    both.back()
    told["in at last"] = not both.is_out
    told["bits"] = all(torch.equal(before[name], tensor) for name, tensor in held.items())
    told["same tensors"] = all(
        tensor is held[name] for name, tensor in reference.named_parameters().items()
    )
    destroy_mesh()
    return told


@pytest.mark.parametrize("name", ["dp2 sharded", "pp2 tied", "bfloat16"])
def test_its_weights_are_there_while_it_scores_and_come_back_bit_for_bit(
    ranks, folder, name: str
) -> None:
    world, *layout = LAYOUTS[name]
    for told in ranks.run(world, _offloaded, folder, *layout):
        assert all(told.values()), told


def _another(folder: Path, other: Path) -> str:
    from megarl.models.build import destroy_mesh

    world = make_world(1)
    actor = make_actor(folder, world)
    from megarl.models.roles import Reference
    from megarl.reshard.families import read_spec

    numbers = SimpleNamespace(dtype="float32")
    reference = Reference(read_spec(other), other, world, numbers, actor_section(), 0.8)
    with pytest.raises(ValueError) as error:
        reference.refresh_from(actor)
    destroy_mesh()
    return str(error.value)


def test_a_reference_of_another_size_cannot_be_refreshed(ranks, folder, tmp_path) -> None:
    write_hf_model(tmp_path, "qwen2", tied=True, intermediate_size=128)
    (told,) = ranks.run(1, _another, folder, tmp_path)
    assert "linear_fc1.weight is torch.float32[256, 64] here and torch.float32[192, 64]" in told
