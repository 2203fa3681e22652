"""Megatron's layers of torch modules, with this house's attention core, norms, routers and heads.

H hidden size, A scored positions.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from torch import Tensor, nn
from torch.nn.functional import linear

from megarl.models.latent import latent_attention
from megarl.models.packed import PackedAttention, RMSNorm
from megarl.models.routers import ExpertRouter, GroupedRouter, Router
from megarl.reshard.families.spec import ModelSpec


def block_spec(spec: ModelSpec, layers: range) -> TransformerBlockSubmodules:
    """The modules of the layers with the global numbers `layers`, dense or with experts."""
    experts = frozenset(spec.moe.layers if spec.moe else ())
    specs = [_layer(spec, number in experts) for number in layers]
    return TransformerBlockSubmodules(layer_specs=specs, layer_norm=RMSNorm)


def _layer(spec: ModelSpec, has_experts: bool) -> ModuleSpec:
    layer = get_gpt_layer_local_spec(
        num_experts=spec.moe.experts if has_experts else None,
        moe_grouped_gemm=False,
        qk_layernorm=spec.qk_norm,
        normalization="RMSNorm",
    )
    parts = layer.submodules
    if spec.mla:
        parts.self_attention = latent_attention(spec.mla.interleaved)
    else:
        parts.self_attention.submodules.core_attention = PackedAttention
    if spec.qk_norm:
        parts.self_attention.submodules.q_layernorm = RMSNorm
        parts.self_attention.submodules.k_layernorm = RMSNorm
    parts.input_layernorm = RMSNorm
    parts.pre_mlp_layernorm = RMSNorm
    if has_experts:
        moe = spec.moe

        def router(*, config: Any, pg_collection: Any) -> ExpertRouter:
            if moe.router == "sigmoid":
                return GroupedRouter(config, pg_collection, moe=moe)
            return Router(config, pg_collection, normalize=moe.normalize)

        parts.mlp.submodules.router = router
    return layer


class ValueHead(nn.Module):
    """One number per position from the last hidden state, the same on every tensor-parallel rank.

    `weight` [1, H], and `bias` [1] where the model has one, as in HF's `score`.
    """

    def __init__(self, config: Any, *, bias: bool) -> None:
        super().__init__()
        device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
        options = {"dtype": config.params_dtype, "device": device}
        self.weight = nn.Parameter(torch.empty(1, config.hidden_size, **options))
        self.register_parameter("bias", nn.Parameter(torch.empty(1, **options)) if bias else None)

    def forward(self, hidden_AH: Tensor) -> Tensor:
        """float32 [A]; the product is in the model's dtype."""
        return linear(hidden_AH, self.weight, self.bias).squeeze(-1).float()


def mark_shards(model: nn.Module) -> None:
    """Mark what is cut over ranks, for megatron's gradient norm and its reduction of gradients.

    Megatron marks a weight cut over tensor-parallel ranks, by the dimension it is cut along, where
    it initialises it, which is switched off here; an unmarked one counts as a copy, and the norm
    would leave out every rank's but the first's. Experts are reduced over the ranks that hold the
    same experts; megatron marks them so under expert parallelism only, though with expert_tp
    unlike tp they have other copies than the rest, too.
    """
    cut = {ColumnParallelLinear: 0, VocabParallelEmbedding: 0, RowParallelLinear: 1}
    for module in model.modules():
        if type(module) in cut and module.weight is not None:
            set_tensor_model_parallel_attributes(module.weight, True, cut[type(module)], 1)
        if isinstance(module, SequentialMLP):
            for param in module.parameters():
                param.allreduce = False
