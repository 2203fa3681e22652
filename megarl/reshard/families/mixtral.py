"""Mixtral: Mistral's layers with experts in place of the feed-forward."""

from __future__ import annotations

from functools import partial

from megarl.reshard.families.config import Config
from megarl.reshard.families.decoder import MoENames, decoder_rules
from megarl.reshard.families.experts import routed
from megarl.reshard.families.family import Family
from megarl.reshard.families.spec import MoESpec


def experts(config: Config) -> MoESpec:
    """The chosen experts' probabilities are always divided by their sum."""
    return routed(config, count="num_local_experts", ffn="intermediate_size", normalize=True)


FAMILY = Family(
    prefix="Mixtral",
    only={
        # With it the loss would have a term for balance.
        "output_router_logits": (False,),
        "router_jitter_noise": (0, 0.0),
        # SGLang gives it an output projection of its own all the same.
        "tie_word_embeddings": (False,),
    },
    required=frozenset({"num_experts_per_tok", "num_key_value_heads", "num_local_experts"}),
    optional=frozenset({"head_dim", "sliding_window"}),
    harmless=frozenset({"router_aux_loss_coef"}),
    # SGLang's Mixtral does not read them, and of theta only the whole part.
    rope_kinds=(),
    whole_theta=True,
    head_dim_free=False,
    window=True,
    experts=experts,
    rules=partial(decoder_rules, names=MoENames("block_sparse_moe", "w1", "w3", "w2")),
)
