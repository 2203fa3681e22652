"""What is copied from whom to whom: a pure function of two placements, the same on every rank.

Every element a rank's target parameters want is written exactly once. What the rank's own source
parameters hold is copied locally; the rest comes once, from a holder on the same node where there
is one, among these from the one with the fewest bytes to send so far, at a tie the lowest rank.
So the bytes sent are the least possible: what the targets want and their ranks do not hold.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import NamedTuple

from megarl.reshard.placement import Piece, Placement, tiles


class PlanError(ValueError):
    """Two placements between which no complete transfer exists."""


class Copy(NamedTuple):
    """A rectangle of `tensor` on its way from one rank's parameter into another's."""

    tensor: str
    row: int
    col: int
    rows: int
    cols: int
    source: int
    source_param: str
    source_row: int
    source_col: int
    target: int
    target_param: str
    target_row: int
    target_col: int

    @property
    def elements(self) -> int:
        return self.rows * self.cols

    def part(self, row: int, col: int, rows: int, cols: int) -> Copy:
        """The part of this copy that begins `row` rows and `col` columns into it."""
        return self._replace(
            row=self.row + row,
            col=self.col + col,
            rows=rows,
            cols=cols,
            source_row=self.source_row + row,
            source_col=self.source_col + col,
            target_row=self.target_row + row,
            target_col=self.target_col + col,
        )


@dataclass(frozen=True, eq=False)
class Plan:
    """All copies of a transfer, in one order that every rank shares."""

    world: int
    copies: tuple[Copy, ...]
    bound: int
    """The fewest elements that any transfer must send: wanted by a rank and not held by it."""

    @cached_property
    def sent(self) -> tuple[Copy, ...]:
        """The copies between two ranks."""
        return tuple(copy for copy in self.copies if copy.source != copy.target)

    @cached_property
    def elements_sent(self) -> int:
        return sum(copy.elements for copy in self.sent)

    def only(self, tensors: Collection[str]) -> Plan:
        """The part of the plan that moves these logical tensors."""
        copies = tuple(copy for copy in self.copies if copy.tensor in tensors)
        sent = sum(copy.elements for copy in copies if copy.source != copy.target)
        return Plan(self.world, copies, sent)

    @cached_property
    def elements_local(self) -> int:
        return sum(copy.elements for copy in self.copies) - self.elements_sent

    def buckets(self, capacity: int) -> list[list[Copy]]:
        """`sent`, cut and dealt so that no rank sends or receives above `capacity` elements.

        `capacity` is per bucket and rank, at least 1. The order within a bucket is `sent`'s.
        """
        if capacity < 1:
            raise PlanError(f"a bucket of {capacity} elements; raise rollout.bucket_bytes")
        buckets: list[list[Copy]] = []
        place = {"sends": [0] * self.world, "receives": [0] * self.world}
        filled = {"sends": [0] * self.world, "receives": [0] * self.world}
        for copy in self.sent:
            for part in _within(copy, capacity):
                sides = (("sends", part.source), ("receives", part.target))
                at = max(place[side][rank] for side, rank in sides)
                if any(
                    place[side][rank] == at and filled[side][rank] + part.elements > capacity
                    for side, rank in sides
                ):
                    at += 1
                for side, rank in sides:
                    if place[side][rank] != at:
                        place[side][rank], filled[side][rank] = at, 0
                    filled[side][rank] += part.elements
                while len(buckets) <= at:
                    buckets.append([])
                buckets[at].append(part)
        return buckets


def _within(copy: Copy, capacity: int) -> Iterator[Copy]:
    """`copy` in parts of at most `capacity` elements: whole rows where one fits."""
    cols = min(copy.cols, capacity)
    rows = max(1, capacity // copy.cols)
    for row in range(0, copy.rows, rows):
        for col in range(0, copy.cols, cols):
            yield copy.part(row, col, min(rows, copy.rows - row), min(cols, copy.cols - col))


@lru_cache(maxsize=16)
def make_plan(source: Placement, target: Placement, ranks_per_node: int | None = None) -> Plan:
    """The cheapest complete transfer from `source` to `target`. Pure; cached by placement.

    A rank's own source pieces of one tensor must be disjoint or equal.

    `ranks_per_node`: ranks `n · ranks_per_node …` share node n; None is one node.
    Raises `PlanError` naming the logical tensor: not on both sides, of another shape, or with an
    element that no rank holds or that a rank's target parameters would take twice.
    """
    if source.world != target.world:
        raise PlanError(f"placements over {source.world} and {target.world} ranks")
    for name in sorted(source.tensors.keys() | target.tensors.keys()):
        if source.tensors.get(name) != target.tensors.get(name):
            raise PlanError(
                f"{name} is {source.tensors.get(name)} in the {source.kind} layout and "
                f"{target.tensors.get(name)} in the {target.kind} layout"
            )
    node = [rank // (ranks_per_node or source.world) for rank in range(source.world)]
    holders, takers = _by_tensor(source), _by_tensor(target)
    load = [0] * source.world
    bound = 0
    copies: list[Copy] = []
    for name in target.tensors:
        if not takers[name]:
            raise PlanError(f"{name}: no rank of the {target.kind} layout takes it")
        _refuse_double(name, takers[name], target)
        for taker in takers[name]:
            found = list(_copies_into(taker, holders[name], node, load))
            boxes = [(c.row - taker.row, c.col - taker.col, c.rows, c.cols) for c in found]
            if not tiles(boxes, taker.rows, taker.cols):
                raise PlanError(
                    f"{name}: the {source.kind} layout does not hold all of rows {taker.row} to "
                    f"{taker.row + taker.rows - 1}, columns {taker.col} to "
                    f"{taker.col + taker.cols - 1} that rank {taker.rank} takes"
                )
            copies += found
            bound += taker.rows * taker.cols - _held(taker, holders[name])
    return Plan(source.world, tuple(copies), bound)


def _by_tensor(placement: Placement) -> dict[str, list[Piece]]:
    found: dict[str, list[Piece]] = {name: [] for name in placement.tensors}
    for pieces in placement.pieces:
        for piece in pieces:
            found[piece.tensor].append(piece)
    return found


def _refuse_double(name: str, pieces: list[Piece], target: Placement) -> None:
    """A rank that takes an element into two parameters would have it sent or copied twice."""
    by_rank: dict[int, list[Piece]] = {}
    for piece in pieces:
        for other in by_rank.setdefault(piece.rank, []):
            if _overlap(piece, other) is not None:
                raise PlanError(
                    f"{name}: rank {piece.rank} of the {target.kind} layout takes elements twice, "
                    f"into {other.param} and {piece.param}"
                )
        by_rank[piece.rank].append(piece)


def _overlap(a: Piece, b: Piece) -> tuple[int, int, int, int] | None:
    """Logical first row, first column, end row, end column of what both hold."""
    row, col = max(a.row, b.row), max(a.col, b.col)
    end_row, end_col = min(a.row + a.rows, b.row + b.rows), min(a.col + a.cols, b.col + b.cols)
    return (row, col, end_row, end_col) if row < end_row and col < end_col else None


def _held(taker: Piece, holders: list[Piece]) -> int:
    """Elements of `taker` that its own rank's source parameters hold."""
    own = [h for h in holders if h.rank == taker.rank]
    boxes = {box for h in own if (box := _overlap(taker, h)) is not None}
    return sum((end_row - row) * (end_col - col) for row, col, end_row, end_col in boxes)


def _copies_into(
    taker: Piece, holders: list[Piece], node: list[int], load: list[int]
) -> Iterator[Copy]:
    """The copies that fill `taker`; `load` (elements sent so far, by rank) is brought forward.

    The taker's rectangle is cut along every edge of a holder's; each cell then lies wholly inside
    or outside each holder.
    """
    shared = [(h, box) for h in holders if (box := _overlap(taker, h)) is not None]
    rows = sorted({edge for _, box in shared for edge in (box[0], box[2])})
    cols = sorted({edge for _, box in shared for edge in (box[1], box[3])})
    for row, end_row in pairwise(rows):
        for col, end_col in pairwise(cols):
            able = [
                h
                for h, box in shared
                if box[0] <= row and end_row <= box[2] and box[1] <= col and end_col <= box[3]
            ]
            if not able:
                continue
            holder = min(
                able,
                key=lambda h: (
                    h.rank != taker.rank,
                    node[h.rank] != node[taker.rank],
                    load[h.rank],
                    h.rank,
                ),
            )
            if holder.rank != taker.rank:
                load[holder.rank] += (end_row - row) * (end_col - col)
            yield Copy(
                taker.tensor,
                row,
                col,
                end_row - row,
                end_col - col,
                holder.rank,
                holder.param,
                holder.param_row + row - holder.row,
                holder.param_col + col - holder.col,
                taker.rank,
                taker.param,
                taker.param_row + row - taker.row,
                taker.param_col + col - taker.col,
            )
