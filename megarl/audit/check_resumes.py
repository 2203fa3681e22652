"""Checks of a run that was resumed: the claims of its resumes, attempts, and what was set aside.

What is set aside is verified like the run (`verify`): journal, versions, sealed experience. Here is
what holds between the two.
"""

from __future__ import annotations

from collections.abc import Iterator

from megarl.audit.earlier import EarlierView, earlier, every_state
from megarl.audit.findings import Found
from megarl.audit.logs import FIELDS, Line
from megarl.audit.view import RunView
from megarl.checkpoint.commit import checkpoint_folder
from megarl.checkpoint.resume import RESUME_FILE
from megarl.checkpoint.segments import (
    Resumed,
    Segment,
    read_resumes,
    resume_folders,
    segment_of,
)
from megarl.contracts.states import State
from megarl.experience.columns import UNFINISHED
from megarl.observe.runfolder import RECIPE_FILE
from megarl.recipe import RecipeError, load_recipe


def resumes(run: RunView) -> Iterator[Found]:
    """Resumes are numbered 1, 2, … by their folders, each with a claim that can be read; each
    tells the recipe that it went on with, and what it set aside lies there."""
    good, bad = read_resumes(run.root)
    for path, what in bad:
        yield Found(str(path.relative_to(run.root)), what)
    for at, resumed in enumerate(good, start=1):
        file = _file(run, resumed)
        if resumed.folder.name != f"{resumed.number:03d}":
            yield Found(file, f"is resume {resumed.number}", field="number")
        elif resumed.number != at and not bad:
            yield Found(file, f"follows {at - 1} resumes: one is missing", field="number")
        if at > 1 and resumed.time < good[at - 2].time:
            yield Found(file, "was claimed before the resume before it", field="time")
        name = checkpoint_folder(run.root, resumed.iteration).name
        told = resumed.checkpoint
        if resumed.iteration != 0 if told is None else not told.endswith(f"/{name}"):
            what = f"iteration {resumed.iteration} from checkpoint {told}"
            yield Found(file, what, field="iteration")
    for folder in resume_folders(run.root):
        there = {resumed.folder for resumed in good} | {path.parent for path, _ in bad}
        names = {path.name.removesuffix(UNFINISHED) for path in folder.iterdir()}
        claimed = folder in there or names <= {RECIPE_FILE, RESUME_FILE}
        if not claimed:
            yield Found(str(folder.relative_to(run.root)), f"set aside without a {RESUME_FILE}")
    for view in [run, *earlier(run)]:  # of no resume that was killed before it wrote its recipe
        start = view.segments[-1].start
        if start is not None and view.begun and start is view.resumes[view.begun - 1]:
            yield from _recipe_told(run, start, view.segments[-1])


def _recipe_told(run: RunView, start: Resumed, segment: Segment) -> Iterator[Found]:
    try:
        hash_ = load_recipe(segment.recipe).hash
    except RecipeError:  # `recipe` tells it
        return
    if start.told.get("recipe_hash") != hash_:
        where = segment.recipe.relative_to(run.root)
        what = f"went on with recipe {start.told.get('recipe_hash')}, {where} is {hash_}"
        yield Found(_file(run, start), what, field="recipe_hash")


def attempts(run: RunView) -> Iterator[Found]:
    """The update attempt never falls and rises where an update is done again; versions carry that
    of the start that made them, and a start goes on with the weights that were committed last."""
    claimed = 0
    for view in every_state(run):
        resumed = view.resumed
        begun = {
            line["iteration"]: line
            for line in view.journal
            if line["state"] == State.UPDATING_FROM and line["iteration"] >= resumed.cut
        }
        highest = max([claimed, *(line["update_attempt"] for line in view.journal)])
        file, what = _file(run, resumed), f"attempt {resumed.attempt}, before it there was"
        if resumed.attempt < highest:
            yield Found(file, f"{what} {highest}", field="attempt")
        elif begun and resumed.attempt == highest:
            first = begun[min(begun)]
            yield Found(file, f"{what} {highest} and {first.where} is done again", field="attempt")
        claimed = max(highest, resumed.attempt)
    yield from _carried(run)
    for view in earlier(run):
        yield from (found for found in _carried(view) if view.holds(found.file))


def _carried(run: RunView) -> Iterator[Found]:
    """The attempt of each state's version is that of the start it is from."""
    firsts: dict[int, Line] = {}
    before: Line | None = None
    for line in run.journal:
        segment = segment_of(run.segments, line["iteration"])
        start, number = segment.start, segment.first
        if number not in firsts and (start is None or line["time"] >= start.time):
            firsts[number] = line
            if start is not None and start.own and start.checkpoint and before is not None:
                yield from _same_weights(before, line)
        first = firsts.get(number, line)
        attempt = 0 if start is None else start.attempt
        if start is not None and line["optimizer_step"] <= first["optimizer_step"]:
            # The checkpoint's own version, or the model folder's: no update of this start.
            attempt = first["update_attempt"] if start.checkpoint else 0
        if line["update_attempt"] != attempt:
            what = f"attempt {line['update_attempt']}, its start had {attempt}"
            yield Found(line.where, what, field="update_attempt")
        version = run.policy_versions.get(line["version"])
        if version is None or version.id != line["version"]:
            version = None  # `versions` tells it
        for field in ("update_attempt", "optimizer_step"):
            if version is not None and line[field] != getattr(version, field):
                what = f"{line[field]}, version {version.id} has {getattr(version, field)}"
                yield Found(line.where, what, field=field)
        before = line


def _same_weights(before: Line, line: Line) -> Iterator[Found]:
    fields = ("weight_manifest_hash", "optimizer_step", "update_attempt", "critic")
    if before["state"] != State.ACTOR_COMMITTED:
        yield Found(line.where, f"goes on at {before.where}, which committed nothing")
        return
    for field in fields:
        if before.told.get(field) != line.told.get(field):
            what = f"goes on with {line.told.get(field)}, {before.where} was"
            yield Found(line.where, f"{what} {before.told.get(field)}", field=field)


def set_aside(run: RunView) -> Iterator[Found]:
    """What a resume set aside is of iterations from its position on, and all that it says it set
    aside is there."""
    for view in earlier(run):
        for member in view.members:
            yield from _tails(member)
        sealed = {
            line["iteration"] for line in view.journal if line["state"] == State.EXPERIENCE_SEALED
        }
        last = max((line["iteration"] for line in view.journal), default=-1)
        for number in view.set_aside:
            if number not in sealed and number < last:
                file = view.iteration(number).file("")
                yield Found(file, "was set aside, and the journal set aside never sealed it")
        told = [member.resumed.told.get("dropped_experience") for member in view.members]
        moved = {n for numbers in told if isinstance(numbers, list) for n in numbers}
        for number in sorted(moved - set(view.sealed)):
            what = f"says that iteration {number} was set aside, which is not there"
            yield Found(_file(run, view.resumed), what, field="dropped_experience")
    # Once it has trained, `retention` says whether it may be gone.
    for number in sorted(run.reused - set(run.homes) - run.trained):
        yield Found(f"iteration {number}", "a resume went on from its facts, which are not there")


def _tails(member: EarlierView) -> Iterator[Found]:
    cut = member.resumed.cut
    for file in FIELDS:
        for line in member.log(file):
            # A run that fails between two iterations says so of the one before.
            first = cut - 1 if line.told.get("state") == State.FAILED else cut
            if line.file == member.file(file) and line["iteration"] < first:
                what = f"of iteration {line['iteration']}, the position was {cut}"
                yield Found(line.where, what, field="iteration")


def _file(run: RunView, resumed: Resumed) -> str:
    return str((resumed.folder / RESUME_FILE).relative_to(run.root))
