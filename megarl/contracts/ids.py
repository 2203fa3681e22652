"""A sample's id inside the loop: (draw index, candidate), and the pair as one number."""

from __future__ import annotations

import numpy as np


def pair_keys(draw_index: np.ndarray, candidate: np.ndarray) -> np.ndarray:
    """int64, one per (draw index, candidate), rising in canonical order."""
    return (np.asarray(draw_index, dtype=np.int64) << 32) | np.asarray(candidate, dtype=np.int64)


def name_pairs(keys: np.ndarray, most: int = 8) -> str:
    """`draw/candidate, …` of some keys, for messages."""
    told = ", ".join(f"{key >> 32}/{key & 0xFFFFFFFF}" for key in keys[:most].tolist())
    return told + (f" and {len(keys) - most} more" if len(keys) > most else "")
