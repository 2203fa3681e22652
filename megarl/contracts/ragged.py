"""Columns of rows of different lengths, flat: row r is flat[offsets[r]:offsets[r + 1]]."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

BLOCK = 1 << 16
"""Elements worked on at once, so that temporaries stay in cache."""
LONG = 192
"""From so many elements on a row is worth a copy of its own (measured: it costs about 0.4 µs,
an index about 1.5 ns an element and column)."""


def lengths_to_offsets(lengths: np.ndarray) -> np.ndarray:
    """int64 [N+1]."""
    return np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])


def blocks_of(offsets: np.ndarray) -> list[tuple[int, int]]:
    """Ranges of rows of about `BLOCK` elements each, one row at least."""
    rows, start, blocks = len(offsets) - 1, 0, []
    while start < rows:
        stop = int(np.searchsorted(offsets, offsets[start] + BLOCK, side="right")) - 1
        stop = min(max(stop, start + 1), rows)
        blocks.append((start, stop))
        start = stop
    return blocks


def gather_ragged(
    flats: Sequence[np.ndarray], offsets: np.ndarray, rows: np.ndarray
) -> list[np.ndarray]:
    """The elements of `rows` of each column, one row behind the other. All share `offsets`.

    Neighbouring rows are one piece. Long pieces are copied one by one, short ones by index.
    """
    if len(rows) == 0:
        return [flat[:0].copy() for flat in flats]
    first = np.flatnonzero(np.concatenate([[True], np.diff(rows) != 1]))
    last = np.concatenate([first[1:], [len(rows)]]) - 1
    begins, ends = offsets[rows[first]], offsets[rows[last] + 1]
    target = lengths_to_offsets(ends - begins)
    if target[-1] >= LONG * len(begins):
        pieces = list(map(slice, begins.tolist(), ends.tolist()))
        return [np.concatenate([flat[piece] for piece in pieces]) for flat in flats]
    gathered = [np.empty(target[-1], dtype=flat.dtype) for flat in flats]
    shift = begins - target[:-1]
    for start, stop in blocks_of(target):
        into = slice(int(target[start]), int(target[stop]))
        index = np.arange(into.start, into.stop)
        index += np.repeat(shift[start:stop], np.diff(target[start : stop + 1]))
        for flat, column in zip(flats, gathered, strict=True):
            np.take(flat, index, out=column[into], mode="clip")  # "raise" would buffer `out`
    return gathered
