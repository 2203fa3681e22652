"""From where samples were generated to where they train, joined by id, never by position.

Two steps, each the same collectives on every rank, also on one that has or gets nothing:

1. `gather_arrivals`: a few numbers per sample and its score reach every rank, from replica leaders
   only. Decisions (groups, minibatches, packs) are then pure functions of that table.
2. `exchange`: tokens go to their owners, all ranks of a data-parallel part, in one all-to-all.

What comes again, or late, changes nothing and is counted (`join.py`). What is missing, unscored or
contradicts what came before is an error that names it, raised on every rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import numpy as np

from megarl.contracts.hashes import bytes_hash
from megarl.contracts.ids import name_pairs
from megarl.contracts.records import STATUSES, RewardRecord, Scores
from megarl.contracts.samples import Samples
from megarl.data.arrivals import Arrival, Scope, join_records, join_samples, rows_that_stay
from megarl.data.join import (
    FEW,
    Column,
    JoinCounts,
    Joined,
    JoinError,
    Ragged,
    Results,
    contains,
    duplicate_counts,
    join,
    late_counts,
)
from megarl.data.table import SampleTable
from megarl.data.wire import send_to_owners
from megarl.world import World


class ExchangeError(RuntimeError):
    """Samples or scores that do not join."""


@dataclass(frozen=True)
class Gathered:
    """The global table, and this replica's part of it."""

    table: SampleTable
    samples: Samples
    """The replica's rows of the table, in canonical order."""
    records: list[RewardRecord]
    """Their reward records, in the same order; none where this rank does not lead its replica."""


@dataclass(frozen=True)
class Owned:
    """What one data-parallel part trains on, in canonical order."""

    samples: Samples
    scores: Scores
    joined: JoinCounts
    """All that came again or late on any rank, in the table and on the way to the owners."""


@dataclass(frozen=True)
class Report:
    """What one rank tells the others of its replica's samples."""

    scope: Scope
    digest: str = ""
    problem: str = ""
    counts: JoinCounts = JoinCounts()
    columns: dict[str, np.ndarray] | None = None  # from the replica's leader
    scores: Scores | None = None  # its rows are those of `columns`, its ids are not repeated


def gather_table(
    world: World, samples: Samples, records: Sequence[RewardRecord], scope: Scope | None = None
) -> SampleTable:
    """The table of one arrival per replica; as `gather_arrivals`."""
    scope = Scope("", 0, samples.version_id) if scope is None else scope
    return gather_arrivals(world, scope, [Arrival(scope, samples, records)]).table


def gather_arrivals(world: World, scope: Scope, arrivals: Sequence[Arrival]) -> Gathered:
    """Every replica's samples and scores as one table in canonical order. Collective.

    `scope` is what is awaited, the same on every rank. `arrivals` are what this rank's replica
    made, in any order and number; samples on all its ranks, records read on its leader only. Of
    a sample that two replicas made alike, the lower one's stays.

    Raises `ExchangeError` on every rank: two different results of one sample, a sample without a
    score or the reverse, ranks of one replica that hold different samples, several scopes.
    """
    report, samples, records = report_of(scope, arrivals, leads=world.leads_replica)
    reports = world.gather(report)
    _check_reports(world, reports)
    leads = {
        world.mesh.replica(rank): report
        for rank, report in enumerate(reports)
        if report.columns is not None
    }
    try:
        table = table_of(scope, leads)
    except JoinError as error:  # from what all ranks hold alike, so all come here
        told = str(error)
        if error.field == "contents":
            told = _name_fields(world, samples, error.keys[:FEW])
        raise ExchangeError(f"samples and scores do not join: {told}") from error
    rows = table.rows_of(samples.draw_index, samples.candidate)
    mine = np.flatnonzero(table.replica[rows] == world.replica)
    if len(mine) < len(samples):
        samples = samples.select(mine)
        records = [records[row] for row in mine.tolist()] if records else records
    return Gathered(table, samples, records)


def report_of(
    scope: Scope, arrivals: Sequence[Arrival], leads: bool
) -> tuple[Report, Samples, list[RewardRecord]]:
    """(what this rank tells, its samples, their records) in canonical order; pure.

    A problem is told too and not raised, for peers wait in the collective already.
    """
    none = Samples.from_rows([], scope.version_id)
    try:
        samples, counts = join_samples(scope, arrivals)
    except ValueError as error:
        return Report(scope, problem=str(error)), none, []
    report = Report(scope, _digest(samples))
    if not leads:
        return report, samples, []
    try:
        records, scored = join_records(scope, arrivals)
        scores = Scores.from_records(records)
    except ValueError as error:
        return replace(report, problem=str(error)), samples, []
    counts += scored
    mine = samples.keys
    keys = scores.keys
    unscored, unknown = mine[~contains(keys, mine)], keys[~contains(mine, keys)]
    told = []
    if len(unscored):
        late = f" (late: {'; '.join(counts.late_names)})" if counts.late else ""
        told.append(f"samples without a reward record: {name_pairs(unscored)}{late}")
    if len(unknown):
        told.append(f"reward records without a sample: {name_pairs(unknown)}")
    if told:
        return replace(report, problem=", ".join(told)), samples, []
    stripped = replace(scores, draw_index=none.draw_index, candidate=none.candidate)
    columns = _table_columns(samples)
    return replace(report, columns=columns, scores=stripped, counts=counts), samples, records


def _table_columns(samples: Samples) -> dict[str, np.ndarray]:
    """All that other ranks are told of each sample; lengths fit int32."""
    actions = np.zeros(0, np.int32)
    if len(samples):
        starts = samples.response_offsets[:-1]
        actions = np.add.reduceat(samples.action_mask, starts, dtype=np.int32)
    return {
        "draw_index": samples.draw_index,
        "candidate": samples.candidate,
        "prompt_length": samples.prompt_lengths.astype(np.int32),
        "response_length": samples.response_lengths.astype(np.int32),
        "actions": actions,
        "end_reason": samples.end_reason,
        "started": samples.started,
        "finished": samples.finished,
        "contents": samples.fingerprints,
    }


def _digest(samples: Samples) -> str:
    """Hash of all facts but the times, which each rank reads from its own clock."""
    names = [item.name for item in fields(Samples) if item.name not in ("started", "finished")]
    columns = [getattr(samples, name) for name in names if name != "version_id"]
    return bytes_hash(np.ascontiguousarray(column).data.cast("B") for column in columns)


def _check_reports(world: World, reports: list[Report]) -> None:
    problems = [f"rank {rank}: {r.problem}" for rank, r in enumerate(reports) if r.problem]
    versions = sorted({report.scope.version_id for report in reports})
    if len(versions) > 1:
        problems.append(f"samples of several policy versions in one iteration: {versions}")
    scorer = next((r.scores.scorer_version for r in reports if r.scores), "")
    for rank, report in enumerate(reports):
        mine, first = (
            replace(r.scope, version_id="", scorer_version=None) for r in (report, reports[0])
        )
        if mine != first:
            problems.append(f"rank {rank} awaits {mine.told}, rank 0 {first.told}")
        leader = world.mesh.replica(rank) * world.mesh.rollout_tp
        if report.digest != reports[leader].digest and not report.problem:
            problems.append(f"ranks {leader} and {rank} of one replica hold different samples")
        if report.scores is not None and len(report.scores):
            scorer = scorer or report.scores.scorer_version
            if report.scores.scorer_version != scorer:
                problems.append(
                    f"rank {rank} scored with {report.scores.scorer_version}, others with {scorer}"
                )
    if problems:
        raise ExchangeError("samples and scores do not join: " + "; ".join(problems))


def table_of(scope: Scope, leads: dict[int, Report]) -> SampleTable:
    """One row per sample, of the lowest replica that made it; pure.

    `leads` are the reports of the replicas' leaders by replica. Raises `JoinError` for two
    different results of one sample; where tokens differ, its `field` is `contents`.
    """
    columns = {
        name: np.concatenate([lead.columns[name] for lead in leads.values()])
        for name in next(iter(leads.values())).columns
    }
    sizes = [len(lead.columns["draw_index"]) for lead in leads.values()]
    columns["replica"] = np.repeat(np.array(list(leads), dtype=np.int32), sizes)
    ids = {name: columns[name] for name in ("draw_index", "candidate")}
    scores = replace(Scores.concat([lead.scores for lead in leads.values()]), **ids)
    keys = scores.keys
    by_replica = {"replica": columns["replica"]}
    names = ("prompt_length", "response_length", "contents")
    told = {name: columns[name] for name in names}
    generated = Results(scope.origin("rollout"), keys, told, by_replica)
    scored = Results(scope.origin("reward"), keys, _score_columns(scores), by_replica)
    joined = join(scope.origin("rollout"), [generated])
    counts = sum((lead.counts for lead in leads.values()), JoinCounts())
    counts += joined.counts + join(scope.origin("reward"), [scored]).counts
    rows = joined.row
    columns = {name: column[rows] for name, column in columns.items()}
    for name in ("prompt_length", "response_length", "actions"):
        columns[name] = columns[name].astype(np.int64)
    scores = scores.select(rows)
    return SampleTable(**columns, scores=scores, version_id=scope.version_id, joined=counts)


def _score_columns(scores: Scores) -> dict[str, Column]:
    """What two reward records of one sample must agree in; seconds are a clock's."""
    components = {f"component {name}": column for name, column in scores.components.items()}
    words = np.array(STATUSES, dtype=object), np.array(scores.details, dtype=object)
    columns = {
        "total": scores.total,
        "status": words[0][scores.status_code],
        "detail": words[1][scores.detail_code],
        "step tokens": Ragged(scores.steps.token, scores.steps.offsets),
        "step values": Ragged(scores.steps.value, scores.steps.offsets),
    }
    return columns | components


def _name_fields(world: World, samples: Samples, keys: np.ndarray) -> str:
    """In which facts the samples of `keys`, each made by two replicas, differ. Collective."""
    mine = samples.keys
    facts = {}
    if world.leads_replica:
        for row in np.flatnonzero(np.isin(mine, keys)).tolist():
            sample = samples[row]
            names = ("prompt_ids", "response_ids", "action_mask", "rollout_log_probs", "seed")
            digests = {n: bytes_hash([np.asarray(getattr(sample, n)).tobytes()]) for n in names}
            facts[int(mine[row])] = digests | {"end_reason": sample.end_reason.name}
    told = []
    everyone = world.gather(facts)
    for key in keys.tolist():
        made = {rank: known[key] for rank, known in enumerate(everyone) if key in known}
        first = next(iter(made.values()))
        odd = [name for name in first if len({facts[name] for facts in made.values()}) > 1]
        told.append(
            f"ranks {list(made)} made different samples {name_pairs(np.array([key]))}: "
            f"{', '.join(odd)} differ"
        )
    return "; ".join(told)


def exchange(world: World, samples: Samples, table: SampleTable, owner: np.ndarray) -> Owned:
    """This rank's samples, and their scores, in canonical order. Collective.

    `samples` are this rank's replica's, as `gather_arrivals` gave them; `owner` int [N] over the
    table's rows is the data-parallel part that trains each, −1 for none. All ranks of a part get
    the same. Rows that the table has from another replica are duplicates, rows it does not have
    are late: both stay where they are.

    Raises `ExchangeError` on every rank, naming ids that came missing or unasked, and those whose
    facts are not the ones that were gathered.
    """
    to, counts, lines = _destinations(world, samples, table, owner)
    parts = send_to_owners(world, samples, to)
    own = np.flatnonzero(owner == world.dp_index)
    joined, wrong = join_arrived(table, own, parts)
    if world.leads_owners:
        counts += joined.counts
    told = world.gather((", ".join(lines + wrong), counts))
    problems = [f"rank {rank}: {problem}" for rank, (problem, _) in enumerate(told) if problem]
    if problems:
        raise ExchangeError("samples did not reach their owners: " + "; ".join(problems))
    whole = Samples.concat(rows_that_stay(parts, joined)).canonical()
    whole = replace(whole, started=table.started[own], finished=table.finished[own])
    total = sum((each for _, each in told), table.joined)
    return Owned(whole, table.scores.select(own), total)


def _destinations(
    world: World, samples: Samples, table: SampleTable, owner: np.ndarray
) -> tuple[np.ndarray, JoinCounts, list[str]]:
    """(the part each row goes to, −1 for none; what does not go, counted; what is wrong)."""
    keys = samples.keys
    known = contains(table.keys, keys)
    if samples.version_id != table.version_id:
        known[:] = False
    rows = np.searchsorted(table.keys, keys[known])
    changed = keys[known][samples.fingerprints[known] != table.contents[rows]]
    is_mine = table.replica[rows] == world.replica
    counts = JoinCounts()
    if world.leads_replica:
        counts += late_counts("rollout", keys[~known], "that the table does not have")
        counts += duplicate_counts("rollout", keys[known][~is_mine])
    to = np.full(len(samples), -1, dtype=np.int64)
    to[known] = np.where(is_mine, owner[rows], -1)
    lines = [f"{name_pairs(changed)} changed since they were gathered"] if len(changed) else []
    return to, counts, lines


def join_arrived(
    table: SampleTable, own: np.ndarray, parts: Sequence[Samples]
) -> tuple[Joined, list[str]]:
    """What came to this rank, once each, and what is wrong with it. `own` are its table rows."""
    origin = Scope("", 0, table.version_id).origin("rollout")
    expected = table.keys[own]
    results = [
        Results(origin, part.keys, {"contents": part.fingerprints}, {"finished": part.finished})
        for part in parts
    ]
    try:
        joined = join(origin, results)
    except JoinError as error:
        return join(origin, results[:0]), [str(error)]
    asked = contains(expected, joined.keys)
    missing = expected[~contains(joined.keys, expected)]
    lines = [f"{name_pairs(missing)} missing"] if len(missing) else []
    if not asked.all():
        lines.append(f"{name_pairs(joined.keys[~asked])} unasked")
    gathered = table.contents[own][np.searchsorted(expected, joined.keys[asked])]
    changed = joined.keys[asked][joined.take(results, "contents")[asked] != gathered]
    if len(changed):
        lines.append(f"{name_pairs(changed)} changed on the way")
    return joined, lines
