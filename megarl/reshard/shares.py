"""Tensors that lie alike on both sides, and who sends which of their cells: what a plan is made of.

A `Share` is every tensor of one source pattern and one target pattern. What a rank wants of such a
tensor is cut along the holders' edges into *cells*; each cell lies wholly inside or outside each
holder's rectangle. A share's cells are worked out once for all its tensors. Pure: no torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from megarl.reshard.placement import Pattern, Placed, Seat

Box = tuple[int, int, int, int]
"""First row, first column, end row, end column."""
Member = tuple[int, str, Placed, Placed]
"""A tensor of a share: its number among them, its name, how it lies on either side."""


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


@dataclass(eq=False)
class Holders:
    """Who can send the same cells, equally near: one seat a rank, as they take turns."""

    seats: tuple[Seat, ...]
    turns: int = 0
    """Cells of a tensor that one of them sends."""

    @cached_property
    def ranks(self) -> frozenset[int]:
        return frozenset(seat.rank for seat in self.seats)

    @property
    def cycle(self) -> int:
        """Tensors after which the turns begin again."""
        return len(self.seats) // math.gcd(len(self.seats), self.turns)


class Cell(NamedTuple):
    """What one taker gets in one piece, of every tensor of a share."""

    row: int
    col: int
    rows: int
    cols: int
    taker: Seat
    holders: Holders
    """The taker's own rank alone where it holds the cell."""
    turn: int
    """Number among the cells of these holders."""

    @property
    def elements(self) -> int:
        return self.rows * self.cols

    @property
    def is_local(self) -> bool:
        return self.holders.seats[0].rank == self.taker.rank

    def sender(self, number: int) -> Seat:
        """Who sends it of the share's `number`-th tensor."""
        seats = self.holders.seats
        return seats[(number * self.holders.turns + self.turn) % len(seats)]


@dataclass(eq=False)
class Share:
    """The tensors of one pair of patterns."""

    source: Pattern
    target: Pattern
    members: list[Member]
    cells: list[Cell]
    bound: int
    """Of one tensor: elements that ranks want and do not hold."""
    total: int
    """Tensors in the share, also where `members` are fewer."""
    dealings: dict[tuple, Any] = field(default_factory=dict)
    """What the plan worked out once for tensors alike."""
    _by_rank: dict[int | None, tuple[list[Cell], list[Cell], list[Cell]]] = field(
        default_factory=dict
    )
    _loads: dict[int, tuple[np.ndarray, np.ndarray]] = field(default_factory=dict)

    @cached_property
    def period(self) -> int:
        """Tensors after which all turns begin again."""
        cycles = {cell.holders.cycle for cell in self.cells if not cell.is_local}
        return min(math.lcm(*cycles), self.total)

    def take_turns(self, load: np.ndarray) -> None:
        """Order the holders of each cell, the least loaded first, at a tie the lowest rank; `load`,
        int64 [world], elements sent so far, is brought forward."""
        groups: dict[Holders, list[Cell]] = {}
        for cell in self.cells:
            if not cell.is_local:
                groups.setdefault(cell.holders, []).append(cell)
        for holders, cells in groups.items():
            holders.seats = tuple(
                sorted(holders.seats, key=lambda seat: (load[seat.rank], seat.rank))
            )
            cycle = holders.cycle
            for cell in cells:
                for number in range(min(cycle, self.total)):
                    times = -(-(self.total - number) // cycle)
                    load[cell.sender(number).rank] += times * cell.elements

    def loads(self, number: int, world: int) -> tuple[np.ndarray, np.ndarray]:
        """Elements that each rank sends and receives of the `number`-th tensor, int64 [world]."""
        phase = number % self.period
        if phase not in self._loads:
            sends, receives = (np.zeros(world, np.int64) for _ in range(2))
            for cell in self.cells:
                if not cell.is_local:
                    sends[cell.sender(phase).rank] += cell.elements
                    receives[cell.taker.rank] += cell.elements
            self._loads[phase] = (sends, receives)
        return self._loads[phase]

    def copies(self, member: Member, cells: Sequence[Cell]) -> list[Copy]:
        """These `cells` of one tensor."""
        number, name, source, target = member
        found = []
        for cell in cells:
            row, col, rows, cols, taker = cell[:5]
            holder = cell.sender(number)
            found.append(
                Copy(
                    name,
                    row,
                    col,
                    rows,
                    cols,
                    holder.rank,
                    source.params[holder.variant],
                    source.base_row + holder.param_row + row - holder.row,
                    holder.param_col + col - holder.col,
                    taker.rank,
                    target.params[taker.variant],
                    target.base_row + taker.param_row + row - taker.row,
                    taker.param_col + col - taker.col,
                )
            )
        return found

    def local_of(self, rank: int | None) -> list[Cell]:
        """The cells that `rank` copies from itself; None: of all ranks."""
        return self._of_rank(rank)[0]

    def sent_by_or_to(self, rank: int | None, number: int) -> list[Cell]:
        """The cells of the `number`-th tensor that `rank` sends or receives; None: all."""
        _, takes, may_send = self._of_rank(rank)
        return takes + [cell for cell in may_send if cell.sender(number).rank == rank]

    def _of_rank(self, rank: int | None) -> tuple[list[Cell], list[Cell], list[Cell]]:
        if rank not in self._by_rank:
            local, takes, may_send = [], [], []
            for cell in self.cells:
                if rank in (None, cell.taker.rank):
                    (local if cell.is_local else takes).append(cell)
                elif rank in cell.holders.ranks:
                    may_send.append(cell)
            self._by_rank[rank] = local, takes, may_send
        return self._by_rank[rank]


def overlap(a: Seat, b: Seat) -> Box | None:
    """What both hold, in the tensor's rows and columns."""
    row, col = max(a.row, b.row), max(a.col, b.col)
    end_row, end_col = min(a.row + a.rows, b.row + b.rows), min(a.col + a.cols, b.col + b.cols)
    return (row, col, end_row, end_col) if row < end_row and col < end_col else None


def held(taker: Seat, holders: Sequence[Seat]) -> int:
    """Elements of `taker` among `holders`, its own rank's seats, which are disjoint or equal."""
    boxes = {box for seat in holders if (box := overlap(taker, seat)) is not None}
    return sum((end_row - row) * (end_col - col) for row, col, end_row, end_col in boxes)


def make_cells(source: Pattern, target: Pattern, nodes: Sequence[int]) -> list[Cell]:
    """The cells of every taker, in the order of the target's seats.

    `nodes`: by rank. An element that no rank holds is in no cell.
    """
    grid = _Grid(source, nodes)
    return [cell for taker in target.seats for cell in grid.cells(taker)]


class _Grid:
    """Who holds what of a source pattern, looked up by rectangle; of a rank's equal seats, one."""

    def __init__(self, source: Pattern, nodes: Sequence[int]) -> None:
        self._nodes = nodes
        self._seats: dict[tuple[int, ...], list[Seat]] = {}
        for seat in source.seats:
            self._seats.setdefault(seat[1:5], []).append(seat)
        self._cuts: dict[tuple[int, ...], list[tuple[Box, dict[int, Seat]]]] = {}
        self._near: dict[tuple[Box, int | None], Holders] = {}

    def cells(self, taker: Seat) -> Iterator[Cell]:
        """The cells of one taker that somebody holds, in row and column order."""
        if taker[1:5] not in self._cuts:
            self._cuts[taker[1:5]] = list(self._cut(taker))
        for box, able in self._cuts[taker[1:5]]:
            own = able.get(taker.rank)
            if own is not None:
                near = Holders((own,))
            else:
                near = self._nearest(box, able, self._nodes[taker.rank])
            row, col, end_row, end_col = box
            yield Cell(row, col, end_row - row, end_col - col, taker, near, near.turns)
            near.turns += 1

    def _cut(self, taker: Seat) -> Iterator[tuple[Box, dict[int, Seat]]]:
        shared = [
            (seats, box)
            for seats in self._seats.values()
            if (box := overlap(taker, seats[0])) is not None
        ]
        rows = sorted({edge for _, box in shared for edge in (box[0], box[2])})
        cols = sorted({edge for _, box in shared for edge in (box[1], box[3])})
        for row, end_row in pairwise(rows):
            for col, end_col in pairwise(cols):
                able = {
                    seat.rank: seat
                    for seats, box in shared
                    if box[0] <= row and end_row <= box[2] and box[1] <= col and end_col <= box[3]
                    for seat in seats
                }
                if able:
                    yield (row, col, end_row, end_col), able

    def _nearest(self, box: Box, able: dict[int, Seat], node: int) -> Holders:
        """The holders on the taker's node, without one all of them; by rank, each once."""
        key: tuple[Box, int | None] = (box, node)
        if key not in self._near:
            here = [rank for rank in able if self._nodes[rank] == node]
            # All nodes without a holder draw on the same turns.
            near = self._near.get((box, None)) if not here else None
            if near is None:
                near = Holders(tuple(able[rank] for rank in sorted(here or able)))
            self._near[key] = near
            if not here:
                self._near[box, None] = near
        return self._near[key]
