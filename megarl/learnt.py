"""What an iteration's update did, role by role."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Generic, TypeVar

Step = TypeVar("Step")


@dataclass(frozen=True, slots=True)
class Learnt(Generic[Step]):
    """One entry for each optimizer step that was begun: pass by pass over the minibatches.

    The actor has none while the critic warms up, and fewer where its policy had moved too far.
    """

    actor: list[Step]
    critic: list[Step] = field(default_factory=list)
