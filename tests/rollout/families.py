"""Tiny random HF models of every family that the generator serves, and their log-probs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

VOCABULARY = 304
ROPE = {"rope_type": "default", "rope_theta": 5e4}
LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 28,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    # Every published checkpoint has these; transformers leaves them out.
    "moe_layer_freq": 1,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"head_dim": 20}),
    "llama_llama3": (
        "Llama",
        {
            "rope_parameters": ROPE
            | {
                "rope_type": "llama3",
                "factor": 4.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
            }
        },
    ),
    "llama_linear": ("Llama", {"rope_parameters": ROPE | {"rope_type": "linear", "factor": 2.5}}),
    "llama_yarn": (
        "Llama",
        {
            "rope_parameters": ROPE
            | {
                "rope_type": "yarn",
                "factor": 8.0,
                "original_max_position_embeddings": 64,
                "beta_fast": 20.0,
                "beta_slow": 2.0,
            }
        },
    ),
    "mistral": ("Mistral", {"head_dim": 20, "sliding_window": None}),
    "qwen2": ("Qwen2", {"head_dim": 20, "tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {"head_dim": 20}),
    "qwen3_moe": (
        "Qwen3Moe",
        {
            "head_dim": 20,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 28,
            "norm_topk_prob": True,
        },
    ),
    "qwen3_moe_unnormalized": (
        "Qwen3Moe",
        {
            "head_dim": 20,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 28,
            "norm_topk_prob": False,
        },
    ),
    "mixtral": (
        "Mixtral",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
    ),
    "deepseek_v2": (
        "DeepseekV2",
        LATENT
        | {
            "q_lora_rank": None,
            "head_dim": 8,
            "topk_method": "greedy",
            "scoring_func": "softmax",
            "n_group": 1,
            "topk_group": 1,
            "norm_topk_prob": False,
            "routed_scaling_factor": 1.5,
        },
    ),
    "deepseek_v3": (
        "DeepseekV3",
        LATENT
        | {
            "q_lora_rank": 24,
            "topk_method": "noaux_tc",
            "scoring_func": "sigmoid",
            "n_group": 4,
            "topk_group": 2,
            "norm_topk_prob": True,
            "routed_scaling_factor": 2.5,
            "num_nextn_predict_layers": 0,
            "rope_parameters": ROPE
            | {
                "rope_type": "yarn",
                "factor": 8.0,
                "original_max_position_embeddings": 64,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
            },
        },
    ),
}
DENSE = [name for name in FAMILIES if "moe" not in name and name[:3] not in ("mix", "dee")]
WITH_EXPERTS = [name for name in FAMILIES if name not in DENSE]


def save_family(folder: Path, name: str, seed: int = 3) -> str:
    """A random float32 checkpoint of two layers: four heads, two key/value heads, width 80.

    Every weight is random, norms, biases and the router's too, so that log-probs are far from
    uniform. Returns `folder` as a string.
    """
    import transformers

    family, numbers = FAMILIES[name]
    sizes: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 96,
        "intermediate_size": 80,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "rms_norm_eps": 3e-6,
        "eos_token_id": 2,
        "bos_token_id": 1,
        "pad_token_id": 0,
        "rope_parameters": ROPE,
    }
    torch.manual_seed(seed)
    config = getattr(transformers, f"{family}Config")(**sizes | numbers)
    model = getattr(transformers, f"{family}ForCausalLM")(config).float()
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if "norm" in name:
                tensor.uniform_(0.5, 1.5)
            elif name.endswith("bias"):
                tensor.normal_(std=0.2)
            elif "embed" in name:
                tensor.normal_(std=0.3)
            elif tensor.is_floating_point():
                tensor.normal_(std=1.5 * tensor.shape[-1] ** -0.5)
    model.save_pretrained(folder)
    return str(folder)


def hf_log_probs(folder: str, sequences: list[list[int]]) -> list[np.ndarray]:
    """Log-prob of every token but the first, by the HF model in float32: the oracle."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    found = []
    with torch.no_grad():
        for ids in map(torch.tensor, sequences):
            rows = torch.log_softmax(model(ids[None]).logits[0, :-1].double(), dim=-1)
            found.append(rows.gather(1, ids[1:, None]).squeeze(1).numpy())
    return found
