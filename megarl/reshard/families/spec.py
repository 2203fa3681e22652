"""The numbers of a model, read from its HF config: what trainer, generator and converter share."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """How rotary frequencies are stretched; formulas as in transformers' `modeling_rope_utils`."""

    kind: str
    """`linear`, `llama3` or `yarn`."""
    factor: float
    original_max_positions: int | None = None
    """llama3 and yarn: positions before the stretching."""
    low_freq_factor: float | None = None
    """llama3 only, as is `high_freq_factor`."""
    high_freq_factor: float | None = None
    beta_fast: float = 32.0
    """yarn only, as is all below."""
    beta_slow: float = 1.0
    attention_factor: float = 1.0
    """Multiplies cosine and sine; resolved from `factor`, `mscale` and `mscale_all_dim`."""
    truncate: bool = True
    """The correction range is rounded to whole dimensions."""
    mscale_all_dim: float = 0.0
    """Of latent attention: scores are multiplied by (0.1 · mscale_all_dim · ln(factor) + 1)²."""


@dataclass(frozen=True, slots=True)
class MoESpec:
    """The feed-forward experts of a mixture model."""

    experts: int
    per_token: int
    """Experts that each token goes to."""
    ffn: int
    """Width of one expert."""
    layers: tuple[int, ...]
    """Global numbers of the layers with experts; the others are dense, of width `ModelSpec.ffn`."""
    normalize: bool
    """The chosen experts' probabilities are divided by their sum."""
    shared_ffn: int = 0
    """Width of the expert that every token goes to; 0: none."""
    router: str = "softmax"
    """Or `sigmoid`."""
    router_bias: bool = False
    """`e_score_correction_bias`, float32: moves the choice, not the weights."""
    groups: int = 1
    top_groups: int = 1
    scale: float = 1.0
    """Multiplies the chosen experts' weights."""


@dataclass(frozen=True, slots=True)
class MLASpec:
    """Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434)."""

    q_lora_rank: int | None
    """None: queries are projected in one step."""
    kv_lora_rank: int
    nope_dim: int
    """Of one head's query and key, the dimensions without positions."""
    rope_dim: int
    """Dimensions with positions, whose key all heads share."""
    v_dim: int
    interleaved: bool = True
    """Neighbouring dimensions turn together, not those half of `rope_dim` apart."""


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A decoder-only transformer: RMSNorm, RoPE, SwiGLU, grouped-query or latent attention."""

    family: str
    """Name of the file in `reshard/families`."""
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    """Of latent attention, its `rope_dim`, as transformers has it."""
    ffn: int
    """Width of the dense layers' feed-forward."""
    vocab: int
    """The config's `vocab_size`, without any padding rows."""
    norm_eps: float
    rope_theta: float
    tied: bool
    """The output projection is the embedding; never so under a value head."""
    qkv_bias: bool
    max_positions: int
    config_hash: str
    """Contract hash of the whole config.json."""
    qk_norm: bool = False
    """RMSNorm over each head's query and key, [head_dim], before RoPE."""
    rope_scaling: RopeScaling | None = None
    moe: MoESpec | None = None
    mla: MLASpec | None = None
    head: str = "lm"
    """Or `value`: `score.weight` [1, hidden] in place of `lm_head.weight`."""
    value_bias: bool = False
    """The value head adds `score.bias` [1], as HF's token classification does."""

    @property
    def even_length(self) -> int:
        """Tokens of a sequence at which causal attention costs as many operations as the linear
        layers: 2 · heads · head_dim · length against 2 · weights, a layer and token. Of the
        experts, those count that a token goes to."""
        attention = self.heads * self.head_dim
        projections = self.hidden * (2 * attention + 2 * self.kv_heads * self.head_dim)
        if self.mla:
            attention, projections = self._latent_sizes(self.mla)
        moe_layers = len(self.moe.layers) if self.moe else 0
        width = self.ffn * (self.layers - moe_layers)
        if self.moe:
            width += moe_layers * (self.moe.per_token * self.moe.ffn + self.moe.shared_ffn)
        outside = self.vocab if self.head == "lm" else 1
        weights = projections + self.hidden * (3 * width + outside) // self.layers
        return weights // attention

    def _latent_sizes(self, mla: MLASpec) -> tuple[int, int]:
        """(mean width of all heads' keys and values, weights of a layer's projections)."""
        key, value = mla.nope_dim + mla.rope_dim, mla.v_dim
        queries = self.hidden * self.heads * key
        if mla.q_lora_rank is not None:
            queries = mla.q_lora_rank * (self.hidden + self.heads * key)
        down = self.hidden * (mla.kv_lora_rank + mla.rope_dim)
        up = mla.kv_lora_rank * self.heads * (mla.nope_dim + value)
        out = self.hidden * self.heads * value
        return self.heads * (key + value) // 2, queries + down + up + out
