"""Digests of the optimizer's state that do not depend on how it is laid out.

One for each state tensor of each logical (HF-named) tensor, as `reshard/digest.py` defines it: over
the float32 bits at their logical place, on any number of tensor-, pipeline- and data-parallel
ranks, with the distributed optimizer or without. A resume whose digests are those of the save
brought every element back, bit for bit, to where it belongs.

A rank may hold any flat range of a parameter: the end of one row, whole rows, the beginning of
another. Each of these is a rectangle, and is digested where it lies.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megarl.contracts.mesh import Mesh
from megarl.models.optimizer_state import OptimizerState, StatePart
from megarl.reshard.digest import Digester, DriftError, drifted, joined
from megarl.reshard.families.spec import ModelSpec
from megarl.reshard.layout import megatron_placement
from megarl.reshard.placement import LayoutError, Padding, Piece, Placement
from megarl.world import World

Shape = tuple[int, ...]
Ranges = dict[str, tuple[int, int]]
"""Parameter → [start, end) of it, flattened."""


class Rectangle(NamedTuple):
    """Rows and columns of a parameter that lie one after another at `at` of a flat range."""

    row: int
    col: int
    rows: int
    cols: int
    at: int


def rectangles(start: int, end: int, cols: int) -> list[Rectangle]:
    """The elements `start … end − 1` of a row-major matrix of `cols` columns: at most three."""
    found = []
    at = start
    while at < end:
        row, col = divmod(at, cols)
        whole_rows = (end - at) // cols
        if col == 0 and whole_rows:
            block = Rectangle(row, 0, whole_rows, cols, at - start)
        else:
            block = Rectangle(row, col, 1, min(cols - col, end - at), at - start)
        found.append(block)
        at += block.rows * block.cols
    return found


def state_digests(
    spec: ModelSpec, mesh: Mesh, state: OptimizerState, world: World
) -> dict[str, int]:
    """`exp_avg/<HF name>` … → digest in 0 … 2^64 − 1, the same on every rank. Collective.

    A tensor's digest is that of its values alone: equal values have equal digests in any of the
    state tensors. Raises `DriftError` naming tensor and ranks where copies differ (norms on
    tensor-parallel ranks, both ends of a tied pipeline, data-parallel copies), and `LayoutError`
    where the ranks' ranges do not make up the parameters.
    """
    placement = megatron_placement(spec, mesh)
    copies, places = _places(spec, mesh, state.parts, world)
    digester = Digester(_blocks(placement, world.rank, state.parts), 0, {}, torch.float32)
    shares = []
    for key in state.keys:
        digester.params = _views(placement.params[world.rank], state.parts, key)
        shares.append(digester.digest())
    mine = torch.stack(shares)
    everyone = [torch.empty_like(mine) for _ in range(world.size)]
    dist.all_gather(everyone, mine, group=world.control)
    digests: dict[str, int] = {}
    torn: dict[str, Sequence[Mapping[int, Sequence[int]]]] = {}
    for number, key in enumerate(state.keys):
        # int64 sums wrap, which is the digest's own arithmetic.
        by_place = [sum(everyone[rank][number] for rank in ranks).tolist() for ranks in places]
        whole, differing = joined(copies, by_place)
        digests |= {f"{key}/{name}": value for name, value in whole.items()}
        for name, parts in differing.items():
            torn[f"{key}/{name}"] = [
                {share: [rank for place in said[share] for rank in places[place]] for share in said}
                for said in parts
            ]
    if torn:
        raise DriftError(f"copies of the optimizer's state differ: {drifted(torn)}")
    return digests


def _places(
    spec: ModelSpec, mesh: Mesh, parts: Sequence[StatePart], world: World
) -> tuple[Placement, list[list[int]]]:
    """The layout whose copies must agree, and for each of its ranks those that hold it together.

    Without the distributed optimizer every rank holds its parameters' state whole; with it, the
    data-parallel ranks of one model-parallel place do.
    """
    placement = megatron_placement(spec, mesh)
    held = world.gather({part.name: (part.start, part.end) for part in parts})
    if all(_make_up([held[rank]], placement.params[rank]) for rank in range(world.size)):
        return placement, [[rank] for rank in range(world.size)]
    place = Mesh(mesh.tp * mesh.pp, tp=mesh.tp, pp=mesh.pp)
    together: list[list[int]] = [[] for _ in range(place.world)]
    for rank in range(world.size):
        together[mesh.tp_index(rank) + mesh.tp * mesh.pp_index(rank)].append(rank)
    for ranks in together:
        if not _make_up([held[rank] for rank in ranks], placement.params[ranks[0]]):
            raise LayoutError(
                f"the optimizer's state on ranks {ranks} does not make up their parameters exactly"
            )
    return megatron_placement(spec, place), together


def _make_up(held: Sequence[Ranges], shapes: Mapping[str, Shape]) -> bool:
    """Whether the ranges cover every parameter exactly once."""
    if any(name not in shapes for ranges in held for name in ranges):
        return False
    for name, shape in shapes.items():
        at = 0
        for start, end in sorted(ranges[name] for ranges in held if name in ranges):
            if start != at:
                return False
            at = end
        if at != torch.Size(shape).numel():
            return False
    return True


def _matrix(shape: Shape) -> tuple[int, int]:
    return (shape[0], 1) if len(shape) == 1 else (shape[0], shape[1])


def _rectangles_of(part: StatePart, shape: Shape) -> Iterator[tuple[str, Rectangle]]:
    for number, block in enumerate(rectangles(part.start, part.end, _matrix(shape)[1])):
        yield f"{part.name}/{number}", block


def _views(shapes: Mapping[str, Shape], parts: Sequence[StatePart], key: str) -> dict[str, Tensor]:
    """Each rectangle of the state tensor `key`, where it lies."""
    return {
        name: part.tensors[key][b.at : b.at + b.rows * b.cols].view(b.rows, b.cols)
        for part in parts
        for name, b in _rectangles_of(part, shapes[part.name])
    }


def _blocks(placement: Placement, rank: int, parts: Sequence[StatePart]) -> Placement:
    """What `rank` holds as a layout of its own: each rectangle a parameter, cut as its own is."""
    pieces: dict[str, list[Piece]] = {}
    for piece in placement.pieces[rank]:
        pieces.setdefault(piece.param, []).append(piece)
    padding: dict[str, list[Padding]] = {}
    for pad in placement.padding[rank]:
        padding.setdefault(pad.param, []).append(pad)
    cut: list[Piece] = []
    unused: list[Padding] = []
    shapes: dict[str, Shape] = {}
    for part in parts:
        for name, block in _rectangles_of(part, placement.params[rank][part.name]):
            shapes[name] = (block.rows, block.cols)
            for piece in pieces.get(part.name, ()):
                if common := _common(block, piece):
                    row, col, rows, cols = common
                    cut.append(
                        Piece(
                            rank=0,
                            tensor=piece.tensor,
                            row=piece.row + row - piece.param_row,
                            col=piece.col + col - piece.param_col,
                            rows=rows,
                            cols=cols,
                            param=name,
                            param_row=row - block.row,
                            param_col=col - block.col,
                        )
                    )
            for pad in padding.get(part.name, ()):
                if common := _common(block, pad):
                    row, col, rows, cols = common
                    unused.append(Padding(name, row - block.row, col - block.col, rows, cols))
    return Placement("optimizer", placement.tensors, (tuple(cut),), (shapes,), (tuple(unused),))


def _common(block: Rectangle, held: Piece | Padding) -> tuple[int, int, int, int] | None:
    """(row, column, rows, columns) of the parameter that both have, or None."""
    row, col = max(block.row, held.param_row), max(block.col, held.param_col)
    rows = min(block.row + block.rows, held.param_row + held.rows) - row
    cols = min(block.col + block.cols, held.param_col + held.cols) - col
    return (row, col, rows, cols) if rows > 0 and cols > 0 else None
