"""Mistral 7B, Nemo and others without an acting sliding window, which SGLang would leave out."""

from __future__ import annotations

from megarl.reshard.families.family import Family

FAMILY = Family(
    prefix="Mistral",
    # transformers takes 8 and 4096 where they are missing.
    required=frozenset({"num_key_value_heads", "sliding_window"}),
    window=True,
)
