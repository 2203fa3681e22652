"""The small global table of one iteration's samples, the same on every rank: what decides what
trains, in which minibatch and where. A few numbers per sample and its score, no tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from megarl.contracts.ids import name_pairs, pair_keys
from megarl.contracts.records import UNKNOWN_TOKEN, Scores
from megarl.contracts.samples import END_OF_REASON, EndReason
from megarl.data.join import JoinCounts


@dataclass(frozen=True)
class SampleTable:
    """All samples of all replicas in canonical order (N rows)."""

    draw_index: np.ndarray  # int32 [N]
    candidate: np.ndarray  # int32 [N]
    prompt_length: np.ndarray  # int64 [N], tokens
    response_length: np.ndarray  # int64 [N], tokens
    actions: np.ndarray  # int64 [N], action tokens of the response
    end_reason: np.ndarray  # int8 [N], an `EndReason`
    replica: np.ndarray  # int32 [N], which rollout replica made it
    started: np.ndarray  # float64 [N], unix seconds, by the clock of the replica's leader
    finished: np.ndarray  # float64 [N]
    scores: Scores
    version_id: str
    """The policy version that generated every row."""
    contents: np.ndarray | None = None
    """uint64 [N], `fingerprints` of the rows' facts; None where no tokens will follow the table."""
    joined: JoinCounts = JoinCounts()
    """What came again or late while the table was gathered."""

    def __post_init__(self) -> None:
        """Raises `ValueError` for a step score beyond its response, alike wherever the table is."""
        steps = self.scores.steps
        beyond = np.flatnonzero(steps.token >= self.response_length[steps.row])
        if len(beyond):
            row = steps.row[beyond[0]]
            raise ValueError(
                f"a step score at token {steps.token[beyond[0]]} of sample "
                f"{name_pairs(self.keys[[row]])}, whose response has "
                f"{self.response_length[row]} tokens"
            )

    def __len__(self) -> int:
        return len(self.draw_index)

    @property
    def lengths(self) -> np.ndarray:
        """int64 [N], prompt + response tokens."""
        return self.prompt_length + self.response_length

    @property
    def end(self) -> np.ndarray:
        """int8 [N], an `End` per row."""
        table = np.array([END_OF_REASON[reason] for reason in EndReason], dtype=np.int8)
        return table[self.end_reason]

    @property
    def invalid(self) -> np.ndarray:
        """bool [N], responses with an id that the tokenizer does not know."""
        return self.scores.has_detail(UNKNOWN_TOKEN)

    @cached_property
    def keys(self) -> np.ndarray:
        """int64 [N], `pair_keys`, rising."""
        return pair_keys(self.draw_index, self.candidate)

    def rows_of(self, draw_index: np.ndarray, candidate: np.ndarray) -> np.ndarray:
        """int64 rows of the given ids; raises `KeyError` naming ids the table does not have."""
        keys = pair_keys(draw_index, candidate)
        rows = np.searchsorted(self.keys, keys)
        found = np.zeros(len(keys), dtype=bool)
        inside = rows < len(self)
        found[inside] = self.keys[rows[inside]] == keys[inside]
        if not found.all():
            raise KeyError(f"samples that are not in the table: {name_pairs(keys[~found])}")
        return rows
