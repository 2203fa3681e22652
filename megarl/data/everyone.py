"""From numbers of one rank's samples to those of all samples, in canonical order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from megarl.contracts.ids import name_pairs
from megarl.contracts.samples import Samples
from megarl.data.table import SampleTable

if TYPE_CHECKING:  # one process that holds all samples needs no ranks, so no torch either
    from megarl.world import World

Everyone = Callable[[np.ndarray], np.ndarray]
"""float64 [n, k] of this rank's rows in canonical order → float64 [N, k] of the table's rows, the
same on every rank; NaN where no owner holds the row. Collective: every rank asks alike."""


def everyone_of(world: World, table: SampleTable, samples: Samples) -> Everyone:
    """The numbers of every data-parallel part's samples, which only the part's speaker sends.

    `samples` are this rank's, as `exchange` gave them. What comes back raises `ValueError` on every
    rank, naming rank or rows, for numbers that are not one row per sample and where two parts
    hold one row. Collective, also on a rank without samples.
    """
    own = table.rows_of(samples.draw_index, samples.candidate)

    def everyone(values: np.ndarray) -> np.ndarray:
        problem = _problem(values, len(own))
        sent = (own, values) if world.leads_owners and not problem else None
        told = world.gather((problem, sent))
        problems = [f"rank {rank}: {problem}" for rank, (problem, _) in enumerate(told) if problem]
        if problems:
            raise ValueError("numbers that are not its samples': " + "; ".join(problems))
        return _placed(table, [sent for _, sent in told if sent is not None])

    return everyone


def alone(table: SampleTable, samples: Samples) -> Everyone:
    """The same of one process that holds all samples that anybody does."""
    own = table.rows_of(samples.draw_index, samples.candidate)

    def everyone(values: np.ndarray) -> np.ndarray:
        problem = _problem(values, len(own))
        if problem:
            raise ValueError(f"numbers that are not its samples': {problem}")
        return _placed(table, [(own, values)])

    return everyone


def _problem(values: np.ndarray, rows: int) -> str:
    if values.dtype != np.float64 or values.ndim != 2 or len(values) != rows:
        return f"{values.dtype}{values.shape} for {rows} samples, not float64({rows}, k)"
    return ""


def _placed(table: SampleTable, parts: Sequence[tuple[np.ndarray, np.ndarray]]) -> np.ndarray:
    rows = np.concatenate([rows for rows, _ in parts])
    seen = np.bincount(rows, minlength=len(table))
    if (seen > 1).any():
        twice = name_pairs(table.keys[seen > 1])
        raise ValueError(f"samples that two data-parallel parts hold: {twice}")
    whole = np.full((len(table), parts[0][1].shape[1]), np.nan)
    whole[rows] = np.concatenate([values for _, values in parts])
    return whole
