"""Token-budget micro-batches: a plan's rows → the packed tensors of one forward, and back.

Which samples share a pack is planned in `pack_plan.py`; what a pack is, and the letters of its
shapes, is in `pack.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megarl.contracts.samples import Samples
from megarl.data.pack import MicroBatch, Pack, ValueBatch
from megarl.data.pack_plan import UpdatePlan, plan_own_packs, plan_packs, plan_update

__all__ = [
    "MicroBatch",
    "Pack",
    "UpdatePlan",
    "ValueBatch",
    "build_pack",
    "empty_pack",
    "pad_pack",
    "plan_own_packs",
    "plan_packs",
    "plan_update",
    "ragged_index",
    "restore",
]


def ragged_index(offsets: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """int64 indices of the flat elements of `rows`, row by row, without a loop."""
    lengths = offsets[rows + 1] - offsets[rows]
    starts = np.concatenate([[0], np.cumsum(lengths)])
    return np.arange(starts[-1]) - np.repeat(starts[:-1] - offsets[rows], lengths)


def build_pack(samples: Samples, rows: np.ndarray | Sequence[int]) -> Pack:
    """The packed tensors of `rows`, in that order; no rows give the dummy pack."""
    rows = np.asarray(rows, dtype=np.int64)
    if len(rows) == 0:
        return empty_pack()
    prompts, responses = samples.prompt_lengths[rows], samples.response_lengths[rows]
    lengths = prompts + responses
    cu_seqlens = np.concatenate([[0], np.cumsum(lengths)])
    sequence_T = np.repeat(np.arange(len(rows)), lengths)
    positions_T = np.arange(cu_seqlens[-1]) - cu_seqlens[:-1][sequence_T]
    is_response_T = positions_T >= prompts[sequence_T]
    response_A = ragged_index(samples.response_offsets, rows)
    token_ids_T = np.empty(cu_seqlens[-1], dtype=np.int64)
    token_ids_T[~is_response_T] = samples.prompt_ids[ragged_index(samples.prompt_offsets, rows)]
    token_ids_T[is_response_T] = samples.response_ids[response_A]
    # No prompt is empty (a contract of Samples), so the position before is in the same sequence.
    predictor_A = np.flatnonzero(is_response_T) - 1
    return Pack(
        rows=_tensor(rows),
        token_ids_T=_tensor(token_ids_T),
        positions_T=_tensor(positions_T),
        cu_seqlens=_tensor(cu_seqlens, np.int32),
        predictor_A=_tensor(predictor_A),
        target_A=_tensor(token_ids_T[is_response_T]),
        action_mask_A=_tensor(samples.action_mask[response_A], np.bool_),
        sequence_A=_tensor(sequence_T[is_response_T]),
        response_A=_tensor(response_A),
        max_length=int(lengths.max()),
        experts_TX=_experts(samples, rows, cu_seqlens) if len(samples.experts) else None,
    )


def _experts(samples: Samples, rows: np.ndarray, cu_seqlens: np.ndarray) -> Tensor:
    told = samples.experts[ragged_index(samples.experts_offsets, rows)]
    is_last_T = np.zeros(cu_seqlens[-1], dtype=np.bool_)
    is_last_T[cu_seqlens[1:] - 1] = True
    experts_TX = np.full((len(is_last_T), len(told) // (~is_last_T).sum()), -1, dtype=np.int16)
    experts_TX[~is_last_T] = told.reshape(-1, experts_TX.shape[1])
    return _tensor(experts_TX, np.int16)


def empty_pack() -> Pack:
    """The pack without samples: one dummy token."""
    none = np.zeros(0)
    return Pack(
        rows=_tensor(none),
        token_ids_T=_tensor([0]),
        positions_T=_tensor([0]),
        cu_seqlens=_tensor([0, 1], np.int32),
        predictor_A=_tensor(none),
        target_A=_tensor(none),
        action_mask_A=_tensor(none, np.bool_),
        sequence_A=_tensor(none),
        response_A=_tensor(none),
        max_length=1,
    )


def _tensor(values: Any, dtype: type = np.int64) -> Tensor:
    return torch.from_numpy(np.array(values, dtype=dtype))


def pad_pack(pack: Pack, length: int) -> Pack:
    """`pack` with dummy sequences (id 0) behind its own, so that T is `length`.

    Nothing scored is theirs, so they add exactly 0 to every loss and gradient. None is longer than
    the pack's longest sequence: attention pays for padding as it does for tokens. Raises
    `ValueError` when the pack is longer than `length`.
    """
    missing = length - len(pack.token_ids_T)
    if missing < 0:
        raise ValueError(f"a pack of {len(pack.token_ids_T)} tokens does not fit into {length}")
    if missing == 0:
        return pack
    offset = torch.arange(missing, device=pack.token_ids_T.device)
    starts = torch.arange(0, missing, pack.max_length, device=pack.cu_seqlens.device)
    first = pack.cu_seqlens[-1]
    ends = torch.cat([first + starts[1:], first[None] + missing])
    experts = pack.experts_TX
    if experts is not None:
        experts = torch.cat([experts, experts.new_full((missing, experts.shape[1]), -1)])
    return replace(
        pack,
        token_ids_T=torch.cat([pack.token_ids_T, torch.zeros_like(offset)]),
        positions_T=torch.cat([pack.positions_T, offset % pack.max_length]),
        cu_seqlens=torch.cat([pack.cu_seqlens, ends.to(torch.int32)]),
        experts_TX=experts,
    )


def restore(packs: Sequence[Pack], values: Sequence[Tensor]) -> np.ndarray:
    """Per-pack arrays [A] back in the order of the Samples' response tokens: float32 [R].

    Raises `ValueError` unless the packs cover every response token exactly once.
    """
    if len(packs) != len(values):
        raise ValueError(f"{len(values)} arrays for {len(packs)} packs")
    where = np.concatenate([np.zeros(0, np.int64), *(p.response_A.cpu().numpy() for p in packs)])
    columns = [value.detach().float().cpu().numpy() for value in values]
    flat = np.concatenate([np.zeros(0, np.float32), *columns])
    if len(where) != len(flat):
        raise ValueError(f"{len(flat)} values for {len(where)} response tokens")
    if not np.array_equal(np.sort(where), np.arange(len(where))):
        raise ValueError("the packs do not cover every response token exactly once")
    restored = np.empty(len(flat), dtype=np.float32)
    restored[where] = flat
    return restored
