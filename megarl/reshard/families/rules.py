"""What a family's table is made of: one rule per logical (HF-named) tensor."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Part(Enum):
    """How a logical tensor is cut over tensor-parallel ranks, and with what it is fused."""

    VOCAB = "vocab"
    """Rows cut, padded."""
    QUERY = "query"
    """Rows cut by head; fused with KEY and VALUE in one parameter, weights and biases alike."""
    KEY = "key"
    VALUE = "value"
    ROWS = "rows"
    """Rows cut evenly."""
    COLUMNS = "columns"
    """Columns cut evenly."""
    GATE = "gate"
    """Rows cut; fused with UP: [gate shard; up shard]."""
    UP = "up"
    WHOLE = "whole"
    """The same on every tensor-parallel rank."""


@dataclass(frozen=True, slots=True)
class Rule:
    """One logical tensor and the parameter that holds (a part of) it on either side."""

    part: Part
    hf: str
    """Full name in the checkpoint's files, where every expert has tensors of its own."""
    shape: tuple[int, ...]
    """In those files; 1-D or 2-D."""
    megatron: str
    """`{layer}` counts within a model chunk, `{expert}` within an expert-parallel rank."""
    sglang: str
    """Full name, with the global layer; of an expert, the 3-D parameter it is a row of."""
    layer: int | None = None
    """Global layer number; None outside the layers."""
    expert: int | None = None
    """Global expert number; its parts are cut over expert-tensor-parallel ranks."""
    sglang_row: int = 0
    """Of SGLang's parameter, the row where this tensor begins: those above are another's."""
    dtype: str | None = None
    """What it is held in on both sides, `float32`; None: in the model's dtype."""
