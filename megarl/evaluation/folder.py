"""The folder of an evaluation by itself: taken before anything slow is imported.

Files are written into `unfinished/` within it, and come to their places when all of them are there:
an earlier evaluation stays as it is until then.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from filelock import FileLock, Timeout

from megarl.evaluation.arguments import Asked
from megarl.evaluation.targets import EvaluationError
from megarl.experience.columns import sync_folder

LOGS = "logs"
RECIPE_FILE = "recipe.yaml"
RESULTS_FILE = "results.json"
"""Written last: an evaluation with it is whole."""
UNFINISHED = "unfinished"
"""Where an evaluation writes until it has its results."""
REPLACED = ".replaced"
"""Takes in the earlier evaluation, until all of it can go beside the folder at once."""
MARK = "evaluation"
"""In the first line of its recipe.yaml: the folder is no run's."""


def claim(folder: Path, asked: Asked) -> FileLock:
    """Rank 0's: take `folder`, and write the recipe into its `unfinished/`.

    What an evaluation that never came to its end left is removed; a finished one stays. Where one
    has its results and was ended as they came to their places, they come there. Raises
    `EvaluationError` as `refuse_folder` and `settle` do, where another evaluation writes there, and
    where no folder can be made.
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
    if _is_whole(folder / UNFINISHED):
        settle(folder)
    refuse_folder(folder, asked)
    begun, finished = folder / UNFINISHED, _is_whole(folder)
    for entry in _entries(folder):
        if entry == begun or not finished:
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
    begun.mkdir()
    recipe = f"# {MARK}\n{asked.recipe.resolved_yaml()}"
    (begun / RECIPE_FILE).write_text(recipe, encoding="utf-8")
    return lock


def settle(folder: Path) -> None:
    """Rank 0's, once `unfinished/` holds the results: they come to their places.

    An earlier evaluation is set aside as `<name>.replaced-<n>`. Where the process is killed in
    here, the next `claim` does the rest. Raises `EvaluationError` where something cannot be moved.
    """
    # Imported here: it brings torch, and the launcher, which has no use for that, refuses folders.
    from megarl.run_folder import free_beside, undisturbed

    begun, replaced = folder / UNFINISHED, folder / REPLACED
    try:
        with undisturbed():
            if _is_whole(folder):
                replaced.mkdir(exist_ok=True)
                _move(folder, replaced)
            if replaced.is_dir():
                sync_folder(replaced)
                replaced.rename(free_beside(folder))
            _move(begun, folder)
            begun.rmdir()
            sync_folder(folder)
    except OSError as error:
        raise EvaluationError(
            f"{folder}: the results cannot come to their places ({error.strerror}: "
            f"{error.filename}); nothing is lost, and the next evaluation with this --out moves "
            "the rest"
        ) from error


def refuse_folder(folder: Path, asked: Asked) -> None:
    """Raises `EvaluationError` where an evaluation may not write; changes nothing."""
    others = _entries(folder) if folder.is_dir() else []
    if (folder.exists() and not folder.is_dir()) or (others and not _is_evaluation(folder)):
        what = f" ({others[0].name})" if others else ""
        raise EvaluationError(
            f"{folder} holds something else than an evaluation{what}; give another --out"
        )
    if _is_whole(folder / UNFINISHED):  # which `claim` brings to its place before it asks again
        return
    if _is_whole(folder) and not asked.overwrite:
        raise EvaluationError(
            f"{folder} holds a finished evaluation; --overwrite sets it aside, --out FOLDER "
            "writes elsewhere"
        )


def _entries(folder: Path) -> list[Path]:
    """All but the logs, which other ranks may be writing already."""
    return sorted(entry for entry in folder.iterdir() if entry.name != LOGS)


def _is_evaluation(folder: Path) -> bool:
    return _is_marked(folder / RECIPE_FILE) or _is_marked(folder / UNFINISHED / RECIPE_FILE)


def _is_marked(file: Path) -> bool:
    try:
        with open(file, encoding="utf-8") as lines:
            return lines.readline() == f"# {MARK}\n"
    except (OSError, UnicodeDecodeError):
        return False


def _is_whole(folder: Path) -> bool:
    return (folder / RESULTS_FILE).exists()


def _move(folder: Path, to: Path) -> None:
    """An evaluation's files: the recipe, which says whose a folder is, first; the results, which
    say that it is whole, last."""
    order = {RECIPE_FILE: 0, RESULTS_FILE: 2}
    for entry in sorted(_entries(folder), key=lambda path: (order.get(path.name, 1), path.name)):
        if entry.name not in (UNFINISHED, REPLACED):
            entry.rename(to / entry.name)
