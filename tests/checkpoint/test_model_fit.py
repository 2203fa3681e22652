"""A changed model is told number by number; what changes a tensor's shape cannot be allowed.

Not covered: how a resume says it (tests/launch/test_resume_refusals.py).
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from megarl.checkpoint.model_fit import (
    HF_NAMES,
    MLA_NAMES,
    MOE_NAMES,
    ROPE_NAMES,
    as_words,
    critic_differences,
    misfit,
    model_differences,
    numbers_of,
)
from megarl.reshard.families import family_rules, read_spec
from megarl.reshard.families.spec import MLASpec, ModelSpec, MoESpec, RopeScaling
from tests.reshard.published import DEEPSEEK_V3_MAIN, LLAMA_3_1_8B, QWEN3_30B_A3B

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}


def _write(folder: Path, config: dict) -> Path:
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def _names(kind: type) -> set[str]:
    return {field.name for field in dataclasses.fields(kind)}


def test_every_number_has_a_name() -> None:
    # config_hash stands beside the numbers; what is none of these is refused.
    assert _names(ModelSpec) - HF_NAMES.keys() == {"config_hash", "rope_scaling", "moe", "mla"}
    assert _names(MoESpec) == MOE_NAMES.keys() and _names(RopeScaling) == ROPE_NAMES.keys()
    assert _names(MLASpec) == MLA_NAMES.keys()
    names = [*HF_NAMES.values(), *MOE_NAMES.values(), *ROPE_NAMES.values(), *MLA_NAMES.values()]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("config", [LLAMA_3_1_8B, QWEN3_30B_A3B, DEEPSEEK_V3_MAIN])
def test_what_a_position_tells_comes_back_from_json_alike(tmp_path, config) -> None:
    stored = json.loads(json.dumps(numbers_of(read_spec(_write(tmp_path, config)))))
    assert model_differences(stored, tmp_path) == {}


@pytest.mark.parametrize(
    "base, change, told",
    [
        (QWEN3_30B_A3B, {"num_experts_per_tok": 4}, {"num_experts_per_tok": (8, 4)}),
        (QWEN3_30B_A3B, {"norm_topk_prob": False}, {"norm_topk_prob": (True, False)}),
        (QWEN3_30B_A3B, {"num_experts": 64}, {"num_experts": (128, 64)}),
        (QWEN3_30B_A3B, {"moe_intermediate_size": 512}, {"moe_intermediate_size": (768, 512)}),
        (
            LLAMA_3_1_8B,
            {"rope_scaling": LLAMA_3_1_8B["rope_scaling"] | {"factor": 16.0}},
            {"rope_scaling.factor": (8.0, 16.0)},
        ),
        (
            QWEN3_30B_A3B,
            {"rope_scaling": YARN},
            {
                "rope_scaling.rope_type": (None, "yarn"),
                "rope_scaling.factor": (None, 4.0),
                "rope_scaling.original_max_position_embeddings": (None, 32768),
                "rope_scaling.beta_fast": (None, 32.0),
                "rope_scaling.beta_slow": (None, 1.0),
                "rope_scaling.attention_factor": (None, pytest.approx(1.1386294)),
                "rope_scaling.truncate": (None, True),
                "rope_scaling.mscale_all_dim": (None, 0.0),
            },
        ),
        (
            DEEPSEEK_V3_MAIN,
            {"q_lora_rank": None, "rope_interleave": False},
            {"q_lora_rank": (1536, None), "rope_interleave": (True, False)},
        ),
        (DEEPSEEK_V3_MAIN, {"topk_group": 8}, {"topk_group": (4, 8)}),
        (
            LLAMA_3_1_8B,
            {"architectures": ["LlamaForTokenClassification"], "num_labels": 1},
            {"head": ("lm", "value"), "value_bias": (False, True)},
        ),
    ],
)
def test_a_changed_number_is_told_and_fits_when_no_shape_changed(
    tmp_path, base, change, told
) -> None:
    spec = read_spec(_write(tmp_path, base))
    stored = json.loads(json.dumps(numbers_of(spec)))
    other = read_spec(_write(tmp_path, base | change))
    differences = model_differences(stored, tmp_path)
    assert differences == told
    before, now = as_words(differences)
    assert all(f"{name} {pair[0]}" in before for name, pair in differences.items())
    assert all(f"{name} {pair[1]}" in now for name, pair in differences.items())
    shapes, others = (
        {rule.hf: rule.shape for rule in family_rules(each)} for each in (spec, other)
    )
    assert (misfit(differences, tmp_path) is None) == (shapes == others)


def test_a_position_that_tells_less_is_held_against_what_it_tells(tmp_path) -> None:
    _write(tmp_path, QWEN3_30B_A3B)
    assert model_differences({}, tmp_path) == {}
    assert model_differences({"vocab_size": 1}, tmp_path) == {"vocab_size": (1, 151936)}


def test_a_critic_is_held_against_its_body(tmp_path) -> None:
    """The folder of a causal model has no value head: the critic began with one of its own."""
    spec = read_spec(_write(tmp_path, LLAMA_3_1_8B))
    stored = numbers_of(dataclasses.replace(spec, head="value", tied=False))
    assert critic_differences(stored, tmp_path) == {}
    other = LLAMA_3_1_8B | {"num_hidden_layers": 16, "rope_theta": 1e4}
    differences = critic_differences(stored, _write(tmp_path, other))
    assert differences == {"num_hidden_layers": (32, 16), "rope_theta": (5e5, 1e4)}
    told = misfit(differences, tmp_path, "critic")
    assert (
        "critic was num_hidden_layers 32, is num_hidden_layers 16" in told and "critic.path" in told
    )
