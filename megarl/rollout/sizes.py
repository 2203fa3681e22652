"""Whether a checkpoint's sizes divide by the rollout's layout. Pure.

SGLang asserts it, in its layers and without a word; here it is one line before anything is built.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

EXPERT_KEYS = ("num_experts", "num_local_experts", "n_routed_experts")
"""What families call their number of experts."""
EXPERT_FFN = "intermediate_size"
"""The width of an expert where a config has no key of its own for it (Mixtral)."""


def check_divides(config: Mapping[str, Any], tp: int, ep: int, where: str) -> None:
    """Raise `ValueError`, naming `where`, the key and its value, unless all of `config` divides.

    `config`: an HF config.json. Attention heads and dense feed-forward widths are cut into `tp`
    parts, experts spread over `ep`, each expert's width cut into tp / ep. Key/value heads are cut
    or, where there are fewer than `tp`, replicated; latent attention has none.
    """
    if tp % ep:
        raise ValueError(f"rollout.ep={ep} does not divide rollout.tp={tp}; choose one that does")
    heads = config["num_attention_heads"]
    kv_heads = config.get("num_key_value_heads") or heads
    if "kv_lora_rank" not in config and kv_heads % tp and tp % kv_heads:
        raise ValueError(
            f"{where}: num_key_value_heads {kv_heads} and rollout.tp={tp} do not divide one "
            "another; choose another rollout.tp"
        )
    cuts = [("num_attention_heads", heads, tp)]
    experts = next((key for key in EXPERT_KEYS if config.get(key)), None)
    if experts is None:
        if ep > 1:
            raise ValueError(f"{where}: the model has no experts for rollout.ep={ep}; set it to 1")
        cuts.append(("intermediate_size", config["intermediate_size"], tp))
    else:
        width = "moe_intermediate_size" if "moe_intermediate_size" in config else EXPERT_FFN
        cuts += [(experts, config[experts], ep), (width, config[width], tp // ep)]
        if config.get("first_k_dense_replace"):
            cuts.append(("intermediate_size", config["intermediate_size"], tp))
        if config.get("n_shared_experts"):
            shared = config["n_shared_experts"] * config[width]
            cuts.append((f"n_shared_experts · {width}", shared, tp))
    for key, size, parts in cuts:
        if size % parts:
            raise ValueError(
                f"{where}: {key} {size} does not divide by {parts} "
                f"(rollout.tp={tp}, rollout.ep={ep}); choose another layout"
            )
