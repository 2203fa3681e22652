"""Which columns each kind of part has, and the check that a file has them. Pure."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from megarl.contracts.records import STATUSES, RewardStatus
from megarl.data.table import pair_keys
from megarl.rollout.selection import VERDICTS

COMPONENT = "reward.component."
"""Before a component's name: float64 [N], NaN where a record has none."""

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
        "experts_offsets": ("int64", "N+1?"),
        "experts": ("int16", "X?"),
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
        "values": ("float32", "R?"),
        "last_values": ("float32", "N?"),
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
_OFFSETS = {
    "P": "prompt_offsets",
    "R": "response_offsets",
    "S": "reward.step_offsets",
    "X": "experts_offsets",
}


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
    if ("experts" in columns) != ("experts_offsets" in columns):
        raise ValueError("experts and experts_offsets are not both there")
    for name, array in columns.items():
        dtype, size = wanted[name]
        expected = (lengths[size.removesuffix("?")],)
        if array.dtype != dtype or array.shape != expected:
            raise ValueError(f"{name} is {array.dtype}{array.shape}, not {dtype}{expected}")
    if kind == "scored" and ("values" in columns) != ("last_values" in columns):
        raise ValueError("values and last_values are not both there")
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
