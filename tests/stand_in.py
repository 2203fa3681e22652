"""A rank with all of a run that a stop concerns, and no training: `python -m tests.stand_in`.

    bash launch/… RECIPE run.folder=F world.ranks=N …     8 iterations of $STAND_IN_SECONDS

Its checkpoint is the number of finished iterations in `F/position_<rank>`; started again it goes on
from there. Every rank decides alone, and waits for the others before it ends. Boundary, signals,
journal, launcher and script are megarl's.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from megarl.contracts.states import JOURNAL_FILE, Journal, State
from megarl.contracts.version import PolicyVersion
from megarl.failure import Failure
from megarl.observe.console import Console
from megarl.observe.logs import captured
from megarl.stages import StageBoard
from megarl.stop import StopAsked, hold
from megarl.torchrun import die_with_launcher

ITERATIONS = 8
SECONDS = float(os.environ.get("STAND_IN_SECONDS", "0.25"))


def main() -> int:
    die_with_launcher()
    hold()
    given = dict(argument.split("=", 1) for argument in sys.argv[1:] if "=" in argument)
    rank, folder = int(os.environ.get("RANK", "0")), Path(given["run.folder"])
    with captured(folder / f"rank_{rank}.log", rank) as terminal:
        failure = Failure(terminal, StageBoard(rank))
        failure.watch_signals()
        journal = Journal(folder / JOURNAL_FILE if rank == 0 else None)
        failure.attach(journal, Console("off"))
        with failure.told():
            version = PolicyVersion("run", 0, 0, *"abc", "actor")
            journal.enter(State.ACTOR_COMMITTED, 0, version, weight_manifest_hash="a")
            _iterate(folder, rank, failure)
        failure.leave_signals()
    return 0


def _iterate(folder: Path, rank: int, failure: Failure) -> None:
    position = folder / f"position_{rank}"
    first = int(position.read_text()) if position.exists() else 0
    print(f"starts at {first}", flush=True)
    for iteration in range(first, ITERATIONS):
        time.sleep(SECONDS)
        position.write_text(f"{iteration + 1}")
        if failure.stop.asked and iteration + 1 < ITERATIONS:
            _meet(folder, rank)
            raise StopAsked(iteration, position)


def _meet(folder: Path, rank: int) -> None:
    """A launch of ranks has a port of its own."""
    name = f"stopped_{os.environ.get('MASTER_PORT')}_{{}}"
    (folder / name.format(rank)).touch()
    for other in range(int(os.environ.get("WORLD_SIZE", "1"))):
        while not (folder / name.format(other)).exists():
            time.sleep(0.01)


if __name__ == "__main__":
    sys.exit(main())
