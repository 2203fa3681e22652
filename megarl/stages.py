"""Which stage this rank is in, for time-outs, messages and fault injection.

`StageBoard.enter` is called at the start of every stage, barrier and vote. All ranks run the same
loop, so the number of stages entered tells who is behind.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass

from megarl import faults, torchrun

STAGES = (
    "load_data",
    "build_actor",
    "start_generator",
    "commit",
    "reshard",
    "verify",
    "evaluate",
    "generate",
    "grade",
    "exchange",
    "log_probs",
    "seal",
    "update",
    "checkpoint",
    "checkpoint_commit",
    "export",
)
"""In the order of a run. Between two of them a rank is still in the earlier one."""
VOTE = "vote "
"""Before a state's name: the stage of waiting for every rank's vote on it."""
LONGEST_NAME = 64


@dataclass(frozen=True, slots=True)
class Entered:
    """A stage, the how-manieth of this rank, and when it began (`time.monotonic`)."""

    count: int
    stage: str
    since: float


class StageBoard:
    """This rank's stage. Written by the main thread, read by any."""

    def __init__(self, rank: int = 0) -> None:
        self.now = Entered(0, "start", time.monotonic())
        self._fault = faults.planned(rank)
        path = torchrun.stage_file()
        # Kept open and written in place: the launcher reads it after a rank was killed.
        self._file = None if path is None else os.open(path, os.O_WRONLY | os.O_CREAT, 0o644)

    def enter(self, stage: str) -> None:
        self.now = Entered(self.now.count + 1, stage, time.monotonic())
        if self._file is not None:
            os.pwrite(self._file, stage[:LONGEST_NAME].ljust(LONGEST_NAME).encode(), 0)
        if self._fault is not None:
            self._fault.strike(stage)

    @property
    def is_losing(self) -> bool:
        """Whether a planned fault loses a response of the stage that goes on."""
        return self._fault is not None and self._fault.is_losing

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None
