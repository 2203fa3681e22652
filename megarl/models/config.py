"""Megatron's `TransformerConfig` of a model on a mesh. No dropout, no fusion, no auxiliary loss: a
forward is a pure function.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from torch import nn

from megarl.contracts.mesh import Mesh
from megarl.reshard.families.spec import ModelSpec


def refuse_layout(spec: ModelSpec, mesh: Mesh, sequence_parallel: bool) -> None:
    """Raises `ValueError`, the same on every rank, for a model that this mesh cannot train."""
    if spec.moe is None:
        if mesh.ep > 1 or mesh.etp != mesh.tp:
            raise ValueError(
                f"actor.ep={mesh.ep}, actor.expert_tp={mesh.etp}: the {spec.family} model has no "
                "experts; leave both out"
            )
        return
    if spec.moe.experts % mesh.ep:
        raise ValueError(
            f"{spec.moe.experts} experts do not divide by actor.ep={mesh.ep}; change actor.ep"
        )
    if mesh.tp > 1 and not sequence_parallel:
        raise ValueError(
            f"actor.tp={mesh.tp}: every tensor-parallel rank would send all tokens to the experts; "
            "set actor.sequence_parallel=true"
        )


def transformer_config(
    spec: ModelSpec,
    mesh: Mesh,
    dtype: torch.dtype,
    device: torch.device,
    recompute: str,
    sequence_parallel: bool = False,
) -> TransformerConfig:
    """Megatron's config of `spec`.

    `recompute`: the recipe's `actor.recompute`, none or full; in effect in training mode only.
    `sequence_parallel` has no effect on one tensor-parallel rank.
    """
    recomputing = {
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
    }
    return (MLATransformerConfig if spec.mla else TransformerConfig)(
        num_layers=spec.layers,
        hidden_size=spec.hidden,
        num_attention_heads=spec.heads,
        num_query_groups=spec.kv_heads,
        kv_channels=spec.head_dim,
        ffn_hidden_size=spec.ffn,
        normalization="RMSNorm",
        layernorm_epsilon=spec.norm_eps,
        qk_layernorm=spec.qk_norm,
        gated_linear_unit=True,
        activation_func=nn.functional.silu,
        add_bias_linear=False,
        add_qkv_bias=spec.qkv_bias,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=mesh.tp,
        sequence_parallel=sequence_parallel and mesh.tp > 1,
        params_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        use_cpu_initialization=device.type == "cpu",
        perform_initialization=False,
        # Losses carry global denominators, so gradients are summed over data-parallel ranks:
        # with this flag megatron's DDP scales by 1 and not by 1/dp, experts' too.
        calculate_per_token_loss=True,
        bias_dropout_fusion=False,
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        apply_rope_fusion=False,
        persist_layer_norm=False,
        **_pipeline(spec, mesh, dtype, device),
        **_experts(spec, mesh),
        **_latent(spec),
        **(recomputing if recompute == "full" else {}),
    )


def _pipeline(
    spec: ModelSpec, mesh: Mesh, dtype: torch.dtype, device: torch.device
) -> dict[str, Any]:
    chosen: dict[str, Any] = {
        "pipeline_model_parallel_size": mesh.pp,
        "pipeline_dtype": dtype,
        "batch_p2p_sync": device.type == "cuda",
    }
    if mesh.pp == 1:
        return chosen
    layout = [["decoder"] * len(layers) for layers in mesh.chunks(spec.layers)]
    layout[0].insert(0, "embedding")
    layout[-1].append("loss")
    chosen["pipeline_model_parallel_layout"] = layout
    if mesh.virtual > 1:
        chosen["virtual_pipeline_model_parallel_size"] = mesh.virtual
        # On two stages the next one is the previous one too: batched sends of both kinds would
        # arrive as one another. Unbatched ones go through groups of their own.
        chosen |= {"overlap_p2p_comm": True, "batch_p2p_comm": False}
    return chosen


def _experts(spec: ModelSpec, mesh: Mesh) -> dict[str, Any]:
    if spec.moe is None:
        return {}
    return {
        "num_moe_experts": spec.moe.experts,
        "moe_router_topk": spec.moe.per_token,
        "moe_ffn_hidden_size": spec.moe.ffn,
        "moe_shared_expert_intermediate_size": spec.moe.shared_ffn or None,
        # Told for completeness: this house's routers have the arithmetic.
        "moe_router_pre_softmax": True,
        "moe_router_load_balancing_type": "none",
        # Every rank of a group of experts gathers the group's tokens: megatron's other dispatchers
        # want CUDA streams or DeepEP.
        "moe_token_dispatcher_type": "allgather",
        "expert_model_parallel_size": mesh.ep,
        "expert_tensor_parallel_size": mesh.etp,
    }


def _latent(spec: ModelSpec) -> dict[str, Any]:
    """Of rotary embedding only what scales attention scores: `models/latent.py` turns by itself."""
    if spec.mla is None:
        return {}
    scaling = spec.rope_scaling
    return {
        "q_lora_rank": spec.mla.q_lora_rank,
        "kv_lora_rank": spec.mla.kv_lora_rank,
        "qk_head_dim": spec.mla.nope_dim,
        "qk_pos_emb_head_dim": spec.mla.rope_dim,
        "v_head_dim": spec.mla.v_dim,
        "rope_type": "rope",
        "rotary_scaling_factor": scaling.factor if scaling else 1.0,
        "mscale_all_dim": scaling.mscale_all_dim if scaling else 0.0,
    }
