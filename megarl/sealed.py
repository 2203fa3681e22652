"""One iteration between its sealing and its update, whether it was generated just now or before."""

from __future__ import annotations

from dataclasses import dataclass

from megarl.contracts.records import Experience, Prompt
from megarl.data.join import JoinCounts
from megarl.data.prepare import Parity, Prepared
from megarl.data.table import SampleTable
from megarl.rollout.groups import IterationPlan


@dataclass(frozen=True)
class Sealed:
    """One iteration's facts, and what was decided over them once and globally."""

    table: SampleTable
    plan: IterationPlan
    prepared: Prepared
    parity: Parity
    experience: Experience
    joined: JoinCounts = JoinCounts()
    """Results that came again or late and changed nothing, over all ranks."""
    prompts: tuple[Prompt, ...] = ()
    """By draw index; none where only their sealed words are known."""
