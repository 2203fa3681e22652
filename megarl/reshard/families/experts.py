"""Experts out of config.json: what the mixture families share."""

from __future__ import annotations

from megarl.reshard.families.config import Config
from megarl.reshard.families.spec import MoESpec


def routed(config: Config, count: str, ffn: str, normalize: bool) -> MoESpec:
    """Experts in every layer behind a softmax router; `count` and `ffn` are config.json's keys.

    Raises `FolderError` where a token would go to more experts than there are.
    """
    experts, chosen = config.integer(count), config.integer("num_experts_per_tok")
    if chosen > experts:
        raise config.fail(f"num_experts_per_tok {chosen} is above {count} {experts}")
    return MoESpec(
        experts=experts,
        per_token=chosen,
        ffn=config.integer(ffn),
        layers=tuple(range(config.integer("num_hidden_layers"))),
        normalize=normalize,
    )
