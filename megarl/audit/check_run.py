"""Checks of the run as a whole: its logs, recipe, journal, tokenizer and last word."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

from megarl.audit.check_contracts import kept_file, tokenizer_folder, tokenizer_folders
from megarl.audit.findings import Found
from megarl.audit.logs import Line
from megarl.audit.view import RunView
from megarl.contracts.states import (
    COLLECTING,
    FROM_SEALED,
    RESUMED,
    TRANSITIONS,
    IllegalTransition,
    Journal,
    State,
)
from megarl.contracts.tokens import TokensError
from megarl.experience.columns import SealError
from megarl.experience.manifest import MANIFEST_FILE, fault
from megarl.observe.runfolder import FINISHED_FILE, RECIPE_FILE, TOKENIZER_FOLDER
from megarl.recipe import RecipeError, load_recipe
from megarl.run_folder import REPLAY_FILE

SEALED_BEFORE = (State.ACTOR_COMMITTED, State.EXPERIENCE_SEALED)
LAST_STATES = (State.UPDATING_FROM, State.EXPERIENCE_SEALED)
"""What an iteration's commit follows; a run that only collects has no update."""
_HASH = "tokenizer_hash"
CLOCK_TOLERANCE_SECONDS = 1.0
"""How far clocks may differ: those of several hosts, or one that is being set right."""


def records(run: RunView) -> Iterator[Found]:
    """Every line of every log can be read and has its fields."""
    logs = (run.journal, run.versions, run.updates, run.ledger)
    # Of a replay, or of scores alone, nothing but the experience and its logs is of use.
    for log in logs if run.is_replay or run.only_scores else (*logs, run.metrics):
        for number, what in log.problems:
            yield Found(f"{log.file}:{number}" if number else log.file, what)
        if log.torn and run.is_finished:
            yield Found(log.file, "its last line is cut off, though the run finished")


def recipe(run: RunView) -> Iterator[Found]:
    """recipe.yaml is a whole recipe of this program, and so are those of earlier starts."""
    for path in sorted({run.folder / RECIPE_FILE} | {part.recipe for part in run.segments}):
        try:
            _ = load_recipe(path).hash
        except RecipeError as error:
            yield Found(str(path.relative_to(run.root)), str(error))


def journal(run: RunView) -> Iterator[Found]:
    """A legal walk through the states, one whole cycle after another, each with its evidence."""
    table = transitions_of(run)
    walk, cycles = Journal(None, table), Cycles(run.first)
    before: Line | None = None
    earlier_state: State | None = None
    for line in run.journal:
        version = run.policy_versions.get(line["version"])
        if before is not None and before.told == line.told:
            yield Found(line.where, f"is {before.where} again, at the same time", field="state")
        before = line
        try:
            state = State(line["state"])
        except ValueError:
            yield Found(line.where, f"{line['state']} is no state", field="state")
            continue
        evidence = {k: v for k, v in line.told.items() if k not in ("state", "iteration")}
        evidence.pop("version")
        if version is None:
            # `versions` tells it; the order of states is checked all the same.
            version = walk.version
        try:
            if version is not None:
                walk.enter(state, line["iteration"], version, **evidence)
        except IllegalTransition as error:
            yield Found(line.where, str(error), field="state")
            walk.state, walk.iteration, walk.version = state, line["iteration"], version
        yield from cycles.follow(state, line)
        before_it, earlier_state = earlier_state, state
        as_found = (before_it, state) == SEALED_BEFORE and bool(run.reused)
        if as_found and line["iteration"] not in run.reused:
            what = "is sealed, and was not generated: no resume went on from its facts"
            yield Found(line.where, what, field="state")
    last = "no state" if before is None else before["state"]
    if run.is_finished and last != State.ACTOR_COMMITTED and not run.only_scores:
        yield Found(run.journal.file, f"ends at {last}, though the run finished")


def transitions_of(run: RunView) -> Mapping[State, frozenset[State]]:
    """The whole loop's, or those of the part of it that this run is."""
    if run.sources:
        return FROM_SEALED
    if run.only_collects:
        return COLLECTING
    return RESUMED if run.reused else TRANSITIONS


class Cycles:
    """Follows which iteration a journal is in."""

    def __init__(self, first: int) -> None:
        self._next = self._now = first
        """The iteration that trains next, and the one that it is in."""
        self._before: State | None = None

    def follow(self, state: State, line: Line) -> Iterator[Found]:
        """Iterations follow each other without a gap; one cycle is of one iteration."""
        number = line["iteration"]
        wanted = (self._now,)
        if state is State.GENERATING or self._before is State.ACTOR_COMMITTED:
            # Evaluation after the last update exports once more, and commits the same version.
            ended = state in (State.EXPORTING, State.ACTOR_COMMITTED, State.FAILED)
            wanted = (self._next, self._next - 1) if ended else (self._next,)
            self._now = number
        if number not in wanted:
            what = f"{state} of iteration {number}, expected {wanted[0]}"
            yield Found(line.where, what, field="iteration")
        if state is State.ACTOR_COMMITTED and self._before in LAST_STATES:
            self._next = number + 1
        self._before = state


def clocks_of_journal(run: RunView) -> Iterator[Found]:
    """Journal times do not jump back."""
    latest = None
    for line in run.journal:
        if latest is not None and line["time"] < latest["time"] - CLOCK_TOLERANCE_SECONDS:
            what = f"{latest['time'] - line['time']:.3f} s before {latest.where}"
            yield Found(line.where, what, field="time")
        latest = line


def finished(run: RunView) -> Iterator[Found]:
    """finished.json names the version that was committed last, and all iterations trained."""
    if not run.is_finished or run.only_scores:
        return
    file = run.file(FINISHED_FILE)
    try:
        told = json.loads((run.folder / FINISHED_FILE).read_text(encoding="utf-8"))
        named, hash_, count = told["version"], told["weight_manifest_hash"], told["iterations"]
    except OSError as error:
        yield Found(file, f"cannot be read: {error.strerror}")
        return
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        yield Found(file, f"does not say how the run ended: {fault(error)}")
        return
    commits = [line for line in run.journal if line["state"] == "ACTOR_COMMITTED"]
    if commits:
        last = commits[-1]
        if named != last["version"]:
            what = f"names version {named}, {last.where} committed {last['version']}"
            yield Found(file, what, field="version")
        if hash_ != last.told.get("weight_manifest_hash"):
            what = f"{hash_}, {last.where} committed {last.told.get('weight_manifest_hash')}"
            yield Found(file, what, field="weight_manifest_hash")
    if count != run.recipe.run.iterations:
        what = f"{count} iterations, the recipe asks for {run.recipe.run.iterations}"
        yield Found(file, what, field="iterations")
    done = run.trained
    word = "update"
    if run.only_collects:
        done = {line["iteration"] for line in run.journal if line["state"] == "EXPERIENCE_SEALED"}
        word = "experience"
    missing = sorted(set(range(run.first, run.recipe.run.iterations)) - done)
    if missing:
        yield Found(file, f"the journal has no {word} of iterations {missing[:8]}")


def tokenizer(run: RunView) -> Iterator[Found]:
    """The run's copy of the tokenizer is the one that every record was made with; of records from
    before a resume with another one, the copy that it set aside."""
    hashes: dict[Path, str] = {}
    for folder in tokenizer_folders(run):
        try:
            hashes[folder] = run.tokens_in(folder).hash
        except TokensError as error:
            yield Found(str(folder.relative_to(run.root)), str(error))
    for number in run.sealed:
        view, folder = run.iteration(number), tokenizer_folder(run, number)
        try:
            told = view.manifest.header.tokenizer_hash
        except SealError:  # `manifest` tells it
            continue
        if told != hashes.get(folder, told):
            what = f"made with tokenizer {told}, {folder.relative_to(run.root)}/ is"
            yield Found(view.file(MANIFEST_FILE), f"{what} {hashes[folder]}", field=_HASH)
    for line in run.versions:
        folder = kept_file(run, line["iteration"], TOKENIZER_FOLDER)
        told = line.told.get(_HASH)
        if told is not None and told != hashes.get(folder, told):
            what = f"with tokenizer {told}, {folder.relative_to(run.root)}/ is {hashes[folder]}"
            yield Found(line.where, what, field=_HASH)


def unfinished(run: RunView) -> str | None:
    """One line on a run without finished.json; None where it has one."""
    if run.is_finished:
        return None
    lines = run.journal.lines
    if run.is_replay:
        return f"a replay of another run's updates ({REPLAY_FILE}): {len(run.trained)} were redone"
    if not lines:
        return "the run never came to its first version"
    last = lines[-1]
    where = f"iteration {last['iteration']}, {len(run.trained)} iterations trained"
    if last["state"] == "FAILED":
        return f"the run FAILED in {where}: {last.told.get('reason')}"
    return f"the run has not finished; {last['state']} in {where}"
