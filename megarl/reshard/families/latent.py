"""Latent attention out of config.json, and its rules: what the DeepSeek families share."""

from __future__ import annotations

from collections.abc import Iterator

from megarl.reshard.families.config import Config
from megarl.reshard.families.rules import Part, Rule
from megarl.reshard.families.spec import MLASpec, ModelSpec


def latent(config: Config) -> MLASpec:
    """Raises `FolderError` where a number that follows from others is told differently."""
    rank = config.values.get("q_lora_rank")
    spec = MLASpec(
        q_lora_rank=None if rank is None else config.integer("q_lora_rank"),
        kv_lora_rank=config.integer("kv_lora_rank"),
        nope_dim=config.integer("qk_nope_head_dim"),
        rope_dim=config.integer("qk_rope_head_dim"),
        v_dim=config.integer("v_head_dim"),
        interleaved=config.flag("rope_interleave", True),
    )
    for key, follows in (
        ("head_dim", spec.rope_dim),  # as transformers writes it
        ("qk_head_dim", spec.nope_dim + spec.rope_dim),
        ("num_key_value_heads", config.integer("num_attention_heads")),
    ):
        if config.values.get(key) is not None and config.integer(key) != follows:
            raise config.fail(f"{key} is {config.values[key]}; latent attention makes it {follows}")
    return spec


def latent_rules(spec: ModelSpec, layer: int) -> Iterator[Rule]:
    """The projections of one layer, in the order of HF's modules, without the norm before them.

    SGLang holds both down projections one below the other; without one of queries, each alone.
    """
    mla = spec.mla
    assert mla is not None
    theirs, ours = f"model.layers.{layer}.self_attn", "decoder.layers.{layer}.self_attention"
    rank, key, kv_rank = mla.q_lora_rank, mla.nope_dim + mla.rope_dim, mla.kv_lora_rank
    fused = "kv_a_proj_with_mqa" if rank is None else "fused_qkv_a_proj_with_mqa"

    def rule(
        part: Part, hf: str, shape: tuple[int, ...], mine: str, sglang: str = "", row: int = 0
    ) -> Rule:
        return Rule(
            part,
            f"{theirs}.{hf}.weight",
            shape,
            f"{ours}.{mine}.weight",
            f"{theirs}.{sglang or hf}.weight",
            layer,
            sglang_row=row,
        )

    if rank is None:
        yield rule(Part.ROWS, "q_proj", (spec.heads * key, spec.hidden), "linear_q_proj")
    else:
        yield rule(Part.WHOLE, "q_a_proj", (rank, spec.hidden), "linear_q_down_proj", fused)
        yield rule(Part.WHOLE, "q_a_layernorm", (rank,), "q_layernorm")
        yield rule(Part.ROWS, "q_b_proj", (spec.heads * key, rank), "linear_q_up_proj")
    down = (kv_rank + mla.rope_dim, spec.hidden)
    yield rule(Part.WHOLE, "kv_a_proj_with_mqa", down, "linear_kv_down_proj", fused, row=rank or 0)
    yield rule(Part.WHOLE, "kv_a_layernorm", (kv_rank,), "kv_layernorm")
    up = (spec.heads * (mla.nope_dim + mla.v_dim), kv_rank)
    yield rule(Part.ROWS, "kv_b_proj", up, "linear_kv_up_proj")
    yield rule(Part.COLUMNS, "o_proj", (spec.hidden, spec.heads * mla.v_dim), "linear_proj")
