"""What is copied from whom to whom: a pure function of two placements, the same on every rank.

Every element a rank's target parameters want is written exactly once. What the rank's own source
parameters hold is copied locally; the rest comes once, from a holder on the same node where there
is one. Equally near holders take turns, the one with the fewest bytes to send so far first, at a
tie the lowest rank. So the bytes sent are the least possible: what the targets want and their ranks
do not hold.

Tensors that lie alike on both sides are planned together (`shares.py`), so a plan of hundreds of
ranks costs seconds, and one rank's part of it is made without the others'.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from functools import cached_property, lru_cache

import numpy as np

from megarl.reshard.buckets import deal
from megarl.reshard.placement import Pattern, Placed, Placement, tiles
from megarl.reshard.shares import Copy, Member, Share, held, make_cells, overlap

__all__ = ["Copy", "Plan", "PlanError", "make_plan"]


class PlanError(ValueError):
    """Two placements between which no complete transfer exists."""


class Plan:
    """All copies of a transfer, in one order that every rank shares."""

    def __init__(self, world: int, shares: Sequence[Share]) -> None:
        self.world = world
        self.shares = tuple(shares)

    @property
    def bound(self) -> int:
        """The fewest elements that any transfer must send: wanted by a rank and not held by it."""
        return sum(share.bound * len(share.members) for share in self.shares)

    @cached_property
    def load(self) -> list[int]:
        """Elements that each rank sends."""
        load = np.zeros(self.world, np.int64)
        for share in self.shares:
            for member in share.members:
                load += share.loads(member[0], self.world)[0]
        return load.tolist()

    @property
    def elements_sent(self) -> int:
        return sum(self.load)

    @cached_property
    def elements_local(self) -> int:
        return sum(
            sum(cell.elements for cell in share.cells if cell.is_local) * len(share.members)
            for share in self.shares
        )

    def _copies(self, rank: int | None) -> Iterator[Copy]:
        for share in self.shares:
            for member in share.members:
                local = share.local_of(rank)
                yield from share.copies(member, local + share.sent_by_or_to(rank, member[0]))

    @cached_property
    def copies(self) -> tuple[Copy, ...]:
        """Of all ranks."""
        return tuple(self._copies(None))

    @cached_property
    def sent(self) -> tuple[Copy, ...]:
        """The copies between two ranks."""
        return tuple(copy for copy in self.copies if copy.source != copy.target)

    def of(self, rank: int) -> list[Copy]:
        """What `rank` copies locally, sends and receives."""
        return list(self._copies(rank))

    def only(self, tensors: Collection[str]) -> Plan:
        """The part of the plan that moves these logical tensors, by the same senders."""
        shares = []
        for share in self.shares:
            members = [member for member in share.members if member[1] in tensors]
            if members:
                shares.append(
                    Share(
                        share.source,
                        share.target,
                        members,
                        share.cells,
                        share.bound,
                        share.total,
                    )
                )
        return Plan(self.world, shares)

    def buckets(self, capacity: int, rank: int | None = None) -> list[list[Copy]]:
        """What is sent, cut and dealt so that no rank sends or receives above `capacity` elements.

        `capacity` is per bucket and rank, at least 1. With `rank` the buckets hold that rank's
        copies alone; there are as many of them, cut alike, as for every other. Raises `PlanError`
        for a capacity below 1.
        """
        if capacity < 1:
            raise PlanError(f"a bucket of {capacity} elements; raise rollout.bucket_bytes")
        return deal(self.shares, self.world, capacity, rank)


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
    nodes = [rank // (ranks_per_node or source.world) for rank in range(source.world)]
    alike: dict[tuple[Pattern, Pattern], list[Member]] = {}
    for name in target.tensors:
        ours, theirs = source.placed[name], target.placed[name]
        members = alike.setdefault((ours.pattern, theirs.pattern), [])
        members.append((len(members), name, ours, theirs))
    shares = [_share(*pair, members, nodes, source, target) for pair, members in alike.items()]
    load = np.zeros(source.world, np.int64)
    # What is largest first, so that what comes after can level it.
    for share in sorted(shares, key=lambda share: -share.bound * share.total):
        share.take_turns(load)
    return Plan(source.world, shares)


def _share(
    ours: Pattern,
    theirs: Pattern,
    members: list[Member],
    nodes: Sequence[int],
    source: Placement,
    target: Placement,
) -> Share:
    """Raises `PlanError` naming the first of its tensors."""
    _, name, _, placed = members[0]
    if not theirs.seats:
        raise PlanError(f"{name}: no rank of the {target.kind} layout takes it")
    _refuse_double(name, placed, target.kind)
    cells = make_cells(ours, theirs, nodes)
    boxes: dict[int, list[tuple[int, int, int, int]]] = {}
    for cell in cells:
        boxes.setdefault(id(cell.taker), []).append(
            (cell.row - cell.taker.row, cell.col - cell.taker.col, cell.rows, cell.cols)
        )
    bound = 0
    for taker in theirs.seats:
        if not tiles(boxes.get(id(taker), ()), taker.rows, taker.cols):
            raise PlanError(
                f"{name}: the {source.kind} layout does not hold all of rows {taker.row} to "
                f"{taker.row + taker.rows - 1}, columns {taker.col} to "
                f"{taker.col + taker.cols - 1} that rank {taker.rank} takes"
            )
        own = ours.by_rank.get(taker.rank, ())
        bound += taker.rows * taker.cols - held(taker, own)
    return Share(ours, theirs, members, cells, bound, len(members))


def _refuse_double(name: str, placed: Placed, kind: str) -> None:
    """A rank that takes an element into two parameters would have it sent or copied twice."""
    for rank, seats in placed.pattern.by_rank.items():
        for number, seat in enumerate(seats):
            for other in seats[:number]:
                if overlap(seat, other) is not None:
                    raise PlanError(
                        f"{name}: rank {rank} of the {kind} layout takes elements twice, into "
                        f"{placed.params[other.variant]} and {placed.params[seat.variant]}"
                    )
