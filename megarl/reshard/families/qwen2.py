"""Qwen2 and Qwen2.5, dense: biases on query, key and value; no sliding window."""

from __future__ import annotations

from megarl.reshard.families.family import WINDOW_OFF, WINDOW_UNUSED, Family

FAMILY = Family(
    prefix="Qwen2",
    only={**WINDOW_OFF, "use_mrope": (False,)},
    required=frozenset({"num_key_value_heads"}),
    harmless=WINDOW_UNUSED,
    qkv_bias=True,
)
