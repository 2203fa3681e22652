"""One number per sample over its facts: by it ranks compare samples whose tokens they do not hold.

    f(row) = Σ_j w(j) · b(j),   w(j) = log-prob bits | mask bit | response id,   wrapping

in 64 bits, and the same over prompt ids, experts, end reason and seed, with odd multipliers b drawn
from (column, j). It guards against faults, not against an adversary. Clocks are in no fingerprint.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from megarl.contracts.ragged import blocks_of

if TYPE_CHECKING:
    from megarl.contracts.samples import Samples


def fingerprints(samples: Samples) -> np.ndarray:
    """uint64 [N]."""
    prompt = _row_sums([samples.prompt_ids], samples.prompt_offsets, b"prompt")
    columns = [samples.response_ids, samples.action_mask, samples.rollout_log_probs]
    response = _row_sums(columns, samples.response_offsets, b"response")
    with np.errstate(over="ignore"):
        ends = samples.end_reason.astype(np.uint64) * _multipliers(b"end", 1)
        if len(samples.experts):
            ends += _row_sums([samples.experts], samples.experts_offsets, b"experts")
        seeds = samples.seed.astype(np.uint64) * _multipliers(b"seed", 1)
        return _mix(prompt + ends + seeds) ^ response


def _row_sums(columns: list[np.ndarray], offsets: np.ndarray, name: bytes) -> np.ndarray:
    """uint64 [N]: every row's Σ w(j) · b(j). No row is empty."""
    rows = len(offsets) - 1
    sums = np.zeros(rows, dtype=np.uint64)
    if rows == 0:
        return sums
    lengths = np.diff(offsets)
    multipliers = _multipliers(name, int(lengths.max()))
    for start, stop in blocks_of(offsets):
        first, last = int(offsets[start]), int(offsets[stop])
        begins = offsets[start:stop] - first
        words = _words([column[first:last] for column in columns])
        position = np.arange(last - first)
        position -= np.repeat(begins, lengths[start:stop])
        words *= multipliers[position]
        np.add.reduceat(words, begins, out=sums[start:stop])
    return sums


def _words(columns: list[np.ndarray]) -> np.ndarray:
    """Token columns as one uint64 each token: ids below, mask at bit 31, log-prob bits above."""
    words = columns[0].astype(np.uint64)  # ids are ≥ 0, so bit 31 is free
    if len(columns) == 3:
        words |= columns[1].astype(np.uint64) << np.uint64(31)
        words |= columns[2].view(np.uint32).astype(np.uint64) << np.uint64(32)
    return words


def _multipliers(name: bytes, count: int) -> np.ndarray:
    """uint64 [count], odd, of a column's name and the position."""
    seed = np.uint64(int.from_bytes(name.ljust(8, b"\0")[:8], "little"))
    with np.errstate(over="ignore"):
        return _mix(np.arange(count, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + seed) | (
            np.uint64(1)
        )


def _mix(values: np.ndarray) -> np.ndarray:
    """splitmix64's finaliser (Steele, Lea and Flood, 2014)."""
    with np.errstate(over="ignore"):
        values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return values ^ (values >> np.uint64(31))
