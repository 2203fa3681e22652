"""Which samples share a forward: token-budget packs, balanced over data-parallel parts.

A plan is a pure function of the lengths in canonical order, so every rank draws the same plan and
only takes its own part. N samples, all of them.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from megarl.data.leveling import level_packs, level_parts

SLACK = 64
"""Packs get longer by at most this part of the longest where that levels work over dp indices."""


def plan_packs(
    lengths: np.ndarray | Sequence[int],
    dp: int,
    budget: int,
    name: Callable[[int], str] = "sample {}".format,
    even_length: int | None = None,
    key: str = "actor.tokens_per_micro_batch",
) -> list[list[np.ndarray]]:
    """Rows of every pack, `plan[dp_index][pack]`, int64 ascending.

    `lengths` are prompt + response tokens in canonical order. Each row is in one pack, no pack is
    above `budget` tokens, every dp index has the same number of packs (at least one, perhaps
    empty). Tokens are balanced over packs, and work over dp indices: n · (1 + n / even_length)
    for a sample of n tokens, where at `even_length` attention costs as much as all else (None:
    tokens alone). Longest sample first into the lightest pack, then trades between packs
    (`leveling.py`), with as few packs as that allows, never more than best-fit decreasing needs.

    A group's samples may lie apart, for what needs siblings (means, deviations) comes from the
    global table. Work of the busiest dp index over the mean, 64 groups of 16 at lognormal lengths
    (median 6000, at most 32768), even_length 16000: 1.00 on 8 and on 32 indices; with whole groups
    on one index 1.01 and 2.39. `tools/bench.py packing` holds plans to a bound.

    Raises `ValueError` for a sample longer than the budget; `name` turns a row into its name, `key`
    is the budget's.
    """
    lengths = np.asarray(lengths, dtype=np.int64)
    long = np.flatnonzero(lengths > budget)
    if len(long):
        told = ", ".join(f"{name(int(row))} ({lengths[row]} tokens)" for row in long[:5])
        more = f" and {len(long) - 5} more" if len(long) > 5 else ""
        raise ValueError(
            f"longer than the budget of {budget} tokens per micro-batch: {told}{more}; "
            f"raise {key} or lower the response limit"
        )
    if dp < 1 or (lengths <= 0).any():
        raise ValueError(f"packing needs dp ≥ 1 and lengths ≥ 1, got dp={dp}, {lengths.tolist()}")
    order = _longest_first(lengths)
    tokens = lengths.tolist()
    fallback = _best_fit(tokens, order, budget)
    most = max(1, -(-len(fallback) // dp))
    fewest = max(1, -(-int(lengths.sum()) // (dp * budget)))
    packs = fallback + [[] for _ in range(most * dp - len(fallback))]
    for per_index in range(fewest, most + 1):
        balanced = level_packs(_spread(tokens, order, per_index * dp), tokens)
        if max(sum(tokens[row] for row in rows) for rows in balanced) <= budget:
            packs = balanced
            break
    work = tokens if even_length is None else (lengths * (even_length + lengths)).tolist()
    parts = _deal(packs, work, dp)
    room = max(sum(tokens[row] for row in rows) for rows in packs)
    parts = level_parts(parts, tokens, work, min(budget, room + room // SLACK))
    return [_heaviest_first(own, work) for own in parts]


def _longest_first(lengths: np.ndarray) -> list[int]:
    return np.lexsort((np.arange(len(lengths)), -lengths)).tolist()


def _spread(tokens: list[int], order: list[int], bins: int) -> list[list[int]]:
    """Longest first into the lightest bin; the lower bin wins a tie."""
    packs: list[list[int]] = [[] for _ in range(bins)]
    loads = [(0, index) for index in range(bins)]
    for row in order:
        load, index = loads[0]
        packs[index].append(row)
        heapq.heapreplace(loads, (load + tokens[row], index))
    return packs


def _best_fit(tokens: list[int], order: list[int], budget: int) -> list[list[int]]:
    """Longest first into the fullest bin with room."""
    packs: list[list[int]] = []
    rooms: list[tuple[int, int]] = []  # (room left, bin), ascending
    for row in order:
        at = bisect_left(rooms, (tokens[row], -1))
        if at == len(rooms):
            packs.append([])
            room, index = budget, len(packs) - 1
        else:
            room, index = rooms.pop(at)
        packs[index].append(row)
        insort(rooms, (room - tokens[row], index))
    return packs


def _deal(packs: list[list[int]], work: list[int], dp: int) -> list[list[list[int]]]:
    """Packs over dp indices, an equal number each, heaviest first to the lightest index."""
    per_index = len(packs) // dp
    loads = {pack: sum(work[row] for row in rows) for pack, rows in enumerate(packs)}
    dealt: list[list[list[int]]] = [[] for _ in range(dp)]
    lightest = [(0, index) for index in range(dp)]
    for pack in sorted(loads, key=lambda pack: (-loads[pack], pack)):
        total, index = heapq.heappop(lightest)
        dealt[index].append(packs[pack])
        if len(dealt[index]) < per_index:
            heapq.heappush(lightest, (total + loads[pack], index))
    return dealt


def _heaviest_first(packs: list[list[int]], work: list[int]) -> list[np.ndarray]:
    ordered = sorted(map(sorted, packs), key=lambda rows: (-sum(work[row] for row in rows), rows))
    return [np.array(rows, dtype=np.int64) for rows in ordered]


@dataclass(frozen=True)
class UpdatePlan:
    """Which rows train in which minibatch, pack and data-parallel part; fixed once, globally."""

    packs: tuple[tuple[tuple[np.ndarray, ...], ...], ...]
    """`packs[minibatch][dp_index][pack]`: global canonical rows, int64 ascending."""
    owner: np.ndarray
    """int64 [N], the dp index that packs each global row; −1 where no pack has the row."""

    @property
    def packed(self) -> np.ndarray:
        """bool [N]."""
        return self.owner >= 0

    def local_packs(self, dp_index: int) -> list[list[np.ndarray]]:
        """`[minibatch][pack]` rows of a dp index's own Samples (its rows in canonical order)."""
        local = np.full(len(self.owner), -1, dtype=np.int64)
        own = np.flatnonzero(self.owner == dp_index)
        local[own] = np.arange(len(own))
        return [[local[rows] for rows in parts[dp_index]] for parts in self.packs]


def plan_update(
    lengths: np.ndarray | Sequence[int],
    minibatches: Sequence[np.ndarray],
    dp: int,
    budget: int,
    name: Callable[[int], str] = "sample {}".format,
    even_length: int | None = None,
) -> UpdatePlan:
    """Packs of every minibatch (arrays of global rows, disjoint); pure, the same on every rank.

    An empty minibatch has one empty pack on every dp index. Raises `ValueError` when a row is in
    two minibatches, and as `plan_packs`.
    """
    lengths = np.asarray(lengths, dtype=np.int64)
    owner = np.full(len(lengths), -1, dtype=np.int64)
    plan = []
    for rows in minibatches:
        rows = np.sort(np.asarray(rows, dtype=np.int64))
        if (owner[rows] >= 0).any() or len(np.unique(rows)) != len(rows):
            raise ValueError(f"a row is in two minibatches or twice in one: {rows.tolist()}")
        parts = plan_packs(
            lengths[rows], dp, budget, lambda row, rows=rows: name(int(rows[row])), even_length
        )
        plan.append(tuple(tuple(rows[pack] for pack in own) for own in parts))
        for dp_index, own in enumerate(plan[-1]):
            for pack in own:
                owner[pack] = dp_index
    return UpdatePlan(packs=tuple(plan), owner=owner)


def plan_own_packs(
    update: UpdatePlan,
    lengths: np.ndarray | Sequence[int],
    budget: int,
    even_length: int | None = None,
    name: Callable[[int], str] = "sample {}".format,
) -> UpdatePlan:
    """Packs of the critic under a `budget` of its own: the rows of every minibatch on the same
    data-parallel part as in `update`, whose samples it holds. Pure, the same on every rank.

    Every part has as many packs of a minibatch as the part that needs most of them; the others
    spread theirs over as many, or where that breaks the budget have empty ones.

    Raises `ValueError` as `plan_packs`, naming critic.tokens_per_micro_batch.
    """
    lengths = np.asarray(lengths, dtype=np.int64)
    key = "critic.tokens_per_micro_batch"
    plan = []
    for parts in update.packs:
        held = [np.sort(np.concatenate(own)) for own in parts]
        packs = [
            plan_packs(
                lengths[rows], 1, budget, lambda row, rows=rows: name(rows[row]), even_length, key
            )[0]
            for rows in held
        ]
        count = max(len(own) for own in packs)
        plan.append(
            tuple(
                tuple(rows[pack] for pack in _as_many(lengths[rows], own, count, budget))
                for rows, own in zip(held, packs, strict=True)
            )
        )
    return UpdatePlan(packs=tuple(plan), owner=update.owner)


def _as_many(
    lengths: np.ndarray, packs: list[np.ndarray], count: int, budget: int
) -> list[np.ndarray]:
    """`count` packs of the same rows, at least as many as `packs`."""
    if len(packs) == count:
        return packs
    spread = _spread(lengths.tolist(), _longest_first(lengths), count)
    wider = [np.array(sorted(rows), dtype=np.int64) for rows in spread]
    if max(int(lengths[rows].sum()) for rows in wider) <= budget:
        return wider
    return packs + [np.zeros(0, dtype=np.int64)] * (count - len(packs))
