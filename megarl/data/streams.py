"""Endless orders of rows, and which source's turn it is where the recipe weighs its sources.

A stream goes through the rows of one source again and again; every epoch is a shuffle of its own.
Whose turn it is follows from the turns so far alone, without any randomness.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Container, Iterable, Sequence
from fractions import Fraction
from math import lcm

import numpy as np


class Stream:
    """The rows of one source in an endless order, once an epoch."""

    def __init__(self, rows: np.ndarray, key: np.uint64) -> None:
        """`rows` int64 [R], at least one; `key` seeds the shuffles."""
        self.rows = rows
        self.position = 0
        """Rows of the endless order that were passed: drawn, stepped back or passed over."""
        self._stepped: list[int] = []
        """Rows that stepped back in this iteration."""
        self._waiting: deque[int] = deque()
        """Rows that stepped back in earlier ones; they come before what follows `position`."""
        self._spent = False
        """Nothing is left to this iteration."""
        self._key = key
        self._epoch, self._order = 0, self._shuffle(0)

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def epoch(self) -> float:
        """How many times the rows have been gone through."""
        back = len(self._stepped) + len(self._waiting)
        return (self.position - back) / len(self.rows)

    @property
    def back(self) -> list[int]:
        """Passed rows that stepped back, in order; the next iteration begins with them."""
        return [*self._stepped, *self._waiting]

    def restore(self, position: int, back: Iterable[int]) -> None:
        """Go on, with an iteration that begins, where the stream stopped that said these."""
        self.position, self._waiting = position, deque(back)
        self._stepped, self._spent = [], False

    def begin(self) -> None:
        """An iteration begins: rows that stepped back come up again, in their order."""
        self._waiting.extendleft(reversed(self._stepped))
        self._stepped, self._spent = [], False

    def take(self, drawn: Container[int], may: Callable[[int], bool]) -> int | None:
        """The next row that is not in `drawn` and `may` be drawn. Rows in `drawn` step back, others
        that may not are passed over until their turn in the next epoch.

        None when there is no such row; then nothing is consumed. Until `begin`, rows may come into
        `drawn` and be refused by `may`, never the other way: no row is looked at again, and where
        there was none once there is none until then.
        """
        if self._spent:
            return None
        position, stepped, waited = self.position, len(self._stepped), []
        # The end of the next epoch: by then every row came up.
        end = (self.position // len(self.rows) + 2) * len(self.rows)
        while self._waiting or self.position < end:
            if self._waiting:
                row = self._waiting.popleft()
                waited.append(row)
            else:
                row = self._next()
            if row in drawn:
                self._stepped.append(row)
            elif may(row):
                return row
        self.position, self._spent = position, True
        self._waiting.extend(waited)
        del self._stepped[stepped:]
        return None

    def _next(self) -> int:
        epoch, at = divmod(self.position, len(self.rows))
        if epoch != self._epoch:
            self._epoch, self._order = epoch, self._shuffle(epoch)
        self.position += 1
        return int(self._order[at])

    def _shuffle(self, epoch: int) -> np.ndarray:
        """int64 [R]. Integer mixing of our own: the same on every machine and numpy version."""
        places = np.arange(len(self.rows), dtype=np.uint64)
        with np.errstate(over="ignore"):
            stream = mix(np.array([self._key], np.uint64) + np.uint64(epoch))
            keys = mix(stream + places * np.uint64(0x9E3779B97F4A7C15))
        return self.rows[np.argsort(keys, kind="stable")]


def stream_key(seed: int, source: int | None = None) -> np.uint64:
    """What seeds the shuffles of a stream: of source number `source`, or of all rows."""
    with np.errstate(over="ignore"):
        key = mix(np.array([seed % 2**64], np.uint64))
        return (key if source is None else mix(key + mix(np.array([source], np.uint64))))[0]


def mix(x: np.ndarray) -> np.ndarray:
    """splitmix64's finaliser, uint64 → uint64."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


class Turns:
    """Deals turns to sources by their weights, in exact arithmetic.

    After any number n of turns each source has had less than one turn more or less than its share
    n · weight / Σ weights. This is the quota method of Balinski and Young (American Mathematical
    Monthly 82, 1975): of the sources whose next turn would not lift them above their share rounded
    up, the one with the smallest (turns + 1) / weight. Without that condition (D'Hondt) a source of
    0.9 beside ten of 0.01 is 8.9 turns ahead after 89.
    """

    def __init__(self, weights: Sequence[float]) -> None:
        """`weights` above 0, taken as the decimal numbers that they are written as."""
        exact = [Fraction(repr(float(weight))) for weight in weights]
        scale = lcm(*(weight.denominator for weight in exact))
        self._parts = [int(weight * scale) for weight in exact]
        self._whole = sum(self._parts)

    def share(self, source: int) -> Fraction:
        return Fraction(self._parts[source], self._whole)

    def next(self, turns: Sequence[int]) -> int:
        """The source whose turn comes after each has had so many `turns`; of equals the first."""
        number = sum(turns) + 1
        return self._first(
            turns,
            [
                source
                for source, part in enumerate(self._parts)
                if turns[source] * self._whole < number * part
            ],
        )

    def stand_in(self, turns: Sequence[int], able: Sequence[int]) -> int:
        """Which of the `able` sources takes over another's turn, after each took over `turns`."""
        return self._first(turns, able)

    def _first(self, turns: Sequence[int], among: Sequence[int]) -> int:
        return min(among, key=lambda source: Fraction(turns[source] + 1, self._parts[source]))
