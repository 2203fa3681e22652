"""What lies in each kind of part, as columns. Pure: arrays in, arrays out.

    rollout_<replica>.safetensors   facts of generation and scoring, by the replica's leader
    scored_<dp>.safetensors         facts of the trainer: old and reference log-probs, by dp owner
    prompts.jsonl                   the drawn prompts, by draw index
    selection.safetensors           derived: which rows train, in which minibatch, the rest why not
    derived_<dp>.safetensors        derived: advantages (shaped rewards, returns), by dp owner

Facts are what cannot be computed again; derived parts follow from them under the recipe's
hyper-parameters. Every column file has `draw_index` and `candidate`: joins are by that pair.
Per-token columns run over the rows' response tokens, `response_offsets` says where rows begin.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from megarl.contracts.records import (
    Derived,
    Prompt,
    RewardKind,
    RewardRecord,
    RewardStatus,
    Scores,
)
from megarl.contracts.samples import Samples
from megarl.rollout.groups import Selection

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
STATUSES = tuple(RewardStatus)
COMPONENT = "reward.component."
"""Before a component's name: float64 [N], NaN where a record has none."""


def rollout_part(
    samples: Samples, records: Sequence[RewardRecord], scorer_version: str
) -> tuple[Columns, dict[str, Any]]:
    """Columns and metadata of one replica's samples and their reward records.

    `samples` in any order, `records` one for each in any order; stored in canonical order.
    `reward.total` is NaN exactly where the status is not ok. Raises `ValueError` when a sample
    has no record or a record no sample, and for a reward that is not raw: shaping is derived.
    """
    samples = samples.canonical()
    by_id = {(record.draw_index, record.candidate): record for record in records}
    pairs = list(zip(samples.draw_index.tolist(), samples.candidate.tolist(), strict=True))
    if by_id.keys() != set(pairs) or len(by_id) != len(records):
        odd = sorted(by_id.keys() ^ set(pairs))[:4]
        raise ValueError(f"reward records and samples do not join by id, at {odd}")
    ordered = [by_id[pair] for pair in pairs]
    shaped = [record for record in ordered if record.kind is not RewardKind.RAW]
    if shaped:
        raise ValueError(f"a fact must be a raw reward, not {shaped[0]}")
    columns = {name: getattr(samples, name) for name in SAMPLE_COLUMNS}
    columns |= _reward_columns(ordered)
    details = sorted({record.detail for record in ordered})
    place = {detail: number for number, detail in enumerate(details)}
    columns["reward.detail"] = np.array([place[r.detail] for r in ordered], dtype=np.int32)
    spans = {
        f"{r.draw_index}/{r.candidate}": {name: list(span) for name, span in r.applies_to.items()}
        for r in ordered
        if r.applies_to
    }
    return columns, {
        "version_id": samples.version_id,
        "scorer_version": scorer_version,
        "details": details,
        "applies_to": spans,
    }


def _reward_columns(records: Sequence[RewardRecord]) -> Columns:
    nan = float("nan")
    steps = [record.step_rewards for record in records]
    columns = {
        "reward.total": np.array([nan if r.total is None else r.total for r in records], float),
        "reward.status": np.array([STATUSES.index(r.status) for r in records], dtype=np.int8),
        "reward.seconds": np.array([record.seconds for record in records], dtype=np.float64),
        "reward.step_offsets": np.cumsum([0, *map(len, steps)], dtype=np.int64),
        "reward.step_token": np.array([at for row in steps for at, _ in row], dtype=np.int32),
        "reward.step_value": np.array([v for row in steps for _, v in row], dtype=np.float64),
    }
    for name in sorted({name for record in records for name in record.components}):
        values = [record.components.get(name, nan) for record in records]
        columns[COMPONENT + name] = np.array(values, dtype=np.float64)
    return columns


def samples_of(columns: Mapping[str, np.ndarray], version_id: str) -> Samples:
    """Raises `ValueError` and `KeyError` as `Samples` does for columns that are none."""
    return Samples(**{name: columns[name] for name in SAMPLE_COLUMNS}, version_id=version_id)


def records_of(
    columns: Mapping[str, np.ndarray], metadata: Mapping[str, Any]
) -> list[RewardRecord]:
    """The reward records of a rollout part, in its row order."""
    names = sorted(name for name in columns if name.startswith(COMPONENT))
    steps = columns["reward.step_offsets"].tolist()
    records = []
    for row, draw in enumerate(columns["draw_index"].tolist()):
        candidate = int(columns["candidate"][row])
        span = slice(steps[row], steps[row + 1])
        values = {name.removeprefix(COMPONENT): float(columns[name][row]) for name in names}
        spans = metadata["applies_to"].get(f"{draw}/{candidate}", {})
        status = STATUSES[int(columns["reward.status"][row])]
        total = float(columns["reward.total"][row])
        records.append(
            RewardRecord(
                draw_index=draw,
                candidate=candidate,
                total=total if status is RewardStatus.OK else None,
                components={name: value for name, value in values.items() if value == value},
                scorer_version=metadata["scorer_version"],
                status=status,
                kind=RewardKind.RAW,
                detail=metadata["details"][int(columns["reward.detail"][row])],
                seconds=float(columns["reward.seconds"][row]),
                applies_to={name: tuple(ends) for name, ends in spans.items()},
                step_rewards=tuple(
                    zip(
                        columns["reward.step_token"][span].tolist(),
                        columns["reward.step_value"][span].tolist(),
                        strict=True,
                    )
                ),
            )
        )
    return records


def scores_of(columns: Mapping[str, np.ndarray], metadata: Mapping[str, Any]) -> Scores:
    """The columnar rewards of a rollout part, in its (canonical) row order."""
    names = sorted(name for name in columns if name.startswith(COMPONENT))
    details = metadata["details"]
    return Scores(
        draw_index=columns["draw_index"],
        candidate=columns["candidate"],
        total=columns["reward.total"],
        status=tuple(STATUSES[status] for status in columns["reward.status"].tolist()),
        detail=tuple(details[number] for number in columns["reward.detail"].tolist()),
        components={name.removeprefix(COMPONENT): columns[name] for name in names},
        seconds=columns["reward.seconds"],
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
    for name in ("advantages", "shaped_rewards", "returns"):
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
    return [
        {name: value for name, value in asdict(prompt).items() if name != "token_ids"}
        for prompt in prompts
    ]


def _rows(samples: Samples) -> Columns:
    return {
        "draw_index": samples.draw_index,
        "candidate": samples.candidate,
        "response_offsets": samples.response_offsets,
    }
