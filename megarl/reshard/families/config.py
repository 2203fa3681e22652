"""Reading an HF config.json so that nothing which changes the model's arithmetic is passed over."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megarl.contracts.errors import InputError
from megarl.contracts.hashes import contract_hash
from megarl.reshard.families.spec import ModelSpec


class FolderError(InputError):
    """A model folder that is missing, incomplete, or of a kind that is not handled."""


HARMLESS = frozenset(
    {
        "_name_or_path",
        "bos_token_id",
        "dtype",
        "eos_token_id",
        "initializer_range",
        "model_type",
        "pad_token_id",
        "torch_dtype",
        "transformers_version",
        "use_cache",
    }
)
"""Keys that change nothing in the arithmetic of a trained model."""

NUMBERS = (
    "hidden_size",
    "intermediate_size",
    "max_position_embeddings",
    "num_attention_heads",
    "num_hidden_layers",
    "rms_norm_eps",
    "vocab_size",
)
"""Keys that every dense family reads and none may leave to a default."""

ROPE_KEYS = frozenset({"rope_theta", "rope_scaling", "rope_parameters"})
DEFAULT_ROPE_THETA = 10000.0
"""transformers' own for Llama and Qwen2; SGLang reads the config through transformers."""


@dataclass(frozen=True)
class Family:
    """What a family understands of a config.json, beyond `NUMBERS` and the rope keys."""

    name: str
    architecture: str
    qkv_bias: bool
    only: Mapping[str, tuple[Any, ...]]
    """Keys that change the arithmetic, with the values that are handled."""
    optional: frozenset[str] = frozenset()
    """Keys that are read where they are there: `head_dim`, `tie_word_embeddings`, ..."""
    harmless: frozenset[str] = frozenset()
    required: frozenset[str] = frozenset()
    """Keys whose absence transformers fills with a fixed number: never left to it."""


def read_config(folder: Path) -> dict[str, Any]:
    """The config.json of `folder`; `FolderError` says in one line what is missing."""
    path = Path(folder) / "config.json"
    if not Path(folder).is_dir():
        raise FolderError(
            f"{folder}: there is no such model folder; check model.path, "
            "or make a small one: python tools/make_tiny_model.py --help"
        )
    if not path.is_file():
        raise FolderError(f"{folder}: no config.json; model.path must be an HF checkpoint folder")
    try:
        config = json.loads(path.read_text())
    except ValueError as error:
        raise FolderError(f"{path}: not JSON: {error}") from error
    if not isinstance(config, dict):
        raise FolderError(f"{path}: holds {type(config).__name__}, not an object")
    return config


def dense_spec(folder: Path, config: Mapping[str, Any], family: Family) -> ModelSpec:
    """The numbers of a dense model; `FolderError` names each key that is not handled."""
    path = Path(folder) / "config.json"
    _refuse_unhandled(path, config, family)
    heads = _number(path, config, "num_attention_heads")
    hidden = _number(path, config, "hidden_size")
    kv_heads = config.get("num_key_value_heads")
    head_dim = config.get("head_dim")
    if head_dim is None:
        if hidden % heads:
            raise FolderError(
                f"{path}: hidden_size {hidden} does not divide by num_attention_heads {heads} "
                "and there is no head_dim"
            )
        head_dim = hidden // heads
    spec = ModelSpec(
        family=family.name,
        layers=_number(path, config, "num_hidden_layers"),
        hidden=hidden,
        heads=heads,
        kv_heads=heads if kv_heads is None else kv_heads,
        head_dim=head_dim,
        ffn=_number(path, config, "intermediate_size"),
        vocab=_number(path, config, "vocab_size"),
        norm_eps=float(_number(path, config, "rms_norm_eps", float)),
        rope_theta=_rope_theta(path, config),
        tied=bool(config.get("tie_word_embeddings", False)),
        qkv_bias=family.qkv_bias,
        max_positions=_number(path, config, "max_position_embeddings"),
        config_hash=contract_hash(dict(config)),
    )
    for name in ("kv_heads", "head_dim"):
        value = getattr(spec, name)
        if type(value) is not int or value <= 0:
            raise FolderError(f"{path}: {name} is {value!r}, not a positive integer")
    if spec.heads % spec.kv_heads:
        raise FolderError(
            f"{path}: {spec.heads} attention heads do not divide by {spec.kv_heads} kv heads"
        )
    if spec.head_dim % 2:
        raise FolderError(f"{path}: head_dim {spec.head_dim} is odd; rotary embedding needs pairs")
    return spec


def _number(path: Path, config: Mapping[str, Any], key: str, kind: type = int) -> Any:
    value = config.get(key)
    if value is None:
        raise FolderError(f"{path}: {key} is missing; it is never left to a default")
    allowed = (int, float) if kind is float else (int,)
    if type(value) not in allowed or value <= 0:
        raise FolderError(f"{path}: {key} is {value!r}, not a positive {kind.__name__}")
    return value


def _refuse_unhandled(path: Path, config: Mapping[str, Any], family: Family) -> None:
    known = HARMLESS | ROPE_KEYS | family.optional | family.harmless | {"architectures"}
    known |= family.required
    faults = [f"{key} is missing" for key in sorted(family.required - config.keys())]
    architectures = config.get("architectures")
    if architectures is not None and list(architectures) != [family.architecture]:
        faults.append(f"architectures {architectures!r} (handled: {family.architecture})")
    for key in sorted(config.keys() - known - set(NUMBERS)):
        if key not in family.only:
            faults.append(f"{key} = {config[key]!r} (unknown; it may change the arithmetic)")
        elif config[key] not in family.only[key]:
            handled = " or ".join(repr(value) for value in family.only[key])
            faults.append(f"{key} = {config[key]!r} (handled: {handled})")
    faults += _layer_type_faults(config)
    if faults:
        raise FolderError(f"{path}: not handled for {family.name}: " + "; ".join(faults))


def _layer_type_faults(config: Mapping[str, Any]) -> list[str]:
    odd = sorted({str(kind) for kind in config.get("layer_types") or ()} - {"full_attention"})
    return [f"layer_types with {odd} (handled: full_attention)"] if odd else []


def _rope_theta(path: Path, config: Mapping[str, Any]) -> float:
    """The theta of plain rotary embedding, from either place transformers writes it in."""
    found = {}
    if config.get("rope_theta") is not None:
        found["rope_theta"] = float(config["rope_theta"])
    for key in ("rope_scaling", "rope_parameters"):
        block = config.get(key)
        if block is None:
            continue
        kind = block.get("rope_type", block.get("type", "default"))
        odd = sorted(block.keys() - {"rope_type", "type", "rope_theta"})
        if kind != "default":
            raise FolderError(f"{path}: {key} of type {kind!r} is not handled, only 'default'")
        if odd:
            raise FolderError(f"{path}: {key} has {', '.join(odd)}, not handled")
        if block.get("rope_theta") is not None:
            found[f"{key}.rope_theta"] = float(block["rope_theta"])
    if len(set(found.values())) > 1:
        raise FolderError(f"{path}: rope theta is told twice and differs: {found}")
    return next(iter(found.values()), DEFAULT_ROPE_THETA)
