"""Step scores: process rewards on single response tokens, ragged over samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megarl.contracts.ragged import gather_ragged, lengths_to_offsets


@dataclass(frozen=True)
class Steps:
    """Step scores of N samples: those of row r are `[offsets[r]:offsets[r + 1]]`.

    Raises `ValueError` when lengths disagree, an index is negative or a value is not finite.
    """

    offsets: np.ndarray  # int64 [N+1]
    token: np.ndarray  # int32 [S], the response token at which the step ends, rising within a row
    value: np.ndarray  # float64 [S]

    def __post_init__(self) -> None:
        for name, dtype in (("offsets", np.int64), ("token", np.int32), ("value", np.float64)):
            object.__setattr__(self, name, np.asarray(getattr(self, name), dtype=dtype))
        offsets, steps = self.offsets, len(self.token)
        if not len(offsets) or offsets[0] != 0 or (np.diff(offsets) < 0).any():
            raise ValueError("offsets of step scores must begin with 0 and never fall")
        if not offsets[-1] == steps == len(self.value):
            raise ValueError(
                f"step scores: offsets end at {offsets[-1]} for {steps} tokens and "
                f"{len(self.value)} values"
            )
        if (self.token < 0).any() or not np.isfinite(self.value).all():
            raise ValueError("step scores need response token indices ≥ 0 and finite values")

    def __len__(self) -> int:
        """N, the rows."""
        return len(self.offsets) - 1

    @property
    def counts(self) -> np.ndarray:
        """int64 [N], step scores of each row."""
        return np.diff(self.offsets)

    @property
    def row(self) -> np.ndarray:
        """int64 [S], the row of each step."""
        return np.repeat(np.arange(len(self)), self.counts)

    @property
    def totals(self) -> np.ndarray:
        """float64 [N], each row's values summed in their order; 0 where there are none."""
        return np.bincount(self.row, self.value, minlength=len(self))

    def select(self, rows: Sequence[int] | np.ndarray) -> Steps:
        """The given rows, in the given order."""
        rows = np.asarray(rows, dtype=np.int64)
        token, value = gather_ragged([self.token, self.value], self.offsets, rows)
        return Steps(lengths_to_offsets(self.counts[rows]), token, value)

    @staticmethod
    def none(rows: int) -> Steps:
        """No step scores for so many rows."""
        return Steps(np.zeros(rows + 1, np.int64), np.zeros(0, np.int32), np.zeros(0))

    @staticmethod
    def concat(parts: Sequence[Steps]) -> Steps:
        """All rows of `parts`, in the given order."""
        if not parts:
            return Steps.none(0)
        return Steps(
            lengths_to_offsets(np.concatenate([part.counts for part in parts])),
            np.concatenate([part.token for part in parts]),
            np.concatenate([part.value for part in parts]),
        )

    @staticmethod
    def from_pairs(rows: Sequence[Sequence[tuple[int, float]]]) -> Steps:
        """Of each row its (response token index, value) pairs, as reward records hold them."""
        pairs = [pair for row in rows for pair in row]
        lengths = np.fromiter(map(len, rows), np.int64, len(rows))
        return Steps(
            lengths_to_offsets(lengths),
            np.fromiter((token for token, _ in pairs), np.int32, len(pairs)),
            np.fromiter((value for _, value in pairs), np.float64, len(pairs)),
        )
