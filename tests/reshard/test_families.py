"""What is read from config.json, and the tables against models that transformers saved.

Not covered: rotary embedding (test_family_rope.py), published models (test_published.py), and that
the numbers give HF's logits (tests/models).
"""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import pytest
import transformers
from safetensors import safe_open
from transformers import PreTrainedConfig

from megarl.reshard.families import FAMILIES, FolderError, family_rules, read_spec
from megarl.reshard.families.__main__ import tables
from megarl.reshard.families.family import HARMLESS, NUMBERS, ONLY, ROPE_KEYS, Family
from megarl.reshard.families.rules import Part

NUMBERS_OF_A_MODEL = dict(
    vocab_size=300,
    hidden_size=32,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=256,
    rms_norm_eps=3e-5,
)
LLAMA = NUMBERS_OF_A_MODEL | {"model_type": "llama", "rope_theta": 5e5, "head_dim": 16}
QWEN2 = NUMBERS_OF_A_MODEL | {
    "model_type": "qwen2",
    "rope_theta": 1e6,
    "tie_word_embeddings": True,
}
MORE = {
    "deepseek_v3": {
        "first_k_dense_replace": 1,
        "kv_lora_rank": 12,
        "moe_intermediate_size": 10,
        "moe_layer_freq": 1,
        "n_group": 2,
        "n_routed_experts": 4,
        "n_shared_experts": 2,
        "norm_topk_prob": True,
        "num_experts_per_tok": 2,
        "num_key_value_heads": 4,
        "q_lora_rank": 20,
        "qk_nope_head_dim": 6,
        "qk_rope_head_dim": 4,
        "rms_norm_eps": 1e-6,
        "routed_scaling_factor": 2.5,
        "scoring_func": "sigmoid",
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "v_head_dim": 5,
    },
    "llama": {"head_dim": 16},
    "mistral": {"head_dim": 16, "sliding_window": None},
    "mixtral": {"num_local_experts": 3, "num_experts_per_tok": 2},
    "qwen2": {},
    "qwen3": {"head_dim": 6},
    "qwen3_moe": {
        "head_dim": 6,
        "moe_intermediate_size": 10,
        "norm_topk_prob": True,
        "num_experts": 3,
        "num_experts_per_tok": 2,
    },
}
"""What a family's config must say beyond the numbers, with a head_dim of its own where one may."""
DEEPSEEK = NUMBERS_OF_A_MODEL | MORE["deepseek_v3"]
DEEPSEEK |= {"model_type": "deepseek_v3", "rope_theta": 1e4}


def _config(name: str, **more: object) -> PreTrainedConfig:
    kind = getattr(transformers, FAMILIES[name].prefix + "Config")
    return kind(**NUMBERS_OF_A_MODEL | MORE[name] | {"rope_theta": 5e5} | more)


def _write(folder: Path, config: object) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def _saved(folder: Path, name: str, end: str, **more: object) -> dict[str, tuple[int, ...]]:
    """Names and shapes in the file of a model that transformers made and saved in `folder`."""
    model = getattr(transformers, FAMILIES[name].prefix + end)(_config(name, **more))
    model.save_pretrained(folder)
    with safe_open(folder / "model.safetensors", "pt") as file:
        return {key: tuple(file.get_slice(key).get_shape()) for key in file.keys()}  # noqa: SIM118


def _tied(family: Family) -> list[bool]:
    return [
        tied for tied in (False, True) if tied in family.only.get("tie_word_embeddings", [tied])
    ]


@pytest.mark.parametrize(
    "name, tied", [(name, tied) for name in FAMILIES for tied in _tied(FAMILIES[name])]
)
def test_the_table_is_what_transformers_saves(tmp_path, name, tied) -> None:
    saved = _saved(tmp_path, name, "ForCausalLM", tie_word_embeddings=tied)
    spec = read_spec(tmp_path)
    assert {rule.hf: rule.shape for rule in family_rules(spec)} == saved
    assert spec.head == "lm" and spec.tied is tied and spec.family == name
    assert ("lm_head.weight" in saved) is not tied


@pytest.mark.parametrize("end", ["ForTokenClassification", "ForSequenceClassification"])
@pytest.mark.parametrize("name", FAMILIES)
def test_a_head_of_one_label_is_a_value_head(tmp_path, name, end) -> None:
    saved = _saved(tmp_path, name, end, num_labels=1)
    spec = read_spec(tmp_path)
    rules = family_rules(spec)
    assert {rule.hf: rule.shape for rule in rules} == saved
    assert spec.head == "value" and not spec.tied
    assert spec.value_bias is ("score.bias" in saved) is (end == "ForTokenClassification")
    ours = {rule.hf: rule.megatron for rule in rules if rule.hf.startswith("score")}
    assert ours == {hf: hf.replace("score", "value_head") for hf in saved if hf.startswith("score")}


@pytest.mark.parametrize("labels", [{}, {"num_labels": 2}, {"id2label": {"0": "a", "1": "b"}}])
def test_a_head_of_several_labels_is_refused(tmp_path, labels) -> None:
    config = LLAMA | {"architectures": ["LlamaForTokenClassification"]} | labels
    with pytest.raises(FolderError, match="only a head of one label"):
        read_spec(_write(tmp_path, config))
    assert read_spec(_write(tmp_path, config | {"id2label": {"0": "a"}, "num_labels": 1}))
    # A label means nothing to a language model.
    config["architectures"] = ["LlamaForCausalLM"]
    assert read_spec(_write(tmp_path, config)).head == "lm"


@pytest.mark.parametrize("name", FAMILIES)
def test_every_key_of_transformers_own_config_is_known(tmp_path, name) -> None:
    """And absent, it means what transformers fills in."""
    family, config = FAMILIES[name], _config(name)
    base = {field.name for field in dataclasses.fields(PreTrainedConfig)}
    told = {key: value for key, value in config.to_dict().items() if key not in base}
    known = HARMLESS | NUMBERS | ROPE_KEYS | ONLY.keys() | family.only.keys()
    known |= family.required | family.optional | family.harmless
    assert {field.name for field in dataclasses.fields(config)} - base <= known
    short = NUMBERS_OF_A_MODEL | MORE[name] | {"rope_theta": 5e5, "model_type": name}
    least, full = read_spec(_write(tmp_path, short)), read_spec(_write(tmp_path, told))
    assert dataclasses.replace(least, config_hash="") == dataclasses.replace(full, config_hash="")
    if "head_dim" in MORE[name] and "head_dim" in family.optional:
        del short["head_dim"]
        theirs = getattr(transformers, family.prefix + "Config")(**short)
        theirs = getattr(theirs, "head_dim", None) or theirs.hidden_size // 4
        assert read_spec(_write(tmp_path, short)).head_dim == theirs


@pytest.mark.parametrize("name", FAMILIES)
def test_a_default_of_theta_is_transformers_own(name) -> None:
    theirs = getattr(transformers, FAMILIES[name].prefix + "Config").default_theta
    assert FAMILIES[name].rope_theta in (None, theirs)


@pytest.mark.parametrize("name", FAMILIES)
def test_both_sides_name_a_tensor_once_or_as_parts_of_one(tmp_path, name) -> None:
    """No two tensors fall on the same rows of a parameter, and each has its own layer's."""
    _config(name).save_pretrained(tmp_path)
    rules = family_rules(read_spec(tmp_path))
    for side in ("megatron", "sglang"):
        rows = [rule.sglang_row if side == "sglang" else 0 for rule in rules]
        places = [
            (getattr(r, side), r.part, r.layer, r.expert, row)
            for r, row in zip(rules, rows, strict=True)
        ]
        assert len(set(places)) == len(places)
    for rule in rules:
        assert ("{layer}" in rule.megatron) == (rule.layer is not None)
        assert ("{expert}" in rule.megatron) == (rule.expert is not None)
        assert rule.layer is None or f".{rule.layer}." in rule.sglang
        assert len(rule.shape) == 2 or rule.part in (Part.WHOLE, Part.QUERY, Part.KEY, Part.VALUE)


@pytest.mark.parametrize("name", FAMILIES)
def test_even_length_counts_the_weights_that_a_token_meets(tmp_path, name) -> None:
    _config(name).save_pretrained(tmp_path)
    spec = read_spec(tmp_path)
    met = 0
    for rule in family_rules(spec):
        outside = rule.layer is None and rule.hf != "lm_head.weight"
        router = spec.moe and rule.shape == (spec.moe.experts, spec.hidden)
        if len(rule.shape) == 2 and not outside and not router:
            share = 1.0 if rule.expert is None else spec.moe.per_token / spec.moe.experts
            met += share * math.prod(rule.shape)
    width = spec.head_dim
    if spec.mla:  # half of it for scores, half for what they weigh
        width = (spec.mla.nope_dim + spec.mla.rope_dim + spec.mla.v_dim) / 2
    assert spec.even_length == int(met / spec.layers) // int(spec.heads * width)


@pytest.mark.parametrize(
    "base, change, named",
    [
        (LLAMA, {"attention_bias": True}, "attention_bias = True (handled: False)"),
        (LLAMA, {"attention_bias": 0}, "attention_bias = 0"),
        (LLAMA, {"mlp_bias": True}, "mlp_bias"),
        (LLAMA, {"hidden_act": "gelu"}, "hidden_act"),
        (LLAMA, {"attention_dropout": 0.1}, "attention_dropout"),
        (LLAMA, {"classifier_dropout": 0.1}, "classifier_dropout"),
        (LLAMA, {"pretraining_tp": 2}, "pretraining_tp"),
        (LLAMA, {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        (LLAMA, {"quantization_config": {"bits": 4}}, "quantization_config"),
        (LLAMA, {"logits_scaling": 8.0}, "logits_scaling = 8.0 (unknown"),
        (LLAMA, {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
        (LLAMA, {"sliding_window": 128}, "sliding_window"),
        (LLAMA, {"architectures": ["LlamaForQuestionAnswering"]}, "architectures"),
        (LLAMA, {"architectures": ["MistralForCausalLM"]}, "architectures"),
        (LLAMA, {"architectures": []}, "architectures"),
        (LLAMA, {"architectures": "LlamaForCausalLM"}, "architectures"),
        (LLAMA, {"model_type": "gemma"}, "handled: deepseek_v3, llama, mistral"),
        (LLAMA, {"model_type": ["llama"]}, "model_type ['llama']"),
        (LLAMA, {"num_key_value_heads": 3}, "4 attention heads do not divide by 3 kv heads"),
        (LLAMA, {"num_key_value_heads": True}, "num_key_value_heads is True"),
        (LLAMA, {"head_dim": 5}, "odd"),
        (LLAMA, {"head_dim": 0}, "head_dim is 0"),
        (LLAMA, {"rms_norm_eps": None}, "rms_norm_eps is null"),
        (LLAMA, {"rms_norm_eps": float("nan")}, "rms_norm_eps is nan"),
        (LLAMA, {"vocab_size": "300"}, "vocab_size"),
        (LLAMA, {"tie_word_embeddings": "yes"}, "tie_word_embeddings"),
        (LLAMA, {"tie_word_embeddings": None}, "tie_word_embeddings"),
        (QWEN2, {"use_sliding_window": True}, "use_sliding_window"),
        (QWEN2, {"layer_types": ["full_attention", "sliding_attention"]}, "sliding_attention"),
        (QWEN2, {"layer_types": "full_attention"}, "layer_types"),
        (QWEN2, {"hidden_size": 30}, "hidden_size 30 does not divide"),
        (DEEPSEEK, {"attention_bias": True}, "attention_bias"),
        (DEEPSEEK, {"moe_layer_freq": 2}, "moe_layer_freq = 2"),
        (DEEPSEEK, {"num_nextn_predict_layers": 1}, "num_nextn_predict_layers = 1"),
        (DEEPSEEK, {"rms_norm_eps": 1e-5}, "rms_norm_eps = 1e-05"),
        (DEEPSEEK, {"scoring_func": "softmax"}, "scoring_func"),
        (DEEPSEEK, {"tie_word_embeddings": True}, "tie_word_embeddings"),
        (DEEPSEEK, {"topk_method": "greedy"}, "topk_method"),
        (DEEPSEEK, {"router_fp32": True}, "router_fp32 = True (unknown"),
        (DEEPSEEK, {"auto_map": {"AutoModel": "x.Y"}}, "auto_map"),
        (DEEPSEEK, {"head_dim": 8}, "head_dim is 8; latent attention makes it 4"),
        (DEEPSEEK, {"qk_head_dim": 8}, "qk_head_dim is 8; latent attention makes it 10"),
        (DEEPSEEK, {"num_key_value_heads": 2}, "num_key_value_heads is 2"),
        (DEEPSEEK, {"qk_rope_head_dim": 3}, "odd"),
        (DEEPSEEK, {"first_k_dense_replace": 2}, "leaves none with experts"),
        (DEEPSEEK, {"n_group": 4}, "4 do not make n_group 4 groups of two or more"),
        (DEEPSEEK, {"topk_group": 3}, "topk_group 3 of n_group 2"),
        (DEEPSEEK, {"num_experts_per_tok": 3}, "num_experts_per_tok 3"),
        (DEEPSEEK, {"n_shared_experts": 0}, "n_shared_experts"),
        (DEEPSEEK, {"model_type": "deepseek_v2"}, "YaRN's scale"),
    ],
)
def test_what_changes_the_arithmetic_is_refused_by_name(tmp_path, base, change, named) -> None:
    with pytest.raises(FolderError) as refused:
        read_spec(_write(tmp_path, base | change))
    assert named in str(refused.value) and str(tmp_path) in str(refused.value)
    assert "\n" not in str(refused.value)


def test_all_that_is_not_handled_is_told_at_once(tmp_path) -> None:
    with pytest.raises(FolderError, match="attention_bias.*; logits_scaling.*; architectures"):
        change = {"attention_bias": True, "logits_scaling": 2.0, "architectures": ["X"]}
        read_spec(_write(tmp_path, LLAMA | change))


def test_llama_s_kv_heads_default_to_the_heads(tmp_path) -> None:
    # transformers' default for the others is a fixed number.
    config = {key: value for key, value in LLAMA.items() if key != "num_key_value_heads"}
    assert read_spec(_write(tmp_path, config)).kv_heads == 4


def test_harmless_keys_change_only_the_hash(tmp_path) -> None:
    before = read_spec(_write(tmp_path, QWEN2))
    harmless = {"use_cache": False, "sliding_window": 4096, "max_window_layers": 1, "dtype": "x"}
    after = read_spec(_write(tmp_path, QWEN2 | harmless))
    assert before.config_hash != after.config_hash
    assert dataclasses.replace(before, config_hash=after.config_hash) == after


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


def test_the_page_shows_what_is_handled() -> None:
    page = Path(__file__).parents[2] / "docs" / "families.md"
    hint = "python -m megarl.reshard.families prints the tables of docs/families.md"
    assert tables(FAMILIES) in page.read_text(encoding="utf-8"), hint
    # What stands beside the families is no family.
    assert FAMILIES.keys() == MORE.keys()
