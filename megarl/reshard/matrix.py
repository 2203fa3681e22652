"""Live parameters as the matrices that layouts speak of, always as views."""

from __future__ import annotations

import torch
from torch import Tensor

from megarl.reshard.placement import LayoutError, LogicalTensor


def held_as(tensor: LogicalTensor, dtype: torch.dtype) -> torch.dtype:
    """The dtype that a model of `dtype` holds this tensor in."""
    return dtype if tensor.dtype is None else getattr(torch, tensor.dtype)


def as_matrix(param: Tensor) -> Tensor:
    """The parameter as rows × columns, a view without gradient.

    [n] is n × 1; [e, rows, cols] and deeper are flattened to [e · rows, cols]. Raises `LayoutError`
    for a scalar and where the leading dimensions do not lie one after another in memory: a copy
    would be written to, or digested, in the parameter's place.
    """
    matrix = param.detach()
    if matrix.dim() == 2:
        return matrix
    if matrix.dim() == 1:
        return matrix.unsqueeze(1)
    try:
        return matrix.view(-1, matrix.shape[-1])
    except (RuntimeError, IndexError) as error:
        raise LayoutError(
            f"a parameter of shape {list(param.shape)} and strides {list(param.stride())} is no "
            "matrix without copying it; lay it out contiguously"
        ) from error


def window(param: Tensor, row: int, col: int, rows: int, cols: int) -> Tensor:
    """A rectangle of the parameter's matrix, as a 2-D view without gradient."""
    return as_matrix(param)[row : row + rows, col : col + cols]
