"""Model families: short tables of names and rules, shared by resharding and conversion."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

from megarl.reshard.families import llama, qwen2
from megarl.reshard.families.config import FolderError, dense_spec, read_config
from megarl.reshard.families.rules import Rule
from megarl.reshard.families.spec import ModelSpec

FAMILIES = {"llama": llama, "qwen2": qwen2}
"""By the config's `model_type`."""

__all__ = ["FAMILIES", "FolderError", "ModelSpec", "Rule", "family_rules", "read_spec"]


def read_spec(folder: Path) -> ModelSpec:
    """The numbers of the HF checkpoint in `folder`.

    Raises `FolderError`, in one line, for a missing folder or config.json, an unknown
    `model_type`, and every config key whose value changes the arithmetic and is not handled.
    """
    config = read_config(folder)
    kind = config.get("model_type")
    if kind not in FAMILIES:
        raise FolderError(
            f"{Path(folder) / 'config.json'}: model_type {kind!r} is not handled; "
            f"handled: {', '.join(sorted(FAMILIES))}"
        )
    return dense_spec(folder, config, FAMILIES[kind].FAMILY)


@lru_cache(maxsize=32)
def family_rules(spec: ModelSpec) -> tuple[Rule, ...]:
    """One rule per logical tensor of the model, in HF's order."""
    return FAMILIES[spec.family].rules(spec)
