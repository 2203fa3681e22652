"""A model's numbers out of its config.json, so that nothing which changes them is passed over."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megarl.contracts.hashes import contract_hash
from megarl.reshard.families.config import Config
from megarl.reshard.families.family import Family
from megarl.reshard.families.rope import rope_of
from megarl.reshard.families.spec import ModelSpec

HEADS = {
    "ForCausalLM": ("lm", False),
    "ForSequenceClassification": ("value", False),
    "ForTokenClassification": ("value", True),
}
"""End of HF's class name → head, and whether a value head has a bias."""


def spec_of(folder: Path, values: dict[str, Any], name: str, family: Family) -> ModelSpec:
    """The numbers of a model of the family `name`.

    Raises `FolderError`, in one line, for every key of `values` that is not handled, and for
    numbers that do not fit one another.
    """
    config = Config(Path(folder) / "config.json", values)
    faults = family.faults(values)
    architectures = values.get("architectures")
    heads = {family.prefix + end: head for end, head in HEADS.items()}
    if architectures is None:
        architectures = [f"{family.prefix}ForCausalLM"]
    if len(architectures) != 1 or architectures[0] not in heads:
        faults.append(f"architectures {architectures!r} (handled: one of {', '.join(heads)})")
    if faults:
        raise config.fail(f"not handled for {name}: " + "; ".join(faults))
    head, value_bias = heads[architectures[0]]
    if head == "value":
        _refuse_many_labels(config, architectures[0])
    _refuse_window(config, family)
    theta, scaling = rope_of(config, family)
    mla = family.latent(config)
    spec = ModelSpec(
        family=name,
        layers=config.integer("num_hidden_layers"),
        hidden=config.integer("hidden_size"),
        heads=config.integer("num_attention_heads"),
        kv_heads=_kv_heads(config),
        head_dim=mla.rope_dim if mla else _head_dim(config, family),
        ffn=config.integer("intermediate_size"),
        vocab=config.integer("vocab_size"),
        norm_eps=config.real("rms_norm_eps"),
        rope_theta=theta,
        tied=config.flag("tie_word_embeddings", False) and head == "lm",
        qkv_bias=family.qkv_bias,
        max_positions=config.integer("max_position_embeddings"),
        config_hash=contract_hash(dict(values)),
        qk_norm=family.qk_norm,
        rope_scaling=scaling,
        moe=family.experts(config),
        mla=mla,
        head=head,
        value_bias=value_bias,
    )
    if spec.heads % spec.kv_heads:
        raise config.fail(f"{spec.heads} attention heads do not divide by {spec.kv_heads} kv heads")
    if spec.head_dim % 2:
        raise config.fail(f"head_dim {spec.head_dim} is odd; rotary embedding needs pairs")
    return spec


def _kv_heads(config: Config) -> int:
    if config.values.get("num_key_value_heads") is None:
        return config.integer("num_attention_heads")
    return config.integer("num_key_value_heads")


def _head_dim(config: Config, family: Family) -> int:
    heads, hidden = config.integer("num_attention_heads"), config.integer("hidden_size")
    told = config.values.get("head_dim")
    if told is None and hidden % heads:
        raise config.fail(
            f"hidden_size {hidden} does not divide by num_attention_heads {heads} "
            "and there is no head_dim"
        )
    head_dim = hidden // heads if told is None else config.integer("head_dim")
    if head_dim * heads != hidden and not family.head_dim_free:
        raise config.fail(
            f"head_dim {head_dim} is not hidden_size / num_attention_heads = {hidden}/{heads}, "
            f"which SGLang takes for {family.prefix} whatever head_dim says"
        )
    return head_dim


def _refuse_many_labels(config: Config, architecture: str) -> None:
    """A value head has one output; without any key transformers makes two."""
    names, count = config.values.get("id2label"), config.values.get("num_labels")
    if isinstance(names, dict):
        names = len(names)
    told = {"id2label": names, "num_labels": count}
    given = {key: number for key, number in told.items() if number is not None}
    if not given:
        raise config.fail(
            f"{architecture} with two labels (transformers' default where config.json has neither "
            "id2label nor num_labels): only a head of one label is handled, as a value head"
        )
    if set(given.values()) != {1}:
        labels = ", ".join(f"{number} in {key}" for key, number in given.items())
        raise config.fail(
            f"{architecture} with several labels ({labels}): only a head of one label is handled, "
            "as a value head"
        )


def _refuse_window(config: Config, family: Family) -> None:
    window = config.values.get("sliding_window")
    if not family.window or window is None:
        return
    window, positions = config.integer("sliding_window"), config.integer("max_position_embeddings")
    # A token sees itself and the window - 1 before it.
    if window < positions:
        raise config.fail(
            f"sliding_window = {window} (handled: null, or at least max_position_embeddings = "
            f"{positions}, where it never acts)"
        )
