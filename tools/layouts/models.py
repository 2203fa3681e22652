"""Tiny random HF models in float32, one or two of each family, with nothing at its default."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ROPE: dict[str, Any] = {"rope_type": "default", "rope_theta": 77_000.0}
LLAMA3 = ROPE | {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = ROPE | {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
SIZES: dict[str, Any] = {
    "vocab_size": 307,  # no multiple of anything that is padded to
    "hidden_size": 96,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,  # four ranks of a generator hold copies
    "head_dim": 20,  # not hidden / heads
    "max_position_embeddings": 256,
    "rms_norm_eps": 3e-4,
    "rope_parameters": ROPE,
    "tie_word_embeddings": False,
    "eos_token_id": 2,
    "bos_token_id": 1,
    "pad_token_id": 0,
}
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": (
        "llama",
        "Llama",
        # Heads for every tensor-parallel size.
        {"num_attention_heads": 12, "num_key_value_heads": 12, "head_dim": 10},
    ),
    "llama3 rope, tied": (
        "llama",
        "Llama",
        {"tie_word_embeddings": True, "rope_parameters": LLAMA3, "num_hidden_layers": 5},
    ),
    "mistral": (
        "mistral",
        "Mistral",
        {"sliding_window": None, "num_attention_heads": 8, "num_key_value_heads": 4},
    ),
    "qwen2": ("qwen2", "Qwen2", {"tie_word_embeddings": True, "num_hidden_layers": 5}),
    "qwen3": ("qwen3", "Qwen3", {"rope_parameters": YARN}),
    "qwen3_moe": (
        "qwen3_moe",
        "Qwen3Moe",
        {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "norm_topk_prob": True,
            "num_key_value_heads": 4,
        },
    ),
    "mixtral": (
        "mixtral",
        "Mixtral",
        {
            "num_local_experts": 4,
            "num_experts_per_tok": 3,
            "sliding_window": None,
            "head_dim": 24,  # the generator reads no other
        },
    ),
    "deepseek_v3": (
        "deepseek_v3",
        "DeepseekV3",
        {
            "num_key_value_heads": 4,
            "head_dim": 8,
            "q_lora_rank": 24,
            "kv_lora_rank": 32,
            "qk_nope_head_dim": 16,
            "qk_rope_head_dim": 8,
            "v_head_dim": 12,
            "n_routed_experts": 8,  # four groups of two
            "num_experts_per_tok": 3,
            "n_group": 4,
            "topk_group": 2,
            "moe_intermediate_size": 24,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
            "norm_topk_prob": True,
            "routed_scaling_factor": 2.5,
            "num_nextn_predict_layers": 0,
            "rms_norm_eps": 1e-6,
            "rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0},
            # Every published config has these; transformers leaves them out.
            "moe_layer_freq": 1,
            "topk_method": "noaux_tc",
            "scoring_func": "sigmoid",
        },
    ),
}
"""Name → family, prefix of transformers' classes, numbers that differ from `SIZES`."""

KEPT = "e_score_correction_bias"
"""A router's bias, which stays float32 in a model of any dtype."""
FAMILIES = tuple(dict.fromkeys(family for family, _, _ in MODELS.values()))


def make_model(folder: Path, name: str, seed: int = 11) -> None:
    """Write `folder`/float32 and `folder`/bfloat16: the same random weights, biases, norms and
    routers too, large enough for log-probs far from uniform."""
    import torch
    import transformers

    _, prefix, numbers = MODELS[name]
    torch.manual_seed(seed)
    config = getattr(transformers, f"{prefix}Config")(**SIZES | numbers)
    model = getattr(transformers, f"{prefix}ForCausalLM")(config).float()
    with torch.no_grad():
        for key, weight in model.state_dict().items():
            if "norm" in key:
                weight.uniform_(0.5, 1.5)
            elif key.endswith("bias"):
                weight.normal_(std=0.3)
            else:
                weight.normal_(std=1.5 * weight.shape[-1] ** -0.5)
    model.save_pretrained(folder / "float32")
    kept = {key: weight.clone() for key, weight in model.state_dict().items() if KEPT in key}
    model.to(torch.bfloat16)
    for key, weight in kept.items():
        model.get_submodule(key.rpartition(".")[0]).register_buffer(KEPT, weight)
    model.save_pretrained(folder / "bfloat16")


def make_models(folder: str, names: list[str]) -> None:
    """Each in `folder`/its name."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    for name in names:
        make_model(Path(folder) / name, name)


def stored_dtype(folder: Path) -> str:
    """What a model folder's config.json says its weights are; float32 where it says nothing."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return str(config.get("dtype") or config.get("torch_dtype") or "float32")
