"""What transformers calls the families that are tested here, and numbers of small models."""

from __future__ import annotations

NAMES = {
    "deepseek_v3": "DeepseekV3",
    "llama": "Llama",
    "mistral": "Mistral",
    "qwen2": "Qwen2",
    "qwen3": "Qwen3",
    "qwen3_moe": "Qwen3Moe",
    "mixtral": "Mixtral",
}
EXPERTS = {
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16},
    "qwen3_moe": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 40,
        "norm_topk_prob": True,
    },
    "deepseek_v3": {
        "head_dim": 8,
        "num_key_value_heads": 4,
        "rms_norm_eps": 1e-6,
        "q_lora_rank": 24,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 12,
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 40,
        "n_shared_experts": 2,
        "first_k_dense_replace": 1,
        "n_group": 4,
        "topk_group": 2,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        # Every published checkpoint has these; transformers leaves them out.
        "moe_layer_freq": 1,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 77_000.0,
            "factor": 8.0,
            "original_max_position_embeddings": 32,
            "mscale": 1.0,
            "mscale_all_dim": 0.8,
        },
    },
}
