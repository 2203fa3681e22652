"""Prompts, identities, rewards, experience (sealed facts) and derived tensors of one iteration.

Identities. `prompt_id` names the source row, `group_id = run/iteration/prompt_id`,
`sample_id = group_id/candidate`; strings are made at the edge, inside the loop ids are the pair
(draw index, candidate).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from enum import StrEnum

import numpy as np

from megarl.contracts.samples import Samples


@dataclass(frozen=True, slots=True)
class Prompt:
    """One row of a data source, as the engine will get it."""

    prompt_id: str
    source: str
    text: str
    """What the user wrote, before the chat template; for people and scorers."""
    token_ids: tuple[int, ...]
    """The very ids the engine executes, template and special tokens included."""
    answer: str
    metadata: dict = field(default_factory=dict)


@dataclass(frozen=True)
class Identities:
    """Names of one iteration's draw; turns (draw index, candidate) into id strings."""

    run_id: str
    iteration: int
    prompt_ids: tuple[str, ...]
    """`prompt_ids[draw_index]` is the source row's id; one row is drawn at most once."""

    def __post_init__(self) -> None:
        if len(set(self.prompt_ids)) != len(self.prompt_ids):
            raise ValueError(f"iteration {self.iteration} draws a prompt twice")

    def group_id(self, draw_index: int) -> str:
        return f"{self.run_id}/{self.iteration}/{self.prompt_ids[draw_index]}"

    def sample_id(self, draw_index: int, candidate: int) -> str:
        return f"{self.group_id(draw_index)}/{candidate}"


class RewardStatus(StrEnum):
    OK = "ok"
    TIMEOUT = "timeout"
    ERROR = "error"


UNKNOWN_TOKEN = "unknown_token"
"""The detail of an error record: the response has an id that the tokenizer does not know."""


class RewardKind(StrEnum):
    RAW = "raw"
    NORMALISED = "normalised"
    SHAPED = "shaped"


@dataclass(frozen=True, slots=True)
class RewardRecord:
    """What a scorer said of one sample. "Wrong", "scored 0" and "not scorable" are three things.

    Raises `ValueError` when the total and the status contradict: `total` is None exactly when
    `status` is not `ok`, and a non-finite total is refused.
    """

    draw_index: int
    candidate: int
    total: float | None
    components: dict[str, float]
    scorer_version: str
    status: RewardStatus
    kind: RewardKind = RewardKind.RAW
    detail: str = ""
    seconds: float = 0.0
    applies_to: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Component → response token span [start, stop); empty means the whole response."""
    step_rewards: tuple[tuple[int, float], ...] = ()
    """(response token index, value) of process rewards."""

    def __post_init__(self) -> None:
        if (self.total is None) == (self.status is RewardStatus.OK):
            raise ValueError(f"reward of status {self.status} with total {self.total}")
        values = [*self.components.values(), *(v for _, v in self.step_rewards)]
        values += [] if self.total is None else [self.total]
        if not np.isfinite(values).all():
            raise ValueError(f"reward with a value that is not finite: {self}")


@dataclass(frozen=True)
class Scores:
    """Columnar reward records in canonical order. `total` is NaN exactly where `ok` is False."""

    draw_index: np.ndarray  # int32 [N]
    candidate: np.ndarray  # int32 [N]
    total: np.ndarray  # float64 [N]
    status: tuple[RewardStatus, ...]
    detail: tuple[str, ...]
    components: dict[str, np.ndarray]  # float64 [N] each, NaN where the record has none
    seconds: np.ndarray  # float64 [N]
    scorer_version: str

    @property
    def ok(self) -> np.ndarray:
        return np.array([status is RewardStatus.OK for status in self.status], dtype=bool)

    def select(self, rows: Sequence[int] | np.ndarray) -> Scores:
        """The given rows, in the given order."""
        rows = np.asarray(rows, dtype=np.int64)
        return Scores(
            draw_index=self.draw_index[rows],
            candidate=self.candidate[rows],
            total=self.total[rows],
            status=tuple(self.status[row] for row in rows),
            detail=tuple(self.detail[row] for row in rows),
            components={name: values[rows] for name, values in self.components.items()},
            seconds=self.seconds[rows],
            scorer_version=self.scorer_version,
        )

    @staticmethod
    def concat(parts: Sequence[Scores]) -> Scores:
        """All rows of `parts`, in the given order; refuses several scorer versions."""
        versions = {part.scorer_version for part in parts if len(part.status)}
        if len(versions) > 1:
            raise ValueError(f"rewards of several scorer versions in one step: {sorted(versions)}")
        names = sorted({name for part in parts for name in part.components})

        def column(name: str) -> np.ndarray:
            empty = [np.full(len(part.status), np.nan) for part in parts]
            columns = [p.components.get(name, e) for p, e in zip(parts, empty, strict=True)]
            return np.concatenate(columns)

        return Scores(
            draw_index=np.concatenate([part.draw_index for part in parts]),
            candidate=np.concatenate([part.candidate for part in parts]),
            total=np.concatenate([part.total for part in parts]),
            status=tuple(status for part in parts for status in part.status),
            detail=tuple(detail for part in parts for detail in part.detail),
            components={name: column(name) for name in names},
            seconds=np.concatenate([part.seconds for part in parts]),
            scorer_version=next(iter(versions), ""),
        )

    @staticmethod
    def from_records(records: Sequence[RewardRecord]) -> Scores:
        """Canonical columns of `records`; refuses two records for one sample or two scorers."""
        ordered = sorted(records, key=lambda record: (record.draw_index, record.candidate))
        pairs = {(record.draw_index, record.candidate) for record in ordered}
        if len(pairs) != len(ordered):
            raise ValueError("two reward records for one sample")
        versions = {record.scorer_version for record in ordered}
        if len(versions) > 1:
            raise ValueError(f"rewards of several scorer versions in one step: {sorted(versions)}")
        nan = float("nan")
        names = sorted({name for record in ordered for name in record.components})
        return Scores(
            draw_index=np.array([r.draw_index for r in ordered], dtype=np.int32),
            candidate=np.array([r.candidate for r in ordered], dtype=np.int32),
            total=np.array([nan if r.total is None else r.total for r in ordered]),
            status=tuple(r.status for r in ordered),
            detail=tuple(r.detail for r in ordered),
            components={
                name: np.array([r.components.get(name, nan) for r in ordered]) for name in names
            },
            seconds=np.array([r.seconds for r in ordered]),
            scorer_version=next(iter(versions), ""),
        )


@dataclass(frozen=True)
class Experience:
    """Sealed facts of this rank's samples. Per-token arrays run over `samples.response_ids`."""

    samples: Samples
    scores: Scores
    old_log_probs: np.ndarray  # float32 [R], the actor's before any update of the iteration
    ref_log_probs: np.ndarray | None  # float32 [R], when a KL term needs them
    values: np.ndarray | None  # float32 [R], the critic's
    producers: dict[str, str]
    """Role (`rollout`, `old`, `ref`, `critic`) → version id that made its column."""
    hash: str
    """Manifest hash over every rank's part; the same on every rank."""

    def __post_init__(self) -> None:
        tokens = len(self.samples.response_ids)
        for item in fields(self):
            value = getattr(self, item.name)
            if item.name.endswith("_log_probs") or item.name == "values":
                if value is None:
                    continue
                if value.dtype != np.float32 or value.shape != (tokens,):
                    raise ValueError(
                        f"{item.name} is {value.dtype}{value.shape}, not float32({tokens},)"
                    )
                value.setflags(write=False)
        for name in ("draw_index", "candidate"):
            if not np.array_equal(getattr(self.samples, name), getattr(self.scores, name)):
                raise ValueError(f"{name} of samples and scores differ: scores join by id")
        if self.ref_log_probs is not None and "ref" not in self.producers:
            raise ValueError(f"reference log-probs of an unnamed version: {self.producers}")
        if self.producers.get("rollout") != self.producers.get("old"):
            raise ValueError(f"rollout and old log-probs of two versions: {self.producers}")
        if self.samples.version_id != self.producers.get("rollout"):
            raise ValueError(
                f"samples of version {self.samples.version_id}, rollout {self.producers}"
            )


@dataclass(frozen=True)
class Derived:
    """What can be recomputed from an experience under some hyper-parameters."""

    experience_hash: str
    recipe_hash: str
    advantages: np.ndarray  # float32 [R]
    shaped_rewards: np.ndarray | None = None  # float32 [R]
    returns: np.ndarray | None = None  # float32 [R]
