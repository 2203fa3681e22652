"""In which numbers the model at hand is another than a checkpoint's. Plain Python."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megarl.reshard.families import read_spec
from megarl.reshard.families.spec import MLASpec, ModelSpec, MoESpec, RopeScaling

HF_NAMES = {
    "family": "model_type",
    "layers": "num_hidden_layers",
    "hidden": "hidden_size",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "ffn": "intermediate_size",
    "vocab": "vocab_size",
    "norm_eps": "rms_norm_eps",
    "rope_theta": "rope_theta",
    "tied": "tie_word_embeddings",
    "qkv_bias": "qkv_bias",
    "max_positions": "max_position_embeddings",
    "qk_norm": "qk_norm",
    "head": "head",
    "value_bias": "value_bias",
}
"""Number of a `ModelSpec` → what config.json calls it, or megarl where it does not say it."""
HEAD_NAMES = ("head", "value_bias", "tie_word_embeddings")
"""Those of them that tell of what stands on the last hidden states."""
MOE_NAMES = {
    "experts": "num_experts",
    "per_token": "num_experts_per_tok",
    "ffn": "moe_intermediate_size",
    "layers": "moe_layers",
    "normalize": "norm_topk_prob",
    "shared_ffn": "shared_expert_intermediate_size",
    "router": "scoring_func",
    "router_bias": "e_score_correction_bias",
    "groups": "n_group",
    "top_groups": "topk_group",
    "scale": "routed_scaling_factor",
}
"""The same of a `MoESpec`."""
ROPE_NAMES = {
    "kind": "rope_scaling.rope_type",
    "factor": "rope_scaling.factor",
    "original_max_positions": "rope_scaling.original_max_position_embeddings",
    "low_freq_factor": "rope_scaling.low_freq_factor",
    "high_freq_factor": "rope_scaling.high_freq_factor",
    "beta_fast": "rope_scaling.beta_fast",
    "beta_slow": "rope_scaling.beta_slow",
    "attention_factor": "rope_scaling.attention_factor",
    "truncate": "rope_scaling.truncate",
    "mscale_all_dim": "rope_scaling.mscale_all_dim",
}
"""The same of a `RopeScaling`."""
MLA_NAMES = {
    "q_lora_rank": "q_lora_rank",
    "kv_lora_rank": "kv_lora_rank",
    "nope_dim": "qk_nope_head_dim",
    "rope_dim": "qk_rope_head_dim",
    "v_dim": "v_head_dim",
    "interleaved": "rope_interleave",
}
"""The same of an `MLASpec`."""
SHAPELESS = frozenset(
    {
        "model_type",
        "rms_norm_eps",
        "rope_theta",
        "max_position_embeddings",
        "num_experts_per_tok",
        "norm_topk_prob",
        "scoring_func",
        "n_group",
        "topk_group",
        "routed_scaling_factor",
        "rope_interleave",
        *ROPE_NAMES.values(),
    }
)
"""Numbers on which no tensor's shape, nor that there is one, depends."""


def numbers_of(spec: ModelSpec) -> dict[str, Any]:
    """What a position tells of its model, under config.json's names: plain JSON, None for each
    number of experts, stretched rotary embedding or latent attention that it does not have."""
    return {
        **_told(spec, HF_NAMES),
        **_told(spec.rope_scaling, ROPE_NAMES),
        **_told(spec.moe, MOE_NAMES),
        **_told(spec.mla, MLA_NAMES),
    }


def _told(
    numbers: ModelSpec | RopeScaling | MoESpec | MLASpec | None, names: Mapping[str, str]
) -> dict[str, Any]:
    values = {told: getattr(numbers, name, None) for name, told in names.items()}
    return {
        told: list(value) if isinstance(value, tuple) else value for told, value in values.items()
    }


def model_differences(stored: Mapping[str, Any], model_folder: Path) -> dict[str, tuple[Any, Any]]:
    """Number → (the position's, the model folder's), where they differ. Empty where the position
    tells none, or config.json differs in what megarl does not read. Raises `FolderError`."""
    return _differences(stored, numbers_of(read_spec(model_folder)))


def critic_differences(stored: Mapping[str, Any], folder: Path) -> dict[str, tuple[Any, Any]]:
    """As `model_differences`, of a critic that begins from `folder`: its body's numbers. The head
    may be one that the folder does not have."""
    mine = numbers_of(read_spec(folder))
    return _differences(stored, {name: mine[name] for name in mine if name not in HEAD_NAMES})


def _differences(stored: Mapping[str, Any], mine: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    return {
        name: (stored[name], value)
        for name, value in mine.items()
        if name in stored and stored[name] != value
    }


def as_words(differences: Mapping[str, tuple[Any, Any]]) -> tuple[str, str]:
    """(before, now), each as `name value, …`."""
    before, now = (
        ", ".join(f"{name} {pair[side]}" for name, pair in differences.items()) for side in (0, 1)
    )
    return before, now


def misfit(
    differences: Mapping[str, tuple[Any, Any]], model_folder: Path, role: str = "model"
) -> str | None:
    """Why no permission lets the tensors into the model at hand; None where they fit. `role`: the
    recipe's section that names the folder."""
    shapes = {name: pair for name, pair in differences.items() if name not in SHAPELESS}
    if not shapes:
        return None
    before, now = as_words(shapes)
    return (
        f"{role} was {before}, is {now} ({model_folder}): the checkpoint's tensors have other "
        f"shapes; set {role}.path to a model of the checkpoint's shape, or run.name=… to begin a "
        "run of its own with this one"
    )
