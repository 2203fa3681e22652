"""The table of a decoder-only model, out of its numbers: what the families share."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from megarl.reshard.families.latent import latent_rules
from megarl.reshard.families.rules import Part, Rule
from megarl.reshard.families.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class MoENames:
    """What the files and SGLang call the parts of a layer of experts."""

    block: str = "mlp"
    """The layer's module of experts, on both sides."""
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"


def decoder_rules(spec: ModelSpec, names: MoENames | None = None) -> tuple[Rule, ...]:
    """One rule per tensor of the checkpoint's files, in depth order.

    A tied model has no `lm_head.weight`: its output projection is the embedding. A value head
    stands in `score.weight` (and `score.bias`), with no output projection.
    """
    outside = (spec.vocab, spec.hidden)
    embedding = "model.embed_tokens.weight"
    rules = [Rule(Part.VOCAB, embedding, outside, "embedding.word_embeddings.weight", embedding)]
    for layer in range(spec.layers):
        rules += _layer(spec, layer, names or MoENames())
    norm = "model.norm.weight"
    rules.append(Rule(Part.WHOLE, norm, (spec.hidden,), "decoder.final_layernorm.weight", norm))
    if spec.head == "value":
        rules.append(
            Rule(Part.WHOLE, "score.weight", (1, spec.hidden), "value_head.weight", "score.weight")
        )
        if spec.value_bias:
            rules.append(Rule(Part.WHOLE, "score.bias", (1,), "value_head.bias", "score.bias"))
    elif not spec.tied:
        head = "lm_head.weight"
        rules.append(Rule(Part.VOCAB, head, outside, "output_layer.weight", head))
    return tuple(rules)


def _layer(spec: ModelSpec, layer: int, names: MoENames) -> Iterator[Rule]:
    yield _norm(layer, "input_layernorm", "input_layernorm", spec.hidden)
    yield from latent_rules(spec, layer) if spec.mla else _attention(spec, layer)
    yield _norm(layer, "post_attention_layernorm", "pre_mlp_layernorm", spec.hidden)
    if spec.moe and layer in spec.moe.layers:
        yield from _experts(spec, layer, names)
    else:
        yield from _feed_forward(spec, layer, "mlp", "mlp", spec.ffn)


def _rule(layer: int, part: Part, hf: str, shape: tuple[int, ...], ours: str, theirs: str) -> Rule:
    start = f"model.layers.{layer}."
    return Rule(part, start + hf, shape, f"decoder.layers.{{layer}}.{ours}", start + theirs, layer)


def _norm(layer: int, hf: str, ours: str, size: int) -> Rule:
    return _rule(layer, Part.WHOLE, f"{hf}.weight", (size,), f"{ours}.weight", f"{hf}.weight")


def _attention(spec: ModelSpec, layer: int) -> Iterator[Rule]:
    heads, kv = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    fused = "self_attention.linear_qkv", "self_attn.qkv_proj"
    for part, name, rows in ((Part.QUERY, "q", heads), (Part.KEY, "k", kv), (Part.VALUE, "v", kv)):
        for kind, shape in (("weight", (rows, spec.hidden)), ("bias", (rows,))):
            if kind == "weight" or spec.qkv_bias:
                ours, theirs = (f"{parameter}.{kind}" for parameter in fused)
                yield _rule(layer, part, f"self_attn.{name}_proj.{kind}", shape, ours, theirs)
    if spec.qk_norm:
        yield _norm(layer, "self_attn.q_norm", "self_attention.q_layernorm", spec.head_dim)
        yield _norm(layer, "self_attn.k_norm", "self_attention.k_layernorm", spec.head_dim)
    out, ours = "self_attn.o_proj.weight", "self_attention.linear_proj.weight"
    yield _rule(layer, Part.COLUMNS, out, (spec.hidden, heads), ours, out)


def _feed_forward(
    spec: ModelSpec, layer: int, theirs: str, ours: str, width: int
) -> Iterator[Rule]:
    """Of a dense layer, or of the expert that every token goes to."""
    fused = f"{ours}.linear_fc1.weight", f"{theirs}.gate_up_proj.weight"
    for part, name in ((Part.GATE, "gate"), (Part.UP, "up")):
        yield _rule(layer, part, f"{theirs}.{name}_proj.weight", (width, spec.hidden), *fused)
    down = f"{theirs}.down_proj.weight"
    shape = (spec.hidden, width)
    yield _rule(layer, Part.COLUMNS, down, shape, f"{ours}.linear_fc2.weight", down)


def _experts(spec: ModelSpec, layer: int, names: MoENames) -> Iterator[Rule]:
    """The router, each expert's gate, up and down projection, those of the shared expert."""
    moe = spec.moe
    assert moe is not None
    theirs, ours = f"model.layers.{layer}.{names.block}", "decoder.layers.{layer}.mlp"
    router = f"{theirs}.gate.weight"
    shape = (moe.experts, spec.hidden)
    yield Rule(Part.WHOLE, router, shape, f"{ours}.router.weight", router, layer)
    if moe.router_bias:
        bias = f"{theirs}.gate.e_score_correction_bias"
        mine = f"{ours}.router.expert_bias"
        yield Rule(Part.WHOLE, bias, (moe.experts,), mine, bias, layer, dtype="float32")
    for expert in range(moe.experts):
        for part, name, shape, mine, fused in (
            (Part.GATE, names.gate, (moe.ffn, spec.hidden), "linear_fc1", "w13_weight"),
            (Part.UP, names.up, (moe.ffn, spec.hidden), "linear_fc1", "w13_weight"),
            (Part.COLUMNS, names.down, (spec.hidden, moe.ffn), "linear_fc2", "w2_weight"),
        ):
            yield Rule(
                part,
                f"{theirs}.experts.{expert}.{name}.weight",
                shape,
                f"{ours}.experts.local_experts.{{expert}}.{mine}.weight",
                f"{theirs}.experts.{fused}",
                layer,
                expert,
            )
    if moe.shared_ffn:
        block = f"{names.block}.shared_experts", "mlp.shared_experts"
        yield from _feed_forward(spec, layer, *block, moe.shared_ffn)
