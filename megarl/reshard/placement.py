"""Where every element of every logical tensor lies: pieces, paddings, and the checks on them.

Every logical (HF-named) tensor is a rectangle; a 1-D tensor of n elements is n × 1. Pure: no torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from megarl.contracts.errors import InputError


class LayoutError(InputError):
    """A model that does not fit a mesh, or a placement that does not tile its parameters."""


@dataclass(frozen=True, slots=True)
class LogicalTensor:
    """One tensor under its HF name and shape (1-D or 2-D)."""

    name: str
    shape: tuple[int, ...]

    @property
    def rows(self) -> int:
        return self.shape[0]

    @property
    def cols(self) -> int:
        return self.shape[1] if len(self.shape) == 2 else 1


class Piece(NamedTuple):
    """Rows `row … row + rows − 1` and columns `col …` of `tensor`, where they lie on `rank`."""

    rank: int
    tensor: str
    row: int
    col: int
    rows: int
    cols: int
    param: str
    param_row: int
    param_col: int


class Padding(NamedTuple):
    """A rectangle of a local parameter that holds no element of any logical tensor."""

    param: str
    param_row: int
    param_col: int
    rows: int
    cols: int


@dataclass(frozen=True, eq=False)
class Placement:
    """Where every element of a model lies, on every rank of a world.

    Raises `LayoutError` when the pieces and paddings of a rank do not tile its parameters exactly
    or leave the logical tensors. Compared by identity, so that plans can be cached.
    """

    kind: str
    """`megatron`, `sglang`, `hf`: for messages."""
    tensors: Mapping[str, LogicalTensor]
    pieces: tuple[tuple[Piece, ...], ...]
    """By rank."""
    params: tuple[Mapping[str, tuple[int, ...]], ...]
    """By rank: local parameter name → its shape."""
    padding: tuple[tuple[Padding, ...], ...]
    """By rank."""

    def __post_init__(self) -> None:
        for rank, (pieces, params) in enumerate(zip(self.pieces, self.params, strict=True)):
            boxes: dict[str, list[tuple[int, int, int, int]]] = {name: [] for name in params}
            for piece in pieces:
                tensor = self.tensors[piece.tensor]
                if piece.row + piece.rows > tensor.rows or piece.col + piece.cols > tensor.cols:
                    raise LayoutError(f"{piece} leaves {tensor}")
                boxes[piece.param].append(
                    (piece.param_row, piece.param_col, piece.rows, piece.cols)
                )
            for pad in self.padding[rank]:
                boxes[pad.param].append((pad.param_row, pad.param_col, pad.rows, pad.cols))
            for name, shape in params.items():
                if not tiles(boxes[name], shape[0], shape[1] if len(shape) == 2 else 1):
                    raise LayoutError(
                        f"{self.kind} layout of rank {rank}: {name} {list(shape)} is not tiled "
                        "exactly by its pieces and paddings"
                    )

    @property
    def world(self) -> int:
        return len(self.pieces)

    @cached_property
    def copies(self) -> dict[str, tuple[tuple[int, ...], ...]]:
        """For each logical tensor, its disjoint parts, each with the ranks that hold that part.

        The ranks of one part hold the same elements. Raises `LayoutError` when the parts of a
        tensor do not make it up exactly: then no digest over them would be its digest.
        """
        held: dict[str, dict[int, list[tuple[int, int, int, int]]]] = {
            name: {} for name in self.tensors
        }
        for rank, pieces in enumerate(self.pieces):
            for piece in pieces:
                box = (piece.row, piece.col, piece.rows, piece.cols)
                held[piece.tensor].setdefault(rank, []).append(box)
        parts: dict[str, tuple[tuple[int, ...], ...]] = {}
        for name, by_rank in held.items():
            groups: dict[tuple, list[int]] = {}
            for rank, boxes in by_rank.items():
                groups.setdefault(tuple(sorted(boxes)), []).append(rank)
            tensor = self.tensors[name]
            if not tiles([box for key in groups for box in key], tensor.rows, tensor.cols):
                raise LayoutError(
                    f"{self.kind} layout: the parts of {name} {list(tensor.shape)} on ranks "
                    f"{sorted(by_rank)} do not make it up exactly"
                )
            parts[name] = tuple(tuple(ranks) for ranks in groups.values())
        return parts


def tiles(boxes: Iterable[tuple[int, int, int, int]], rows: int, cols: int) -> bool:
    """True when the (row, col, rows, cols) boxes cover rows × cols exactly, without overlap."""
    ordered = sorted(boxes)
    area = 0
    for index, (row, col, height, width) in enumerate(ordered):
        if min(row, col) < 0 or height <= 0 or width <= 0:
            return False
        if row + height > rows or col + width > cols:
            return False
        area += height * width
        for other in ordered[index + 1 :]:
            if other[0] >= row + height:
                break
            if other[1] < col + width and col < other[1] + other[3]:
                return False
    return area == rows * cols
