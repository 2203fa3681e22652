"""`experience/iter_N/source.json`: whose sealed facts an iteration of a run is made of.

A run that scores old samples again, or trains on them, generates none of its own.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megarl.contracts.hashes import canonical_json
from megarl.experience.columns import write_whole
from megarl.experience.load import SealedIteration
from megarl.experience.manifest import SOURCE_FILE, iteration_folder


def write_source(run_folder: Path, number: int, iteration: SealedIteration) -> None:
    """The facts of this run's iteration `number` are those of `iteration`: its run's folder and
    id, its number, its `experience_hash` and its manifest's hash. For rank 0."""
    told: dict[str, Any] = {
        "run": str(iteration.folder.parent.parent.resolve()),
        "run_id": iteration.manifest.header.run_id,
        "iteration": iteration.manifest.header.iteration,
        "experience_hash": iteration.manifest.experience_hash,
        "manifest": iteration.manifest.hash,
    }
    place = iteration_folder(run_folder, number)
    place.mkdir(parents=True, exist_ok=True)
    write_whole(place / SOURCE_FILE, (canonical_json(told) + "\n").encode())
