"""Qwen3, dense: RMSNorm over each head's query and key; no biases, no sliding window."""

from __future__ import annotations

from megarl.reshard.families.family import WINDOW_OFF, WINDOW_UNUSED, Family

FAMILY = Family(
    prefix="Qwen3",
    # True would put a bias on the output projection as well.
    only={**WINDOW_OFF, "attention_bias": (False,)},
    # transformers takes 128 for a missing head_dim, whatever hidden / heads is.
    required=frozenset({"head_dim", "num_key_value_heads"}),
    optional=frozenset({"tie_word_embeddings"}),
    harmless=WINDOW_UNUSED,
    qk_norm=True,
)
