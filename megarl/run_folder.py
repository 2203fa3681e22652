"""The folder of a run, opened before anything slow is imported; nothing learnt is ever deleted."""

from __future__ import annotations

import shutil
from itertools import count
from pathlib import Path

from filelock import FileLock, Timeout

from megarl.checkpoint.begin import write_recipe
from megarl.checkpoint.resume import Resume, decide
from megarl.observe.environment import ENVIRONMENT_FILE
from megarl.observe.metrics import TENSORBOARD_FOLDER
from megarl.observe.runfolder import (
    DATA_FILE,
    FINISHED_FILE,
    RECIPE_FILE,
    REPLAY_FILE,
    TIMELINE_FILE,
    TOKENIZER_FOLDER,
)
from megarl.recipe import Recipe, RecipeError, load_recipe

LOGS = "logs"
START_FILES = frozenset({RECIPE_FILE, ENVIRONMENT_FILE, DATA_FILE, TIMELINE_FILE})
START_FOLDERS = frozenset({LOGS, TOKENIZER_FOLDER, TENSORBOARD_FOLDER})
"""What a run writes before it has weights, besides files and folders that are still empty."""


def make_folder(recipe: Recipe) -> Path:
    """`runs/<name>/logs`, on every rank; raises `RecipeError` where no folder can be made."""
    folder = recipe.run_folder
    try:
        (folder / LOGS).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RecipeError(
            f"{folder} cannot be made ({error.strerror}: {error.filename}); "
            "set run.folder to a folder that can be written to"
        ) from error
    return folder


def claim_folder(
    recipe: Recipe, *, again: bool = False, may_resume: bool = False
) -> tuple[FileLock, Resume | None]:
    """Rank 0's: take `runs/<name>` for this run; where it goes on, or None for a new run, whose
    resolved recipe is written into it.

    The lock is the process's for as long as it is kept; the system frees it when the process ends,
    however it ends. With `run.overwrite` an earlier run is set aside as `<name>.replaced-<n>`, for
    inputs may still turn out bad after this; the stored recipe does not overwrite again.
    A run that ended before it had weights keeps its name no more than its logs.
    `again`: the folder is a replay's, which computes nothing new; an earlier replay there goes.
    `may_resume`: a run that lies there is gone on with as the recipe's `resume` says; the folder
    stays as it is until `checkpoint.begin.begin`.

    Raises `RecipeError` when a run is going on there, or lies there and is neither to be replaced
    nor to be gone on with, and what `checkpoint.resume.decide` raises.
    """
    folder = make_folder(recipe)
    lock = FileLock(folder.parent / f".{folder.name}.lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise RecipeError(
            f"{folder} belongs to a run that is going on; set run.name=…, or wait for its end"
        ) from None
    if (again and (folder / REPLAY_FILE).exists()) or _never_began(folder):
        _clear(folder)
    if (folder / RECIPE_FILE).exists() and recipe.run.overwrite:
        _set_aside(folder)
    if may_resume:
        resume = decide(recipe, folder)
        if resume is not None:
            return lock, resume
    elif (folder / RECIPE_FILE).exists():
        state = "a finished run" if (folder / FINISHED_FILE).exists() else "an unfinished run"
        raise RecipeError(
            f"{folder} holds {state}; set run.name=…, or run.overwrite=true to replace it"
        )
    write_recipe(recipe, folder)
    if again:
        (folder / REPLAY_FILE).touch()
    return lock, None


def _never_began(folder: Path) -> bool:
    """Whether nothing lies there but what a run writes before it has weights: it learnt nothing."""
    return _is_stored(folder / RECIPE_FILE) and all(map(_is_of_the_start, folder.iterdir()))


def _is_stored(recipe: Path) -> bool:
    """Whether a run wrote this file. One written by hand is somebody's work, and stays."""
    try:
        return load_recipe(recipe, []).resolved_yaml() == recipe.read_text(encoding="utf-8")
    except (RecipeError, OSError, UnicodeDecodeError):
        return False


def _is_of_the_start(entry: Path) -> bool:
    if entry.is_symlink():
        return False
    if entry.is_dir():
        return entry.name in START_FOLDERS or all(map(_is_of_the_start, entry.iterdir()))
    return entry.name in START_FILES or entry.stat().st_size == 0


def _clear(folder: Path) -> None:
    """Remove all but the logs, which other ranks may be writing already."""
    for entry in list(folder.iterdir()):
        if entry.is_dir() and entry.name != LOGS:
            shutil.rmtree(entry)
        elif not entry.is_dir():
            entry.unlink()


def _set_aside(folder: Path) -> None:
    """Move all but the logs, which other ranks may be writing already."""
    names = (folder.with_name(f"{folder.name}.replaced-{n}") for n in count(1))
    aside = next(name for name in names if not name.exists())
    aside.mkdir()
    for entry in list(folder.iterdir()):
        if entry.name != LOGS:
            entry.rename(aside / entry.name)
