"""A run's sealed files as they lie on the disk, for oracles that use no code of the audit's."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

Key = tuple[int, int]
STATUSES = ("ok", "timeout", "error")


@dataclass(frozen=True)
class RawSample:
    reward: float | None
    status: str
    seed: int
    ids: list[int]
    columns: dict[str, np.ndarray]
    """`rollout_log_probs`, `old_log_probs`, `ref_log_probs`, `advantages` of its tokens, where
    they are there."""
    minibatch: int


def read_samples(run: Path, iteration: int) -> dict[Key, RawSample]:
    """(draw index, candidate) → sample."""
    folder = run / "experience" / f"iter_{iteration:06d}"
    owned = [load_file(path) for path in folder.glob("scored_*.safetensors")]
    owned += [load_file(path) for path in folder.glob("derived_*.safetensors")]
    chosen = load_file(folder / "selection.safetensors")
    minibatch = dict(zip(_keys(chosen), chosen["minibatch"].tolist(), strict=True))
    tokens: dict[Key, dict[str, np.ndarray]] = {}
    for part in owned:
        for row, key in enumerate(_keys(part)):
            span = slice(*part["response_offsets"][row : row + 2])
            named = [n for n in part if n.endswith("_log_probs") or n == "advantages"]
            tokens[key] = tokens.get(key, {}) | {name: part[name][span] for name in named}
    found = {}
    for path in folder.glob("rollout_*.safetensors"):
        part = load_file(path)
        for row, key in enumerate(_keys(part)):
            span = slice(*part["response_offsets"][row : row + 2])
            total = float(part["reward.total"][row])
            mine = {"rollout_log_probs": part["rollout_log_probs"][span]}
            found[key] = RawSample(
                reward=None if np.isnan(total) else total,
                status=STATUSES[part["reward.status"][row]],
                seed=int(part["seed"][row]),
                ids=part["response_ids"][span].tolist(),
                columns=mine | tokens.get(key, {}),
                minibatch=minibatch[key],
            )
    return found


def read_prompts(run: Path, iteration: int) -> list[dict[str, Any]]:
    return read_jsonl(run / "experience" / f"iter_{iteration:06d}" / "prompts.jsonl")


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def groups(samples: dict[Key, RawSample]) -> dict[int, dict[int, RawSample]]:
    """Draw index → candidate → sample."""
    found: dict[int, dict[int, RawSample]] = {}
    for (draw, candidate), sample in sorted(samples.items()):
        found.setdefault(draw, {})[candidate] = sample
    return found


def _keys(part: dict[str, np.ndarray]) -> list[Key]:
    return list(zip(part["draw_index"].tolist(), part["candidate"].tolist(), strict=True))
