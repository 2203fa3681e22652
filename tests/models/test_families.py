"""Scores of every family against HF's model: q/k norms, rope scaling, experts, on one and two TP
ranks. A tiny random model says as much of the arithmetic as a real one.

Not covered: updates (`test_step.py`, `test_layouts.py`, `test_experts.py`), GPU.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.models.runs import several
from tests.models.support import hf_scores, make_samples, write_hf_model

pytestmark = pytest.mark.dist
THETA = {"rope_theta": 77_000.0}
LINEAR = THETA | {"rope_type": "linear", "factor": 2.0}
LLAMA3 = THETA | {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = THETA | {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "mistral": ("mistral", {}),
    "qwen3": ("qwen3", {}),
    "qwen3, tied": ("qwen3", {"tied": True}),
    "mixtral": ("mixtral", {}),
    "mixtral, one expert": ("mixtral", {"num_experts_per_tok": 1}),
    "qwen3_moe": ("qwen3_moe", {}),
    "qwen3_moe, not normalised": ("qwen3_moe", {"norm_topk_prob": False}),
    "deepseek_v3": ("deepseek_v3", {}),
    "deepseek_v3, one group": (
        "deepseek_v3",
        {
            "q_lora_rank": None,
            "n_group": 1,
            "topk_group": 1,
            "norm_topk_prob": False,
            "rope_interleave": False,
            "rope_parameters": THETA | {"rope_type": "default"},
        },
    ),
    "linear": ("llama", {"rope_parameters": LINEAR}),
    "llama3": ("llama", {"rope_parameters": LLAMA3}),
    "yarn": ("qwen3", {"rope_parameters": YARN}),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, tuple[Path, torch.Tensor, torch.Tensor]]:
    made = {}
    for number, (name, (family, numbers)) in enumerate(MODELS.items()):
        folder = tmp_path_factory.mktemp(f"model{number}")
        model = write_hf_model(folder, family, **numbers)
        with torch.no_grad():
            made[name] = (folder, *hf_scores(model, make_samples(5, 12), 0.8))
    return made


@pytest.mark.parametrize("tp", [1, 2])
def test_scores_are_those_of_transformers(ranks, models, tp: int) -> None:
    """Under sequence parallelism on two: a model with experts takes no other tensor parallelism."""
    calls = [(folder, tp, 60, {"sequence_parallel": tp > 1}) for folder, _, _ in models.values()]
    for told in ranks.run(tp, several, calls):
        for run, (name, (_, log_probs, entropy)) in zip(told, models.items(), strict=True):
            assert log_probs.min() < -4, "a model near uniform proves little"
            assert (run["log_probs"] - log_probs).abs().max() <= 3e-5, name
            assert (run["entropy"] - entropy).abs().max() <= 3e-5, name
            assert torch.equal(run["log_probs"], run["in_update"]), name


def test_the_models_differ(models) -> None:
    """Scaling and normalisation reach the arithmetic that is compared."""
    for one, other in (("qwen3", "yarn"), ("linear", "llama3")):
        assert (models[one][1] - models[other][1]).abs().max() > 1e-2
    plain, normalised = models["qwen3_moe, not normalised"], models["qwen3_moe"]
    assert (plain[1] - normalised[1]).abs().max() > 1e-2


@pytest.mark.parametrize("family", ["qwen3", "mixtral", "qwen3_moe"])
def test_bfloat16_is_as_far_from_float32_as_in_transformers(ranks, models, family: str) -> None:
    """Rounding may turn the choice of an expert; HF's own bfloat16 model is the measure."""
    from transformers import AutoModelForCausalLM

    folder, wide, _ = models[family]
    rounded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    with torch.no_grad():
        theirs, _ = hf_scores(rounded, make_samples(5, 12), 0.8)
    ((run,), *_) = ranks.run(1, several, [(folder, 1, 60, {"dtype": "bfloat16"})])
    gap, theirs = (run["log_probs"] - wide).abs().mean(), (theirs - wide).abs().mean()
    assert 0 < gap < 2 * theirs + 1e-3
    assert torch.equal(run["log_probs"], run["in_update"])
