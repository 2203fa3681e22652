"""Rotary embedding out of config.json, where any transformers wrote it.

transformers 5 writes `rope_parameters`, older ones `rope_theta` and `rope_scaling`. Formulas and
defaults are those of transformers' `modeling_rope_utils`. A value that SGLang takes otherwise than
transformers is refused by name.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from megarl.reshard.families.config import Config
from megarl.reshard.families.family import Family, not_latent
from megarl.reshard.families.spec import RopeScaling

COMMON = frozenset({"rope_type", "type", "rope_theta", "partial_rotary_factor"})
OF_KIND: Mapping[str, frozenset[str]] = {
    "default": frozenset(),
    "linear": frozenset({"factor"}),
    "llama3": frozenset(
        {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}
    ),
    "yarn": frozenset(
        {
            "attention_factor",
            "beta_fast",
            "beta_slow",
            "factor",
            "mscale",
            "mscale_all_dim",
            "original_max_position_embeddings",
            "truncate",
        }
    ),
}
"""Keys that act, by type."""


def rope_of(config: Config, family: Family) -> tuple[float, RopeScaling | None]:
    """(theta, stretching or None). Raises `FolderError` for a type or key that is not handled, a
    number that is missing, and what two places tell differently."""
    blocks = {key: config.values.get(key) for key in ("rope_parameters", "rope_scaling")}
    told = {key: block for key, block in blocks.items() if block not in (None, {})}
    for key, block in told.items():
        if not isinstance(block, dict):
            raise config.fail(f"{key} is {block!r}, not an object")
    theta = _theta(config, told, family)
    plain = [_without_theta(block) for block in told.values()]
    if any(block != plain[0] for block in plain):
        raise config.fail("rope_parameters and rope_scaling tell rotary embedding differently")
    for key, block in told.items():
        return theta, _scaling(config, key, block, family)
    return theta, None


def _without_theta(block: Mapping[str, Any]) -> dict[str, Any]:
    kind = block.get("rope_type", block.get("type", "default"))
    rest = {key: value for key, value in block.items() if key not in ("rope_theta", "type")}
    return rest | {"rope_type": kind}


def _theta(config: Config, told: Mapping[str, Mapping[str, Any]], family: Family) -> float:
    found = {}
    if config.values.get("rope_theta") is not None:
        found["rope_theta"] = config.real("rope_theta")
    for key, block in told.items():
        if block.get("rope_theta") is not None:
            found[f"{key}.rope_theta"] = Config(config.path, block).real("rope_theta")
    if len(set(found.values())) > 1:
        raise config.fail(f"rope theta is told twice and differs: {found}")
    if not found and family.rope_theta is None:
        raise config.fail("rope_theta is missing; it is never left to a default")
    theta = next(iter(found.values()), family.rope_theta or 0.0)
    if family.whole_theta and not theta.is_integer():
        raise config.fail(
            f"rope_theta {theta}: SGLang takes only its whole part for {family.prefix}"
        )
    return theta


def _scaling(
    config: Config, key: str, block: Mapping[str, Any], family: Family
) -> RopeScaling | None:
    kinds = [block[name] for name in ("rope_type", "type") if block.get(name) is not None]
    if any(kind != kinds[0] for kind in kinds):
        raise config.fail(f"{key} has rope_type {kinds[0]!r} and type {kinds[1]!r}; which?")
    kind = kinds[0] if kinds else "default"
    handled = ("default", *family.rope_kinds)
    if kind not in handled:
        raise config.fail(f"{key} of type {kind!r} is not handled, only {', '.join(handled)}")
    odd = sorted(block.keys() - COMMON - OF_KIND[kind])
    if odd:
        raise config.fail(f"{key} of type {kind!r} has {', '.join(odd)}, not handled")
    if block.get("partial_rotary_factor", 1.0) != 1.0:
        part = block["partial_rotary_factor"]
        raise config.fail(f"{key}.partial_rotary_factor = {part!r} (handled: 1.0)")
    # Its own reader, so that errors name `rope_scaling.factor`.
    numbers = Config(config.path, {f"{key}.{name}": value for name, value in block.items()})
    if kind == "default":
        return None
    factor = numbers.real(f"{key}.factor")
    if factor < 1:
        raise config.fail(f"{key}.factor is {factor}, below 1")
    if kind == "linear":
        if type(block["factor"]) is int:
            raise config.fail(
                f"{key}.factor is {block['factor']}: SGLang takes no whole number there; "
                f"write {factor}"
            )
        return RopeScaling(kind, factor)
    original = f"{key}.original_max_position_embeddings"
    positions = config.integer("max_position_embeddings")
    if numbers.values.get(original) is not None:
        positions = numbers.integer(original)
    if kind == "llama3":
        return _llama3(numbers, key, factor, positions)
    return _yarn(numbers, key, factor, positions, family)


def _llama3(numbers: Config, key: str, factor: float, positions: int) -> RopeScaling:
    low, high = (numbers.real(f"{key}.{end}_freq_factor") for end in ("low", "high"))
    if low >= high:
        raise numbers.fail(f"{key}.low_freq_factor {low} is not below high_freq_factor {high}")
    return RopeScaling(
        "llama3",
        factor,
        original_max_positions=positions,
        low_freq_factor=low,
        high_freq_factor=high,
    )


def _yarn(numbers: Config, key: str, factor: float, positions: int, family: Family) -> RopeScaling:
    def real(name: str, missing: float | None) -> float | None:
        # A null is read as absent by transformers, and not by SGLang.
        there = f"{key}.{name}" in numbers.values
        return numbers.real(f"{key}.{name}") if there else missing

    fast, slow = real("beta_fast", 32.0), real("beta_slow", 1.0)
    if fast <= slow:
        raise numbers.fail(f"{key}.beta_fast {fast} is not above beta_slow {slow}")
    mscale, all_dim = real("mscale", None), real("mscale_all_dim", None)
    inferred = attention_factor(factor, mscale, all_dim)
    attention = numbers.values.get(f"{key}.attention_factor")
    if attention is not None and not _same(attention, inferred):
        raise numbers.fail(
            f"{key}.attention_factor = {attention!r}: SGLang does not read it and takes "
            f"{inferred}, from factor and mscale (handled: that number, or none)"
        )
    truncate, latent = numbers.flag(f"{key}.truncate", True), family.latent is not not_latent
    if latent and ((mscale is None) != (all_dim is None) or not truncate):
        raise numbers.fail(
            f"{key} tells one of mscale and mscale_all_dim, or truncate = false: in latent "
            "attention SGLang takes these otherwise than transformers (handled: both or none)"
        )
    return RopeScaling(
        "yarn",
        factor,
        original_max_positions=positions,
        beta_fast=fast,
        beta_slow=slow,
        attention_factor=inferred,
        truncate=truncate,
        mscale_all_dim=all_dim or 0.0 if latent else 0.0,
    )


def attention_factor(factor: float, mscale: float | None, all_dim: float | None) -> float:
    """YaRN's factor on cosine and sine (arXiv:2309.00071, equation 22): 0.1 · ln(factor) + 1, or
    the ratio of two such with ln(factor) weighted by `mscale` and `all_dim` where both are told."""

    def scaled(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    if mscale is None or all_dim is None:
        return scaled(1.0)
    return scaled(mscale) / scaled(all_dim)


def _same(told: Any, inferred: float) -> bool:
    return type(told) in (int, float) and math.isclose(told, inferred, rel_tol=1e-9)
