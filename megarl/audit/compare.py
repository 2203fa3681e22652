"""Compares two runs' columns: rows joined by id, floats within a tolerance, the first difference
and how many there are. Two NaN are equal: absent on both sides.

N rows, R tokens; offsets int64 [N+1] say where each row's tokens begin.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True, slots=True)
class FieldDifference:
    """One field that differs between two runs."""

    field: str
    where: str | None
    """The first place: a sample id, `step 1`, a tensor's name; None for what holds for all."""
    token: int | None
    """Of that sample's response (or prompt), for a field that has a value per token."""
    a: Any
    b: Any
    size: float | None
    """|a − b| there, for numbers."""
    count: int
    """How many samples (steps, tensors) differ in it."""
    of: int
    largest: float | None
    """Largest |a − b|, for floats."""
    rank: int = 0
    """Place of `where` in its order: the lowest one is told first."""


@dataclass(frozen=True)
class Rows:
    """Rows of two runs that have the same ids: `a[i]` and `b[i]` are one sample."""

    a: np.ndarray  # int64
    b: np.ndarray  # int64
    names: tuple[str, ...]


def values(
    field: str, rows: Rows, a: np.ndarray, b: np.ndarray, tolerance: float
) -> FieldDifference | None:
    """A field with one value a row; None where no row differs."""
    left, right = a[rows.a], b[rows.b]
    wrong = _differ(left, right, tolerance)
    at = np.flatnonzero(wrong)
    if not len(at):
        return None
    first = int(at[0])
    return FieldDifference(
        field=field,
        where=rows.names[first],
        token=None,
        a=left[first].item(),
        b=right[first].item(),
        size=_size(left[first], right[first]),
        count=len(at),
        of=len(rows.names),
        largest=_largest(left[wrong], right[wrong]),
        rank=first,
    )


@dataclass(frozen=True)
class Ragged:
    """A field with values per token."""

    flat: np.ndarray
    offsets: np.ndarray

    def rows(self, rows: np.ndarray) -> Ragged:
        lengths = np.diff(self.offsets)[rows]
        offsets = np.concatenate([[0], np.cumsum(lengths)])
        at = np.repeat(self.offsets[rows] - offsets[:-1], lengths) + np.arange(offsets[-1])
        return Ragged(self.flat[at], offsets)


def tokens(
    field: str, rows: Rows, a: Ragged, b: Ragged, tolerance: float
) -> FieldDifference | None:
    """A field with values per token; rows of different lengths differ."""
    left, right = a.rows(rows.a), b.rows(rows.b)
    lengths = np.diff(left.offsets), np.diff(right.offsets)
    same_length = lengths[0] == lengths[1]
    wrong = ~same_length
    even = np.flatnonzero(same_length)
    mine, theirs = left.rows(even), right.rows(even)
    odd = _differ(mine.flat, theirs.flat, tolerance)
    wrong[even] |= np.add.reduceat(np.append(odd, False), mine.offsets[:-1]) > 0
    at = np.flatnonzero(wrong)
    if not len(at):
        return None
    first = int(at[0])
    one = left.flat[left.offsets[first] : left.offsets[first + 1]]
    other = right.flat[right.offsets[first] : right.offsets[first + 1]]
    shared = min(len(one), len(other))
    off = np.flatnonzero(_differ(one[:shared], other[:shared], tolerance))
    token = int(off[0]) if len(off) else shared
    ended = "no such token"
    x = one[token].item() if token < len(one) else ended
    y = other[token].item() if token < len(other) else ended
    return FieldDifference(
        field=field,
        where=rows.names[first],
        token=token,
        a=x,
        b=y,
        size=_size(x, y) if token < shared else None,
        count=len(at),
        of=len(rows.names),
        largest=_largest(mine.flat[odd], theirs.flat[odd]),
        rank=first,
    )


def single(
    field: str, where: str | None, a: Any, b: Any, tolerance: float, rank: int = 0
) -> FieldDifference | None:
    """One value, of any kind."""
    numbers = _is_number(a) and _is_number(b)
    size = abs(a - b) if numbers else None
    if a == b or numbers and isinstance(a, float | int) and size <= tolerance:
        return None
    return FieldDifference(field, where, None, a, b, size, 1, 1, size, rank)


def objects(
    field: str, rows: Rows, a: tuple[Any, ...], b: tuple[Any, ...]
) -> FieldDifference | None:
    """A field with one object a row, compared by `==`."""
    wrong = [
        at
        for at, (x, y) in enumerate(zip(rows.a.tolist(), rows.b.tolist(), strict=True))
        if a[x] != b[y]
    ]
    if not wrong:
        return None
    first = wrong[0]
    x, y = a[int(rows.a[first])], b[int(rows.b[first])]
    name = rows.names[first]
    return FieldDifference(field, name, None, x, y, None, len(wrong), len(rows.names), None, first)


def merged(found: Iterator[FieldDifference | None], of: int) -> list[FieldDifference]:
    """Differences of one field at several places as one, with the first place and the count."""
    by_field: dict[str, list[FieldDifference]] = {}
    for item in found:
        if item is not None:
            by_field.setdefault(item.field, []).append(item)
    return [_together(items, of) for items in by_field.values()]


def _together(items: list[FieldDifference], of: int) -> FieldDifference:
    first = min(items, key=lambda item: item.rank)
    sizes = [item.largest for item in items if item.largest is not None]
    return FieldDifference(
        field=first.field,
        where=first.where,
        token=first.token,
        a=first.a,
        b=first.b,
        size=first.size,
        count=len(items),
        of=of,
        largest=max(sizes, default=None),
        rank=first.rank,
    )


def _differ(a: np.ndarray, b: np.ndarray, tolerance: float) -> np.ndarray:
    """bool, like `a`."""
    if a.dtype.kind != "f":
        return a != b
    with np.errstate(invalid="ignore"):
        near = np.abs(a.astype(np.float64) - b) <= tolerance
    return ~(near | (a == b) | (np.isnan(a) & np.isnan(b)))


def _size(a: Any, b: Any) -> float | None:
    if not (_is_number(a) and _is_number(b)):
        return None
    return abs(float(a) - float(b))


def _largest(a: np.ndarray, b: np.ndarray) -> float | None:
    if a.dtype.kind != "f" or not len(a):
        return None
    gap = np.abs(a.astype(np.float64) - b)
    return float(np.max(gap)) if np.isfinite(gap).all() else float("inf")


def _is_number(value: Any) -> bool:
    number = isinstance(value, int | float | np.integer | np.floating)
    return number and not isinstance(value, bool | np.bool_)
