"""Brings a run's folder to the position that it goes on from, and says so in `resumes/NNN/`."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from megarl.checkpoint.commit import FOLDER as CHECKPOINTS
from megarl.checkpoint.cut_back import cut_back
from megarl.checkpoint.position import Position
from megarl.checkpoint.records import check_records
from megarl.checkpoint.resume import FOLDER, RECORDS, RESUME_FILE, REUSE, Resume
from megarl.contracts.lines import LinesWriter, read_json_lines
from megarl.experience.columns import sync_folder, write_whole
from megarl.experience.manifest import iteration_folders, sealed_iterations
from megarl.experience.versions import LOADED, VERSIONS_FILE
from megarl.observe.runfolder import RECIPE_FILE
from megarl.recipe import Recipe


def begin(recipe: Recipe, resume: Resume, run_folder: Path, layout: Mapping[str, int]) -> list[str]:
    """Bring the run's folder to the position. Rank 0's; returns lines for people.

    A crash in here leaves a folder from which the next resume does the same.
    """
    position = resume.position() if resume.own else None
    beyond = [n for n in sealed_iterations(run_folder) if n >= resume.iteration]
    reuse = resume.iteration if resume.use == REUSE and resume.iteration in beyond else None
    aside = run_folder / resume.folder_name
    aside.mkdir(parents=True, exist_ok=True)
    if (run_folder / RECIPE_FILE).exists():
        shutil.copyfile(run_folder / RECIPE_FILE, aside / RECIPE_FILE)
    before = resume.position()
    told = {
        "time": round(time.time(), 3),
        "asked": recipe.resume.from_,
        "layout": {"before": before.layout if before else None, "after": dict(layout)},
        "random": random_generators(before, layout),
        "reused": reuse,
        "dropped_experience": [
            n for n, _ in iteration_folders(run_folder) if n in beyond and n != reuse
        ],
        "recipe_hash": recipe.hash,
    } | asdict(resume)
    if resume.own and resume.checkpoint is not None:  # the run's folder may be moved
        told["checkpoint"] = f"{CHECKPOINTS}/{Path(resume.checkpoint).name}"
    write_whole(aside / RESUME_FILE, (json.dumps(told, indent=1) + "\n").encode())
    sync_folder(aside)
    sync_folder(aside.parent)
    lines = cut_back(
        run_folder,
        aside,
        None if position is None else records_at(position, resume, run_folder),
        resume.iteration if resume.own else 0,
        eval_files=() if position is None else position.eval_files,
        export_names=() if position is None else position.exports,
        reuse=reuse,
    )
    if reuse is not None and position is not None:
        keep_hand_over(run_folder, position)
    write_recipe(recipe, run_folder)
    return lines


def records_at(position: Position, resume: Resume, run_folder: Path) -> dict[str, dict[str, Any]]:
    """Where the records are cut. Those that were changed by hand, where that is allowed, after
    their last whole line that is not beyond the position."""
    records = dict(position.records)
    if RECORDS in resume.allowed:
        for name in check_records(run_folder, records):
            path = run_folder / name
            body = path.read_bytes() if path.exists() else b""
            records[name] = {"bytes": body.rfind(b"\n", 0, records[name]["bytes"]) + 1}
    return records


def keep_hand_over(run_folder: Path, position: Position) -> None:
    """The experience that is reused was made by a generator whose weights were read back: that line
    of `versions.jsonl` was cut off with what followed it, and stays."""
    there, _ = read_json_lines(run_folder / VERSIONS_FILE)
    cut = sorted((run_folder / FOLDER).glob(f"*/{VERSIONS_FILE}"))
    found = [line for path in reversed(cut) for line in read_json_lines(path)[0]]
    wanted = (LOADED, position.actor.version.id, position.iteration)

    def is_it(line: Mapping[str, Any]) -> bool:
        return (line.get("kind"), line.get("id"), line.get("iteration")) == wanted

    line = next(filter(is_it, found), None)
    if line is not None and not any(map(is_it, there)):
        writer = LinesWriter(run_folder / VERSIONS_FILE)
        writer.write(line)
        writer.close()


def random_generators(position: Position | None, layout: Mapping[str, int]) -> str:
    """What becomes of Python's, numpy's and torch's generators: a rank's own are restored where as
    many ranks there are."""
    if position is None:
        return "seeded: no checkpoint"
    before, now = position.layout["ranks"], layout["ranks"]
    return "restored" if before == now else f"seeded anew: {before} ranks before, {now} now"


def write_recipe(recipe: Recipe, folder: Path) -> None:
    """The resolved recipe as the run's own, which does not replace it again."""
    stored = recipe.model_copy(update={"run": recipe.run.model_copy(update={"overwrite": False})})
    whole = folder / (RECIPE_FILE + ".tmp")
    whole.write_text(stored.resolved_yaml(), encoding="utf-8")
    whole.replace(folder / RECIPE_FILE)
