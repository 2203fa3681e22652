"""What lies in each kind of part, as columns. Pure: arrays in, arrays out.

    rollout_<replica>.safetensors   facts of generation and scoring, by the replica's leader
    scored_<dp>.safetensors         facts of the trainer: old and reference log-probs, by dp owner
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
from typing import Any

import numpy as np

from megarl.contracts.records import (
    STATUSES,
    Derived,
    Prompt,
    RewardKind,
    RewardRecord,
    RewardStatus,
    Scores,
)
from megarl.contracts.samples import Samples
from megarl.data.table import name_pairs, pair_keys
from megarl.rollout.selection import VERDICTS, Selection

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
COMPONENT = "reward.component."
"""Before a component's name: float64 [N], NaN where a record has none."""
ROW_COLUMNS = ("draw_index", "candidate", "response_offsets")
"""Of parts by owner: whose rows these are, and how long."""
DERIVED_COLUMNS = ("advantages", "shaped_rewards", "returns")
PROMPT_FIELDS = frozenset(item.name for item in fields(Prompt)) - {"token_ids"}

_SCORE_FIELDS = {
    "reward.total": "total",
    "reward.status": "status_code",
    "reward.detail": "detail_code",
    "reward.seconds": "seconds",
}
"""Column → field of `Scores`."""
_SHAPES: dict[str, dict[str, tuple[str, str]]] = {
    "rollout": {
        "draw_index": ("int32", "N"),
        "candidate": ("int32", "N"),
        "prompt_ids": ("int32", "P"),
        "prompt_offsets": ("int64", "N+1"),
        "response_ids": ("int32", "R"),
        "response_offsets": ("int64", "N+1"),
        "action_mask": ("bool", "R"),
        "rollout_log_probs": ("float32", "R"),
        "end_reason": ("int8", "N"),
        "seed": ("int64", "N"),
        "started": ("float64", "N"),
        "finished": ("float64", "N"),
        "reward.total": ("float64", "N"),
        "reward.status": ("int8", "N"),
        "reward.detail": ("int32", "N"),
        "reward.seconds": ("float64", "N"),
        "reward.step_offsets": ("int64", "N+1"),
        "reward.step_token": ("int32", "S"),
        "reward.step_value": ("float64", "S"),
    },
    "scored": {
        "draw_index": ("int32", "N"),
        "candidate": ("int32", "N"),
        "response_offsets": ("int64", "N+1"),
        "old_log_probs": ("float32", "R"),
        "ref_log_probs": ("float32", "R?"),
    },
    "selection": {
        "draw_index": ("int32", "N"),
        "candidate": ("int32", "N"),
        "verdict": ("int8", "N"),
        "minibatch": ("int32", "N"),
    },
    "derived": {
        "draw_index": ("int32", "N"),
        "candidate": ("int32", "N"),
        "response_offsets": ("int64", "N+1"),
        "advantages": ("float32", "R"),
        "shaped_rewards": ("float32", "R?"),
        "returns": ("float32", "R?"),
    },
}
"""Kind → column → dtype and length: N rows, P prompt and R response tokens, S step rewards; with
`?` it may be absent. A rollout part also has its components, float64 [N] each."""
_BOUNDS = {
    "reward.status": (0, len(STATUSES)),
    "reward.detail": (0, 1 << 31),
    "verdict": (0, len(VERDICTS)),
    "minibatch": (-1, 1 << 31),
}
_OFFSETS = {"P": "prompt_offsets", "R": "response_offsets", "S": "reward.step_offsets"}


def check_columns(kind: str, columns: Mapping[str, np.ndarray]) -> None:
    """Raises `ValueError` naming the column: missing, unknown, of another dtype or length than the
    kind has, offsets that fall, or rows that do not rise in (draw index, candidate)."""
    wanted = _SHAPES[kind]
    if kind == "rollout":
        wanted = wanted | {n: ("float64", "N") for n in columns if n.startswith(COMPONENT)}
    missing = [n for n in wanted if n not in columns and not wanted[n][1].endswith("?")]
    if missing:
        raise ValueError(f"{missing[0]} is missing")
    unknown = sorted(columns.keys() - wanted.keys())
    if unknown:
        raise ValueError(f"{unknown[0]} is no column of a {kind} part")
    rows = len(columns["draw_index"])
    lengths = {"N": rows, "N+1": rows + 1}
    for size, name in _OFFSETS.items():
        if name in columns:
            offsets = columns[name]
            if offsets.shape != (rows + 1,) or offsets[0] != 0 or (np.diff(offsets) < 0).any():
                raise ValueError(f"{name} must rise from 0 over {rows} rows")
            lengths[size] = int(offsets[-1])
    for name, array in columns.items():
        dtype, size = wanted[name]
        expected = (lengths[size.removesuffix("?")],)
        if array.dtype != dtype or array.shape != expected:
            raise ValueError(f"{name} is {array.dtype}{array.shape}, not {dtype}{expected}")
    falls = np.flatnonzero(np.diff(pair_keys(columns["draw_index"], columns["candidate"])) <= 0)
    if len(falls):
        row = int(falls[0]) + 1
        told = f"{columns['draw_index'][row]}/{columns['candidate'][row]}"
        raise ValueError(f"draw_index, candidate: sample {told} is twice there or out of order")
    for name, (low, high) in _BOUNDS.items():
        if name in columns and not ((low <= columns[name]) & (columns[name] < high)).all():
            raise ValueError(f"{name} has values that are not in {low} … {high - 1}")
    if kind == "rollout":
        scored = columns["reward.status"] == STATUSES.index(RewardStatus.OK)
        if not np.array_equal(np.isfinite(columns["reward.total"]), scored):
            raise ValueError("reward.total must be a finite number exactly where the status is ok")


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
    columns = {name: getattr(samples, name) for name in SAMPLE_COLUMNS}
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
    return Samples(**{name: columns[name] for name in SAMPLE_COLUMNS}, version_id=version_id)


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
    )


def scored_part(
    samples: Samples, old_log_probs: np.ndarray, ref_log_probs: np.ndarray | None
) -> Columns:
    """The trainer's facts of the rows that one data-parallel part owns, float32 [R] each."""
    columns = _rows(samples) | {"old_log_probs": old_log_probs}
    return columns if ref_log_probs is None else columns | {"ref_log_probs": ref_log_probs}


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
