"""A trained latent-attention model with experts into SGLang's live parameters: what SGLang would
load lies there, and its log-probs are the trainer's after a step.

Not covered: GPU. Other families: `test_live_models.py`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megarl.reshard.layout import megatron_placement, sglang_placement
from megarl.reshard.transfer import Resharder
from tests.models.support import (
    local_packs,
    make_actor,
    make_samples,
    make_world,
    micro_batch,
    policy_gradient,
    write_hf_model,
)
from tests.rollout import tiny

pytestmark = pytest.mark.dist
BIAS = "model.layers.1.mlp.gate.e_score_correction_bias"


def _reached(folder: Path, layout: dict[str, Any], dtype: str = "float32") -> dict[str, Any]:
    """Transfer into an engine full of not-a-number, then again after a step of training."""
    # SGLang before megatron: its stand-ins for a CPU must be there when megatron looks for CUDA.
    from megarl.models.build import destroy_mesh
    from megarl.rollout.generator import Generator

    world = make_world(**layout)
    mesh = world.mesh
    section = tiny.section(tp=mesh.rollout_tp, ep=mesh.rollout_ep, dtype=dtype)
    options = {"temperature": 1.0, "sequence_parallel": mesh.tp > 1, "lr": 1e-2}
    actor = make_actor(folder, world, dtype=dtype, **options)
    generator = Generator(folder, mesh, world.rank, section, 1, torch.device("cpu"))
    live = generator.named_parameters()
    loaded = {name: param.detach().clone() for name, param in live.items()}
    for param in live.values():
        param.data.fill_(float("nan"))
    target = sglang_placement(actor.spec, mesh)
    resharder = Resharder(
        megatron_placement(actor.spec, mesh),
        target,
        actor.named_parameters(),
        live,
        getattr(torch, dtype),
        1 << 20,
        world,
    )

    def publish() -> None:
        manifest = resharder.manifest()
        resharder.transfer()
        resharder.verify(manifest)

    publish()
    for pad in target.padding[world.rank]:
        live[pad.param].data[pad.param_row :].zero_()
    different = [name for name in live if not torch.equal(live[name], loaded[name])]

    samples = make_samples(5, 12)
    prompts = [[*s.prompt_ids.tolist(), *s.response_ids.tolist()] for s in samples]
    generator.activate(tiny.version())
    before = generator.prompt_log_probs(prompts, tiny.version())
    (packs,) = actor.padded([local_packs(samples, mesh, world.rank, 60)])
    actor.update([micro_batch(pack, samples) for pack in packs], policy_gradient)
    trained = np.full(len(samples.response_ids), np.nan, np.float32)
    for pack, scores in zip(packs, actor.log_probs(packs), strict=True):
        trained[np.asarray(pack.response_A)] = scores.log_probs_A.numpy()
    generator.deactivate()
    publish()
    generator.activate(tiny.version(1))
    after = generator.prompt_log_probs(prompts, tiny.version(1))
    generator.close()
    destroy_mesh()
    bias = live[BIAS]
    return {
        "different": different,
        "bias": (bias.dtype, bool(bias.any())),
        "trained": trained,
        "before": _responses(samples, before),
        "after": _responses(samples, after),
    }


def _responses(samples: Any, log_probs: list[np.ndarray]) -> np.ndarray:
    return np.concatenate(
        [
            told[len(told) - len(s.response_ids) :]
            for s, told in zip(samples, log_probs, strict=True)
        ]
    )


@pytest.mark.parametrize(
    "world, layout",
    [
        (2, {"tp": 2, "rollout_tp": 1}),
        (2, {"tp": 1, "ep": 2, "rollout_tp": 2, "rollout_ep": 2}),
        (4, {"tp": 2, "pp": 2, "ep": 2, "expert_tp": 1, "rollout_tp": 4, "rollout_ep": 2}),
    ],
    ids=str,
)
@pytest.mark.parametrize("numbers", [{}, {"q_lora_rank": None}], ids=["two steps", "one step"])
def test_the_engine_has_the_trainer_s_log_probs(ranks, tmp_path, world, layout, numbers) -> None:
    write_hf_model(tmp_path, "deepseek_v3", **numbers)
    for told in ranks.run(world, _reached, tmp_path, layout):
        assert told["different"] == []
        assert told["bias"] == (torch.float32, True)
        mine = ~np.isnan(told["trained"])
        assert mine.any()
        assert np.abs(told["after"] - told["trained"])[mine].max() <= 3e-5
        assert np.abs(told["after"] - told["before"]).max() > 0.1


def test_the_bias_of_the_choice_keeps_its_bits_in_a_bfloat16_model(ranks, tmp_path) -> None:
    write_hf_model(tmp_path, "deepseek_v3")
    layout = {"tp": 1, "ep": 2, "rollout_tp": 2, "rollout_ep": 2}
    for told in ranks.run(2, _reached, tmp_path, layout, "bfloat16"):
        assert told["different"] == [] and told["bias"] == (torch.float32, True)
        mine = ~np.isnan(told["trained"])
        assert np.abs(told["after"] - told["trained"])[mine].mean() < 0.1
