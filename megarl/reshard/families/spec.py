"""The numbers of a model, read from its HF config: what trainer, generator and converter share."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A dense decoder-only transformer: RMSNorm, RoPE, SwiGLU, grouped-query attention."""

    family: str
    """Name of the file in `reshard/families`: `llama`, `qwen2`."""
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    """The config's `vocab_size`, without any padding rows."""
    norm_eps: float
    rope_theta: float
    tied: bool
    """The output projection is the embedding."""
    qkv_bias: bool
    max_positions: int
    config_hash: str
    """Contract hash of the whole config.json."""

    @property
    def even_length(self) -> int:
        """Tokens of a sequence at which causal attention costs as many operations as the linear
        layers: 2 · heads · head_dim · length against 2 · weights, a layer and token."""
        attention = self.heads * self.head_dim
        weights = self.hidden * (2 * attention + 2 * self.kv_heads * self.head_dim + 3 * self.ffn)
        return (weights + self.hidden * self.vocab // self.layers) // attention
