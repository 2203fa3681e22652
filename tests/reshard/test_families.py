"""What is read from config.json; every key that changes the arithmetic is refused by name.

Not covered: that the numbers give HF's logits (tests/models).
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from megarl.reshard.families import FolderError, family_rules, read_spec

NUMBERS = dict(
    vocab_size=300,
    hidden_size=32,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=256,
    rms_norm_eps=3e-5,
)
LLAMA = NUMBERS | {"model_type": "llama", "rope_theta": 5e5, "head_dim": 16}
QWEN2 = NUMBERS | {"model_type": "qwen2", "rope_theta": 1e6, "tie_word_embeddings": True}


def _write(folder: Path, config: object) -> Path:
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(
    "config",
    [
        LlamaConfig(**NUMBERS, head_dim=16, rope_theta=5e5, architectures=["LlamaForCausalLM"]),
        Qwen2Config(**NUMBERS, rope_theta=1e6, tie_word_embeddings=True),
    ],
)
def test_a_config_that_transformers_wrote_is_read_whole(tmp_path, config) -> None:
    config.save_pretrained(tmp_path)
    spec = read_spec(tmp_path)
    assert spec.family == config.model_type
    assert (spec.layers, spec.hidden, spec.heads, spec.kv_heads, spec.ffn) == (2, 32, 4, 2, 96)
    assert (spec.vocab, spec.norm_eps, spec.max_positions) == (300, 3e-5, 256)
    llama = spec.family == "llama"
    assert (spec.head_dim, spec.rope_theta) == ((16, 5e5) if llama else (8, 1e6))
    assert (spec.tied, spec.qkv_bias) == (not llama, not llama)


@pytest.mark.parametrize(
    "rope, theta",
    [
        ({}, 10000.0),
        ({"rope_theta": 1000000}, 1e6),
        ({"rope_scaling": None, "rope_theta": 2e4}, 2e4),
        ({"rope_scaling": {"type": "default"}, "rope_theta": 2e4}, 2e4),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 3e4}}, 3e4),
        ({"rope_parameters": {"rope_type": "default"}, "rope_theta": 3e4}, 3e4),
    ],
)
def test_rope_theta_is_found_where_any_transformers_writes_it(tmp_path, rope, theta) -> None:
    config = {key: value for key, value in LLAMA.items() if key != "rope_theta"}
    assert read_spec(_write(tmp_path, config | rope)).rope_theta == theta


@pytest.mark.parametrize(
    "base, change, named",
    [
        (LLAMA, {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "'llama3'"),
        (LLAMA, {"rope_parameters": {"rope_type": "linear", "factor": 2.0}}, "rope_parameters"),
        (LLAMA, {"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        (LLAMA, {"rope_parameters": {"rope_theta": 1e4}}, "differs"),
        (LLAMA, {"attention_bias": True}, "attention_bias = True (handled: False)"),
        (LLAMA, {"mlp_bias": True}, "mlp_bias"),
        (LLAMA, {"hidden_act": "gelu"}, "hidden_act"),
        (LLAMA, {"attention_dropout": 0.1}, "attention_dropout"),
        (LLAMA, {"pretraining_tp": 2}, "pretraining_tp"),
        (LLAMA, {"quantization_config": {"bits": 4}}, "quantization_config"),
        (LLAMA, {"logits_scaling": 8.0}, "logits_scaling = 8.0 (unknown"),
        (LLAMA, {"architectures": ["LlamaForSequenceClassification"]}, "architectures"),
        (LLAMA, {"model_type": "gemma"}, "handled: llama, qwen2"),
        (LLAMA, {"num_key_value_heads": 3}, "4 attention heads do not divide by 3 kv heads"),
        (LLAMA, {"head_dim": 5}, "odd"),
        (LLAMA, {"rms_norm_eps": None}, "rms_norm_eps is missing"),
        (LLAMA, {"vocab_size": "300"}, "vocab_size"),
        (QWEN2, {"use_sliding_window": True}, "use_sliding_window"),
        (QWEN2, {"layer_types": ["full_attention", "sliding_attention"]}, "sliding_attention"),
        (QWEN2, {"hidden_size": 30}, "hidden_size 30 does not divide"),
    ],
)
def test_what_changes_the_arithmetic_is_refused_by_name(tmp_path, base, change, named) -> None:
    with pytest.raises(FolderError) as refused:
        read_spec(_write(tmp_path, base | change))
    assert named in str(refused.value) and str(tmp_path) in str(refused.value)
    assert "\n" not in str(refused.value)


def test_defaults_that_transformers_would_fill_in_are_refused(tmp_path) -> None:
    config = {key: value for key, value in QWEN2.items() if key != "num_key_value_heads"}
    with pytest.raises(FolderError, match="num_key_value_heads is missing"):
        read_spec(_write(tmp_path, config))
    # Llama's default is no fixed number: as many as there are heads.
    config = {key: value for key, value in LLAMA.items() if key != "num_key_value_heads"}
    assert read_spec(_write(tmp_path, config)).kv_heads == 4


def test_harmless_keys_change_only_the_hash(tmp_path) -> None:
    before = read_spec(_write(tmp_path, QWEN2))
    harmless = {"use_cache": False, "sliding_window": 4096, "max_window_layers": 1, "dtype": "x"}
    after = read_spec(_write(tmp_path, QWEN2 | harmless))
    assert before.config_hash != after.config_hash
    assert all(
        getattr(before, name) == getattr(after, name)
        for name in before.__slots__
        if name != "config_hash"
    )


@pytest.mark.parametrize(
    "text, named",
    [(None, "no config.json"), ("{", "not JSON"), ("[1]", "not an object"), ("gone", "no such")],
)
def test_a_folder_that_is_no_model_is_told_in_one_line(tmp_path, text, named) -> None:
    folder = tmp_path / "gone" if text == "gone" else tmp_path
    if text not in (None, "gone"):
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(FolderError, match=named) as refused:
        read_spec(folder)
    assert str(folder) in str(refused.value) and "\n" not in str(refused.value)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    "config, model", [(LlamaConfig, LlamaForCausalLM), (Qwen2Config, Qwen2ForCausalLM)]
)
def test_the_table_names_every_tensor_of_the_hf_model(tmp_path, config, model, tied) -> None:
    hf = model(config(**NUMBERS, head_dim=6, tie_word_embeddings=tied))
    hf.config.save_pretrained(tmp_path)
    spec = read_spec(tmp_path)
    shapes = {rule.hf: rule.shape(spec) for rule in family_rules(spec)}
    assert shapes == {name: tuple(param.shape) for name, param in hf.named_parameters()}
