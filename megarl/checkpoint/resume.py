"""What a start goes on from, decided once by rank 0 before anything slow is imported.

    decide()     the newest whole checkpoint, or what the recipe names; refuses another recipe
    contents()   later, when data, tokenizer and scorers are loaded: refuses other contents

Every resume of a run folder has a number and a folder `resumes/NNN/`: `resume.json`, written first,
and all that was set aside. Nothing that a run wrote is lost.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megarl.checkpoint import data_fit
from megarl.checkpoint.commit import (
    Commit,
    clean,
    find_checkpoint,
    read_commit,
    whole_checkpoints,
)
from megarl.checkpoint.model_fit import as_words, critic_differences, misfit, model_differences
from megarl.checkpoint.place import check_place, own_entry
from megarl.checkpoint.position import Position, contract_differences, read_position
from megarl.checkpoint.records import check_records
from megarl.contracts.errors import InputError
from megarl.contracts.hashes import short_id
from megarl.contracts.lines import read_json_lines
from megarl.contracts.states import JOURNAL_FILE, State
from megarl.observe.runfolder import FINISHED_FILE, RECIPE_FILE
from megarl.recipe import Recipe, RecipeError, load_recipe, recipe_of_tree
from megarl.recipe.differences import resume_differences

FOLDER = "resumes"
RESUME_FILE = "resume.json"
AUTO, NEVER = "auto", "never"
REUSE = "reuse_sealed"
MODEL, CRITIC, RECORDS, TOKENIZER = "model", "critic", "records", "tokenizer"
_ROWS = tuple(
    f"data.{key}"
    for key in (
        *("prompt_key", "answer_key", "source_key", "reward_key"),
        *("template", "system_prompt", "max_prompt_tokens", "max_row_bytes"),
    )
)
EXPLAINED_BY = {
    "scorer": tuple(
        f"reward.{key}"
        for key in ("scorers", "deadline_seconds", "on_status", "penalty", "violated")
    ),
    "sampling": (
        "seed",
        *(f"rollout.{key}" for key in ("group_size", "temperature", "max_response_tokens")),
        *(f"rollout.{key}" for key in ("stop", "dtype", "attention_backend")),
    ),
    "critic": ("algorithm.name",),
    "algorithm": ("algorithm.advantage", "algorithm.objective"),
    "curriculum": ("data.curriculum",),
    "data": _ROWS,
    "eval_data": _ROWS,
}
"""A content that follows from recipe keys: where one of them differs it was asked for there. Keys
that its hash does not read explain nothing."""
MOST_TOLD = 5


class ResumeRefused(InputError):
    """What lies there cannot be gone on from as it is asked; names old and new values."""

    told_by_all = True


@dataclass(frozen=True)
class Resume:
    """One decision; plain, so that rank 0 can tell it to every rank."""

    number: int
    """Of the resume, from 1."""
    checkpoint: str | None
    """The folder of the checkpoint; None: the run starts at iteration 0 again."""
    own: bool
    """Whether that is a checkpoint of this run's own folder."""
    iteration: int
    attempt: int
    use: str
    allowed: tuple[str, ...]
    changes: dict[str, tuple[Any, Any]] = field(default_factory=dict)
    """Recipe key → (before, now), of all keys that differ."""
    meant: tuple[str, ...] = ()
    """Those of them that change the maths and were allowed."""
    notes: tuple[str, ...] = ()

    @property
    def folder_name(self) -> str:
        return f"{FOLDER}/{self.number:03d}"

    def position(self) -> Position | None:
        """Raises `CheckpointError`."""
        if self.checkpoint is None:
            return None
        return read_position(read_commit(Path(self.checkpoint)))


def resumes(run_folder: Path) -> list[dict[str, Any]]:
    """What `resume.json` of each resume says, by number."""
    found = (run_folder / FOLDER).glob(f"*/{RESUME_FILE}")
    told = [json.loads(path.read_text(encoding="utf-8")) for path in found]
    return sorted(told, key=lambda each: int(each["number"]))  # by name 1000 comes before 999


def decide(recipe: Recipe, folder: Path) -> Resume | None:
    """Where the run of `recipe` in `folder` goes on; None for a new run. Removes half-written
    checkpoints of that folder.

    Raises `RecipeError` for a run that may not be gone on with, `OutOfReach` for checkpoints that
    cannot be looked at, `NoCheckpoint`, `ResumeRefused` for a recipe that changes the maths,
    `CheckpointError`.
    """
    asked = recipe.resume.from_
    began = (folder / RECIPE_FILE).exists()
    if began and (asked == NEVER or not _has_begun(folder)):
        raise RecipeError(f"{_state(folder)}; set run.name=…, or run.overwrite=true to replace it")
    check_place(folder)
    if not began and asked in (AUTO, NEVER):
        return None
    notes = clean(folder)
    commit, own = _chosen(asked, folder)
    position = None if commit is None else read_position(commit)
    iteration = 0 if position is None else position.iteration
    _check_length(recipe, folder, commit, own, iteration)
    stored = recipe_of_tree(position.recipe) if position else load_recipe(folder / RECIPE_FILE, [])
    differences = resume_differences(recipe, stored)
    refuse(differences, recipe, commit, folder)
    if commit is None:
        notes.append(f"{folder} has no whole checkpoint: starting at iteration 0 again")
    # An own one by the name it has in the folder: what a link leads to may be named otherwise.
    place = None if commit is None else commit.folder.absolute() if own else commit.folder.resolve()
    return Resume(
        number=1 + max((int(told["number"]) for told in resumes(folder)), default=0),
        checkpoint=None if place is None else str(place),
        own=own,
        iteration=iteration,
        attempt=_attempt(folder, position if own else None),
        use=recipe.resume.use,
        allowed=tuple(recipe.resume.allow),
        changes=_changes(recipe, stored),
        meant=tuple(differences),
        notes=tuple(notes),
    )


def _check_length(
    recipe: Recipe, folder: Path, commit: Commit | None, own: bool, iteration: int
) -> None:
    """Raises `RecipeError` where `recipe` leaves nothing to do beyond position `iteration`.

    A run that was killed between its last checkpoint and its last write has that write to do.
    """
    last = recipe.run.iterations
    if iteration < last or (own and iteration == last and not (folder / FINISHED_FILE).exists()):
        return
    if own:
        raise RecipeError(
            f"{_state(folder)}; raise run.iterations above {iteration} to go on, set run.name=…, "
            "or run.overwrite=true to replace it"
        )
    raise RecipeError(
        f"resume.from: {commit.folder} is of {iteration} iterations, run.iterations is {last}; "
        "raise it to go on from there, or name an older checkpoint"
    )


def refuse(
    differences: Mapping[str, tuple[Any, Any]],
    recipe: Recipe,
    commit: Commit | None,
    folder: Path,
) -> None:
    """Raises `ResumeRefused` for what differs and is not in `resume.allow`."""
    left = {name: pair for name, pair in differences.items() if name not in recipe.resume.allow}
    if not left:
        return
    told = "; ".join(f"{name} was {old}, is {new}" for name, (old, new) in _first(left))
    more = f" and {len(left) - MOST_TOLD} more" if len(left) > MOST_TOLD else ""
    raise ResumeRefused(
        f"{folder if commit is None else commit.folder} does not fit: {told}{more}; change it "
        "back, set run.name=… for a run of its own, or "
        f"resume.allow=[{','.join((*recipe.resume.allow, *left))}] if it is meant"
    )


def contents(
    recipe: Recipe,
    resume: Resume,
    mine: Mapping[str, str],
    run_folder: Path,
    facts: Callable[[], Mapping[str, Any]] | None = None,
) -> dict[str, tuple[str, str]]:
    """Compare what the position was made with to what is loaded now. Rank 0's. Returns contract →
    (the position's hash, this start's) of all that differ, which is what was let through. `facts`
    gives what `data.json` is to say of this start's data, for words in the place of its hashes.

    Raises `ResumeRefused` for another tokenizer, model, critic, data set, sampling, scorer or code
    of the recipe's own functions, and for records that are not those of the checkpoint.
    """
    position = resume.position()
    if position is None:
        return {}
    found = contract_differences(position.contracts, mine)
    differences: dict[str, tuple[Any, Any]] = {
        name: (short_id(old), short_id(new))
        for name, (old, new) in found.items()
        if not is_explained(name, resume.meant)
    }
    model = Path(recipe.model.path)
    if MODEL in found:
        _compare_numbers(
            resume, MODEL, model_differences(position.model, model), model, differences
        )
    if CRITIC in found and position.critic is not None and CRITIC in mine:
        folder = Path(recipe.critic.path or model)
        numbers = critic_differences(position.critic_model, folder)
        _compare_numbers(resume, CRITIC, numbers, folder, differences)
    for name in differences.keys() & data_fit.NAMES.keys():
        told = None if facts is None else data_fit.set_of(facts(), name)
        source = run_folder if resume.own else Path(resume.checkpoint).parent.parent
        stored = data_fit.stored_facts(source, name, position.contracts.get(name, ""))
        words = told and stored and data_fit.as_words(stored, told)
        if words:
            differences[name] = words
    if resume.own:
        broken = check_records(run_folder, position.records)
        for file, (old, new) in sorted(broken.items())[:1]:
            more = f" (and {len(broken) - 1} more files)" if len(broken) > 1 else ""
            differences[RECORDS] = (f"{file} of {old}", new + more)
    refuse(differences, recipe, read_commit(Path(resume.checkpoint)), run_folder)
    return found


def _compare_numbers(
    resume: Resume,
    name: str,
    numbers: Mapping[str, tuple[Any, Any]],
    folder: Path,
    differences: dict[str, tuple[Any, Any]],
) -> None:
    """Put words for `numbers`, in which a model parts, in the place of its hashes. Raises
    `ResumeRefused` where no permission lets the tensors in."""
    if (why := misfit(numbers, folder, name)) is not None:
        raise ResumeRefused(f"{resume.checkpoint} does not fit: {why}")
    if numbers:
        differences[name] = as_words(numbers)


def let_through(resume: Resume, differ: Mapping[str, tuple[str, str]]) -> list[str]:
    """The line for people that tells what differs and was allowed to: recipe keys, and contents of
    `differ` that do not follow from them. No line where nothing does."""
    pairs = {name: resume.changes[name] for name in resume.meant if name in resume.changes}
    pairs |= {
        name: (short_id(old), short_id(new))
        for name, (old, new) in differ.items()
        if not is_explained(name, resume.meant)
    }
    told = "; ".join(f"{name} {old} → {new}" for name, (old, new) in pairs.items())
    return [f"allowed to differ: {told}"] if told else []


def is_explained(name: str, meant: Iterable[str]) -> bool:
    """Whether that a contract differs follows from recipe keys that were allowed to."""
    keys = EXPLAINED_BY.get(name, ())
    return any(key == each or key.startswith(f"{each}.") for key in meant for each in keys)


def _chosen(asked: str, folder: Path) -> tuple[Commit | None, bool]:
    """The checkpoint that `resume.from` leads to, None where there is none, and whether it is the
    run's own; an own one lies where `folder` lists it."""
    whole, _ = whole_checkpoints(folder)
    newest = whole[-1] if whole else None
    if asked in (AUTO, NEVER):
        return newest, True
    check_place(Path(asked))
    named = find_checkpoint(Path(asked))
    entry = own_entry(folder, named.folder)
    if entry is None:
        # A run that began elsewhere goes on from its own checkpoints, started again.
        return newest or named, newest is not None
    # A rollback that was asked for is done once: started again, the same command goes on from what
    # was saved since. What was saved before is left from a rollback that was itself interrupted.
    done = _rollback(folder, asked)
    since = [] if done is None else [each for each in whole if each.committed_at > done["time"]]
    return since[-1] if since else find_checkpoint(entry), True


def _rollback(folder: Path, asked: str) -> dict[str, Any] | None:
    """The first of the last resumes that were all asked for by `asked`; None where the last one
    was not."""
    found = None
    for told in reversed(resumes(folder)):
        if told["asked"] != asked:
            break
        found = told
    return found


def _attempt(folder: Path, position: Position | None) -> int:
    """`update_attempt` from here on: higher than before where an update is done again."""
    path = folder / JOURNAL_FILE
    lines = read_json_lines(path)[0] if path.exists() else []
    step = 0 if position is None else position.actor.version.optimizer_step
    highest = max(
        [0 if position is None else position.attempt]
        + [int(told["attempt"]) for told in resumes(folder)]
        + [int(line.get("update_attempt", 0)) for line in lines]
    )
    iteration = 0 if position is None else position.iteration
    again = any(
        line.get("state") == State.UPDATING_FROM and line.get("iteration", -1) >= iteration
        for line in lines
    ) or any(int(line.get("optimizer_step", 0)) > step for line in lines)
    return highest + again


def _changes(recipe: Recipe, stored: Recipe) -> dict[str, tuple[Any, Any]]:
    mine, theirs = recipe.flat(), stored.flat()
    return {
        key: (theirs.get(key), mine.get(key))
        for key in sorted(mine | theirs)
        if mine.get(key) != theirs.get(key)
    }


def _has_begun(folder: Path) -> bool:
    """Whether a run came to weights there. A folder without is somebody's, with a recipe in it."""
    journal = folder / JOURNAL_FILE
    return (journal.exists() and journal.stat().st_size > 0) or bool(resumes(folder))


def _state(folder: Path) -> str:
    state = "a finished run" if (folder / FINISHED_FILE).exists() else "an unfinished run"
    return f"{folder} holds {state}"


def _first(differences: Mapping[str, tuple[Any, Any]]) -> list[tuple[str, tuple[Any, Any]]]:
    return sorted(differences.items())[:MOST_TOLD]
