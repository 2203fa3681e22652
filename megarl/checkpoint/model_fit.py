"""In which numbers the model at hand is another than a checkpoint's. Plain Python."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megarl.reshard.families import read_spec
from megarl.reshard.families.spec import ModelSpec

HF_NAMES = {
    "family": "model_type",
    "layers": "num_hidden_layers",
    "hidden": "hidden_size",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "ffn": "intermediate_size",
    "vocab": "vocab_size",
    "norm_eps": "rms_norm_eps",
    "rope_theta": "rope_theta",
    "tied": "tie_word_embeddings",
    "qkv_bias": "qkv_bias",
    "max_positions": "max_position_embeddings",
}
"""Number of a `ModelSpec` → what config.json calls it."""
SHAPELESS = frozenset({"model_type", "rms_norm_eps", "rope_theta", "max_position_embeddings"})
"""Numbers on which no tensor's shape, nor that there is one, depends."""


def numbers_of(spec: ModelSpec) -> dict[str, Any]:
    """What a position tells of its model, under config.json's names."""
    return {told: getattr(spec, name) for name, told in HF_NAMES.items()}


def model_differences(stored: Mapping[str, Any], model_folder: Path) -> dict[str, tuple[Any, Any]]:
    """Number → (the position's, the model folder's), where they differ. Empty where the position
    tells none, or config.json differs in what megarl does not read. Raises `FolderError`."""
    mine = numbers_of(read_spec(model_folder))
    return {
        name: (stored[name], value)
        for name, value in mine.items()
        if name in stored and stored[name] != value
    }


def as_words(differences: Mapping[str, tuple[Any, Any]]) -> tuple[str, str]:
    """(before, now), each as `name value, …`."""
    before, now = (
        ", ".join(f"{name} {pair[side]}" for name, pair in differences.items()) for side in (0, 1)
    )
    return before, now


def misfit(differences: Mapping[str, tuple[Any, Any]], model_folder: Path) -> str | None:
    """Why no permission lets the tensors into the model at hand; None where they fit."""
    shapes = {name: pair for name, pair in differences.items() if name not in SHAPELESS}
    if not shapes:
        return None
    before, now = as_words(shapes)
    return (
        f"model was {before}, is {now} ({model_folder}): the checkpoint's tensors have other "
        "shapes; set model.path to a model of the checkpoint's shape, or run.name=… to begin a "
        "run of its own with this one"
    )
