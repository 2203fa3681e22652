"""The usual way to bring weights into another layout, as a side to compare with.

Every rank gathers each parameter whole (all-gather over the tensor-parallel ranks of its pipeline
stage, then a broadcast to the other stages) and slices from it what its target parameters want.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megarl.contracts.mesh import Mesh
from megarl.reshard.matrix import window
from megarl.reshard.placement import Piece, Placement


class Step(NamedTuple):
    """One parameter of one stage."""

    stage: int
    name: str
    shards: list[Tensor]
    """[tensor-parallel ranks], in the common buffer; one where all ranks hold the same."""
    whole: Tensor
    """All of them, flat."""
    slices: list[tuple[Tensor, Tensor]]
    """(into a target parameter, from a shard)."""


class Gather:
    """Gather, broadcast and slice, repeatable. For one data-parallel rank; collective."""

    def __init__(
        self,
        source: Placement,
        target: Placement,
        mesh: Mesh,
        rank: int,
        source_params: Mapping[str, Tensor],
        target_params: Mapping[str, Tensor],
    ) -> None:
        self.mesh, self.rank = mesh, rank
        self.source_params, self.target_params = source_params, target_params
        stages = [range(stage * mesh.tp, (stage + 1) * mesh.tp) for stage in range(mesh.pp)]
        self.stage_groups = [dist.new_group(list(ranks)) for ranks in stages]
        self.across = [
            dist.new_group([ranks[index] for ranks in stages]) for index in range(mesh.tp)
        ]
        self.wanted: dict[str, list[Piece]] = {}
        for piece in target.pieces[rank]:
            self.wanted.setdefault(piece.tensor, []).append(piece)
        shapes = [shape for ranks in stages for shape in source.params[ranks[0]].values()]
        largest = max(torch.Size(shape).numel() for shape in shapes)
        self.buffer = torch.zeros(mesh.tp * largest)
        self.received = 0
        """Bytes that this rank receives in a run."""
        self.steps = [
            self._step(source, stage, ranks, name)
            for stage, ranks in enumerate(stages)
            for name in source.params[ranks[0]]
        ]

    def _step(self, source: Placement, stage: int, ranks: range, name: str) -> Step:
        shape = source.params[ranks[0]][name]
        size = torch.Size(shape).numel()
        held = [[piece for piece in source.pieces[rank] if piece.param == name] for rank in ranks]
        alike = all(
            [piece[1:] for piece in one] == [piece[1:] for piece in held[0]] for one in held
        )
        count = 1 if alike else len(ranks)
        whole = self.buffer[: count * size]
        shards = [whole[at * size : (at + 1) * size].view(shape) for at in range(count)]
        if stage != self.mesh.pp_index(self.rank):
            self.received += whole.nbytes
        else:
            self.received += whole.nbytes * (count - 1) // count
        slices = []
        for shard, pieces in zip(shards, held[:count], strict=True):
            for piece in pieces:
                for wanted in self.wanted.get(piece.tensor, ()):
                    if pair := self._slice(shard, piece, wanted):
                        slices.append(pair)
        return Step(stage, name, shards, whole, slices)

    def _slice(self, shard: Tensor, held: Piece, wanted: Piece) -> tuple[Tensor, Tensor] | None:
        row, col = max(held.row, wanted.row), max(held.col, wanted.col)
        rows = min(held.row + held.rows, wanted.row + wanted.rows) - row
        cols = min(held.col + held.cols, wanted.col + wanted.cols) - col
        if rows <= 0 or cols <= 0:
            return None
        target, source = (
            window(
                params,
                piece.param_row + row - piece.row,
                piece.param_col + col - piece.col,
                rows,
                cols,
            )
            for params, piece in ((self.target_params[wanted.param], wanted), (shard, held))
        )
        return target, source

    def run(self) -> None:
        stage = self.mesh.pp_index(self.rank)
        for step in self.steps:
            if step.stage == stage:
                param = self.source_params[step.name]
                if len(step.shards) == 1:
                    step.whole.copy_(param.flatten())
                else:
                    dist.all_gather(step.shards, param, group=self.stage_groups[stage])
            if self.mesh.pp > 1:
                index = self.mesh.tp_index(self.rank)
                owner = index + step.stage * self.mesh.tp
                dist.broadcast(step.whole, owner, group=self.across[index])
            for target, source in step.slices:
                target.copy_(source)
