"""Brings a run's folder to the position that it goes on from, and says so in `resumes/NNN/`."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from megarl.checkpoint.commit import FOLDER as CHECKPOINTS
from megarl.checkpoint.cut_back import Aside, cut_back
from megarl.checkpoint.position import Position
from megarl.checkpoint.records import check_records
from megarl.checkpoint.resume import RECORDS, RESUME_FILE, REUSE, TOKENIZER, Resume
from megarl.checkpoint.segments import resume_folders
from megarl.contracts.lines import LinesWriter, read_json_lines
from megarl.contracts.states import State
from megarl.experience.columns import sync_folder, write_whole
from megarl.experience.manifest import iteration_folders, sealed_iterations
from megarl.experience.tokenizer import differing_files
from megarl.experience.versions import LOADED, VERSIONS_FILE
from megarl.observe.runfolder import DATA_FILE, RECIPE_FILE, TOKENIZER_FOLDER
from megarl.recipe import Recipe


def begin(
    recipe: Recipe,
    resume: Resume,
    run_folder: Path,
    layout: Mapping[str, int],
    differ: Mapping[str, tuple[str, str]],
) -> list[str]:
    """Bring the run's folder to the position. Rank 0's; returns lines for people. `differ` is what
    `resume.contents` let through.

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
    records = None if position is None else records_at(position, resume, run_folder)
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
        "contents": dict(differ),
        "records": {} if position is None else changed_records(position, records),
    } | asdict(resume)
    if resume.own and resume.checkpoint is not None:  # the run's folder may be moved
        told["checkpoint"] = f"{CHECKPOINTS}/{Path(resume.checkpoint).name}"
    write_whole(aside / RESUME_FILE, (json.dumps(told, indent=1) + "\n").encode())
    sync_folder(aside)
    sync_folder(aside.parent)
    if (run_folder / DATA_FILE).exists():  # this start writes its own
        shutil.copyfile(run_folder / DATA_FILE, aside / DATA_FILE)
    lines = cut_back(
        run_folder,
        aside,
        records,
        resume.iteration if resume.own else 0,
        eval_files=() if position is None else position.eval_files,
        export_names=() if position is None else position.exports,
        reuse=reuse,
        source=None if resume.checkpoint is None else Path(resume.checkpoint),
    )
    if reuse is not None and position is not None:
        keep_hand_over(run_folder, position)
    lines += set_tokenizer_aside(recipe, resume, run_folder, aside)
    write_recipe(recipe, run_folder)
    return lines


def records_at(position: Position, resume: Resume, run_folder: Path) -> dict[str, dict[str, Any]]:
    """Where the records are cut. Those that were changed by hand, where that is allowed, before
    their first line that tells of what lies beyond the position; a torn last line goes too."""
    records = dict(position.records)
    if RECORDS in resume.allowed:
        for name in check_records(run_folder, records):
            path = run_folder / name
            body = path.read_bytes() if path.exists() else b""
            records[name] = {"bytes": _bytes_before(body, position.iteration)}
    return records


def changed_records(
    position: Position, records: Mapping[str, Mapping[str, Any]]
) -> dict[str, dict[str, int]]:
    """Line file → bytes at the position, and those that stay, of files changed by hand."""
    return {
        name: {"position": position.records[name]["bytes"], "kept": told["bytes"]}
        for name, told in records.items()
        if told is not position.records[name]
    }


def _bytes_before(body: bytes, iteration: int) -> int:
    """Where lines of `iteration` or later begin; a line that tells of none belongs to those above
    it."""
    size = 0
    for line in body.splitlines(keepends=True):
        try:
            told = json.loads(line)
        except ValueError:
            told = None
        of = told.get("iteration") if isinstance(told, dict) else None
        # A run that fails between two iterations says so of the one before.
        beyond = isinstance(of, int) and (of >= iteration or told.get("state") == State.FAILED)
        if beyond or not line.endswith(b"\n"):
            break
        size += len(line)
    return size


def set_tokenizer_aside(
    recipe: Recipe, resume: Resume, run_folder: Path, aside: Path
) -> Sequence[str]:
    """The run's copy of the tokenizer, where this start goes on with another one: it keeps its own
    copy. At the run's start again nothing was compared, so there it takes the word for it."""
    kept = run_folder / TOKENIZER_FOLDER
    if resume.checkpoint is None and TOKENIZER not in resume.allowed:
        return ()
    if not kept.is_dir() or not differing_files(kept, Path(recipe.model.path)):
        return ()
    Aside(aside).move([kept])
    return ("the tokenizer that the run had",)


def keep_hand_over(run_folder: Path, position: Position) -> None:
    """The experience that is reused was made by a generator whose weights were read back: that line
    of `versions.jsonl` was cut off with what followed it, and stays."""
    there, _ = read_json_lines(run_folder / VERSIONS_FILE)
    cut = [folder / VERSIONS_FILE for folder in reversed(resume_folders(run_folder))]
    found = [line for path in cut if path.exists() for line in read_json_lines(path)[0]]
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
