"""Local search after a greedy packing: rows move or trade places until loads are level.

Pure functions of their arguments: sums are of whole numbers, ties go to the lower index.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

NEAR = 0.001
"""Share of the mean by which a load may be above it and is level."""
STEPS = 8
"""Trades per pack, or per part, after which it is enough."""
CANDIDATES = 512
"""Rows of a part that are looked at for one trade."""


def level_packs(packs: Sequence[Sequence[int]], tokens: Sequence[int]) -> list[list[int]]:
    """The packs after trades that each lower the heaviest: one of its rows against a lighter row
    of another pack, or against none.

    Of all trades that with the lightest heavier pack of the two is taken, so the sum of squared
    loads falls with every trade.
    """
    if len(packs) < 2:
        return [list(rows) for rows in packs]
    size = np.asarray(tokens, dtype=np.int64)
    of = np.empty(len(size), dtype=np.int64)
    for pack, rows in enumerate(packs):
        of[list(rows)] = pack
    number = len(packs)
    # A row of no tokens at the end of each pack: to trade against it is to move.
    size = np.concatenate([size, np.zeros(number, np.int64)])
    of = np.concatenate([of, np.arange(number)])
    loads = np.bincount(of, weights=size, minlength=number).astype(np.int64)
    enough = loads.mean() * (1 + NEAR)
    for _ in range(STEPS * number):
        heaviest = int(loads.argmax())
        if loads[heaviest] <= enough:
            break
        own = np.flatnonzero(of == heaviest)[:-1]
        less = size[own][:, None] - size
        after = np.maximum(loads[heaviest] - less, loads[of] + less)
        after[:, of == heaviest] = loads[heaviest]
        best = int(after.argmin())
        given, taken = int(own[best // len(size)]), best % len(size)
        if after.flat[best] >= loads[heaviest]:
            break
        other, moved = int(of[taken]), int(size[given] - size[taken])
        loads[heaviest] -= moved
        loads[other] += moved
        of[given] = other
        if taken < len(tokens):
            of[taken] = heaviest
    return [np.flatnonzero(of[: len(tokens)] == pack).tolist() for pack in range(number)]


def level_parts(
    parts: list[list[list[int]]], tokens: Sequence[int], work: Sequence[int], room: int
) -> list[list[list[int]]]:
    """`parts[part][pack]` after trades of rows between the part with the most work and the one
    with the least, none of which makes a pack longer than `room`.
    """
    size, cost = np.asarray(tokens, dtype=np.int64), np.asarray(work, dtype=np.int64)
    parts = [[list(rows) for rows in part] for part in parts]
    loads = np.array([sum(int(cost[row]) for rows in part for row in rows) for part in parts])
    enough = loads.mean() * (1 + NEAR)
    for _ in range(STEPS * len(parts)):
        heavy, light = int(loads.argmax()), int(loads.argmin())
        if loads[heavy] <= enough:
            break
        give, give_pack = _rows(parts[heavy], with_none=False)
        take, take_pack = _rows(parts[light], with_none=True)
        long = [np.array([size[rows].sum() for rows in parts[p]]) for p in (heavy, light)]
        of_row = [np.append(values, 0) for values in (size, cost)]  # row −1 is none
        more = of_row[0][give][:, None] - of_row[0][take]
        gain = of_row[1][give][:, None] - of_row[1][take]
        fits = (long[0][give_pack][:, None] - more <= room) & (long[1][take_pack] + more <= room)
        after = np.maximum(loads[heavy] - gain, loads[light] + gain)
        after[~fits] = loads[heavy]
        best = int(after.argmin())
        if len(give) == 0 or after.flat[best] >= loads[heavy]:
            break
        i, j = divmod(best, len(take))
        parts[heavy][give_pack[i]].remove(give[i])
        parts[light][take_pack[j]].append(int(give[i]))
        if take[j] >= 0:
            parts[light][take_pack[j]].remove(take[j])
            parts[heavy][give_pack[i]].append(int(take[j]))
        loads[heavy] -= gain[i, j]
        loads[light] += gain[i, j]
    return parts


def _rows(part: Sequence[Sequence[int]], *, with_none: bool) -> tuple[np.ndarray, np.ndarray]:
    """(rows, the pack of each), about `CANDIDATES` of them, evenly; `with_none`: and at the end −1,
    no row, for every pack."""
    rows = np.array([row for pack in part for row in pack], dtype=np.int64)
    packs = np.array([index for index, pack in enumerate(part) for _ in pack], dtype=np.int64)
    step = max(1, -(-len(rows) // CANDIDATES))
    none = np.arange(len(part) if with_none else 0)
    return (
        np.concatenate([rows[::step], np.full(len(none), -1)]),
        np.concatenate([packs[::step], none]),
    )
