"""Modules of a layer that work on packed sequences: attention with rotary embedding, RMSNorm.

T packed tokens, S slots (sequences padded to rows), h query heads, g key/value heads, D head
dimension, n sequences, L tokens of the longest sequence of a block.

Attention takes the packed tokens apart into rows [n, L], runs causal scaled-dot-product attention
over all rows at once and puts the result back. Rows are grouped in blocks whose lengths lie within
a factor of two, so one long sequence does not pad all short ones. Everything that depends on the
pack only (indices, cosines) is computed once per forward and shared by all layers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from megarl.models.rotary import Rotate


@dataclass
class PackedSequences(PackedSeqParams):
    """Megatron's record of a pack (format `thd`) with what the attention of every layer shares."""

    cos_TD: Tensor = None  # [T, 1, D/2], the model's dtype
    sin_TD: Tensor = None  # [T, 1, D/2]
    token_S: Tensor = None  # int64 [S], the packed token that a slot reads
    slot_T: Tensor = None  # int64 [T], the slot that a packed token is
    blocks: tuple[tuple[int, int], ...] = ()
    """(rows, longest) of each block; slots are the blocks' cells, row by row."""
    padding_T: Tensor = None  # bool [T], tokens of no sample, which end the pack
    experts_TX: Tensor | None = None  # int16 [T, layers · k], as in the pack


def pack_sequences(
    cu_seqlens: Tensor,
    positions_T: Tensor,
    inv_freq: Tensor,
    dtype: torch.dtype,
    attention_factor: float = 1.0,
    real: int | None = None,
) -> PackedSequences:
    """Tables of one pack. `cu_seqlens` int32 [n+1] covers T exactly; `positions_T` int64 [T].

    `attention_factor` multiplies cosine and sine in float32, as HF does it for yarn. `real`: how
    many of the sequences are samples', the first ones; None: all.
    """
    device = positions_T.device
    bounds = cu_seqlens.to("cpu", torch.int64)
    starts, lengths = bounds[:-1], bounds.diff()
    longest = int(lengths.max())
    halvings = torch.tensor([(longest // n).bit_length() for n in lengths.tolist()])
    token_blocks, blocks = [], []
    first_slot = torch.empty_like(starts)
    slots = 0
    for halving in halvings.unique().tolist():
        rows = torch.nonzero(halvings == halving).squeeze(1)
        width = int(lengths[rows].max())
        # A row's padding reads the row's own last token: whatever a neighbour holds, even a
        # not-a-number, stays out. Causality hides the padding from the tokens before it.
        column = torch.minimum(torch.arange(width)[None], lengths[rows, None] - 1)
        token_blocks.append((starts[rows, None] + column).flatten())
        first_slot[rows] = slots + width * torch.arange(len(rows))
        blocks.append((len(rows), width))
        slots += width * len(rows)
    sequence_T = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
    slot_T = first_slot[sequence_T] + torch.arange(int(bounds[-1])) - starts[sequence_T]
    last = int(bounds[-1] if real is None else bounds[real])
    angle_TD = positions_T.float()[:, None, None] * inv_freq.to(device)
    return PackedSequences(
        qkv_format="thd",
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_kv=cu_seqlens,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        cos_TD=(angle_TD.cos() * attention_factor).to(dtype),
        sin_TD=(angle_TD.sin() * attention_factor).to(dtype),
        token_S=torch.cat(token_blocks).to(device),
        slot_T=slot_T.to(device),
        blocks=tuple(blocks),
        padding_T=torch.arange(int(bounds[-1]), device=device) >= last,
    )


class _ToSlots(torch.autograd.Function):
    """[T, …] → [S, …]. Padding's gradients are zero, so each token's is read at its own slot."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, token_S: Tensor, slot_T: Tensor) -> Tensor:
        ctx.save_for_backward(slot_T)
        return x.index_select(0, token_S)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (slot_T,) = ctx.saved_tensors
        return grad.index_select(0, slot_T), None, None


class _FromSlots(torch.autograd.Function):
    """[S, …] → [T, …]; padding gets gradient zero."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, slot_T: Tensor) -> Tensor:
        ctx.save_for_backward(slot_T)
        ctx.slots = len(x)
        return x.index_select(0, slot_T)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (slot_T,) = ctx.saved_tensors
        return grad.new_zeros(ctx.slots, *grad.shape[1:]).index_copy_(0, slot_T, grad), None


class PackedCore(nn.Module):
    """Core attention of queries and keys that have their positions."""

    def __init__(self, *, softmax_scale: float | None = None, **_: Any) -> None:
        super().__init__()
        self.scale = softmax_scale

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        *,
        packed_seq_params: PackedSequences,
        **_: Any,
    ) -> Tensor:
        """query [T, h, D], key [T, g, D] and value [T, g, E] → [T, h, E]."""
        return self._attended(
            torch.cat([query, key], dim=1), value, query.shape[1], packed_seq_params
        )

    def _attended(self, both: Tensor, value: Tensor, heads: int, pack: PackedSequences) -> Tensor:
        """`both`: [T, h + g, D], queries and keys; `heads`: h."""
        both_S = _ToSlots.apply(both, pack.token_S, pack.slot_T)
        value_S = _ToSlots.apply(value, pack.token_S, pack.slot_T)
        attended, start = [], 0
        for rows, width in pack.blocks:
            stop = start + rows * width
            pairs = both_S[start:stop].view(rows, width, -1, both.shape[-1]).transpose(1, 2)
            values = value_S[start:stop].view(rows, width, -1, value.shape[-1]).transpose(1, 2)
            out = scaled_dot_product_attention(
                pairs[:, :heads],
                pairs[:, heads:],
                values,
                is_causal=True,
                scale=self.scale,
                enable_gqa=True,
            )
            attended.append(out.transpose(1, 2).flatten(0, 1))
            start = stop
        return _FromSlots.apply(torch.cat(attended), pack.slot_T)


class PackedAttention(PackedCore):
    """Core attention for megatron's SelfAttention, rotary embedding included.

    The rotary embedding is here and not in SelfAttention because megatron's for packed sequences
    cuts and joins the tensors per sequence in Python; the model is built without its own.
    """

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        *,
        packed_seq_params: PackedSequences,
        **_: Any,
    ) -> Tensor:
        """query [T, h, D], key and value [T, g, D] → [T, h, D]."""
        pack = packed_seq_params
        rotated = Rotate.apply(torch.cat([query, key], dim=1), pack.cos_TD, pack.sin_TD)
        return self._attended(rotated, value, query.shape[1], pack)


class RMSNorm(nn.Module):
    """`x / sqrt(mean(x²) + eps) · weight`: normalised in float32, cast, then scaled, as HF does.

    Over the hidden size, or over each head's query and key. Megatron's torch norm has no such cast
    order and takes no sequence parallelism.
    """

    def __init__(self, config: Any, hidden_size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
        self.weight = nn.Parameter(
            torch.empty(hidden_size, dtype=config.params_dtype, device=device)
        )
        # Each tensor-parallel rank then sees a part of the tokens, and a step adds the gradients.
        self.weight.sequence_parallel = config.sequence_parallel

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)
