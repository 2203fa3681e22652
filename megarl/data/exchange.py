"""From where samples were generated to where they train, joined by id, never by position.

Two steps, each the same collectives on every rank, also on one that has or gets nothing:

1. `gather_table`: a few numbers per sample and its score reach every rank, from replica leaders
   only. Decisions (groups, minibatches, packs) are then pure functions of that table.
2. `exchange`: tokens go to their owners, all ranks of a data-parallel part, in one all-to-all.

An id that is missing, doubled, unscored or different on the ranks of one replica is an error that
names it, raised on every rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.distributed as dist

from megarl.contracts.hashes import bytes_hash
from megarl.contracts.records import RewardRecord, Scores
from megarl.contracts.samples import Samples
from megarl.data.table import SampleTable, name_pairs, pair_keys
from megarl.world import World


class ExchangeError(RuntimeError):
    """Samples or scores that do not join."""


@dataclass(frozen=True)
class _Report:
    """What one rank tells the others of its replica's samples."""

    digest: str
    version_id: str
    problem: str = ""
    columns: dict[str, np.ndarray] | None = None  # from the replica's leader
    scores: Scores | None = None


def gather_table(world: World, samples: Samples, records: Sequence[RewardRecord]) -> SampleTable:
    """Every replica's samples and scores as one table in canonical order. Collective.

    `samples` are this rank's replica's, the same on all its ranks, in any order; `records` are
    theirs, in any order, read on the replica's leader only.

    Raises `ExchangeError` on every rank: an id from two replicas, a sample without a score or the
    reverse, ranks of one replica that hold different samples, several policy versions or scorers.
    """
    samples = samples.canonical()
    if world.leads_replica:
        report = _lead(world, samples, records)
    else:
        report = _Report(_digest(samples), samples.version_id)
    reports = world.gather(report)
    _check_reports(world, reports)
    leads = [report for report in reports if report.columns is not None]
    order = np.argsort(
        np.concatenate(
            [pair_keys(lead.columns["draw_index"], lead.columns["candidate"]) for lead in leads]
        ),
        kind="stable",
    )
    columns = {
        name: np.concatenate([lead.columns[name] for lead in leads])[order]
        for name in leads[0].columns
    }
    scores = Scores.concat([lead.scores for lead in leads]).select(order)
    return SampleTable(**columns, scores=scores, version_id=reports[0].version_id)


def _lead(world: World, samples: Samples, records: Sequence[RewardRecord]) -> _Report:
    report = _Report(_digest(samples), samples.version_id)
    try:
        scores = Scores.from_records(records)
    except ValueError as error:  # told to all ranks, which then raise together
        return replace(report, problem=str(error))
    mine = pair_keys(samples.draw_index, samples.candidate)
    scored = pair_keys(scores.draw_index, scores.candidate)
    unscored, unknown = np.setdiff1d(mine, scored), np.setdiff1d(scored, mine)
    if len(unscored):
        return replace(report, problem=f"samples without a reward record: {name_pairs(unscored)}")
    if len(unknown):
        return replace(report, problem=f"reward records without a sample: {name_pairs(unknown)}")
    prefix = np.concatenate([[0], np.cumsum(samples.action_mask)])
    columns = {
        "draw_index": samples.draw_index,
        "candidate": samples.candidate,
        "prompt_length": samples.prompt_lengths,
        "response_length": samples.response_lengths,
        "actions": np.diff(prefix[samples.response_offsets]),
        "end_reason": samples.end_reason,
        "replica": np.full(len(samples), world.replica, dtype=np.int32),
        "started": samples.started,
        "finished": samples.finished,
    }
    return replace(report, columns=columns, scores=scores)


def _digest(samples: Samples) -> str:
    """Hash of all facts but the times, which each rank reads from its own clock."""
    columns = [getattr(samples, name) for name in _PER_SAMPLE if name not in _TIMES]
    columns += [samples.prompt_offsets, samples.response_offsets]
    columns += [getattr(samples, name) for name in (*_PER_PROMPT_TOKEN, *_PER_RESPONSE_TOKEN)]
    return bytes_hash(np.ascontiguousarray(column).tobytes() for column in columns)


def _check_reports(world: World, reports: list[_Report]) -> None:
    problems = [f"rank {rank}: {r.problem}" for rank, r in enumerate(reports) if r.problem]
    versions = sorted({report.version_id for report in reports})
    if len(versions) > 1:
        problems.append(f"samples of several policy versions in one iteration: {versions}")
    seen: dict[int, int] = {}
    for rank, report in enumerate(reports):
        leader = world.mesh.replica(rank) * world.mesh.rollout_tp
        if report.digest != reports[leader].digest:
            problems.append(f"ranks {leader} and {rank} of one replica hold different samples")
        if report.columns is None:
            continue
        scorer = report.scores.scorer_version
        first = next((r.scores for r in reports if r.scores and r.scores.scorer_version), None)
        if scorer and first is not None and scorer != first.scorer_version:
            problems.append(f"rank {rank} scored with {scorer}, others with {first.scorer_version}")
        keys = pair_keys(report.columns["draw_index"], report.columns["candidate"])
        double = np.array([key for key in keys.tolist() if key in seen], dtype=np.int64)
        if len(double):
            other = seen[int(double[0])]
            problems.append(f"ranks {other} and {rank} both made samples {name_pairs(double)}")
        seen |= dict.fromkeys(keys.tolist(), rank)
    if problems:
        raise ExchangeError("samples and scores do not join: " + "; ".join(problems))


def exchange(
    world: World, samples: Samples, table: SampleTable, owner: np.ndarray
) -> tuple[Samples, Scores]:
    """This rank's samples, and their scores, in canonical order. Collective.

    `samples` are this rank's replica's, as given to `gather_table`; `owner` int [N] over the
    table's rows is the data-parallel part that trains each, −1 for none. All ranks of a part get
    the same. A sample comes to a rank from its replica's rank with the same remainder modulo
    rollout.tp: the rank itself when it holds the sample, else work spread over the replica.

    Raises `ExchangeError` on every rank, naming ids that came missing, twice or unasked.
    """
    told = ""
    try:
        rows = table.rows_of(samples.draw_index, samples.candidate)
    except KeyError as error:  # told to all ranks below: peers already wait in the all-to-all
        told, samples, rows = error.args[0], samples.select([]), np.zeros(0, dtype=np.int64)
    tp = world.mesh.rollout_tp
    outgoing = []
    for rank in range(world.size):
        if rank % tp == world.rank % tp:
            chosen = np.flatnonzero(owner[rows] == world.mesh.dp_index(rank))
        else:
            chosen = np.zeros(0, dtype=np.int64)
        outgoing.append(samples.select(chosen))
    parts = _all_to_all(world, outgoing, samples.version_id)

    keys = np.concatenate([pair_keys(part.draw_index, part.candidate) for part in parts])
    own = np.flatnonzero(owner == world.dp_index)
    expected = pair_keys(table.draw_index[own], table.candidate[own])
    names, times = np.unique(keys, return_counts=True)
    wrong = {
        "missing": np.setdiff1d(expected, names),
        "came twice": names[times > 1],
        "unasked": np.setdiff1d(names, expected),
    }
    lines = [f"{name_pairs(ids)} {what}" for what, ids in wrong.items() if len(ids)]
    problem = ", ".join(([told] if told else []) + lines)
    problems = [f"rank {rank}: {text}" for rank, text in enumerate(world.gather(problem)) if text]
    if problems:
        raise ExchangeError("samples did not reach their owners: " + "; ".join(problems))
    joined = Samples.concat(parts).canonical()
    joined = replace(joined, started=table.started[own], finished=table.finished[own])
    return joined, table.scores.select(own)


# One rank's rows as bytes: these columns one after the other, in this order.
_PER_SAMPLE = {
    "draw_index": np.int32,
    "candidate": np.int32,
    "end_reason": np.int8,
    "seed": np.int64,
    "started": np.float64,
    "finished": np.float64,
}
_TIMES = ("started", "finished")
_PER_PROMPT_TOKEN = {"prompt_ids": np.int32}
_PER_RESPONSE_TOKEN = {
    "response_ids": np.int32,
    "action_mask": np.bool_,
    "rollout_log_probs": np.float32,
}
_LENGTHS = {"prompt_lengths": np.int64, "response_lengths": np.int64}


def _columns(rows: int, prompt_tokens: int, response_tokens: int) -> list[tuple[str, type, int]]:
    """(name, dtype, elements) of each column in the byte form of so many rows and tokens."""
    return [
        *((name, dtype, rows) for name, dtype in (_PER_SAMPLE | _LENGTHS).items()),
        *((name, dtype, prompt_tokens) for name, dtype in _PER_PROMPT_TOKEN.items()),
        *((name, dtype, response_tokens) for name, dtype in _PER_RESPONSE_TOKEN.items()),
    ]


def _sizes(samples: Samples) -> tuple[int, int, int]:
    return len(samples), len(samples.prompt_ids), len(samples.response_ids)


def _to_bytes(samples: Samples) -> bytes:
    return b"".join(
        getattr(samples, name).astype(dtype, copy=False).tobytes()
        for name, dtype, _ in _columns(*_sizes(samples))
    )


def _from_bytes(data: bytes, sizes: tuple[int, int, int], version_id: str) -> Samples:
    columns, start = {}, 0
    for name, dtype, elements in _columns(*sizes):
        columns[name] = np.frombuffer(data, dtype=dtype, count=elements, offset=start)
        start += columns[name].nbytes
    for kind in ("prompt", "response"):
        lengths = columns.pop(f"{kind}_lengths")
        columns[f"{kind}_offsets"] = np.concatenate([[0], np.cumsum(lengths)])
    return Samples(**columns, version_id=version_id)


def _all_to_all(world: World, outgoing: Sequence[Samples], version_id: str) -> list[Samples]:
    """`outgoing[rank]` goes to that rank; what each rank sent here, by rank."""
    out_sizes = torch.tensor([_sizes(part) for part in outgoing], dtype=torch.int64)
    in_sizes = torch.empty_like(out_sizes)
    dist.all_to_all_single(in_sizes, out_sizes, group=world.control)

    payloads = [_to_bytes(part) for part in outgoing]
    sizes = [tuple(row) for row in in_sizes.tolist()]
    in_splits = [
        sum(elements * np.dtype(dtype).itemsize for _, dtype, elements in _columns(*size))
        for size in sizes
    ]
    sent = torch.from_numpy(np.frombuffer(bytearray(b"".join(payloads)), dtype=np.uint8))
    received = torch.empty(sum(in_splits), dtype=torch.uint8)
    dist.all_to_all_single(
        received, sent, in_splits, [len(payload) for payload in payloads], group=world.control
    )
    starts = np.concatenate([[0], np.cumsum(in_splits)])
    flat = received.numpy().tobytes()
    return [
        _from_bytes(flat[starts[rank] : starts[rank + 1]], size, version_id)
        for rank, size in enumerate(sizes)
    ]
