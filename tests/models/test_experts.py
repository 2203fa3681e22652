"""Experts cut over ranks in every way: every gradient, the norm and the step of HF's model under
torch's AdamW, and one set of bits for scoring and update.

Scores of the families: `test_families.py`. Other routers: `test_latent.py`. Not covered: GPU.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.models.support import (
    actor_section,
    local_packs,
    make_actor,
    make_samples,
    make_world,
    micro_batch,
    policy_gradient,
    torch_step,
    write_hf_model,
)
from tests.models.test_layouts import OPTIONS, SEQUENCE, SHARDED, is_the_step_of, run_all

pytestmark = pytest.mark.dist
LAYOUTS = {  # name → (ranks, tp, tokens per micro-batch, section)
    "one": (1, 1, 40, OPTIONS),
    "ep2": (2, 1, 40, OPTIONS | {"mesh": {"ep": 2}}),
    "ep2 sharded": (2, 1, 40, OPTIONS | SHARDED | {"mesh": {"ep": 2}}),
    "tp2": (2, 2, 40, SEQUENCE),
    "ep2 etp1 tp2": (2, 2, 40, SEQUENCE | {"mesh": {"ep": 2, "expert_tp": 1}}),
    "etp1 tp2, copies over tp": (2, 2, 40, SEQUENCE | {"mesh": {"expert_tp": 1}}),
    "etp1 tp2 sharded": (2, 2, 40, SEQUENCE | SHARDED | {"mesh": {"expert_tp": 1}}),
    "etp2, cut over dp": (2, 1, 40, OPTIONS | {"mesh": {"expert_tp": 2}}),
    "ep2 tp2 dp2": (4, 2, 40, SEQUENCE | {"mesh": {"ep": 2}}),
    "ep2 dp4 sharded": (4, 1, 30, OPTIONS | SHARDED | {"mesh": {"ep": 2}}),
    "pp2 ep2 dp2": (4, 1, 30, OPTIONS | {"pp": 2, "mesh": {"ep": 2}}),
}
LONG = {
    "dp2": (2, 1, 40, OPTIONS),
    "ep2, one pack": (2, 1, 1000, OPTIONS | {"mesh": {"ep": 2}}),
    "ep2 recomputed": (2, 1, 40, OPTIONS | {"recompute": "full", "mesh": {"ep": 2}}),
    "ep2 dp4": (4, 1, 30, OPTIONS | {"mesh": {"ep": 2}}),
    "ep4": (4, 1, 30, OPTIONS | {"mesh": {"ep": 4}}),
    "ep2 tp2 dp2 sharded": (4, 2, 40, SEQUENCE | SHARDED | {"mesh": {"ep": 2}}),
    "ep2 etp1 tp2 dp2": (4, 2, 40, SEQUENCE | {"mesh": {"ep": 2, "expert_tp": 1}}),
    "ep2 etp1 tp2 dp2 sharded": (
        4,
        2,
        40,
        SEQUENCE | SHARDED | {"mesh": {"ep": 2, "expert_tp": 1}},
    ),
    "ep4 etp1 tp2": (4, 2, 40, SEQUENCE | {"mesh": {"ep": 4, "expert_tp": 1}}),
    "pp2": (2, 1, 40, OPTIONS | {"pp": 2}),
    "pp2 tp2 ep2 etp1 recomputed": (
        4,
        2,
        40,
        SEQUENCE | SHARDED | {"pp": 2, "recompute": "full", "mesh": {"ep": 2, "expert_tp": 1}},
    ),
}
DEEP = {  # four layers
    "virtual": (2, 1, 40, OPTIONS | {"pp": 2, "mesh": {"virtual": 2}}),
    "virtual ep2": (4, 1, 30, OPTIONS | {"pp": 2, "mesh": {"virtual": 2, "ep": 2}}),
    "uneven tp2 ep2 etp1": (
        4,
        2,
        40,
        SEQUENCE | {"pp": 2, "mesh": {"stages": (3, 1), "ep": 2, "expert_tp": 1}},
    ),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("model")


@pytest.fixture(scope="module")
def by_torch(folder) -> dict[str, Any]:
    return torch_step(write_hf_model(folder, "qwen3_moe"), actor_section(**OPTIONS))


@pytest.fixture(scope="module")
def runs(ranks, folder, by_torch) -> dict[str, dict]:
    return run_all(ranks, folder, LAYOUTS)


@pytest.mark.parametrize("name", list(LAYOUTS))
def test_a_step_is_torch_adamw_on_the_hf_model(runs, by_torch, name: str) -> None:
    is_the_step_of(runs[name], by_torch, name)


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "family, numbers", [("mixtral", {}), ("qwen3_moe", {"norm_topk_prob": False})]
)
def test_all_layouts_of_both_families(ranks, tmp_path, family: str, numbers: dict) -> None:
    for depth, layouts in ((2, LAYOUTS | LONG), (4, DEEP)):
        folder = tmp_path / str(depth)
        model = write_hf_model(folder, family, num_hidden_layers=depth, **numbers)
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


def _one_sided(folder: Path, sides: list[list[int]]) -> list[float]:
    """Norm and summed loss where a data-parallel part may hold no sample."""
    from megarl.data.packing import build_pack
    from megarl.models.build import destroy_mesh

    world, samples = make_world(1, ep=2), make_samples(5, 4)
    actor = make_actor(folder, world)
    ((pack,),) = actor.padded([[build_pack(samples, sides[world.dp_index])]])
    scored = sum(len(scores.log_probs_A) for scores in actor.log_probs([pack]))
    result = actor.update([micro_batch(pack, samples)], policy_gradient)
    destroy_mesh()
    return [result.grad_norm, sum(world.gather(result.loss)), sum(world.gather(scored))]


def test_a_part_without_samples_serves_its_experts(ranks, folder, by_torch) -> None:
    one_sided, shared = (
        ranks.run(2, _one_sided, folder, sides) for sides in ([[0, 1, 2, 3], []], [[0, 1], [2, 3]])
    )
    for mine, wanted in zip(one_sided, shared, strict=True):
        assert mine == pytest.approx(wanted, rel=1e-5)


def _sequence(folder: Path) -> tuple[int, float]:
    """How many tokens the experts of this rank saw in one forward, and the router's dtype."""
    from megarl.models.build import destroy_mesh

    world = make_world(1, ep=2)
    actor = make_actor(folder, world, dtype="bfloat16")
    (packs,) = actor.padded([local_packs(make_samples(5, 12), world.mesh, world.rank, 1000)])
    seen: list[int] = []
    layer = actor.model.decoder.layers[0].mlp
    layer.experts.register_forward_hook(lambda _, given, out: seen.append(len(given[0])))
    weights: list[torch.Tensor] = []
    layer.router.register_forward_hook(lambda _, given, out: weights.append(out[0]))
    actor.log_probs(packs)
    destroy_mesh()
    total = sum(world.gather(seen[0])) / sum(world.gather(len(packs[0].token_ids_T)))
    assert weights[0].dtype is torch.float32
    return total, float((weights[0].sum(-1) - 1).abs().max())


def test_every_token_reaches_two_experts_with_weights_of_one(ranks, folder, by_torch) -> None:
    for experts_per_token, gap in ranks.run(2, _sequence, folder):
        assert experts_per_token == 2 and gap < 1e-6


def _router() -> list[list[list[float]]]:
    """Weights of one token by hand: scores ln 1, ln 2, ln 5, ln 2 of four experts, two chosen."""
    from megatron.core import parallel_state
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.transformer_config import TransformerConfig

    from megarl.models.build import destroy_mesh, initialize_mesh
    from megarl.models.routers import Router

    initialize_mesh(make_world(1).mesh)
    assert parallel_state.model_parallel_is_initialized()
    config = TransformerConfig(
        num_layers=1,
        hidden_size=4,
        num_attention_heads=1,
        num_moe_experts=4,
        moe_router_topk=2,
        moe_ffn_hidden_size=4,
        moe_router_load_balancing_type="none",
        add_bias_linear=False,
        perform_initialization=False,
    )
    groups = ProcessGroupCollection.use_mpu_process_groups()
    token = torch.tensor([1.0, 2.0, 5.0, 1.5]).log().view(1, 1, 4)
    told = []
    for normalize in (False, True):
        router = Router(config, groups, normalize=normalize)
        with torch.no_grad():
            router.weight.copy_(torch.eye(4))
        weights, chosen = router(token)
        assert chosen.tolist() == [[False, True, True, False]]
        told.append(weights.tolist())
    destroy_mesh()
    return told


def test_the_router_is_softmax_then_the_largest(ranks) -> None:
    (plain, normalised), *_ = ranks.run(1, _router)
    assert plain[0] == pytest.approx([0, 2 / 9.5, 5 / 9.5, 0])
    assert normalised[0] == pytest.approx([0, 2 / 7, 5 / 7, 0])


def test_layers_without_experts_are_dense(ranks, tmp_path) -> None:
    """Also where they leave a pipeline stage without experts, and its optimizer of them empty."""
    from megarl.reshard.families import read_spec

    model = write_hf_model(tmp_path, "qwen3_moe", mlp_only_layers=[0])
    expected = torch_step(model, actor_section(**OPTIONS))
    # The reader knows no such config: it gets one with experts everywhere, and is told here.
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"mlp_only_layers": []}))
    spec = read_spec(tmp_path)
    spec = dataclasses.replace(spec, moe=dataclasses.replace(spec.moe, layers=(1,)))
    options = OPTIONS | {"spec": spec}
    layouts = {
        "ep2": (2, 1, 40, options | {"mesh": {"ep": 2}}),
        "pp2": (2, 1, 40, options | {"pp": 2}),
        "pp2 ep2 sharded": (4, 1, 30, options | SHARDED | {"pp": 2, "mesh": {"ep": 2}}),
    }
    for name, run in run_all(ranks, tmp_path, layouts).items():
        is_the_step_of(run, expected, name)


def _refusals(folder: Path) -> list[str]:
    from megarl.models.build import destroy_mesh
    from megarl.models.config import refuse_layout
    from megarl.reshard.families import read_spec

    told = []
    spec, world = read_spec(folder), make_world(1, ep=2)
    actor = make_actor(folder, world)
    samples = make_samples(5, 12)
    packs = local_packs(samples, world.mesh, world.rank, 25)
    with pytest.raises(ValueError) as error:
        actor.log_probs(packs)
    told.append(str(error.value))
    with pytest.raises(ValueError) as error:
        actor.log_probs(packs[: world.rank])
    told.append(str(error.value))
    assert not dist.is_initialized() or world.gather(1) == [1, 1], "nobody waits for anybody"
    destroy_mesh()
    for other, mesh, parallel in (
        (spec, SimpleNamespace(tp=2, pp=1, ep=1, etp=2), False),
        (spec, SimpleNamespace(tp=1, pp=1, ep=3, etp=1), False),
    ):
        with pytest.raises(ValueError) as error:
            refuse_layout(other, mesh, parallel)
        told.append(str(error.value))
    return told


def test_what_does_not_fit_is_refused_alike_on_every_rank(ranks, folder, by_torch) -> None:
    first, second = ranks.run(2, _refusals, folder)
    assert first == second
    lengths, counts, parallel, ep = first
    assert "ranks that share experts have packs of" in lengths and "pad them alike" in lengths
    assert "ranks that share experts have packs of" in counts
    assert "set actor.sequence_parallel=true" in parallel
    assert "4 experts do not divide by actor.ep=3" in ep
