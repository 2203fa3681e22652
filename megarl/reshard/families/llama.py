"""Llama 2 and 3, SmolLM2: no biases, head_dim may differ from hidden / heads."""

from __future__ import annotations

from megarl.reshard.families.family import Family

FAMILY = Family(
    prefix="Llama",
    only={
        # True would put a bias on the output projection as well.
        "attention_bias": (False,),
        "mlp_bias": (False,),
        "pretraining_tp": (1, None),
        "rope_interleaved": (False,),
    },
    optional=frozenset({"head_dim", "num_key_value_heads", "tie_word_embeddings"}),
    harmless=frozenset({"is_llama_config"}),
    # Llama 2's files tell none.
    rope_theta=10000.0,
)
