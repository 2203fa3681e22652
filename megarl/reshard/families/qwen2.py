"""Qwen2 and Qwen2.5, dense: biases on query, key and value; no sliding window."""

from __future__ import annotations

from megarl.reshard.families.config import Family
from megarl.reshard.families.rules import dense_rules

FAMILY = Family(
    name="qwen2",
    architecture="Qwen2ForCausalLM",
    qkv_bias=True,
    only={
        "use_sliding_window": (False,),
        "hidden_act": ("silu",),
        "attention_dropout": (0, 0.0),
    },
    optional=frozenset({"head_dim", "tie_word_embeddings"}),
    required=frozenset({"num_key_value_heads"}),
    # Without `use_sliding_window` these two change nothing; `layer_types` is checked by value.
    harmless=frozenset({"sliding_window", "max_window_layers", "layer_types"}),
)
rules = dense_rules
