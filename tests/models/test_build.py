"""Megatron's model against HF's on the same checkpoint, TP 1 and 2, nothing at its default.

Not covered: pipeline stages (`test_pipeline.py`), GPU.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from megarl.contracts.mesh import Mesh
from tests.models.runs import several
from tests.models.support import (
    VOCAB,
    actor_section,
    hf_scores,
    local_packs,
    make_actor,
    make_samples,
    make_world,
    micro_batch,
    policy_gradient,
    write_hf_model,
)

FAMILIES = [("llama", False), ("llama", True), ("qwen2", False), ("qwen2", True)]


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[tuple[str, bool], tuple]:
    made = {}
    for family, tied in FAMILIES:
        folder = tmp_path_factory.mktemp(f"{family}{tied}")
        model = write_hf_model(folder, family, tied=tied)
        with torch.no_grad():
            made[family, tied] = (folder, *hf_scores(model, make_samples(5, 12), 0.8))
    return made


@pytest.mark.dist
@pytest.mark.parametrize("tp", [1, 2])
def test_scores_are_those_of_transformers(ranks, models, tp: int) -> None:
    calls = [(folder, tp, 60, {}) for folder, _, _ in models.values()]
    for told in ranks.run(tp, several, calls):
        for run, (key, (_, log_probs, entropy)) in zip(told, models.items(), strict=True):
            assert log_probs.min() < -4, "a model near uniform proves little"
            assert (run["log_probs"] - log_probs).abs().max() <= 3e-5, key
            assert (run["entropy"] - entropy).abs().max() <= 3e-5, key


def _reference(folder: Path, tp: int) -> list[torch.Tensor]:
    """The actor's and the reference's scores of the same packs, before and after an update."""
    from megarl.models.build import destroy_mesh
    from megarl.models.roles import Reference

    world = make_world(tp)
    samples = make_samples(5, 12)
    actor = make_actor(folder, world)
    reference = Reference(
        actor.spec, folder, world, SimpleNamespace(dtype="float32"), actor_section(), 0.8
    )
    packs = local_packs(samples, world.mesh, world.rank, 60)
    told = [
        torch.cat([s.log_probs_A for s in role.log_probs(packs)]) for role in (actor, reference)
    ]
    actor.update([micro_batch(pack, samples) for pack in packs], policy_gradient)
    told += [
        torch.cat([s.log_probs_A for s in role.log_probs(packs)]) for role in (actor, reference)
    ]
    destroy_mesh()
    return told


@pytest.mark.dist
@pytest.mark.parametrize("tp", [1, 2])
def test_the_reference_starts_as_the_actor_and_stays(ranks, models, tp: int) -> None:
    folder = models["qwen2", True][0]
    for before, frozen, after, still in ranks.run(2, _reference, folder, tp):
        assert torch.equal(before, frozen) and torch.equal(frozen, still)
        assert not torch.equal(after, frozen)


def _refusals(folder: Path) -> list[str]:
    from megarl.models.build import build_model, destroy_mesh, initialize_mesh
    from megarl.reshard.families import read_spec

    told = []
    world = make_world(2)
    initialize_mesh(world.mesh)
    initialize_mesh(world.mesh)  # again is harmless
    for other in (Mesh(2, tp=1), Mesh(2, tp=1, pp=2)):
        with pytest.raises(RuntimeError, match="tp=2, pp=1"):
            initialize_mesh(other)
    import safetensors.torch as st

    weights = st.load_file(folder / "model.safetensors")
    weights["model.layers.1.mlp.up_proj.weight"][3, 5] = float("nan")
    if world.rank == 0:
        st.save_file(weights, folder / "model.safetensors")
    world.barrier("written")
    spec = read_spec(folder)
    device = torch.device("cpu")
    try:
        build_model(spec, folder, world.mesh, world.rank, torch.float32, device)
    except RuntimeError as failure:
        told.append(str(failure))
    destroy_mesh()
    return told


def _unknown_ids(folder: Path) -> str:
    from megarl.models.build import destroy_mesh

    world = make_world(1)
    actor = make_actor(folder, world)
    (pack,) = local_packs(make_samples(5, 2), world.mesh, world.rank, 200)
    ids = torch.full_like(pack.token_ids_T, VOCAB)  # a padding row, not a token
    with pytest.raises(ValueError) as error:
        actor.log_probs([dataclasses.replace(pack, token_ids_T=ids)])
    destroy_mesh()
    return str(error.value)


@pytest.mark.dist
def test_token_ids_beyond_the_vocabulary_are_refused(ranks, models) -> None:
    (told,) = ranks.run(1, _unknown_ids, models["llama", False][0])
    assert "token id 307" in told and "the model has 307" in told


@pytest.mark.dist
def test_what_cannot_be_built_is_refused_by_name(ranks, tmp_path) -> None:
    write_hf_model(tmp_path)
    first, second = ranks.run(2, _refusals, tmp_path)
    assert "decoder.layers.1.mlp.linear_fc1.weight (rank 0)" in first[0]
    assert not second, "rank 1 does not hold the row that is not finite"
