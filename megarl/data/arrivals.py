"""What one replica delivers, samples and their reward records, joined where it was made."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from megarl.contracts.ids import pair_keys
from megarl.contracts.records import RewardRecord, column_of
from megarl.contracts.samples import Samples
from megarl.data.join import JoinCounts, Joined, Origin, Ragged, Results, join, late_counts


@dataclass(frozen=True, slots=True)
class Scope:
    """What an iteration's results are joined for, or what some results were made for."""

    run_id: str
    iteration: int
    version_id: str
    """The policy version that generates."""
    scorer_version: str | None = None
    """None where this rank does not score: then records of one scorer are taken, whichever."""
    attempt: int = 0
    """How often the iteration was begun; 0 the first time."""

    def origin(self, role: str, version: str | None = None) -> Origin:
        """Of the role's results; `version` is the scope's own unless given."""
        if version is None:
            version = self.version_id if role == "rollout" else self.scorer_version or ""
        return Origin(self.run_id, self.iteration, role, version, self.attempt)

    @property
    def told(self) -> str:
        return f"attempt {self.attempt} of iteration {self.iteration} of run {self.run_id!r}"


@dataclass(frozen=True)
class Arrival:
    """Samples and reward records that came together, in any order.

    Which policy and scorer made them is read from them; run, iteration and attempt from `scope`.
    """

    scope: Scope
    samples: Samples
    records: Sequence[RewardRecord] = ()

    @property
    def origin(self) -> Origin:
        """Of the samples."""
        return self.scope.origin("rollout", self.samples.version_id)


def join_samples(scope: Scope, arrivals: Sequence[Arrival]) -> tuple[Samples, JoinCounts]:
    """The samples that `scope` awaits, each once, in canonical order.

    Raises `JoinError` for two different samples of one id, and `ValueError` as `join`.
    """
    results = [_sample_results(arrival) for arrival in arrivals]
    joined = join(scope.origin("rollout"), results)
    kept = rows_that_stay([arrival.samples for arrival in arrivals], joined)
    whole = Samples.concat([Samples.from_rows([], scope.version_id), *kept])
    return whole.canonical(), joined.counts


def rows_that_stay(parts: Sequence[Samples], joined: Joined) -> list[Samples]:
    """Of each part of a join the rows that it kept; parts that lose nothing are not copied."""
    rows = [joined.rows_of(number) for number in range(len(parts))]
    return [
        part if len(kept) == len(part) else part.select(kept)
        for part, kept in zip(parts, rows, strict=True)
        if len(kept)
    ] or [part.select([]) for part in parts[:1]]


def _sample_results(arrival: Arrival) -> Results:
    samples = arrival.samples
    columns = {
        "prompt_ids": Ragged(samples.prompt_ids, samples.prompt_offsets),
        "end_reason": samples.end_reason,
        "seed": samples.seed,
    }
    for name in ("response_ids", "action_mask", "rollout_log_probs"):
        columns[name] = Ragged(getattr(samples, name), samples.response_offsets)
    if len(samples.experts):
        columns["experts"] = Ragged(samples.experts, samples.experts_offsets)
    clocks = {"finished": samples.finished, "started": samples.started}
    return Results(arrival.origin, samples.keys, columns, clocks)


def join_records(
    scope: Scope, arrivals: Sequence[Arrival]
) -> tuple[list[RewardRecord], JoinCounts]:
    """The reward records that `scope` awaits, one for each sample, in canonical order.

    Records that came with late samples are as late as these. Raises `JoinError` for two different
    records of one sample, and `ValueError` as `join`, or for records of several scorer versions
    where none is awaited.
    """
    counts = JoinCounts()
    batches: list[tuple[Origin, Sequence[RewardRecord]]] = []
    for arrival in arrivals:
        why = arrival.origin.why_late(scope.origin("rollout"))
        if why:
            keys = _record_keys(arrival.records)
            counts += late_counts("reward", keys, f"for samples {why}")
            continue
        for version, records in _by_scorer(arrival.records).items():
            batches.append((arrival.scope.origin("reward", version), records))
    awaited = scope.scorer_version
    if awaited is None:
        versions = sorted({origin.version for origin, _ in batches})
        if len(versions) > 1:
            raise ValueError(f"rewards of several scorer versions in one step: {versions}")
        awaited = versions[0] if versions else ""
    results = [_record_results(origin, records) for origin, records in batches]
    joined = join(scope.origin("reward", awaited), results)
    pairs = zip(joined.part.tolist(), joined.row.tolist(), strict=True)
    return [batches[part][1][row] for part, row in pairs], counts + joined.counts


def _by_scorer(records: Sequence[RewardRecord]) -> dict[str, Sequence[RewardRecord]]:
    versions = sorted({record.scorer_version for record in records})
    if len(versions) == 1:
        return {versions[0]: records}
    return {v: [record for record in records if record.scorer_version == v] for v in versions}


_RECORD_FIELDS = ("total", "status", "detail", "components", "kind", "applies_to", "step_rewards")


class _RecordColumns(Mapping[str, np.ndarray]):
    """Fields of records as columns of Python objects, made when repeats are compared in them."""

    def __init__(self, records: Sequence[RewardRecord]) -> None:
        self._records = records

    def __getitem__(self, name: str) -> np.ndarray:
        return column_of(self._records, name, object)

    def __iter__(self) -> Iterator[str]:
        return iter(_RECORD_FIELDS)

    def __len__(self) -> int:
        return len(_RECORD_FIELDS)


def _record_results(origin: Origin, records: Sequence[RewardRecord]) -> Results:
    clocks = {"seconds": column_of(records, "seconds", np.float64)}
    return Results(origin, _record_keys(records), _RecordColumns(records), clocks)


def _record_keys(records: Sequence[RewardRecord]) -> np.ndarray:
    draws, candidates = (column_of(records, n, np.int64) for n in ("draw_index", "candidate"))
    return pair_keys(draws, candidates)
