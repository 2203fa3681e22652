"""Qwen3 with experts: as qwen3, with experts in every layer and an output projection of its own."""

from __future__ import annotations

from megarl.reshard.families.config import Config
from megarl.reshard.families.experts import routed
from megarl.reshard.families.family import WINDOW_OFF, WINDOW_UNUSED, Family
from megarl.reshard.families.spec import MoESpec


def experts(config: Config) -> MoESpec:
    """transformers 5 writes `num_local_experts`, older ones `num_experts`."""
    return routed(
        config,
        count=config.either("num_local_experts", "num_experts"),
        ffn="moe_intermediate_size",
        normalize=config.flag("norm_topk_prob", False),
    )


FAMILY = Family(
    prefix="Qwen3Moe",
    only={
        **WINDOW_OFF,
        "attention_bias": (False,),
        # SGLang builds experts in every layer, whatever these two say.
        "decoder_sparse_step": (1,),
        "mlp_only_layers": ([], None),
        # With it the loss would have a term for balance.
        "output_router_logits": (False,),
        # SGLang gives it an output projection of its own all the same.
        "tie_word_embeddings": (False,),
    },
    required=frozenset(
        {"moe_intermediate_size", "norm_topk_prob", "num_experts_per_tok", "num_key_value_heads"}
    ),
    optional=frozenset({"head_dim", "num_experts", "num_local_experts"}),
    harmless=WINDOW_UNUSED | {"router_aux_loss_coef"},
    qk_norm=True,
    experts=experts,
)
