"""The folder of a run: what lies in it, opened by rank 0 before anything slow is imported."""

from __future__ import annotations

import shutil
from pathlib import Path

from megarl.observe.runfolder import FINISHED_FILE, RECIPE_FILE
from megarl.recipe import Recipe, RecipeError

LOGS = "logs"


def open_folder(recipe: Recipe) -> Path:
    """Make `runs/<name>` with the resolved recipe in it.

    Raises `RecipeError` when a run lies there already, unless `run.overwrite` says to replace it.
    """
    folder = recipe.run_folder
    if (folder / RECIPE_FILE).exists():
        if not recipe.run.overwrite:
            state = "a finished run" if (folder / FINISHED_FILE).exists() else "an unfinished run"
            raise RecipeError(
                f"{folder} holds {state}; set run.name=…, or run.overwrite=true to replace it"
            )
        for entry in folder.iterdir():
            if entry.name == LOGS:  # other ranks may be writing theirs already
                continue
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / RECIPE_FILE).write_text(recipe.resolved_yaml(), encoding="utf-8")
    return folder
