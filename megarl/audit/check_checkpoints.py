"""Checks of checkpoints: whole as far as sizes and hashes tell, and of the run that they lie in.

Their tensors are not read: whoever resumes from one digests them before anything is learnt.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from blake3 import blake3

from megarl.audit.check_contracts import kept_file, parted, told_records
from megarl.audit.earlier import EarlierView, earlier
from megarl.audit.findings import Found
from megarl.audit.view import IterationView, RunView
from megarl.checkpoint.commit import (
    COMMIT_FILE,
    FOLDER,
    POSITION_FILE,
    CheckpointError,
    Commit,
    checkpoint_folders,
    read_commit,
    whole_checkpoints,
)
from megarl.checkpoint.position import NONE, Position, read_position
from megarl.checkpoint.records import EVAL_FOLDER
from megarl.checkpoint.segments import segment_of
from megarl.contracts.tokens import TokensError
from megarl.experience.columns import Part, SealError, read_lines
from megarl.observe.runfolder import DATA_FILE, TOKENIZER_FOLDER
from megarl.recipe import RecipeError, recipe_of_tree
from megarl.recipe.layout import mesh_of

STEPS = "steps"
"""Of a position's trainer: optimizer steps taken, which is the version's."""


def checkpoints(run: RunView) -> Iterator[Found]:
    """Every checkpoint has the files that were committed, tensors by size and others by hash, but
    for one that an unfinished run was writing; a finished run has one of its end."""
    for place in _places(run):
        for folder, path, what in _not_whole(place):
            open_end = place is run and _is_open(run, folder)  # `half_written` tells it
            if not open_end and not _is_damaged_aside(run, place, folder):
                yield Found(_relative(run, path), what)
        for number, folder in checkpoint_folders(place.folder):
            yield from _unlisted(run, folder)
            open_end = run.cut is not None or _is_open(run, folder)
            if place is run and not open_end and number - 1 > _last(run):
                what = f"{number} iterations, the journal has {_last(run) + 1}"
                yield Found(_relative(run, folder), what, field="iteration")
    folder = run.folder / FOLDER
    known = {path for _, path in checkpoint_folders(run.folder)}
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        if path not in known:
            yield Found(_relative(run, path), "is no checkpoint's folder: nothing reads it")
    if run.is_finished and folder.is_dir():
        last = run.recipe.run.iterations
        if last not in {number for number, _ in checkpoint_folders(run.folder)}:
            yield Found(FOLDER, f"none of the end, iteration {last}, though the run finished")


def half_written(run: RunView) -> list[Path]:
    """Checkpoints that an unfinished run had begun and not committed."""
    folders = (folder for _, folder in checkpoint_folders(run.folder))
    return [folder for folder in folders if _is_open(run, folder)]


def damaged_aside(run: RunView) -> list[str]:
    """A line for each committed and damaged checkpoint that a resume set aside. Nothing goes on
    from there, and a resume that fell back to an older one has told what was wrong."""
    return [
        f"{_relative(run, path)}: {what}; a resume has set it aside"
        for place in _places(run)
        for folder, path, what in _not_whole(place)
        if _is_damaged_aside(run, place, folder)
    ]


def _places(run: RunView) -> list[RunView]:
    """The run, and what each resume set aside."""
    return [run, *(member for view in earlier(run) for member in view.members)]


def _not_whole(place: RunView) -> Iterator[tuple[Path, Path, str]]:
    """(folder, path, what is wrong there) of each checkpoint that is not whole."""
    for _, folder in checkpoint_folders(place.folder):
        try:
            read_commit(folder)
        except CheckpointError as error:
            yield folder, *_split(str(error))


def _is_damaged_aside(run: RunView, place: RunView, folder: Path) -> bool:
    return place is not run and (folder / COMMIT_FILE).exists()


def _is_open(run: RunView, path: Path) -> bool:
    return not run.is_finished and path.is_dir() and not (path / COMMIT_FILE).exists()


def _last(run: RunView) -> int:
    return max(run.trained, default=run.first - 1)


def _split(line: str) -> tuple[Path, str]:
    """(path, what) of a line that says why a checkpoint is not whole."""
    path, _, what = line.partition(": ")
    return Path(path), what


def _relative(run: RunView, path: Path) -> str:
    return str(path.relative_to(run.root))


def _unlisted(run: RunView, folder: Path) -> Iterator[Found]:
    """Files that COMMIT.json does not list."""
    try:
        told = json.loads((folder / COMMIT_FILE).read_text(encoding="utf-8"))["files"]
        listed = {folder / name for name in told} | {folder / COMMIT_FILE}
    except (OSError, ValueError, KeyError, TypeError):
        return  # `checkpoints` tells it, or it is half-written
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        if path not in listed:
            yield Found(_relative(run, path), f"{COMMIT_FILE} does not list it")


def positions(run: RunView) -> Iterator[Found]:
    """A position is that of the run at its iteration: version, weights, recipe, attempt, records,
    prompt cursor and contracts."""
    yield from _positions(run, run)
    for view in earlier(run):
        for member in view.members:
            yield from _positions(view, member)


def _positions(run: RunView, place: RunView) -> Iterator[Found]:
    read: list[tuple[str, Position]] = []
    for commit in whole_checkpoints(place.folder)[0]:
        if run.cut is not None and commit.iteration > run.cut:
            continue  # a resume that is cutting back has not moved it yet
        file = _relative(run, commit.folder / POSITION_FILE)
        try:
            position = read_position(commit)
        except CheckpointError as error:
            yield Found(file, _split(str(error))[1])
            continue
        read.append((file, position))
        for what, field in _wrong(run, commit, position):
            yield Found(file, what, field=field)
    # Others are compared with facts.
    for name in ("model", "critic", "eval_data", "algorithm", "curriculum"):
        told = [(file, item.iteration - 1, item.contracts.get(name, NONE)) for file, item in read]
        for (file, _, value), wanted in parted(run, name, told):
            yield Found(file, f"{value}, it should be {wanted}", field=f"contracts.{name}")


def _wrong(run: RunView, commit: Commit, position: Position) -> Iterator[tuple[str, str]]:
    """(what, field)."""
    for field in ("run_id", "iteration"):
        if getattr(position, field) != getattr(commit, field):
            told = f"{getattr(position, field)}, {COMMIT_FILE} has {getattr(commit, field)}"
            yield told, field
    if position.actor.version.id != commit.version:
        yield f"version {position.actor.version.id}, {COMMIT_FILE} has {commit.version}", "actor.id"
    yield from _versions(run, position)
    try:
        yield from _settings(run, position)
    except RecipeError as error:
        yield str(error), "recipe"
    yield from _records(run, position, commit.committed_at)
    yield from _draws(run, position)


def _versions(run: RunView, position: Position) -> Iterator[tuple[str, str]]:
    actor, last = position.actor.version, position.iteration - 1
    committed = run.commits.get(last)
    if committed is None:
        yield f"the journal has no update of iteration {last}", "iteration"
    elif committed["version"] != actor.id:
        yield f"version {actor.id}, {committed.where} committed {committed['version']}", "actor.id"
    elif committed.told.get("weight_manifest_hash") != position.actor.manifest.hash:
        yield f"weights {position.actor.manifest.hash}, not those of {committed.where}", "actor"
    if position.actor.manifest.hash != actor.weight_manifest_hash:
        yield f"its tensors hash to {position.actor.manifest.hash}", "actor.tensors"
    if position.trainer.get(STEPS) != actor.optimizer_step:
        told = f"{position.trainer.get(STEPS)}, its version has {actor.optimizer_step}"
        yield told, f"trainer.{STEPS}"
    yield from _critic(position, None if committed is None else committed.told.get("critic"))
    reference = position.reference
    if reference is not None:
        known = run.policy_versions.get(reference.version.id)
        if known is None or known.role != "reference":
            yield f"version {reference.version.id} is no reference of versions.jsonl", "reference"


def _critic(position: Position, committed: str | None) -> Iterator[tuple[str, str]]:
    """As for the actor; `committed` is the version that the journal tells."""
    critic = None if position.critic is None else position.critic.version
    if (critic and critic.id) != committed:
        yield f"version {critic and critic.id}, the journal committed {committed}", "critic.id"
    if critic is None:
        return
    if position.critic.manifest.hash != critic.weight_manifest_hash:
        yield f"its tensors hash to {position.critic.manifest.hash}", "critic.tensors"
    if position.critic_trainer.get(STEPS) != critic.optimizer_step:
        told = f"{position.critic_trainer.get(STEPS)}, its version has {critic.optimizer_step}"
        yield told, f"critic_trainer.{STEPS}"


def _settings(run: RunView, position: Position) -> Iterator[tuple[str, str]]:
    """Raises `RecipeError` for a recipe that cannot be read."""
    last = position.iteration - 1
    recipe, start = run.recipe_of(last), segment_of(run.segments, last).start
    attempt = 0 if start is None else start.attempt
    if position.attempt != attempt:
        yield f"{position.attempt}, the run had {attempt}", "attempt"
    if position.run_id != recipe.run.name:
        yield f"of run {position.run_id}, this is {recipe.run.name}", "run_id"
    stored = recipe_of_tree(position.recipe).hash
    for told, field in ((position.recipe_hash, "recipe_hash"), (stored, "recipe")):
        if told != recipe.hash:
            yield f"{told}, the recipe then was {recipe.hash}", field
    kl, beta = recipe.algorithm.kl, position.kl.get("beta")
    if kl.target is None and beta not in (None, kl.beta):
        yield f"{beta}, the recipe then had {kl.beta}", "kl.beta"
    layout = mesh_of(recipe).described
    if dict(position.layout) != layout:
        yield f"{position.layout}, the recipe then had {layout}", "layout"


def _records(run: RunView, position: Position, committed: float) -> Iterator[tuple[str, str]]:
    """What records held at the position is what they begin with, but for those that a resume since
    found changed by hand, as its recipe allowed."""
    since = [item for item in run.resumes if item.time >= committed]
    changed = {name for item in since if item.own for name in told_records(item)}
    for name, record in position.records.items():
        if name in changed:
            continue
        body, size = run.bytes_of(name), record["bytes"]
        if len(body) < size:
            yield f"{name} had {size} bytes, it has {len(body)}", "records"
        elif blake3(body[:size]).hexdigest() != record["blake3"]:
            yield f"the first {size} bytes of {name} are others now", "records"
    if isinstance(run, EarlierView):
        return
    for name in position.eval_files:  # of exports, former bests go
        if (run.folder / EVAL_FOLDER).is_dir() and not (run.folder / EVAL_FOLDER / name).exists():
            yield f"{EVAL_FOLDER}/{name} was there, and is missing", "eval_files"


def _draws(run: RunView, position: Position) -> Iterator[tuple[str, str]]:
    """The cursor stands where the last draw left it, and contracts are those of the facts."""
    contracts, last = position.contracts, position.iteration - 1
    if position.cursor.get("fingerprint") != contracts.get("data"):
        yield f"{position.cursor.get('fingerprint')}, not its own contract", "cursor.fingerprint"
    if position.actor.version.model_config_hash != contracts.get("model"):
        yield f"{contracts.get('model')}, not that of its version", "contracts.model"
    wanted = dict(_kept(run, last))
    if last in run.sealed:
        view = run.iteration(last)
        with suppress(SealError):  # `manifest` and `parts` tell it
            header = view.manifest.header
            wanted |= {"sampling": header.sampling.hash, "scorer": header.scorer_version}
            parts = [part for part in view.manifest.parts if part.kind == "drawn"]
            for cursor in [line["cursor"] for part in parts for line in _drawn_lines(view, part)]:
                if cursor != position.cursor:
                    yield f"{position.cursor}, iteration {last} left {cursor}", "cursor"
    for name, value in wanted.items():
        if contracts.get(name) != value:
            yield f"{contracts.get(name)}, the run has {value}", f"contracts.{name}"


def _drawn_lines(view: IterationView, part: Part) -> list[dict[str, Any]]:
    """Lines with a cursor, of one list. Raises `SealError`."""
    return [line for line in read_lines(view.folder, part) if "cursor" in line]


def _kept(run: RunView, iteration: int) -> Iterator[tuple[str, str]]:
    """Contracts whose contents lie in the run's folder, or where a resume set them aside."""
    with suppress(TokensError):  # `tokenizer` tells it
        yield "tokenizer", run.tokens_in(kept_file(run, iteration, TOKENIZER_FOLDER)).hash
    with suppress(OSError, ValueError, KeyError, TypeError):  # `setting` tells it
        told = json.loads(kept_file(run, iteration, DATA_FILE).read_text(encoding="utf-8"))
        yield "data", told["fingerprint"]
