"""Idempotent joins: results of one role meet by id, in whatever order and however often they come.

The key is (run, iteration, sample, role, role version): an `Origin` names all of it but the sample,
and holds for all rows of a `Results`. Against what is expected a result is

- *joined*, the first time;
- a *duplicate* when it says the same again: it changes nothing and is counted;
- *late* when it is of another run, iteration or version, of an older attempt, or of a sample that
  nobody asked for: it changes nothing and is counted;
- a contradiction when it says something else under the same key: `JoinError` names the sample and
  the field.

What is missing is told; what to do about it is the caller's. Pure, sorts once: N log N.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from megarl.contracts.ids import name_pairs
from megarl.contracts.ragged import gather_ragged, lengths_to_offsets

FEW, MOST_NAMES = 4, 8
"""So many samples are named of one join and kind, and in a sum of counts."""


@dataclass(frozen=True, slots=True)
class JoinCounts:
    """Results that changed nothing, and the first few of them by name."""

    duplicates: int = 0
    """The same result again."""
    late: int = 0
    """Of an older attempt, another version, iteration or run, or of a sample nobody asked for."""
    duplicate_names: tuple[str, ...] = ()
    late_names: tuple[str, ...] = ()

    def __add__(self, other: JoinCounts) -> JoinCounts:
        return JoinCounts(
            self.duplicates + other.duplicates,
            self.late + other.late,
            (self.duplicate_names + other.duplicate_names)[:MOST_NAMES],
            (self.late_names + other.late_names)[:MOST_NAMES],
        )

    @property
    def account(self) -> dict[str, int]:
        """The counts, as the ledger keeps them."""
        return {"duplicates": self.duplicates, "late": self.late}


class JoinError(ValueError):
    """Two different results under one key. `keys` are such samples', `field` is the column."""

    def __init__(self, message: str, keys: np.ndarray, field: str) -> None:
        super().__init__(message)
        self.keys = keys
        self.field = field


@dataclass(frozen=True, slots=True)
class Origin:
    """Of what some results are: with the sample's id, all that they join on."""

    run_id: str
    iteration: int
    role: str
    """`rollout`, `reward`, `old`, `ref` or `critic`."""
    version: str
    """Id of the policy, scorer, reference or critic version that made them."""
    attempt: int = 0
    """How often the iteration was begun: what an abandoned attempt made is never used."""

    def why_late(self, expected: Origin) -> str:
        """In words how results of this origin miss the expected one; empty where they do not.

        Raises `ValueError` for another role, and for an attempt above the expected one: then it
        is the expectation that is out of date.
        """
        if self.role != expected.role:
            raise ValueError(f"results of role {self.role} in a join of role {expected.role}")
        for name in ("run_id", "iteration", "version"):
            mine, theirs = getattr(self, name), getattr(expected, name)
            if mine != theirs:
                return f"of {name} {mine}, expected {theirs}"
        if self.attempt > expected.attempt:
            raise ValueError(
                f"{self.role} results of attempt {self.attempt} of iteration {self.iteration}, "
                f"where attempt {expected.attempt} is running: this rank missed a roll-back"
            )
        if self.attempt < expected.attempt:
            return f"of attempt {self.attempt}, expected {expected.attempt}"
        return ""


@dataclass(frozen=True, slots=True)
class Ragged:
    """A column whose values are rows of elements: row r is flat[offsets[r]:offsets[r + 1]]."""

    flat: np.ndarray  # [elements]
    offsets: np.ndarray  # int64 [N+1]

    def take(self, rows: np.ndarray) -> Ragged:
        (flat,) = gather_ragged([self.flat], self.offsets, rows)
        return Ragged(flat, lengths_to_offsets(np.diff(self.offsets)[rows]))

    @staticmethod
    def concat(parts: Sequence[Ragged]) -> Ragged:
        lengths = np.concatenate([np.diff(part.offsets) for part in parts])
        return Ragged(np.concatenate([part.flat for part in parts]), lengths_to_offsets(lengths))


Column = np.ndarray | Ragged


@dataclass(frozen=True)
class Results:
    """What one source delivered in one go, in any order, n rows."""

    origin: Origin
    keys: np.ndarray  # int64 [n], `pair_keys` of the samples
    columns: Mapping[str, Column]
    """What the results say. Rows under one key must agree in each; NaN agrees with NaN."""
    incidental: Mapping[str, np.ndarray]
    """Numbers that make no two results different: who delivered them, what clocks said. Of
    repeats the smallest stays, compared in this order, so that no order of arrival shows."""


@dataclass(frozen=True)
class Joined:
    """One row per sample in canonical order, K rows."""

    keys: np.ndarray  # int64 [K], rising
    part: np.ndarray  # int64 [K], index in the `results` that were joined
    row: np.ndarray  # int64 [K], row of that part
    missing: np.ndarray  # int64, wanted keys that nobody delivered, rising
    counts: JoinCounts

    def rows_of(self, part: int) -> np.ndarray:
        """int64, the rows that stay of one of the results, in canonical order."""
        return self.row[self.part == part]

    def take(self, results: Sequence[Results], name: str) -> Column:
        """A column [K] of the joined rows."""
        sizes = np.array([len(result.keys) for result in results], dtype=np.int64)
        starts = np.concatenate([[0], np.cumsum(sizes)])[:-1]
        whole = _column([result.columns[name] for result in results])
        return _take(whole, starts[self.part] + self.row)


def join(expected: Origin, results: Sequence[Results], wanted: np.ndarray | None = None) -> Joined:
    """The results of one role, each sample's once.

    `wanted` int64 holds the keys of the samples that results are awaited for: others are late,
    and those without a result are `missing`. None awaits whatever comes.

    Raises `JoinError` for two different results of one sample, and `ValueError` for results of
    another role or of an attempt above the expected one.
    """
    counts = JoinCounts()
    fresh = []
    for number, result in enumerate(results):
        why = result.origin.why_late(expected)
        if why:
            counts += late_counts(expected.role, result.keys, why)
        else:
            fresh.append(number)
    sizes = [len(results[number].keys) for number in fresh]
    part = np.repeat(np.array(fresh, dtype=np.int64), sizes)
    row = np.concatenate([np.zeros(0, np.int64), *map(np.arange, sizes)])
    keys = np.concatenate([np.zeros(0, np.int64), *(results[number].keys for number in fresh)])
    asked = np.arange(len(keys))
    if wanted is not None:
        wanted = np.unique(wanted)
        inside = contains(wanted, keys)
        counts += late_counts(expected.role, keys[~inside], "of a sample nobody asked for")
        asked = np.flatnonzero(inside)
    parts = [results[number] for number in fresh]
    chosen, repeats = _first_of_each(keys, asked, parts)
    counts += duplicate_counts(expected.role, keys[repeats])
    chosen_keys = keys[chosen]
    missing = np.zeros(0, np.int64) if wanted is None else wanted[~contains(chosen_keys, wanted)]
    return Joined(chosen_keys, part[chosen], row[chosen], missing, counts)


def _first_of_each(
    keys: np.ndarray, asked: np.ndarray, parts: Sequence[Results]
) -> tuple[np.ndarray, np.ndarray]:
    """(one index per key, rising in key; the indices that repeat one), of the asked indices."""
    order = asked[np.argsort(keys[asked], kind="stable")]
    if not (np.diff(keys[order]) == 0).any():
        return order, order[:0]
    names = list(parts[0].incidental)
    ties = [np.concatenate([part.incidental[name] for part in parts])[asked] for name in names]
    order = asked[np.lexsort((*reversed(ties), keys[asked]))]
    is_first = np.concatenate([[True], np.diff(keys[order]) != 0])
    first = np.maximum.accumulate(np.where(is_first, np.arange(len(order)), 0))
    repeats, originals = order[~is_first], order[first[~is_first]]
    for name in parts[0].columns:
        whole = _column([part.columns[name] for part in parts])
        odd = _differ(whole, originals, repeats)
        if odd.any():
            at = np.flatnonzero(odd)[0]
            told = _tell(whole, int(originals[at]), int(repeats[at]))
            role = parts[0].origin.role
            odd_keys = np.unique(keys[repeats[odd]])
            raise JoinError(
                f"two different {role} results of sample {name_pairs(odd_keys)}: {name} is {told}",
                odd_keys,
                name,
            )
    return order[is_first], repeats


def contains(rising: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """bool [n], which of `keys` are in the sorted int64 array `rising`."""
    if len(rising) == 0:
        return np.zeros(len(keys), dtype=bool)
    return rising[np.minimum(np.searchsorted(rising, keys), len(rising) - 1)] == keys


def late_counts(role: str, keys: np.ndarray, why: str) -> JoinCounts:
    """All of `keys` as late results of a role, the first few named."""
    named = [f"{role} {name_pairs(np.array([key]))} {why}" for key in np.sort(keys)[:FEW]]
    return JoinCounts(late=len(keys), late_names=tuple(named))


def duplicate_counts(role: str, keys: np.ndarray) -> JoinCounts:
    """All of `keys` as repeated results of a role, the first few named."""
    named = [f"{role} {name_pairs(np.array([key]))}" for key in np.sort(keys)[:FEW]]
    return JoinCounts(duplicates=len(keys), duplicate_names=tuple(named))


def _column(parts: Iterable[Column]) -> Column:
    parts = list(parts)
    ragged = isinstance(parts[0], Ragged)
    return Ragged.concat(parts) if ragged else np.concatenate(parts)


def _take(column: Column, rows: np.ndarray) -> Column:
    return column.take(rows) if isinstance(column, Ragged) else column[rows]


def _differ(column: Column, left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """bool [n]: rows left[i] and right[i] of a column differ."""
    if isinstance(column, Ragged):
        lengths = np.diff(column.offsets)
        odd = lengths[left] != lengths[right]
        same = np.flatnonzero(~odd & (lengths[left] > 0))
        a, b = column.take(left[same]), column.take(right[same])
        if len(same):
            odd[same] = np.logical_or.reduceat(_unequal(a.flat, b.flat), a.offsets[:-1])
        return odd
    return _unequal(column[left], column[right])


def _unequal(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    unequal = np.asarray(left != right, dtype=bool)
    if left.dtype.kind == "f":
        unequal &= ~(np.isnan(left) & np.isnan(right))
    return unequal


def _tell(column: Column, left: int, right: int) -> str:
    """How two rows of a column differ, in a few words."""
    if not isinstance(column, Ragged):
        return f"{_plain(column[left])} and {_plain(column[right])}"
    a, b = (column.take(np.array([row])).flat for row in (left, right))
    if len(a) != len(b):
        return f"{len(a)} and {len(b)} values long"
    at = int(np.flatnonzero(_unequal(a, b))[0])
    return f"{_plain(a[at])} and {_plain(b[at])} at position {at}"


def _plain(value: Any) -> str:
    return repr(value.item() if isinstance(value, np.generic) else value)
