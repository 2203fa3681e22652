"""Rotary position embedding: frequencies, with and without scaling, and the rotation.

D head dimension. Frequencies are computed by the very operations of transformers'
`modeling_rope_utils`, so that they are HF's bit for bit.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from megarl.reshard.families.spec import RopeScaling


def inverse_frequencies(head_dim: int, theta: float, scaling: RopeScaling | None = None) -> Tensor:
    """float32 [D/2]: `theta^(-2i/D)`, stretched by `scaling`.

    linear: divided by the factor. llama3 (Llama 3.1): long waves divided, short ones kept, a ramp
    between. yarn (arXiv:2309.00071): a ramp over dimensions between both. The attention factor is
    no part of it. Raises `ValueError` for another kind.
    """
    powers = theta ** (torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim)
    inverse = 1.0 / powers
    if scaling is None:
        return inverse
    match scaling.kind:
        case "linear":
            return inverse / scaling.factor
        case "llama3":
            return _llama3(inverse, scaling)
        case "yarn":
            return _yarn(powers, head_dim, theta, scaling)
    raise ValueError(f"rope scaling {scaling.kind!r} is unknown: linear, llama3 or yarn")


def _llama3(inverse: Tensor, scaling: RopeScaling) -> Tensor:
    old, factor = scaling.original_max_positions, scaling.factor
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    wavelength = 2 * math.pi / inverse
    scaled = torch.where(wavelength > old / low, inverse / factor, inverse)
    smooth = (old / wavelength - low) / (high - low)
    smoothed = (1 - smooth) * scaled / factor + smooth * scaled
    between = ~(wavelength < old / high) * ~(wavelength > old / low)
    return torch.where(between, smoothed, scaled)


def _yarn(powers: Tensor, head_dim: int, theta: float, scaling: RopeScaling) -> Tensor:
    def dimension(rotations: float) -> float:
        """The dimension that turns `rotations` times over the original positions."""
        turns = scaling.original_max_positions / (rotations * 2 * math.pi)
        return (head_dim * math.log(turns)) / (2 * math.log(theta))

    low, high = dimension(scaling.beta_fast), dimension(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001  # as transformers does, against a division by zero
    ramp = (torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low)
    kept = 1 - torch.clamp(ramp, 0, 1)
    return 1.0 / (scaling.factor * powers) * (1 - kept) + 1.0 / powers * kept


class Rotate(torch.autograd.Function):
    """Halves convention: (a, b) → (a cos − b sin, b cos + a sin)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotated(x, cos, sin)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        # The transpose of a rotation, stretched by the attention factor or not, turns back.
        return _rotated(grad, cos, -sin), None, None


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, dim=-1)
    turned = torch.empty_like(x)
    c, d = turned.chunk(2, dim=-1)
    torch.mul(a, cos, out=c).sub_(b * sin)
    torch.mul(b, cos, out=d).add_(a * sin)
    return turned
