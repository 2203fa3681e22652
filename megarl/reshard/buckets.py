"""Deals the copies of a plan to buckets: what every rank sends and receives at a time is bounded.

A tensor whose copies fit in a bucket stays whole; a larger one is cut into strips of rows. What a
strip costs each rank is the same for all tensors alike, so one rank's buckets are found without
listing the copies of the others. Pure: no torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from megarl.reshard.shares import Copy, Member, Share


class Strips(NamedTuple):
    """How the sent copies of a tensor are cut into strips of whole rows."""

    count: int
    """0: a row of each copy is more than a bucket holds."""
    sides: np.ndarray
    """int64: the ranks that send, and world + those that receive."""
    load: np.ndarray
    """int64, for each of `sides` the most elements of one strip."""


def deal(shares: Sequence[Share], world: int, capacity: int, rank: int | None) -> list[list[Copy]]:
    """The buckets of a plan made of `shares`: see `Plan.buckets`."""
    buckets: list[list[Copy]] = []
    fill = _Fill(world, capacity)
    own: dict[tuple[Share, int], list[Copy]] = {}
    for share, member, number, strips in _in_order(shares, world, capacity):
        if not strips.count:  # whole rows do not fit
            dealt = _dealt(share.copies(member, share.sent_by_or_to(None, 0)), world, capacity)
            at = fill.alone(len(dealt))
            buckets += [[] for _ in range(at + len(dealt) - len(buckets))]
            for order, parts in enumerate(dealt, at):
                buckets[order] += [c for c in parts if rank in (None, c.source, c.target)]
            continue
        at = fill.place(strips)
        if at == len(buckets):
            buckets.append([])
        if number == 0:
            own[share, member[0]] = share.copies(member, share.sent_by_or_to(rank, member[0]))
        for copy in own[share, member[0]]:
            if part := _strip(copy, number, strips.count):
                buckets[at].append(part)
        if number == strips.count - 1:
            del own[share, member[0]]
    return buckets


def _in_order(
    shares: Sequence[Share], world: int, capacity: int
) -> list[tuple[Share, Member, int, Strips]]:
    """Every strip of every tensor of which anything is sent, in the order of sending.

    The strips of each share are spread over the whole, and shares of different holders follow one
    another, so that the holders of all pipeline stages and experts send at the same time.
    """
    found = []
    for order, share in enumerate(_alternating(shares)):
        for member in share.members:
            strips = _strips_of(share, member[0], world, capacity)
            if strips is None:
                continue
            for number in range(max(strips.count, 1)):
                at = (member[0] + (number + 0.5) / max(strips.count, 1)) / share.total
                found.append((at, order, (share, member, number, strips)))
    return [strip for _, _, strip in sorted(found, key=lambda found: found[:2])]


def _alternating(shares: Sequence[Share]) -> list[Share]:
    """The shares: the first of each group of holders, then the second of each, and so on."""
    seen: dict[frozenset[int], int] = {}
    turns = []
    for share in shares:
        holders = frozenset(share.source.by_rank)
        seen[holders] = turn = seen.get(holders, -1) + 1
        turns.append(turn)
    order = sorted(range(len(turns)), key=lambda number: (turns[number], number))
    return [shares[number] for number in order]


class _Fill:
    """How far the buckets of every rank, of what it sends and what it receives, are filled."""

    def __init__(self, world: int, capacity: int) -> None:
        self.capacity = capacity
        self.at = np.zeros(2 * world, np.int64)
        self.filled = np.zeros(2 * world, np.int64)

    def place(self, strips: Strips) -> int:
        """The first bucket with room for one strip on all its ranks, none of which has begun a
        later one."""
        at = self.at[strips.sides]
        first = int(at.max())
        filled = np.where(at == first, self.filled[strips.sides], 0) + strips.load
        if filled.max() > self.capacity:
            first += 1
            filled = strips.load
        self.at[strips.sides] = first
        self.filled[strips.sides] = filled
        return first

    def alone(self, count: int) -> int:
        """The first of `count` buckets that nothing else will use."""
        first = int(self.at.max()) + bool(self.filled.any())
        self.at[:] = first + count
        self.filled[:] = 0
        return first


def _strip(copy: Copy, number: int, pieces: int) -> Copy | None:
    """The `number`-th of `pieces` strips of whole rows, or None where it is empty."""
    first, end = number * copy.rows // pieces, (number + 1) * copy.rows // pieces
    return copy.part(first, 0, end - first, copy.cols) if end > first else None


def _strips_of(share: Share, number: int, world: int, capacity: int) -> Strips | None:
    """How the `number`-th tensor of a share is cut so that a bucket holds a strip of it; None where
    nothing of it is sent. Worked out once for tensors alike."""
    key = (number % share.period, capacity)
    known = share.dealings
    if key not in known:
        load = np.concatenate(share.loads(number, world))
        if not load.any():
            known[key] = None
        elif load.max() <= capacity:
            known[key] = _strips(1, load)
        else:
            known[key] = _cut_rows(share, number, world, capacity, int(load.max()))
    return known[key]


def _strips(count: int, load: np.ndarray) -> Strips:
    sides = load.nonzero()[0]
    return Strips(count, sides, load[sides])


def _cut_rows(share: Share, number: int, world: int, capacity: int, most: int) -> Strips:
    cells = [cell for cell in share.cells if not cell.is_local]
    rows = np.array([cell.rows for cell in cells])
    cols = np.array([cell.cols for cell in cells])
    senders = np.array([cell.sender(number).rank for cell in cells])
    takers = np.array([cell.taker.rank for cell in cells])
    count = min(-(-most // capacity), int(rows.max()))
    while True:
        # A strip has at most so many rows of a copy.
        elements = -(-rows // count) * cols
        load = np.bincount(
            np.concatenate((senders, takers + world)), np.tile(elements, 2), 2 * world
        )
        if load.max() <= capacity:
            return _strips(count, load.astype(np.int64))
        if count == rows.max():
            return _strips(0, load)
        count = min(count + max(1, count // 8), int(rows.max()))


def _dealt(copies: Sequence[Copy], world: int, capacity: int) -> list[list[Copy]]:
    """One tensor's copies, cut and dealt in order to buckets that no rank overfills."""
    buckets: list[list[Copy]] = []
    place = {"sends": [0] * world, "receives": [0] * world}
    filled = {"sends": [0] * world, "receives": [0] * world}
    for copy in copies:
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
