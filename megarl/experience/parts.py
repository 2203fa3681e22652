"""What lies in each kind of part, as columns. Pure: arrays in, arrays out.

    rollout_<replica>.safetensors   facts of generation and scoring, by the replica's leader
    scored_<dp>.safetensors         facts of the trainer: old and reference log-probs, the critic's
                                    values, by dp owner
    prompts.jsonl                   the drawn prompts, by draw index
    drawn.json                      how the samples came about (`drawn.py`)
    selection.safetensors           derived: which rows train, in which minibatch, the rest why not
    derived_<dp>.safetensors        derived: advantages (shaped rewards, returns), by dp owner

Facts are what cannot be computed again; derived parts follow from them under the recipe's
hyper-parameters. Every column file has `draw_index` and `candidate`: joins are by that pair.
Per-token columns run over the rows' response tokens, `response_offsets` says where rows begin.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any

import numpy as np

from megarl.contracts.records import (
    STATUSES,
    Derived,
    Prompt,
    RewardKind,
    RewardRecord,
    Scores,
    Steps,
)
from megarl.contracts.samples import Samples
from megarl.data.table import name_pairs, pair_keys
from megarl.experience.part_columns import COMPONENT
from megarl.rollout.selection import Selection

if TYPE_CHECKING:
    from megarl.data.prepare import Prepared

Columns = dict[str, np.ndarray]

SAMPLE_COLUMNS = (
    "draw_index",
    "candidate",
    "prompt_ids",
    "prompt_offsets",
    "response_ids",
    "response_offsets",
    "action_mask",
    "rollout_log_probs",
    "end_reason",
    "seed",
    "started",
    "finished",
)
EXPERTS_COLUMNS = ("experts_offsets", "experts")
"""Of samples whose generator told them; the others' parts have none."""
ROW_COLUMNS = ("draw_index", "candidate", "response_offsets")
"""Of parts by owner: whose rows these are, and how long."""
SCORED_COLUMNS = ("old_log_probs", "ref_log_probs", "values", "last_values")
DERIVED_COLUMNS = ("advantages", "shaped_rewards", "returns")
PROMPT_FIELDS = frozenset(item.name for item in fields(Prompt)) - {"token_ids"}
PROMPT_NEEDED = PROMPT_FIELDS - {"reward"}
"""Without a reward name, every scorer that names none scores a prompt."""

_SCORE_FIELDS = {
    "reward.total": "total",
    "reward.status": "status_code",
    "reward.detail": "detail_code",
    "reward.seconds": "seconds",
}
"""Column → field of `Scores`."""
_STEP_FIELDS = {
    "reward.step_offsets": "offsets",
    "reward.step_token": "token",
    "reward.step_value": "value",
}
"""Column → field of `Steps`."""


def rollout_part(
    samples: Samples, records: Sequence[RewardRecord], scorer_version: str
) -> tuple[Columns, dict[str, Any]]:
    """Columns and metadata of one replica's samples and their reward records.

    `samples` in any order, `records` one for each in any order; stored in canonical order.
    `reward.total` is NaN exactly where the status is not ok. Raises `ValueError` when a sample
    has no record or a record no sample, and for a reward that is not raw (shaping is derived) or
    of another scorer.
    """
    keys = pair_keys(samples.draw_index, samples.candidate)
    if (np.diff(keys) <= 0).any():
        samples = samples.canonical()
        keys = pair_keys(samples.draw_index, samples.candidate)
    ordered = _in_order(records, keys)
    odd = [
        record
        for record in ordered
        if record.kind is not RewardKind.RAW or record.scorer_version != scorer_version
    ]
    if odd:
        raise ValueError(f"a fact must be a raw reward of scorer {scorer_version}, not {odd[0]}")
    scores = Scores.from_records(ordered)
    names = SAMPLE_COLUMNS + (EXPERTS_COLUMNS if len(samples.experts) else ())
    columns = {name: getattr(samples, name) for name in names}
    columns |= {name: getattr(scores, field) for name, field in _SCORE_FIELDS.items()}
    columns |= {COMPONENT + name: column for name, column in scores.components.items()}
    columns |= _step_columns(ordered)
    spans = {
        f"{r.draw_index}/{r.candidate}": {name: list(span) for name, span in r.applies_to.items()}
        for r in ordered
        if r.applies_to
    }
    return columns, {
        "version_id": samples.version_id,
        "scorer_version": scorer_version,
        "details": list(scores.details),
        "applies_to": spans,
    }


def _in_order(records: Sequence[RewardRecord], keys: np.ndarray) -> list[RewardRecord]:
    """The records of the samples with these rising `pair_keys`, one each."""
    records = list(records)
    theirs = pair_keys(
        np.array([record.draw_index for record in records], dtype=np.int64),
        np.array([record.candidate for record in records], dtype=np.int64),
    )
    order = np.argsort(theirs, kind="stable")
    if not np.array_equal(theirs[order], keys):
        names, times = np.unique(theirs, return_counts=True)
        odd = np.union1d(np.setxor1d(names, keys), names[times > 1])
        raise ValueError(f"reward records and samples do not join by id, at {name_pairs(odd)}")
    return [records[row] for row in order.tolist()]


def _step_columns(records: Sequence[RewardRecord]) -> Columns:
    steps = [record.step_rewards for record in records]
    return {
        "reward.step_offsets": np.cumsum([0, *map(len, steps)], dtype=np.int64),
        "reward.step_token": np.array([at for row in steps for at, _ in row], dtype=np.int32),
        "reward.step_value": np.array([v for row in steps for _, v in row], dtype=np.float64),
    }


def samples_of(columns: Mapping[str, np.ndarray], version_id: str) -> Samples:
    """Raises `ValueError` and `KeyError` as `Samples` does for columns that are none."""
    held = {name: columns[name] for name in EXPERTS_COLUMNS if name in columns}
    held |= {name: columns[name] for name in SAMPLE_COLUMNS}
    return Samples(**held, version_id=version_id)


def records_of(
    columns: Mapping[str, np.ndarray], metadata: Mapping[str, Any]
) -> list[RewardRecord]:
    """The reward records of a rollout part that `check_columns` let pass, in its row order.

    Raises `ValueError` as `RewardRecord` does, `KeyError` and `IndexError` for metadata of others.
    """
    steps = columns["reward.step_offsets"].tolist()
    step_rewards = list(
        zip(
            columns["reward.step_token"].tolist(),
            columns["reward.step_value"].tolist(),
            strict=True,
        )
    )
    components = {
        name.removeprefix(COMPONENT): columns[name].tolist()
        for name in sorted(columns)
        if name.startswith(COMPONENT)
    }
    rows = zip(
        columns["draw_index"].tolist(),
        columns["candidate"].tolist(),
        columns["reward.total"].tolist(),
        columns["reward.status"].tolist(),
        columns["reward.detail"].tolist(),
        columns["reward.seconds"].tolist(),
        strict=True,
    )
    spans, details, scorer = (metadata[n] for n in ("applies_to", "details", "scorer_version"))
    records = []
    for row, (draw, candidate, total, status, detail, seconds) in enumerate(rows):
        told = spans.get(f"{draw}/{candidate}", {})
        records.append(
            RewardRecord(
                draw_index=draw,
                candidate=candidate,
                total=None if total != total else total,
                components={n: v[row] for n, v in components.items() if v[row] == v[row]},
                scorer_version=scorer,
                status=STATUSES[status],
                kind=RewardKind.RAW,
                detail=details[detail],
                seconds=seconds,
                applies_to={name: tuple(ends) for name, ends in told.items()},
                step_rewards=tuple(step_rewards[steps[row] : steps[row + 1]]),
            )
        )
    return records


def scores_of(columns: Mapping[str, np.ndarray], metadata: Mapping[str, Any]) -> Scores:
    """The columnar rewards of a rollout part, in its (canonical) row order."""
    names = sorted(name for name in columns if name.startswith(COMPONENT))
    return Scores(
        draw_index=columns["draw_index"],
        candidate=columns["candidate"],
        **{field: columns[name] for name, field in _SCORE_FIELDS.items()},
        details=tuple(metadata["details"]),
        components={name.removeprefix(COMPONENT): columns[name] for name in names},
        scorer_version=metadata["scorer_version"],
        steps=Steps(**{field: columns[name] for name, field in _STEP_FIELDS.items()}),
    )


def scored_part(prepared: Prepared) -> Columns:
    """The trainer's facts of the rows that one data-parallel part owns, float32 [R] each and
    `last_values` float32 [N]. What is None was not computed and is no column."""
    columns = _rows(prepared.samples)
    for name in SCORED_COLUMNS:
        column = getattr(prepared, name)
        if column is not None:
            columns[name] = column
    return columns


def derived_part(samples: Samples, derived: Derived) -> Columns:
    """What one data-parallel part trains on besides facts, float32 [R] each."""
    columns = _rows(samples)
    for name in DERIVED_COLUMNS:
        column = getattr(derived, name)
        if column is not None:
            columns[name] = column
    return columns


def selection_part(selection: Selection, minibatch: np.ndarray) -> Columns:
    """Of all N rows: `verdict` int8 (an index into `VERDICTS`) and the minibatch, −1 for none."""
    return {
        "draw_index": selection.draw_index,
        "candidate": selection.candidate,
        "verdict": selection.verdict,
        "minibatch": np.asarray(minibatch, dtype=np.int32),
    }


def prompt_lines(prompts: Sequence[Prompt]) -> list[dict[str, Any]]:
    """By draw index. The ids that ran are facts of the samples and not repeated here."""
    return [{name: getattr(prompt, name) for name in PROMPT_FIELDS} for prompt in prompts]


def _rows(samples: Samples) -> Columns:
    return {name: getattr(samples, name) for name in ROW_COLUMNS}
