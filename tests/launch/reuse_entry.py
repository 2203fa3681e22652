"""A rank whose first iteration goes on from what lies sealed in the run's folder, as after a resume
at iteration 0. Which checkpoint a resume takes, and what it sets aside, is not its subject.
"""

from __future__ import annotations

from typing import Any


def main_from_sealed() -> int:
    """Instead of `megarl.process.main`, in a process of its own: nothing is put back."""
    from megarl import process

    work_of = process._work

    def work_from_sealed(*arguments: Any) -> Any:
        from megarl import train
        from megarl.contracts.states import RESUMED

        loop = train.train

        def resumed(run: Any) -> None:
            run.reusable = 0
            run.journal._transitions = RESUMED
            loop(run)

        train.train = resumed
        return work_of(*arguments)

    process._work = work_from_sealed
    return process.main()
