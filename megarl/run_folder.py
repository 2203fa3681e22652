"""The folder of a run, opened before anything slow is imported; nothing learnt is ever deleted."""

from __future__ import annotations

import shutil
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path

from filelock import FileLock, Timeout

from megarl.checkpoint.begin import write_recipe
from megarl.checkpoint.resume import RESUME_FILE, Resume, decide
from megarl.experience.columns import UNFINISHED, sync_folder, write_whole
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
REPLACES = ".replaces"
"""Holds the name of the folder beside, where the run lies that this one replaces once it begins."""
MOVING = ".moving"
"""As `REPLACES`, while entries are moved either way: all of them belong into the run's folder."""
START_FILES = frozenset(
    {
        *(RECIPE_FILE, RECIPE_FILE + UNFINISHED, ENVIRONMENT_FILE, DATA_FILE, TIMELINE_FILE),
        REPLACES,
    }
)
START_FOLDERS = frozenset(
    {LOGS, TOKENIZER_FOLDER, TOKENIZER_FOLDER + UNFINISHED, TENSORBOARD_FOLDER}
)
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
    good once this one has weights (`settle`); the stored recipe does not overwrite again.
    A run that ended before it had weights keeps its name no more than its logs.
    `again`: the folder is a replay's, which computes nothing new; an earlier replay there goes.
    `may_resume`: a run that lies there is gone on with as the recipe's `resume` says; the folder
    stays as it is until `checkpoint.begin.begin`.

    Raises `RecipeError` when a run is going on there, or lies there and is neither to be replaced
    nor to be gone on with, or cannot be set aside, and what `checkpoint.resume.decide` raises.
    """
    folder = make_folder(recipe)
    lock = FileLock(folder.parent / f".{folder.name}.lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise RecipeError(
            f"{folder} belongs to a run that is going on; set run.name=…, or wait for its end"
        ) from None
    _undo_moves(folder)
    settle(folder)
    if (again and (folder / REPLAY_FILE).exists()) or _never_began(folder):
        _clear(folder)
    try:
        if (folder / RECIPE_FILE).exists() and recipe.run.overwrite:
            _set_aside(folder)
        return lock, _taken(recipe, folder, again, may_resume)
    except Exception as error:
        _put_back(folder, error)
        raise


def settle(folder: Path) -> None:
    """Rank 0's, with the lock held and none of the folder's files but logs open: where the run of
    this launch came to weights, what it replaced stays aside; where it did not, that is put back.

    Where it was killed before this, the next claim does it. A crash in here loses nothing.
    """
    if not (folder / REPLACES).exists():
        return
    # A launch that goes on from another run's checkpoint says so before it has loaded that.
    if not all(_is_of_the_start(entry, RESUME_FILE) for entry in folder.iterdir()):
        (folder / REPLACES).unlink()
        return
    with undisturbed():
        _clear(folder)
        (folder / REPLACES).rename(folder / MOVING)
        sync_folder(folder)
        _undo_moves(folder)


@contextmanager
def undisturbed() -> Iterator[None]:
    """torchrun ends the other ranks as soon as one has failed: a few renames come first."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(number, signal.SIG_IGN) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


def _taken(recipe: Recipe, folder: Path, again: bool, may_resume: bool) -> Resume | None:
    """Of a folder that is this run's: where it goes on, or None with the recipe written into it."""
    if may_resume:
        resume = decide(recipe, folder)
        if resume is not None:
            return resume
    elif (folder / RECIPE_FILE).exists():
        state = "a finished run" if (folder / FINISHED_FILE).exists() else "an unfinished run"
        raise RecipeError(
            f"{folder} holds {state}; set run.name=…, or run.overwrite=true to replace it"
        )
    write_recipe(recipe, folder)
    if again:
        (folder / REPLAY_FILE).touch()
    return None


def _never_began(folder: Path) -> bool:
    """Whether nothing lies there but what a run writes before it has weights: it learnt nothing."""
    return _is_stored(folder / RECIPE_FILE) and all(map(_is_of_the_start, folder.iterdir()))


def _is_stored(recipe: Path) -> bool:
    """Whether a run wrote this file. One written by hand is somebody's work, and stays."""
    try:
        return load_recipe(recipe, []).resolved_yaml() == recipe.read_text(encoding="utf-8")
    except (RecipeError, OSError, UnicodeDecodeError):
        return False


def _is_of_the_start(entry: Path, *more: str) -> bool:
    """`more`: names of files that count too."""
    if entry.is_symlink():
        return False
    if entry.is_dir():
        inside = (_is_of_the_start(inner, *more) for inner in entry.iterdir())
        return entry.name in START_FOLDERS or all(inside)
    return entry.name in START_FILES or entry.name in more or entry.stat().st_size == 0


def _clear(folder: Path) -> None:
    """Remove all that `_entries` gives."""
    for entry in _entries(folder):
        if entry.is_dir():
            shutil.rmtree(entry)
        else:
            entry.unlink()


def free_beside(folder: Path) -> Path:
    """Where what lies in `folder` is set aside: the first `<name>.replaced-<n>` that is free."""
    names = (folder.with_name(f"{folder.name}.replaced-{n}") for n in count(1))
    return next(name for name in names if not name.exists())


def _set_aside(folder: Path) -> None:
    """Move all that `_entries` gives. A crash before the end of it is made undone.

    Raises `RecipeError` where it cannot be moved; `_put_back` is still to be called then.
    """
    aside = free_beside(folder)
    try:
        write_whole(folder / MOVING, aside.name.encode())
        sync_folder(folder)
        aside.mkdir()
        for entry in _entries(folder):
            entry.rename(aside / entry.name)
        sync_folder(aside)
        (folder / MOVING).rename(folder / REPLACES)
        sync_folder(folder)
    except OSError as error:
        raise RecipeError(
            f"the run in {folder} cannot be set aside as {aside.name} ({_told(error)}); "
            "make room for that, or set run.name=…"
        ) from error


def _put_back(folder: Path, failed: Exception) -> None:
    """What this launch has set aside, as `failed` kept it from taking the folder.

    Raises `RecipeError` where it cannot be moved: the next claim does it.
    """
    try:
        _undo_moves(folder)
        settle(folder)
    except OSError as error:
        raise RecipeError(
            f"{failed}; nor can the run be put back ({_told(error)}): the next launch of the name "
            "does that"
        ) from failed


def _told(error: OSError) -> str:
    return f"{error.strerror}: {error.filename}"


def _undo_moves(folder: Path) -> None:
    """Bring back what lies aside, where `MOVING` says so."""
    marker = folder / MOVING
    (folder / (MOVING + UNFINISHED)).unlink(missing_ok=True)
    if not marker.exists():
        return
    aside = folder.with_name(marker.read_text(encoding="utf-8"))
    if aside.is_dir():
        for entry in list(aside.iterdir()):
            if not (folder / entry.name).exists():
                entry.rename(folder / entry.name)
        if not any(aside.iterdir()):
            aside.rmdir()
    sync_folder(folder)
    marker.unlink()


def _entries(folder: Path) -> list[Path]:
    """All but the logs, which other ranks may be writing already, and marks of what is moved."""
    kept = (LOGS, REPLACES, MOVING)
    return [entry for entry in folder.iterdir() if entry.name not in kept]
