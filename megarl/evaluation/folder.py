"""The folder of an evaluation by itself: taken before anything slow is imported."""

from __future__ import annotations

import shutil
from itertools import count
from pathlib import Path

from filelock import FileLock, Timeout

from megarl.evaluation.arguments import Asked
from megarl.evaluation.targets import EvaluationError

LOGS = "logs"
RECIPE_FILE = "recipe.yaml"
RESULTS_FILE = "results.json"
"""Written last: an evaluation with it is whole."""
MARK = "evaluation"
"""In the first line of its recipe.yaml: the folder is no run's."""


def claim(folder: Path, asked: Asked) -> FileLock:
    """Rank 0's: take `folder`, and write the recipe into it.

    An evaluation that never came to its end makes room; a finished one is set aside as
    `<name>.replaced-<n>` where that was asked for. Raises `EvaluationError` as `refuse_folder`
    does, where another evaluation writes there, and where no folder can be made.
    """
    refuse_folder(folder, asked)
    try:
        (folder / LOGS).mkdir(parents=True, exist_ok=True)
        lock = FileLock(folder.parent / f".{folder.name}.lock")
        lock.acquire(timeout=0)
    except Timeout:
        raise EvaluationError(
            f"{folder}: an evaluation that is going on writes there; wait, or give another --out"
        ) from None
    except OSError as error:
        raise EvaluationError(
            f"{folder} cannot be made ({error.strerror}); give --out a folder that can be written"
        ) from error
    refuse_folder(folder, asked)
    if (folder / RESULTS_FILE).exists():
        _set_aside(folder)
    for entry in _entries(folder):
        shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
    recipe = f"# {MARK}\n{asked.recipe.resolved_yaml()}"
    (folder / RECIPE_FILE).write_text(recipe, encoding="utf-8")
    return lock


def refuse_folder(folder: Path, asked: Asked) -> None:
    """Raises `EvaluationError` where an evaluation may not write; changes nothing."""
    others = _entries(folder) if folder.is_dir() else []
    if (folder.exists() and not folder.is_dir()) or (others and not _is_evaluation(folder)):
        what = f" ({others[0].name})" if others else ""
        raise EvaluationError(
            f"{folder} holds something else than an evaluation{what}; give another --out"
        )
    if (folder / RESULTS_FILE).exists() and not asked.overwrite:
        raise EvaluationError(
            f"{folder} holds a finished evaluation; --overwrite sets it aside, --out FOLDER "
            "writes elsewhere"
        )


def _entries(folder: Path) -> list[Path]:
    """All but the logs, which other ranks may be writing already."""
    return sorted(entry for entry in folder.iterdir() if entry.name != LOGS)


def _is_evaluation(folder: Path) -> bool:
    try:
        with open(folder / RECIPE_FILE, encoding="utf-8") as file:
            return file.readline() == f"# {MARK}\n"
    except (OSError, UnicodeDecodeError):
        return False


def _set_aside(folder: Path) -> None:
    names = (folder.with_name(f"{folder.name}.replaced-{n}") for n in count(1))
    aside = next(name for name in names if not name.exists())
    aside.mkdir()
    for entry in _entries(folder):
        entry.rename(aside / entry.name)
