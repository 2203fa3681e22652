"""Latent attention, grouped sigmoid routing and shared experts (DeepSeek-V3), cut over ranks in
every way: every gradient, the norm and the step of HF's model under torch's AdamW.

Scores of more variants: `test_families.py`. Not covered: GPU; DeepSeek-V2, which is refused.
"""

from __future__ import annotations

from pathlib import Path
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
    torch_step,
    write_hf_model,
)
from tests.models.test_layouts import OPTIONS, SEQUENCE, SHARDED, is_the_step_of, run_all

pytestmark = pytest.mark.dist
LAYOUTS = {  # name → (ranks, tp, tokens per micro-batch, section)
    "one": (1, 1, 40, OPTIONS),
    "tp2": (2, 2, 40, SEQUENCE),
    "ep2": (2, 1, 40, OPTIONS | {"mesh": {"ep": 2}}),
    "ep2 etp1 tp2 sharded": (2, 2, 40, SEQUENCE | SHARDED | {"mesh": {"ep": 2, "expert_tp": 1}}),
    "ep2 tp2 dp2": (4, 2, 40, SEQUENCE | {"mesh": {"ep": 2}}),
    "pp2 tp2 ep2 etp1 recomputed": (
        4,
        2,
        40,
        SEQUENCE | SHARDED | {"pp": 2, "recompute": "full", "mesh": {"ep": 2, "expert_tp": 1}},
    ),
}
LONG = {
    "dp2 sharded": (2, 1, 40, OPTIONS | SHARDED),
    "etp2, cut over dp": (2, 1, 40, OPTIONS | {"mesh": {"expert_tp": 2}}),
    "tp4": (4, 4, 40, SEQUENCE),
    "ep4 etp1 tp2": (4, 2, 40, SEQUENCE | {"mesh": {"ep": 4, "expert_tp": 1}}),
    "pp2": (2, 1, 40, OPTIONS | {"pp": 2}),
}
BIAS = "model.layers.1.mlp.gate.e_score_correction_bias"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("model")


@pytest.fixture(scope="module")
def by_torch(folder) -> dict[str, Any]:
    return torch_step(write_hf_model(folder, "deepseek_v3"), actor_section(**OPTIONS))


@pytest.fixture(scope="module")
def runs(ranks, folder, by_torch) -> dict[str, dict]:
    return run_all(ranks, folder, LAYOUTS)


@pytest.mark.parametrize("name", list(LAYOUTS))
def test_a_step_is_torch_adamw_on_the_hf_model(runs, by_torch, name: str) -> None:
    is_the_step_of(runs[name], by_torch, name)


@pytest.mark.parametrize("name", list(LAYOUTS))
def test_a_step_leaves_the_bias_of_the_choice(runs, by_torch, name: str) -> None:
    assert by_torch["weights"][BIAS].abs().max() > 0.1
    assert torch.equal(runs[name]["weights"][BIAS], by_torch["weights"][BIAS])


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("numbers", [{}, {"q_lora_rank": None, "norm_topk_prob": False}])
def test_all_layouts_of_both_kinds_of_queries(ranks, tmp_path, numbers: dict) -> None:
    model = write_hf_model(tmp_path, "deepseek_v3", **numbers)
    expected = torch_step(model, actor_section(**OPTIONS))
    for name, run in run_all(ranks, tmp_path, LAYOUTS | LONG).items():
        is_the_step_of(run, expected, name)


def _narrow(folder: Path) -> dict[str, Any]:
    """In bfloat16: the weights that are not, whether an optimizer has them, and what a step did."""
    from megarl.models.build import destroy_mesh

    world = make_world(2, ep=2, expert_tp=1)
    section = SEQUENCE | SHARDED | {"lr": 1e-4}
    actor = make_actor(folder, world, dtype="bfloat16", **section)
    samples = make_samples(5, 12)
    (packs,) = actor.padded([local_packs(samples, world.mesh, world.rank, 40)])
    before = {name: tensor.clone() for name, tensor in actor.named_parameters().items()}
    first = [scores.log_probs_A for scores in actor.log_probs(packs)]
    kept: list[torch.Tensor] = []

    def loss(scores: Any, batch: Any) -> tuple[torch.Tensor, dict]:
        kept.append(scores.log_probs_A.detach().clone())
        return policy_gradient(scores, batch)

    result = actor.update([micro_batch(pack, samples) for pack in packs], loss)
    weights = actor.named_parameters()
    told = {
        "wide": [name for name, tensor in weights.items() if tensor.dtype == torch.float32],
        "trained": [name for name, tensor in weights.items() if tensor.requires_grad],
        "moved": [name for name in weights if not torch.equal(weights[name], before[name])],
        "same bits": all(map(torch.equal, first, kept)),
        "stepped": result.stepped,
    }
    destroy_mesh()
    return told


def test_the_bias_of_the_choice_is_float32_and_never_trained(ranks, folder, by_torch) -> None:
    for told in ranks.run(2, _narrow, folder):
        assert told["wide"] == ["decoder.layers.1.mlp.router.expert_bias"]
        assert not set(told["wide"]) & {*told["trained"], *told["moved"]}
        assert told["stepped"] and told["same bits"] and len(told["moved"]) > 10


def _routed() -> list[dict[str, Any]]:
    """Weights of one token by hand; four experts in two groups, one group open, one expert."""
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.transformer_config import TransformerConfig

    from megarl.models.build import destroy_mesh, initialize_mesh
    from megarl.models.routers import GroupedRouter
    from megarl.reshard.families.spec import MoESpec

    initialize_mesh(make_world(1).mesh)
    config = TransformerConfig(
        num_layers=1,
        hidden_size=4,
        num_attention_heads=1,
        num_moe_experts=4,
        moe_router_topk=1,
        moe_router_pre_softmax=True,
        moe_router_load_balancing_type="none",
        moe_ffn_hidden_size=4,
        add_bias_linear=False,
        perform_initialization=False,
        use_cpu_initialization=True,
    )
    groups = ProcessGroupCollection.use_mpu_process_groups()
    # Sigmoids 0.9, 0.1, 0.6, 0.5.
    token = torch.tensor([0.9, 0.1, 0.6, 0.5]).logit().view(1, 1, 4)
    told = []
    for bias, normalize in (([0.0] * 4, False), ([0.0, 0.2, 0.0, 0.0], False), ([0.0] * 4, True)):
        moe = MoESpec(4, 1, 4, (0,), normalize, groups=2, top_groups=1, scale=2.5)
        router = GroupedRouter(config, groups, moe=moe)
        with torch.no_grad():
            router.weight.copy_(torch.eye(4))
            router.expert_bias.copy_(torch.tensor(bias))
        weights, chosen = router(token)
        assert chosen.sum() == 1 and chosen.equal(weights != 0)
        told.append(weights[0].tolist())
    destroy_mesh()
    return told


def test_the_bias_moves_the_choice_and_not_the_weight(ranks) -> None:
    """Group sums are 1.0 and 1.1; a bias of 0.2 makes them 1.2 and 1.1."""
    plain, biased, normalised = ranks.run(1, _routed)[0]
    assert plain == pytest.approx([0, 0, 2.5 * 0.6, 0])
    assert biased == pytest.approx([2.5 * 0.9, 0, 0, 0])
    assert normalised == pytest.approx([0, 0, 2.5, 0])
