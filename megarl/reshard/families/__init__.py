"""Model families: short tables of names and rules, shared by resharding and conversion.

Every module here that holds a `FAMILY` is one, named as its config's `model_type`; docs/families.md
tells how to add another.
"""

from __future__ import annotations

from functools import lru_cache
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules

from megarl.reshard.families.config import FolderError, read_config
from megarl.reshard.families.family import Family
from megarl.reshard.families.read import spec_of
from megarl.reshard.families.rules import Rule
from megarl.reshard.families.spec import ModelSpec

_NAMES = [each.name for each in iter_modules(__path__) if not each.name.startswith("_")]
_MODULES = {name: import_module(f"{__name__}.{name}") for name in _NAMES}
FAMILIES: dict[str, Family] = {
    name: module.FAMILY for name, module in sorted(_MODULES.items()) if hasattr(module, "FAMILY")
}
"""By the config's `model_type`."""

REFUSED = {
    "deepseek_v2": "transformers computes it without YaRN's scale on attention scores, and its "
    "choice of groups not at all"
}
"""`model_type` → why there is no family of it."""

__all__ = ["FAMILIES", "FolderError", "ModelSpec", "Rule", "family_rules", "read_spec"]


def read_spec(folder: Path) -> ModelSpec:
    """The numbers of the HF checkpoint in `folder`.

    Raises `FolderError`, in one line, for a missing folder or config.json, an unknown
    `model_type`, and every config key whose value changes the arithmetic and is not handled.
    """
    config = read_config(folder)
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in FAMILIES:
        why = f": {REFUSED[kind]}" if isinstance(kind, str) and kind in REFUSED else ""
        raise FolderError(
            f"{Path(folder) / 'config.json'}: model_type {kind!r} is not handled{why}; "
            f"handled: {', '.join(FAMILIES)}"
        )
    return spec_of(folder, config, kind, FAMILIES[kind])


@lru_cache(maxsize=32)
def family_rules(spec: ModelSpec) -> tuple[Rule, ...]:
    """One rule per logical tensor of the model, in depth order."""
    return FAMILIES[spec.family].rules(spec)
