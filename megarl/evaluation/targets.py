"""Whose weights an evaluation is of: what a person named, found and checked. Imports no torch."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from megarl.checkpoint.commit import (
    COMMIT_FILE,
    FOLDER,
    CheckpointError,
    Commit,
    checkpoint_folders,
    read_commit,
)
from megarl.checkpoint.model_fit import as_words, numbers_of
from megarl.checkpoint.position import Position, read_position
from megarl.contracts.errors import InputError
from megarl.models.critic_spec import refuse_other_tokens
from megarl.observe.runfolder import RECIPE_FILE
from megarl.recipe import Recipe
from megarl.reshard.families import FolderError, read_spec

OPTION = "--checkpoint"
CONFIG_FILE = "config.json"
_CHECKPOINT = re.compile(r"iter_\d{6,}")


class EvaluationError(InputError):
    """An evaluation that cannot be done as it is asked; one line."""

    told_by_all = True


@dataclass(frozen=True)
class Target:
    """Weights to evaluate: a checkpoint's, which are proven, or a Hugging Face folder's."""

    label: str
    """Names its files and its rows of tables."""
    path: Path
    is_checkpoint: bool
    iteration: int | None = None
    """Iterations finished, of a checkpoint."""
    named: bool = True
    """False for the recipe's own model, which nobody named."""
    passed_over: tuple[str, ...] = ()
    """What was not taken in its place, a line each: damaged checkpoints of the run after it."""

    def position(self) -> Position:
        """Raises `CheckpointError` where it is whole no longer."""
        return read_position(read_commit(self.path))


def find_targets(named: Sequence[str], recipe: Recipe) -> tuple[Target, ...]:
    """What `named` stands for, in its order; the recipe's own model where nothing is named.

    A run, by its folder or its name in run.folder, stands for its newest whole checkpoint. Raises
    `EvaluationError` for what is no run, checkpoint or model folder, for a checkpoint that is not
    whole, and for a model that is not the recipe's architecture or has another tokenizer.
    """
    model = Path(recipe.model.path)
    if not named:
        return (Target("model", model, is_checkpoint=False, named=False),)
    found: list[Target] = []
    for text in named:
        target = _find(text, recipe)
        labels = {one.label for one in found}
        if any(one.path == target.path for one in found):
            raise EvaluationError(f"{OPTION} {text}: {target.path} is named twice; name it once")
        label, number = target.label, 1
        while label in labels:
            number += 1
            label = f"{target.label}.{number}"
        found.append(replace(target, label=label))
    return tuple(found)


def _find(text: str, recipe: Recipe) -> Target:
    places = [place for place in (Path(text), Path(recipe.run.folder) / text) if place.is_dir()]
    for place in places:
        if (place / CONFIG_FILE).is_file():
            _check_folder(text, place, Path(recipe.model.path))
            return Target(_label(place, recipe), place, is_checkpoint=False)
        if (place / COMMIT_FILE).exists() or _CHECKPOINT.fullmatch(place.name):
            return _checkpoint(text, recipe, _whole(text, place))
        if (place / RECIPE_FILE).is_file() or (place / FOLDER).is_dir():
            newest, others = _newest(text, place)
            target = _checkpoint(text, recipe, newest)
            told = (f"{OPTION} {text}: passed over {why}" for why in others)
            return replace(target, passed_over=tuple(told))
    if places:
        raise EvaluationError(
            f"{OPTION} {text}: {places[0]} is no run ({RECIPE_FILE}), checkpoint ({COMMIT_FILE}) "
            f"or Hugging Face folder ({CONFIG_FILE}); name one of these"
        )
    nor = "" if Path(text).is_absolute() else f" nor {Path(recipe.run.folder) / text}"
    raise EvaluationError(
        f"{OPTION} {text}: there is no folder {text}{nor}; name a run, one of its "
        f"{FOLDER}/iter_N, or a Hugging Face folder"
    )


def _whole(text: str, folder: Path) -> Commit:
    try:
        return read_commit(folder)
    except CheckpointError as error:
        raise EvaluationError(f"{OPTION} {text}: {error}; name a whole one") from error


def _newest(text: str, run: Path) -> tuple[Commit, list[str]]:
    """The newest whole checkpoint, and a line for each later one that says why it is not."""
    others: list[str] = []
    for _, folder in reversed(checkpoint_folders(run)):
        try:
            return read_commit(folder), others
        except CheckpointError as error:
            others.append(str(error))
    why = f" ({others[0]})" if others else ""
    raise EvaluationError(
        f"{OPTION} {text}: {run} holds no whole checkpoint{why}; set checkpoint.every in its "
        "recipe, or name a Hugging Face folder"
    )


def _checkpoint(text: str, recipe: Recipe, commit: Commit) -> Target:
    """Raises `EvaluationError` for one of another model."""
    try:
        position = read_position(commit)
    except CheckpointError as error:
        raise EvaluationError(f"{OPTION} {text}: {error}") from error
    mine = numbers_of(read_spec(Path(recipe.model.path)))
    differ = {
        name: (position.model[name], value)
        for name, value in mine.items()
        if name in position.model and position.model[name] != value
    }
    if differ:
        before, now = as_words(differ)
        raise EvaluationError(
            f"{OPTION} {text}: the checkpoint's model has {before}, model.path "
            f"{recipe.model.path} has {now}; take the recipe of the checkpoint's run"
        )
    label = _label(commit.folder, recipe).removeprefix(f"{FOLDER}-")
    return Target(label, commit.folder, is_checkpoint=True, iteration=commit.iteration)


def _check_folder(text: str, folder: Path, model: Path) -> None:
    """Raises `EvaluationError` for a model folder of another architecture than the recipe's, and
    `InputError` for another tokenizer."""
    try:
        theirs, mine = numbers_of(read_spec(folder)), numbers_of(read_spec(model))
    except FolderError as error:
        raise EvaluationError(f"{OPTION} {text}: {error}") from error
    differ = {name: (theirs[name], mine[name]) for name in mine if theirs[name] != mine[name]}
    if differ:
        before, now = as_words(differ)
        raise EvaluationError(
            f"{OPTION} {text}: {folder} has {before}, model.path {model} has {now}; evaluate it "
            f"as model.path={folder}, without {OPTION}"
        )
    if folder.resolve() != model.resolve():
        refuse_other_tokens(f"{OPTION} {text}", folder, model)


def _label(path: Path, recipe: Recipe) -> str:
    """Of a folder within the recipe's own run: the way to it; else its last two names."""
    whole, run = path.absolute(), recipe.run_folder.absolute()
    if whole.is_relative_to(run) and whole != run:
        parts = whole.relative_to(run).parts
    else:
        parts = tuple(part for part in whole.parts if part not in (FOLDER, "/"))[-2:]
    return "-".join(parts)
