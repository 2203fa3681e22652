"""Checks of what a run's iterations were made under: recipe, tokenizer, sampling, data and scorer
stay what they are, but where a resume was allowed to change them, and tells so.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from megarl.audit.earlier import earlier
from megarl.audit.findings import Found
from megarl.audit.view import IterationView, RunView
from megarl.checkpoint.resume import RECORDS, RESUME_FILE, TOKENIZER, is_explained
from megarl.checkpoint.segments import Resumed, Segment, facts_recipe, segment_of, segments
from megarl.contracts.tokens import TokensError
from megarl.experience.columns import SealError, read_lines
from megarl.experience.manifest import MANIFEST_FILE
from megarl.observe.runfolder import RECIPE_FILE, TOKENIZER_FOLDER
from megarl.recipe import Recipe, RecipeError, load_recipe
from megarl.recipe.differences import resume_differences

Value = tuple[str, int, str]
"""(file, iteration, hash)."""


def contracts(run: RunView) -> Iterator[Found]:
    """A resume lets through what its recipe allows, and tells all of it; on both sides of it
    everything else is the same."""
    for view in [run, *earlier(run)]:  # a resume that came to no state let nothing through
        last = view.segments[-1]
        if last.start is not None and view.begun and last.start is view.resumes[view.begun - 1]:
            yield from _let_through(view, last, last.start)
            yield from _tokenizers(view, last)
    if run.sources:
        return  # facts of another run, which may have been resumed itself
    values = [_of_facts(run.iteration(number)) for number in run.sealed]
    for name in ("sampling", "data"):
        told = [each[name] for each in values if name in each]
        for (file, number, value), wanted in parted(run, name, told):
            what = f"{value}, iteration {number} should have {wanted}"
            yield Found(file, what, field=f"contracts.{name}")


def told_changes(start: Resumed | None) -> dict[str, tuple[str, str]]:
    """Contract → (before, after) that a resume tells; what is wrong with others, `contracts`
    says."""
    told = {} if start is None else start.told.get("contents")
    if not isinstance(told, dict):
        return {}
    return {name: tuple(pair) for name, pair in told.items() if _is_pair(pair)}


def told_records(start: Resumed) -> frozenset[str]:
    """The line files that had been changed by hand, and were let through."""
    told = start.told.get("records")
    allowed = isinstance(told, dict) and RECORDS in start.may_differ
    return frozenset(told if allowed else ())


def parted(run: RunView, name: str, values: Iterable[Value]) -> Iterator[tuple[Value, str]]:
    """The values of contract `name` that are not what the first one, and the resumes since, lead
    to; each with the one that it should be. Values by iteration."""
    before: tuple[int, str] | None = None
    for file, number, value in values:
        if before is None:
            before = (number, value)
            continue
        wanted = before[1]
        for segment in run.segments:
            if before[0] < segment.first <= number:
                old, new = told_changes(segment.start).get(name, (wanted, wanted))
                wanted = new if old == wanted else wanted
        if value == wanted:
            before = (number, value)
        elif number not in run.reused or value != before[1]:  # those may be of the start before
            yield (file, number, value), wanted


def tokenizer_folder(run: RunView, iteration: int) -> Path:
    """The copy of the tokenizer that the facts of `iteration` were made with: of a start before a
    resume that was allowed another one, what that resume set aside."""
    return _kept(run, facts_recipe(run.resumes, run.root, iteration, run.begun), TOKENIZER_FOLDER)


def kept_file(run: RunView, iteration: int, name: str) -> Path:
    """What the run folder's `name` was while `iteration` trained, if resumes copy or move it."""
    return _kept(run, run.recipe_file(iteration), name)


def tokenizer_folders(run: RunView) -> list[Path]:
    """Every copy of the tokenizer that the run's starts and facts are of."""
    found = {_kept(run, segment.recipe, TOKENIZER_FOLDER) for segment in run.segments}
    return sorted(found | {tokenizer_folder(run, number) for number in run.sealed})


def _kept(run: RunView, recipe: Path, name: str) -> Path:
    places = [*(resumed.folder for resumed in run.resumes), run.root]
    places = places[places.index(recipe.parent) :]
    return next((at / name for at in places if (at / name).exists()), run.root / name)


def _let_through(view: RunView, segment: Segment, start: Resumed) -> Iterator[Found]:
    file = str((start.folder / RESUME_FILE).relative_to(view.root))
    contents, records = (start.told.get(field) for field in ("contents", "records"))
    if not isinstance(contents, dict) or not all(map(_is_pair, contents.values())):
        yield Found(file, "does not tell which contracts differed", field="contents")
    if not isinstance(records, dict):
        yield Found(file, "does not tell which records were changed", field="records")
    elif records and RECORDS not in start.may_differ:
        yield Found(file, f"{min(records)} was changed, and not allowed to", field="records")
    for name, (old, new) in told_changes(start).items():
        allowed = name in start.may_differ or is_explained(name, start.told["meant"])
        if not allowed:
            yield Found(file, f"{old} became {new}, and was not allowed to", field=name)
    try:
        recipe, stored = load_recipe(segment.recipe), _gone_on_from(view, start)
    except RecipeError:  # `recipe` tells it
        return
    if list(recipe.resume.allow) != start.told["allowed"]:
        what = f"allows {start.told['allowed']}, its recipe {list(recipe.resume.allow)}"
        yield Found(file, what, field="allowed")
    if stored is None:
        return
    differences = resume_differences(recipe, stored)
    for key, (old, new) in differences.items():
        if key not in recipe.resume.allow:
            yield Found(file, f"{old} became {new}, and was not allowed to", field=key)
    if sorted(differences) != sorted(map(str, start.told["meant"])):
        what = f"tells that {start.told['meant']} differ, the recipes differ in"
        yield Found(file, f"{what} {sorted(differences)}", field="meant")


def _gone_on_from(view: RunView, start: Resumed) -> Recipe | None:
    """The recipe that a resume's was compared with; None where that is another run's. Raises
    `RecipeError`."""
    if not start.own:
        return None
    if start.checkpoint is None:
        return load_recipe(start.folder / RECIPE_FILE)
    found = segments(view.resumes, view.root, view.resumes.index(start))
    return load_recipe(segment_of(found, start.iteration - 1).recipe)


def _tokenizers(view: RunView, last: Segment) -> Iterator[Found]:
    """The tokenizers that lie on both sides of a resume are those that it tells."""
    if len(view.segments) < 2 or last.start is None:
        return  # nothing is left of what it went on from
    try:
        old, new = (
            view.tokens_in(_kept(view, segment.recipe, TOKENIZER_FOLDER)).hash
            for segment in view.segments[-2:]
        )
    except TokensError:  # `tokenizer` tells it
        return
    told = told_changes(last.start).get(TOKENIZER, (old, old))
    if told != (old, new):
        file = str((last.start.folder / RESUME_FILE).relative_to(view.root))
        what = f"went on from {told[0]} with {told[1]}, the run's copies are {old} and {new}"
        yield Found(file, what, field=TOKENIZER)


def _of_facts(view: IterationView) -> dict[str, Value]:
    found: dict[str, Value] = {}
    with suppress(SealError, KeyError, TypeError):  # `manifest` and `parts` tell it
        file = view.file(MANIFEST_FILE)
        found["sampling"] = (file, view.number, view.manifest.header.sampling.hash)
        for part in (part for part in view.manifest.parts if part.kind == "drawn"):
            for line in read_lines(view.folder, part):
                data = line["cursor"]["fingerprint"]
                found["data"] = (view.file(part.file), view.number, data)
    return found


def _is_pair(value: object) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(isinstance(v, str) for v in value)
