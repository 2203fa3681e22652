"""What a family's table is made of: one rule per logical (HF-named) tensor."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from megarl.reshard.families.spec import ModelSpec


class Part(Enum):
    """How a logical tensor is cut and fused; it also fixes its shape."""

    VOCAB = "vocab"
    """[vocab, hidden], rows cut over tp, padded."""
    QUERY = "query"
    """[heads · head_dim, hidden], rows cut by head; fused with KEY and VALUE."""
    KEY = "key"
    """[kv_heads · head_dim, hidden]."""
    VALUE = "value"
    """[kv_heads · head_dim, hidden]."""
    ATTENTION_OUT = "attention_out"
    """[hidden, heads · head_dim], columns cut."""
    GATE = "gate"
    """[ffn, hidden], rows cut; fused with UP: [gate shard; up shard]."""
    UP = "up"
    """[ffn, hidden]."""
    FFN_OUT = "ffn_out"
    """[hidden, ffn], columns cut."""
    NORM = "norm"
    """[hidden], the same on every tp rank."""


@dataclass(frozen=True, slots=True)
class Rule:
    """One logical tensor and the parameter that holds (a part of) it on either side."""

    part: Part
    hf: str
    megatron: str
    """`{layer}` counts within a pipeline stage."""
    sglang: str
    layer: int | None = None
    """Global layer number; None outside the layers."""
    bias: bool = False

    def shape(self, spec: ModelSpec) -> tuple[int, ...]:
        """The HF shape: 1-D for norms and biases."""
        heads, kv = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
        rows, columns = {
            Part.VOCAB: (spec.vocab, spec.hidden),
            Part.QUERY: (heads, spec.hidden),
            Part.KEY: (kv, spec.hidden),
            Part.VALUE: (kv, spec.hidden),
            Part.ATTENTION_OUT: (spec.hidden, heads),
            Part.GATE: (spec.ffn, spec.hidden),
            Part.UP: (spec.ffn, spec.hidden),
            Part.FFN_OUT: (spec.hidden, spec.ffn),
            Part.NORM: (spec.hidden, 1),
        }[self.part]
        return (rows,) if self.bias or self.part is Part.NORM else (rows, columns)


OUTSIDE_LAYERS = (
    (Part.VOCAB, "model.embed_tokens.weight", "embedding.word_embeddings.weight"),
    (Part.NORM, "model.norm.weight", "decoder.final_layernorm.weight"),
)
OUTPUT = (Part.VOCAB, "lm_head.weight", "output_layer.weight")
IN_A_LAYER = (
    (Part.NORM, "input_layernorm", "input_layernorm", "input_layernorm"),
    (Part.QUERY, "self_attn.q_proj", "self_attention.linear_qkv", "self_attn.qkv_proj"),
    (Part.KEY, "self_attn.k_proj", "self_attention.linear_qkv", "self_attn.qkv_proj"),
    (Part.VALUE, "self_attn.v_proj", "self_attention.linear_qkv", "self_attn.qkv_proj"),
    (Part.ATTENTION_OUT, "self_attn.o_proj", "self_attention.linear_proj", "self_attn.o_proj"),
    (
        Part.NORM,
        "post_attention_layernorm",
        "pre_mlp_layernorm",
        "post_attention_layernorm",
    ),
    (Part.GATE, "mlp.gate_proj", "mlp.linear_fc1", "mlp.gate_up_proj"),
    (Part.UP, "mlp.up_proj", "mlp.linear_fc1", "mlp.gate_up_proj"),
    (Part.FFN_OUT, "mlp.down_proj", "mlp.linear_fc2", "mlp.down_proj"),
)
"""Part, HF, megatron and SGLang names of a dense Llama-like layer, without `.weight`/`.bias`."""


def dense_rules(spec: ModelSpec) -> tuple[Rule, ...]:
    """The rules of a dense Llama-like model, in HF's order, one per logical tensor.

    A tied model has no `lm_head.weight`: its output projection is the embedding.
    """
    (embedding, final_norm) = (Rule(part, hf, ours, hf) for part, hf, ours in OUTSIDE_LAYERS)
    rules = [embedding]
    for layer in range(spec.layers):
        for part, hf, ours, theirs in IN_A_LAYER:
            kinds = ["weight"]
            if spec.qkv_bias and part in (Part.QUERY, Part.KEY, Part.VALUE):
                kinds.append("bias")
            rules += [
                Rule(
                    part,
                    f"model.layers.{layer}.{hf}.{kind}",
                    f"decoder.layers.{{layer}}.{ours}.{kind}",
                    f"model.layers.{layer}.{theirs}.{kind}",
                    layer,
                    bias=kind == "bias",
                )
                for kind in kinds
            ]
    rules.append(final_norm)
    if not spec.tied:
        rules.append(Rule(OUTPUT[0], OUTPUT[1], OUTPUT[2], OUTPUT[1]))
    return tuple(rules)
