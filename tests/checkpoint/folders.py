"""Stand-ins for checkpoints: what whole means does not depend on what is in the files."""

from __future__ import annotations

import json
from pathlib import Path

from megarl.checkpoint import commit as commits
from megarl.checkpoint.commit import (
    POSITION_FILE,
    checkpoint_folder,
    commit_folder,
    whole_checkpoints,
)

SHARD = "actor/__0_0.distcp"


def half_written(run: Path, iteration: int) -> Path:
    folder = checkpoint_folder(run, iteration)
    (folder / "actor").mkdir(parents=True)
    (folder / SHARD).write_bytes(b"t" * (100 + iteration))
    (folder / "actor/.metadata").write_bytes(b"index")
    (folder / "actor/common.pt").write_bytes(b"common")
    (folder / POSITION_FILE).write_text(json.dumps({"iteration": iteration}))
    return folder


def make(run: Path, *iterations: int) -> list[Path]:
    folders = [half_written(run, iteration) for iteration in iterations]
    for folder, iteration in zip(folders, iterations, strict=True):
        commit_folder(folder, "run", iteration, f"v{iteration}")
    return folders


def numbers(run: Path) -> list[int]:
    return [commit.iteration for commit in whole_checkpoints(run)[0]]


def names(run: Path) -> list[str]:
    return sorted(path.name for path in (run / commits.FOLDER).iterdir())
