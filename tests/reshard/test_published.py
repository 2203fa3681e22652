"""Configs as published are read to the published size, or refused by the key that is not handled.

Not covered: that a published model's logits come out right (tests/models, with small models).
"""

from __future__ import annotations

import json
import math

import pytest

from megarl.reshard.families import FAMILIES, FolderError, family_rules, read_spec
from tests.reshard import published


def _write(folder, config):
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("name", published.PARAMETERS)
def test_the_tables_hold_as_many_parameters_as_were_published(tmp_path, name) -> None:
    spec = read_spec(_write(tmp_path, getattr(published, name)))
    rules = family_rules(spec)
    assert sum(math.prod(rule.shape) for rule in rules) == published.PARAMETERS[name]
    assert len({rule.hf for rule in rules}) == len(rules)


def test_every_family_has_a_published_model() -> None:
    found = {getattr(published, name)["model_type"] for name in published.PARAMETERS}
    assert found == FAMILIES.keys()


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
CHUNKS = {"chunk_size": 262144, "local_size": 8192, "original_max_position_embeddings": 262144}
EXPERTS = published.QWEN3_30B_A3B
MIXTRAL = published.MIXTRAL_8X7B


@pytest.mark.parametrize(
    "config, named",
    [
        (published.MISTRAL_7B_V01, "sliding_window = 4096 (handled: null, or at least"),
        (published.DEEPSEEK_V3, "num_nextn_predict_layers = 1 (handled: 0 or None)"),
        (published.DEEPSEEK_V3, "quantization_config = "),
        (
            published.DEEPSEEK_V3_MAIN | {"model_type": "deepseek_v2"},
            "'deepseek_v2' is not handled:",
        ),
        # Qwen2.5-7B-Instruct-1M
        (published.QWEN25_7B | {"dual_chunk_attention_config": CHUNKS}, "dual_chunk_attention"),
        # Qwen2.5-Math-PRM
        (published.QWEN25_7B | {"architectures": ["Qwen2ForProcessRewardModel"]}, "ProcessReward"),
        # AWQ and the like
        (published.QWEN25_7B | {"quantization_config": {"bits": 4}}, "quantization_config = "),
        (published.QWEN3_8B | {"attention_bias": True}, "attention_bias = True (handled: False)"),
        (published.QWEN3_8B | {"rope_scaling": YARN | {"rope_type": "dynamic"}}, "'dynamic'"),
        (published.QWEN3_8B | {"rope_scaling": YARN | {"rope_type": "longrope"}}, "'longrope'"),
        (published.LLAMA_2_7B | {"attention_bias": True}, "attention_bias"),
        (published.LLAMA_2_7B | {"rope_interleaved": True}, "rope_interleaved"),
        (published.LLAMA_2_7B | {"auto_map": {"AutoModel": "x.Y"}}, "auto_map"),
        (EXPERTS | {"mlp_only_layers": [0]}, "mlp_only_layers = [0]"),
        (EXPERTS | {"decoder_sparse_step": 2}, "decoder_sparse_step = 2"),
        (EXPERTS | {"output_router_logits": True}, "output_router_logits"),
        (EXPERTS | {"tie_word_embeddings": True}, "tie_word_embeddings"),
        (EXPERTS | {"num_experts_per_tok": 129}, "num_experts_per_tok 129 is above num_experts"),
        (EXPERTS | {"num_local_experts": 64}, "told twice and differs"),
        (EXPERTS | {"shared_expert_intermediate_size": 8}, "shared_expert_intermediate_size"),
        (MIXTRAL | {"sliding_window": 4096}, "sliding_window = 4096"),
        (MIXTRAL | {"head_dim": 64}, "head_dim 64 is not hidden_size / num_attention_heads"),
        (MIXTRAL | {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "type 'linear'"),
        (MIXTRAL | {"rope_theta": 1000000.5}, "rope_theta 1000000.5"),
        (MIXTRAL | {"rope_theta": None, "rope_parameters": {"rope_theta": 0.5}}, "rope_theta 0.5"),
        (MIXTRAL | {"router_jitter_noise": 0.1}, "router_jitter_noise"),
        (MIXTRAL | {"tie_word_embeddings": True}, "tie_word_embeddings"),
        (published.SKYWORK_REWARD_8B | {"id2label": {"0": "a", "1": "b"}}, "only a head of one"),
    ],
)
def test_a_variant_that_is_not_handled_is_refused_by_name(tmp_path, config, named) -> None:
    with pytest.raises(FolderError) as refused:
        read_spec(_write(tmp_path, config))
    assert named in str(refused.value) and str(tmp_path) in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "config, missing",
    [
        (config, key)
        for name, config in vars(published).items()
        if name in published.PARAMETERS
        for key in (
            *("hidden_size", "intermediate_size", "max_position_embeddings", "num_hidden_layers"),
            *("num_attention_heads", "rms_norm_eps", "vocab_size"),
            *FAMILIES[config["model_type"]].required,
        )
    ]
    + [(published.QWEN25_7B, "rope_theta"), (published.MIXTRAL_8X7B, "rope_theta")],
)
def test_a_number_that_transformers_would_fill_in_is_never_left_out(
    tmp_path, config, missing
) -> None:
    config = {key: value for key, value in config.items() if key != missing}
    with pytest.raises(FolderError, match=f"{missing} is missing"):
        read_spec(_write(tmp_path, config))


def test_a_window_as_long_as_the_positions_never_acts(tmp_path) -> None:
    for window in (32768, 40000):
        config = published.MISTRAL_7B_V01 | {"sliding_window": window}
        assert read_spec(_write(tmp_path, config)).max_positions == 32768


def test_the_experts_of_either_transformers_are_read(tmp_path) -> None:
    moe = read_spec(_write(tmp_path, EXPERTS)).moe
    newer = {key: value for key, value in EXPERTS.items() if key != "num_experts"}
    assert read_spec(_write(tmp_path, newer | {"num_local_experts": 128})).moe == moe
    assert (moe.experts, moe.per_token, moe.ffn, moe.normalize) == (128, 8, 768, True)
    assert moe.layers == tuple(range(48)) and moe.router == "softmax" and not moe.shared_ffn
    plain = read_spec(_write(tmp_path, EXPERTS | {"norm_topk_prob": False})).moe
    assert plain.normalize is False
