"""Models made of nothing but named tensors, and their shards by a placement: what tests compare."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from megarl.reshard.families import ModelSpec
from megarl.reshard.placement import Piece, Placement


def make_spec(**changes) -> ModelSpec:
    """A small odd model: head_dim is not hidden / heads, the vocabulary divides by nothing."""
    numbers = dict(
        family="qwen2",
        layers=2,
        hidden=24,
        heads=8,
        kv_heads=4,
        head_dim=6,
        ffn=40,
        vocab=301,
        norm_eps=3e-5,
        rope_theta=5e4,
        tied=False,
        qkv_bias=True,
        max_positions=128,
        config_hash="sha256:test",
    )
    return ModelSpec(**(numbers | changes))


def make_whole(placement: Placement, seed: int = 0) -> dict[str, Tensor]:
    """Every logical tensor, float32, no two elements alike within a tensor."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(tensor.shape, generator=generator)
        for name, tensor in placement.tensors.items()
    }


def matrix(tensor: Tensor) -> Tensor:
    return tensor if tensor.dim() == 2 else tensor[:, None]


def in_tensor(tensor: Tensor, piece: Piece) -> Tensor:
    return matrix(tensor)[piece.row : piece.row + piece.rows, piece.col : piece.col + piece.cols]


def in_param(param: Tensor, piece: Piece) -> Tensor:
    rows = matrix(param)[piece.param_row : piece.param_row + piece.rows]
    return rows[:, piece.param_col : piece.param_col + piece.cols]


def make_shards(
    placement: Placement,
    rank: int,
    whole: Mapping[str, Tensor] | None = None,
    dtype: torch.dtype = torch.float32,
) -> dict[str, Tensor]:
    """This rank's parameters, not-a-number wherever `whole` writes nothing."""
    params = {
        name: torch.full(shape, float("nan"), dtype=dtype)
        for name, shape in placement.params[rank].items()
    }
    for piece in placement.pieces[rank] if whole is not None else ():
        in_param(params[piece.param], piece).copy_(in_tensor(whole[piece.tensor], piece))
    return params


def same_bits(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> bool:
    """True when both hold the same names and bits, not-a-number included."""
    return a.keys() == b.keys() and all(
        a[name].dtype == b[name].dtype
        and a[name].contiguous().view(torch.uint8).equal(b[name].contiguous().view(torch.uint8))
        for name in a
    )
