"""Llama, dense: no biases, head_dim may differ from hidden / heads."""

from __future__ import annotations

from megarl.reshard.families.config import Family
from megarl.reshard.families.rules import dense_rules

FAMILY = Family(
    name="llama",
    architecture="LlamaForCausalLM",
    qkv_bias=False,
    only={
        # True would put a bias on the output projection as well.
        "attention_bias": (False,),
        "mlp_bias": (False,),
        "hidden_act": ("silu",),
        "attention_dropout": (0, 0.0),
        "pretraining_tp": (1, None),
    },
    optional=frozenset({"head_dim", "num_key_value_heads", "tie_word_embeddings"}),
)
rules = dense_rules
