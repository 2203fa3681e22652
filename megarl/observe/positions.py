"""What a summary says of a run's resumes and checkpoints, in words."""

from __future__ import annotations

from pathlib import Path

from megarl.checkpoint.commit import FOLDER, whole_checkpoints
from megarl.checkpoint.segments import read_resumes


def resumed_told(run_folder: Path) -> str | None:
    """`resumed 2 times, last from iteration 40 …`; None for a run that never was."""
    resumes, _ = read_resumes(run_folder)
    if not resumes:
        return None
    last, times = resumes[-1], len(resumes)
    if last.checkpoint is None:
        place = "the start"
    else:
        place = last.checkpoint if last.own else f"{last.checkpoint}, another run's"
    count = "once" if times == 1 else f"{times} times, last"
    return f"resumed {count} from iteration {last.iteration} ({place})"


def checkpoints_told(run_folder: Path) -> str | None:
    """Which positions can be gone on from; None where there is no checkpoint at all."""
    whole, others = whole_checkpoints(run_folder)
    if not whole and not others:
        return None
    iterations = ", ".join(str(commit.iteration) for commit in whole) or "none"
    size = f", {whole[-1].bytes / 1e6:.1f} MB each" if whole else ""
    odd = f"; {len(others)} in {FOLDER}/ are not whole" if others else ""
    return f"checkpoints after iterations: {iterations}{size}{odd}"
