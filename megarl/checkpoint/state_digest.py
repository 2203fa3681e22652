"""Digests of the optimizer's state that do not depend on how it is laid out.

One for each state tensor of each logical (HF-named) tensor, as `reshard/digest.py` defines it: over
the float32 bits at their logical place, on any number of tensor-, pipeline-, expert- and
data-parallel ranks, with the distributed optimizer or without. A resume whose digests are those of
the save brought every element back, bit for bit, to where it belongs.

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
from megarl.reshard.families import family_rules
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
    """`exp_avg/<HF name>` … → digest in 0 … 2^64 − 1 of every tensor that is trained, the same on
    every rank. Collective.

    A tensor's digest is that of its values alone: equal values have equal digests in any of the
    state tensors. Raises `DriftError` naming tensor and ranks where copies differ (norms on
    tensor-parallel ranks, both ends of a tied pipeline, data-parallel copies), and `LayoutError`
    where the ranks' ranges do not make up the parameters.
    """
    placement = megatron_placement(spec, mesh)
    digester = Digester(_blocks(placement, world.rank, state.parts), 0, {}, torch.float32)
    shares = []
    for key in state.keys:
        digester.params = _views(placement.params[world.rank], state.parts, key)
        shares.append(digester.digest())
    mine = torch.stack(shares)
    everyone = [torch.empty_like(mine) for _ in range(world.size)]
    dist.all_gather(everyone, mine, group=world.control)
    by_rank, untrained = _whole_shares(spec, mesh, state, world, torch.stack(everyone))
    digests: dict[str, int] = {}
    torn: dict[str, Sequence[Mapping[int, Sequence[int]]]] = {}
    for number, key in enumerate(state.keys):
        whole, differing = joined(placement, by_rank[:, number].tolist())
        digests |= {f"{key}/{n}": value for n, value in whole.items() if n not in untrained}
        torn |= {f"{key}/{name}": parts for name, parts in differing.items()}
    if torn:
        raise DriftError(f"copies of the optimizer's state differ: {drifted(torn)}")
    return digests


def _whole_shares(
    spec: ModelSpec, mesh: Mesh, state: OptimizerState, world: World, shares: Tensor
) -> tuple[Tensor, set[str]]:
    """int64 [ranks, state tensors, logical tensors]: for each rank what the state of its parameters
    digests to, whole, from `shares`, of the same shape, of what each rank holds of it. And the
    names of logical tensors that are no parameters, but buffers.

    With the distributed optimizer the ranks that hold copies of a parameter have its state
    together. Experts lie on the ranks in another way than the rest. Raises `LayoutError`.
    """
    placement = megatron_placement(spec, mesh)
    ranges = {part.name: (part.start, part.end) for part in state.parts}
    held, trained = zip(*world.gather((ranges, set(state.owners))), strict=True)
    experts = {rule.hf for rule in family_rules(spec) if rule.expert is not None}
    is_expert = torch.tensor([name in experts for name in placement.tensors])
    expert_params = [
        {piece.param for piece in pieces if piece.tensor in experts} for pieces in placement.pieces
    ]
    found = shares.clone()
    for of_experts in (False, True) if experts else (False,):
        shapes = [
            {n: placement.params[r][n] for n in trained[r] if (n in expert_params[r]) == of_experts}
            for r in range(world.size)
        ]
        own = [
            {n: held[r][n] for n in held[r] if (n in expert_params[r]) == of_experts}
            for r in range(world.size)
        ]
        if all(_make_up([mine], wanted) for mine, wanted in zip(own, shapes, strict=True)):
            continue  # every rank has the state of its parameters whole
        for ranks in _holders(mesh, of_experts):
            if not _make_up([own[rank] for rank in ranks], shapes[ranks[0]]):
                raise LayoutError(
                    f"the optimizer's state on ranks {ranks} does not make up their parameters "
                    "exactly"
                )
            # int64 sums wrap, which is the digest's own arithmetic.
            total = shares[ranks].sum(dim=0)
            found[ranks] = torch.where(is_expert == of_experts, total, found[ranks])
    untrained = {
        piece.tensor
        for pieces, names in zip(placement.pieces, trained, strict=True)
        for piece in pieces
        if piece.param not in names
    }
    return found, untrained


def _holders(mesh: Mesh, of_experts: bool) -> list[list[int]]:
    """The ranks that hold copies of the same parameters, for each place in the layout."""
    found: dict[tuple[int, ...], list[int]] = {}
    for rank in range(mesh.world):
        place = (mesh.tp_index(rank),)
        if of_experts:
            place = (mesh.etp_index(rank), mesh.ep_index(rank))
        found.setdefault((*place, mesh.pp_index(rank)), []).append(rank)
    return list(found.values())


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
    return Placement.of_pieces("optimizer", placement.tensors, (cut,), (shapes,), (unused,))


def _common(block: Rectangle, held: Piece | Padding) -> tuple[int, int, int, int] | None:
    """(row, column, rows, columns) of the parameter that both have, or None."""
    row, col = max(block.row, held.param_row), max(block.col, held.param_col)
    rows = min(block.row + block.rows, held.param_row + held.rows) - row
    cols = min(block.col + block.cols, held.param_col + held.cols) - col
    return (row, col, rows, cols) if rows > 0 and cols > 0 else None
