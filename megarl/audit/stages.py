"""The stages of an iteration, compared between two runs: what differs in each, field by field.

Prompts are compared by draw index; where they are the same, samples join by (draw index, candidate)
whatever replica made them. Samples are named by their id without the run's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from megarl.audit.compare import (
    FieldDifference,
    Ragged,
    Rows,
    merged,
    objects,
    single,
    tokens,
    values,
)
from megarl.audit.logs import tensors_of
from megarl.audit.view import RunView
from megarl.contracts.ids import pair_keys
from megarl.contracts.version import TensorEntry, WeightManifest
from megarl.experience.load import SealedIteration
from megarl.experience.versions import VERSION
from megarl.rollout.selection import VERDICTS


def prompts(a: SealedIteration, b: SealedIteration, tolerance: float) -> list[FieldDifference]:
    def found() -> Iterator[FieldDifference | None]:
        for draw in range(max(len(a.prompts), len(b.prompts))):
            one, other = (p[draw] if draw < len(p) else {} for p in (a.prompts, b.prompts))
            for name in sorted(one.keys() | other.keys(), key=lambda n: (n != "prompt_id", n)):
                where = f"draw {draw}"
                yield single(name, where, one.get(name), other.get(name), tolerance, draw)

    return merged(found(), max(len(a.prompts), len(b.prompts)))


def joined(a: SealedIteration, b: SealedIteration) -> tuple[Rows, list[FieldDifference]]:
    """Rows of the samples both have, and the samples that one lacks. Prompts are the same."""
    mine, theirs = (pair_keys(it.samples.draw_index, it.samples.candidate) for it in (a, b))
    shared, rows_a, rows_b = np.intersect1d(mine, theirs, return_indices=True)
    names = tuple(_name(a, row) for row in rows_a.tolist())
    missing = []
    for run, keys in ((a, theirs), (b, mine)):
        own = pair_keys(run.samples.draw_index, run.samples.candidate)
        rows = np.flatnonzero(~np.isin(own, keys))
        if len(rows):
            told = ("sampled", "missing") if run is a else ("missing", "sampled")
            where, count = _name(run, int(rows[0])), len(rows)
            rank = int(own[rows[0]])
            item = FieldDifference("sample", where, None, *told, None, count, len(own), None, rank)
            missing.append(item)
    return Rows(rows_a, rows_b, names), missing


def _name(iteration: SealedIteration, row: int) -> str:
    """A sample's id without the run's."""
    return iteration.sample_id(row).partition("/")[2]


def generation(
    a: SealedIteration, b: SealedIteration, rows: Rows, tolerance: float
) -> list[FieldDifference]:
    one, other = asdict(a.manifest.header.sampling), asdict(b.manifest.header.sampling)
    contract = [single(f"sampling.{key}", None, one[key], other[key], tolerance, -1) for key in one]
    return _some(
        *contract,
        _tokens("prompt_ids", a.samples, b.samples, rows, tolerance, "prompt_offsets"),
        values("seed", rows, a.samples.seed, b.samples.seed, tolerance),
        *(
            _tokens(name, a.samples, b.samples, rows, tolerance)
            for name in ("response_ids", "action_mask", "rollout_log_probs")
        ),
        values("end_reason", rows, a.samples.end_reason, b.samples.end_reason, tolerance),
    )


def scoring(
    a: SealedIteration, b: SealedIteration, rows: Rows, tolerance: float
) -> list[FieldDifference]:
    one, other = a.scores.components, b.scores.components
    shared = sorted(one.keys() & other.keys())
    return _some(
        objects("status", rows, a.scores.status, b.scores.status),
        *(
            single(name, None, name in one, name in other, 0.0)
            for name in one.keys() ^ other.keys()
        ),
        *(values(f"component {name}", rows, one[name], other[name], tolerance) for name in shared),
        values("total", rows, a.scores.total, b.scores.total, tolerance),
        objects("detail", rows, a.scores.detail, b.scores.detail),
        *(
            objects(name, rows, *(tuple(getattr(r, name) for r in it.records) for it in (a, b)))
            for name in ("applies_to", "step_rewards")
        ),
    )


def log_probs(
    a: SealedIteration, b: SealedIteration, rows: Rows, tolerance: float
) -> list[FieldDifference]:
    found = [_spread("old_log_probs", a, b, a.old_log_probs, b.old_log_probs, rows, tolerance)]
    there = [it.ref_log_probs is not None for it in (a, b)]
    if all(there):
        ref = _spread("ref_log_probs", a, b, a.ref_log_probs, b.ref_log_probs, rows, tolerance)
        found.append(ref)
    found.append(single("ref_log_probs", None, *there, 0.0))
    there = [it.values is not None for it in (a, b)]
    found.append(single("values", None, *there, 0.0))
    if all(there):
        found.append(_spread("values", a, b, a.values, b.values, rows, tolerance))
        found.append(values("last_values", rows, a.last_values, b.last_values, tolerance))
    return _some(*found)


def selection(
    a: SealedIteration, b: SealedIteration, rows: Rows, tolerance: float
) -> list[FieldDifference]:
    verdicts = (tuple(str(VERDICTS[v]) for v in it.derived.verdict.tolist()) for it in (a, b))
    return _some(
        objects("verdict", rows, *verdicts),
        values("minibatch", rows, a.derived.minibatch, b.derived.minibatch, tolerance),
    )


def advantages(
    a: SealedIteration, b: SealedIteration, rows: Rows, tolerance: float
) -> list[FieldDifference]:
    one, other = a.derived.columns, b.derived.columns
    shared = sorted(one.keys() & other.keys())
    betas = [it.derived.kl_beta for it in (a, b)]
    return _some(
        None if None in betas else single("kl_beta", None, *betas, tolerance, -1),
        *(
            single(name, None, name in one, name in other, 0.0)
            for name in one.keys() ^ other.keys()
        ),
        *(_spread(name, a, b, one[name], other[name], rows, tolerance) for name in shared),
    )


def update(a: RunView, b: RunView, number: int, tolerance: float) -> list[FieldDifference]:
    lines = [line for run in (a, b) for line in run.updates.of(number)[:1]]
    if len(lines) < 2:
        told = ("updated" if run.updates.of(number) else "missing" for run in (a, b))
        return _some(single("update", None, *told, 0.0))
    # The critic's steps come before the actor's, and what they led to after both.
    critic = _steps("critic ", *(line.told.get("critic", []) for line in lines), tolerance, 0)
    taken = max(len(line.told.get("critic", [])) for line in lines)
    steps = critic + _steps("", *(line["steps"] for line in lines), tolerance, taken)
    if tolerance:
        return steps
    after = (_manifest(run, line["to"]) for run, line in zip((a, b), lines, strict=True))
    return steps + weights(*after, taken + max(len(line["steps"]) for line in lines))


_SINCE = {"epoch": 0, "stopped": False}
"""Fields of a step that older lines lack, and what they are then."""


def _steps(
    whose: str,
    one: Sequence[Mapping[str, Any]],
    other: Sequence[Mapping[str, Any]],
    tolerance: float,
    first_rank: int,
) -> list[FieldDifference]:
    count = max(len(one), len(other))

    def found() -> Iterator[FieldDifference | None]:
        for at in range(count):
            x, y = (_SINCE | dict(steps[at]) if at < len(steps) else {} for steps in (one, other))
            for name in x | y:
                values = (x.get(name), y.get(name))
                where, rank = f"{whose}step {at}", first_rank + at
                yield single(f"{whose}{name}", where, *values, tolerance, rank)

    return merged(found(), count)


def first_weights(run: RunView) -> WeightManifest | None:
    first = run.journal_line("ACTOR_COMMITTED", 0)
    return None if first is None else _manifest(run, first["version"])


def _manifest(run: RunView, version_id: str) -> WeightManifest | None:
    for line in run.versions:
        if line["kind"] == VERSION and line["id"] == version_id:
            return tensors_of(line.told)
    return None


def weights(
    a: WeightManifest | None, b: WeightManifest | None, first_rank: int = 0
) -> list[FieldDifference]:
    if a is None or b is None:
        return []
    one, other = ({t.name: t for t in manifest.tensors} for manifest in (a, b))

    def found() -> Iterator[FieldDifference | None]:
        for at, name in enumerate(sorted(one.keys() | other.keys())):
            told = (_told(tensors.get(name)) for tensors in (one, other))
            yield single("weights", name, *told, 0.0, first_rank + at)

    return merged(found(), len(one.keys() | other.keys()))


def _told(tensor: TensorEntry | None) -> str:
    return "missing" if tensor is None else f"{tensor.dtype}{list(tensor.shape)} {tensor.digest:#x}"


def _tokens(
    name: str, a: Any, b: Any, rows: Rows, tolerance: float, offsets: str = "response_offsets"
) -> FieldDifference | None:
    one, other = (Ragged(getattr(s, name), getattr(s, offsets)) for s in (a, b))
    return tokens(name, rows, one, other, tolerance)


def _spread(
    name: str,
    a: SealedIteration,
    b: SealedIteration,
    one: np.ndarray,
    other: np.ndarray,
    rows: Rows,
    tolerance: float,
) -> FieldDifference | None:
    left = Ragged(one, a.samples.response_offsets)
    right = Ragged(other, b.samples.response_offsets)
    return tokens(name, rows, left, right, tolerance)


def _some(*found: FieldDifference | None) -> list[FieldDifference]:
    return [item for item in found if item is not None]
