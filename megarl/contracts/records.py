"""Prompts, identities, rewards, experience (sealed facts) and derived tensors of one iteration.

Identities. `prompt_id` names the source row, `group_id = run/iteration/prompt_id`,
`sample_id = group_id/candidate`; strings are made at the edge, inside the loop ids are the pair
(draw index, candidate).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from operator import attrgetter

import numpy as np

from megarl.contracts.ids import pair_keys
from megarl.contracts.samples import Samples
from megarl.contracts.steps import Steps


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
    reward: str = ""
    """Its reward name: the scorers that name it in `only`, and those that name none, score it."""


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


STATUSES = tuple(RewardStatus)
"""A status as a number, in columns and sealed files, is its place here."""
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
    """Columnar reward records in canonical order. `total` is NaN exactly where `ok` is False.

    Statuses and details are numbers inside: `status` and `detail` spell them out, at a tuple of N.
    """

    draw_index: np.ndarray  # int32 [N]
    candidate: np.ndarray  # int32 [N]
    total: np.ndarray  # float64 [N]
    status_code: np.ndarray  # int8 [N], an index into `STATUSES`
    detail_code: np.ndarray  # int32 [N], an index into `details`
    details: tuple[str, ...]
    """The different details, sorted; some may be no row's."""
    components: dict[str, np.ndarray]  # float64 [N] each, NaN where the record has none
    seconds: np.ndarray  # float64 [N]
    scorer_version: str
    steps: Steps | None = None
    """Step scores of the N rows; None, where nobody gives any, becomes a `Steps` without any."""

    def __post_init__(self) -> None:
        if self.steps is None:
            object.__setattr__(self, "steps", Steps.none(len(self.total)))
        if len(self.steps) != len(self.total):
            raise ValueError(f"step scores of {len(self.steps)} rows for {len(self.total)} totals")

    def __len__(self) -> int:
        return len(self.total)

    @property
    def keys(self) -> np.ndarray:
        """int64 [N], `pair_keys`."""
        return pair_keys(self.draw_index, self.candidate)

    @property
    def status(self) -> tuple[RewardStatus, ...]:
        return tuple(STATUSES[code] for code in self.status_code.tolist())

    @property
    def detail(self) -> tuple[str, ...]:
        return tuple(self.details[code] for code in self.detail_code.tolist())

    @property
    def ok(self) -> np.ndarray:
        """bool [N]."""
        return self.status_code == STATUSES.index(RewardStatus.OK)

    def has_detail(self, detail: str) -> np.ndarray:
        """bool [N], the rows with this very detail."""
        if detail not in self.details:
            return np.zeros(len(self), dtype=bool)
        return self.detail_code == self.details.index(detail)

    def select(self, rows: Sequence[int] | np.ndarray) -> Scores:
        """The given rows, in the given order."""
        rows = np.asarray(rows, dtype=np.int64)
        return Scores(
            **{name: getattr(self, name)[rows] for name in _SCORE_COLUMNS},
            details=self.details,
            components={name: values[rows] for name, values in self.components.items()},
            scorer_version=self.scorer_version,
            steps=self.steps.select(rows),
        )

    @staticmethod
    def concat(parts: Sequence[Scores]) -> Scores:
        """All rows of `parts`, in the given order; refuses several scorer versions."""
        versions = {part.scorer_version for part in parts if len(part)}
        if len(versions) > 1:
            raise ValueError(f"rewards of several scorer versions in one step: {sorted(versions)}")
        names = sorted({name for part in parts for name in part.components})
        details = tuple(sorted({detail for part in parts for detail in part.details}))
        place = {detail: code for code, detail in enumerate(details)}

        def component(name: str) -> np.ndarray:
            empty = [np.full(len(part), np.nan) for part in parts]
            columns = [p.components.get(name, e) for p, e in zip(parts, empty, strict=True)]
            return np.concatenate(columns)

        columns = {n: np.concatenate([getattr(part, n) for part in parts]) for n in _SCORE_COLUMNS}
        columns["detail_code"] = np.concatenate(
            [
                np.array([place[detail] for detail in part.details], np.int32)[part.detail_code]
                for part in parts
            ]
        )
        return Scores(
            **columns,
            details=details,
            components={name: component(name) for name in names},
            scorer_version=next(iter(versions), ""),
            steps=Steps.concat([part.steps for part in parts]),
        )

    @staticmethod
    def from_records(records: Sequence[RewardRecord]) -> Scores:
        """Canonical columns of `records`; refuses two records for one sample or two scorers."""
        draws = column_of(records, "draw_index", np.int32)
        candidates = column_of(records, "candidate", np.int32)
        keys = pair_keys(draws, candidates)
        order = np.argsort(keys, kind="stable")
        if (np.diff(keys[order]) == 0).any():
            raise ValueError("two reward records for one sample")
        ordered = [records[row] for row in order.tolist()]
        versions = {record.scorer_version for record in ordered}
        if len(versions) > 1:
            raise ValueError(f"rewards of several scorer versions in one step: {sorted(versions)}")
        nan = float("nan")
        components = [record.components for record in ordered]
        names = sorted({name for values in components for name in values})
        words = [record.detail for record in ordered]
        details = tuple(sorted(set(words)))
        place = {detail: code for code, detail in enumerate(details)}
        codes = {status: code for code, status in enumerate(STATUSES)}
        rows = len(ordered)
        statuses = [codes[record.status] for record in ordered]
        # None, the total of what is not scored, becomes NaN in a float column.
        return Scores(
            draw_index=draws[order],
            candidate=candidates[order],
            total=column_of(ordered, "total", object).astype(np.float64),
            status_code=np.fromiter(statuses, np.int8, rows),
            detail_code=np.fromiter(map(place.__getitem__, words), np.int32, rows),
            details=details,
            components={
                name: np.fromiter((row.get(name, nan) for row in components), np.float64, rows)
                for name in names
            },
            seconds=column_of(ordered, "seconds", np.float64),
            scorer_version=next(iter(versions), ""),
            steps=Steps.from_pairs([record.step_rewards for record in ordered]),
        )


def column_of(records: Sequence[RewardRecord], name: str, dtype: type) -> np.ndarray:
    """One field of all records, [N]."""
    return np.fromiter(map(attrgetter(name), records), dtype, len(records))


_SCORE_COLUMNS = ("draw_index", "candidate", "total", "status_code", "detail_code", "seconds")


@dataclass(frozen=True)
class Experience:
    """Sealed facts of this rank's samples. Per-token arrays run over `samples.response_ids`."""

    samples: Samples
    scores: Scores
    old_log_probs: np.ndarray  # float32 [R], the actor's before any update of the iteration
    ref_log_probs: np.ndarray | None  # float32 [R], when a KL term needs them
    values: np.ndarray | None
    """float32 [R], the critic's V(s_t), read where response token t is predicted."""
    producers: dict[str, str]
    """Role (`rollout`, `old`, `ref`, `critic`) → version id that made its column."""
    hash: str
    """Manifest hash over every rank's part; the same on every rank."""
    last_values: np.ndarray | None = None
    """float32 [n], the critic's value at each sample's last response token's own position: what
    follows a response that was cut off."""

    def __post_init__(self) -> None:
        tokens = len(self.samples.response_ids)
        sizes = {"old_log_probs": tokens, "ref_log_probs": tokens, "values": tokens}
        for name, size in (sizes | {"last_values": len(self.samples)}).items():
            value = getattr(self, name)
            if value is None:
                continue
            if value.dtype != np.float32 or value.shape != (size,):
                raise ValueError(f"{name} is {value.dtype}{value.shape}, not float32({size},)")
            value.setflags(write=False)
        for name in ("draw_index", "candidate"):
            if not np.array_equal(getattr(self.samples, name), getattr(self.scores, name)):
                raise ValueError(f"{name} of samples and scores differ: scores join by id")
        if self.ref_log_probs is not None and "ref" not in self.producers:
            raise ValueError(f"reference log-probs of an unnamed version: {self.producers}")
        if self.values is not None and "critic" not in self.producers:
            raise ValueError(f"values of an unnamed critic version: {self.producers}")
        if self.values is None and self.last_values is not None:
            raise ValueError("values after the last token, but none of the tokens")
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
    shaped_rewards: np.ndarray | None = None
    """float32 [R], token rewards with the KL penalty, where the estimator sums token rewards."""
    returns: np.ndarray | None = None
    """float32 [R], what the critic learns; 0 where a token is no action."""
    kl_beta: float = 0.0
    """β of the iteration, adaptive or not; 0 without a reference."""
