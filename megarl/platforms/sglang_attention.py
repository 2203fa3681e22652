"""Attention of SGLang 0.5.21 on CPU, for a whole batch at a time.

Importing this module imports SGLang; call `megarl.platforms.prepare_sglang()` first.
Shapes: B requests of a step, T tokens of their prompts, L longest sequence of the step, H query
heads, G key/value heads, D head size.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from torch.nn.functional import scaled_dot_product_attention


class BatchedAttention(TorchNativeAttnBackend):
    """Replaces the per-request Python loops of `TorchNativeAttnBackend`.

    Decode: one masked attention for the whole batch. Keys are shared within a group of heads, so
    the group's H/G query heads are its rows and keys are never repeated. Sliding windows and cross
    attention are refused.
    Prefill of whole prompts of like lengths: one causal attention over them, padded at their ends.
    """

    def init_forward_metadata(self, forward_batch: Any) -> None:
        super().init_forward_metadata(forward_batch)
        self._rows_T = None
        if forward_batch.forward_mode.is_decode():
            longest = int(forward_batch.seq_lens.max())
            valid_BL = torch.arange(longest)[None] < forward_batch.seq_lens[:, None]
            table = self.req_to_token_pool.req_to_token
            slots_BL = table[forward_batch.req_pool_indices, :longest]
            # Table entries past a sequence's end are stale.
            self._slots_BL = slots_BL.masked_fill(~valid_BL, 0)
            self._valid_B11L = valid_BL[:, None, None]

    def _run_sdpa_forward_extend(
        self,
        query: torch.Tensor,
        output: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        req_to_token: torch.Tensor,
        req_pool_indices: torch.Tensor,
        seq_lens: torch.Tensor,
        extend_prefix_lens: torch.Tensor,
        extend_seq_lens: torch.Tensor,
        encoder_lens: torch.Tensor | None,
        **how: Any,
    ) -> torch.Tensor:
        """`query` and `output` [T, H, D], caches [slots, G, D]; writes and returns `output`.

        Values, and with them `output`, may be narrower (latent attention). `how`: scaling,
        enable_gqa, causal, is_cross_attn, sliding_window_size. The stock loop runs where a prompt
        continues a cached prefix, and where padding would make the work more than half as much
        again.
        """
        plain = how["causal"] and encoder_lens is None and how["sliding_window_size"] is None
        if plain and self._rows_T is None:
            self._rows_T = _padded_rows(extend_seq_lens, extend_prefix_lens)
        if not plain or len(self._rows_T) == 0:
            pools = (k_cache, v_cache, req_to_token, req_pool_indices)
            lengths = (seq_lens, extend_prefix_lens, extend_seq_lens, encoder_lens)
            return super()._run_sdpa_forward_extend(query, output, *pools, *lengths, **how)
        batch, longest = len(seq_lens), int(seq_lens.max())
        slots_BL = req_to_token[req_pool_indices, :longest]
        slots_T = slots_BL.reshape(-1).index_select(0, self._rows_T)

        def padded(rows: torch.Tensor) -> torch.Tensor:  # [T, …, D] → [B, …, L, D]
            whole = rows.new_zeros(batch * longest, *rows.shape[1:])
            whole.index_copy_(0, self._rows_T, rows)
            return whole.view(batch, longest, *rows.shape[1:]).transpose(1, 2).to(query.dtype)

        attended = scaled_dot_product_attention(
            padded(query),
            padded(k_cache.index_select(0, slots_T)),
            padded(v_cache.index_select(0, slots_T)),
            is_causal=True,
            scale=how["scaling"],
            enable_gqa=how["enable_gqa"],
        )
        rows = attended.transpose(1, 2).reshape(batch * longest, *output.shape[1:])
        return torch.index_select(rows, 0, self._rows_T, out=output)

    def _run_sdpa_forward_decode(
        self,
        query: torch.Tensor,
        output: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        req_to_token: torch.Tensor,
        req_pool_indices: torch.Tensor,
        seq_lens: torch.Tensor,
        encoder_lens: torch.Tensor | None,
        **how: Any,
    ) -> torch.Tensor:
        """`query` and `output` [B, H, D], caches [slots, G, D]; writes and returns `output`.

        Values, and with them `output`, may be narrower (latent attention).
        """
        windowed = how["sliding_window_size"] is not None
        if encoder_lens is not None or how["is_cross_attn"] or windowed:
            raise NotImplementedError("cross attention and sliding windows are not batched here")
        batch, heads, size = query.shape
        groups = k_cache.shape[1]

        def gathered(cache: torch.Tensor) -> torch.Tensor:  # [B, G, L, D]
            # `index_select` copies whole rows: several times faster than `cache[slots]`.
            rows = cache.index_select(0, self._slots_BL.reshape(-1))
            return rows.view(batch, -1, groups, cache.shape[-1]).transpose(1, 2).to(query.dtype)

        attended = scaled_dot_product_attention(
            query.view(batch, groups, heads // groups, size),
            gathered(k_cache),
            gathered(v_cache),
            attn_mask=self._valid_B11L,
            scale=how["scaling"],
        )
        output.copy_(attended.reshape(batch, heads, -1))
        return output


def _padded_rows(lengths_B: torch.Tensor, prefixes_B: torch.Tensor) -> torch.Tensor:
    """int64 [T]: the cell of [B, L] that each token of the packed prompts is.

    Empty where a prompt has a prefix already, or where half of the tokens again would be padding.
    """
    longest = int(lengths_B.max())
    tokens = int(lengths_B.sum())
    if bool(prefixes_B.any()) or 2 * longest * len(lengths_B) > 3 * tokens:
        return torch.empty(0, dtype=torch.int64)
    used_BL = torch.arange(longest)[None] < lengths_B[:, None]
    return used_BL.flatten().nonzero().squeeze(1)
