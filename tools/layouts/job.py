"""What is given to the ranks: plain values, so that whoever starts them loads no library."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

WORK = "tools.layouts.ranks:work"
Names = tuple[str, str]
"""Of the trainer's layout and of the generator's."""
FAULTS = ("generator", "trainer", "crash")
"""Of tests: an element that changes in the generator after the hand-over, or in the trainer before
it, and a rank that raises."""


@dataclass(frozen=True)
class Job:
    """One model on one number of ranks."""

    world: int
    model: str
    folders: Mapping[str, str]
    """Dtype → the model folder whose weights are of it; each goes through the round trip."""
    folder: str
    """What trainer, generator and HF model load."""
    dtype: str
    """Of trainer and generator."""
    bound: float
    only: frozenset[Names] | None = None
    """None: all pairs of layouts that fit."""
    every: bool = False
    """Also where experts make so many that otherwise every second one is taken."""
    done: frozenset[Names] = frozenset()
    """What is not done again."""
    trips: frozenset[str] = frozenset()
    """Layouts of the trainer whose round trip is done."""
    fault: str | None = None
    """One of `FAULTS`."""
