"""Checks of the sealed files themselves: bytes, manifests, the chain between them, who lists them.

Iteration checks take an `IterationView`, run checks a `RunView`; each yields what it found.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import asdict

from megarl.audit.earlier import EarlierView, every_state
from megarl.audit.findings import Found
from megarl.audit.view import IterationView, RunView
from megarl.contracts.hashes import bytes_hash, file_hash
from megarl.experience.columns import (
    UNFINISHED,
    Part,
    SealError,
    read_columns,
    read_lines,
    read_part,
)
from megarl.experience.manifest import (
    DERIVED_FILE,
    FOLDER,
    LOCK_FILE,
    MANIFEST_FILE,
    is_kept,
    iteration_folder,
    iteration_folders,
    read_manifest,
)
from megarl.experience.source import SOURCE_FILE

_WRITTEN_BEFORE_DERIVED = re.compile(
    rf"(derived_\d+\.safetensors|selection\.safetensors|derived\.json)({re.escape(UNFINISHED)})?"
)
"""What a run that ends in an update may leave without a list of it: `derived.json` comes last."""
LISTS = {"prompts", "drawn"}
"""Kinds of parts that are JSON lines; the others are columns."""


def told_by(error: SealError) -> str:
    """A `SealError` without the path that a finding names anyway."""
    text = str(error)
    head, _, rest = text.partition(": ")
    return rest if rest and "/" in head else text


def manifest(view: IterationView) -> Iterator[Found]:
    """The manifest's own words lead to its hashes, and it counts the rows that its parts have."""
    file = view.file(MANIFEST_FILE)
    try:
        header = view.manifest.header
    except SealError as error:
        yield Found(file, told_by(error))
        return
    kinds = [part.kind for part in view.manifest.parts]
    for kind, wanted in (("prompts", 1), ("drawn", 1), ("rollout", None), ("scored", None)):
        count = kinds.count(kind)
        if not count or wanted is not None and count != wanted:
            yield Found(file, f"lists {count} {kind} parts", field="parts")
    names = [part.file for part in view.manifest.parts]
    places = [(part.kind, part.index) for part in view.manifest.parts]
    for part in view.manifest.parts:
        if names.count(part.file) > 1 or places.count((part.kind, part.index)) > 1:
            yield Found(file, f"lists {part.file} ({part.kind} {part.index}) twice", field="parts")
    rows = sum(part.rows for part in view.manifest.parts if part.kind == "rollout")
    if rows != header.samples:
        what = f"says {header.samples} samples, its rollout parts have {rows} rows"
        yield Found(file, what, field="samples")


def parts(view: IterationView) -> Iterator[Found]:
    """Every listed part is there and has the bytes, rows and content that were sealed."""
    listed, unlisted = list(view.manifest.parts), view.ended_in_update
    for part in listed:
        yield from _part(view, part)
    try:
        derived = view.derived
    except SealError as error:
        yield Found(view.file(DERIVED_FILE), told_by(error))
        derived, unlisted = None, True
    if derived is not None:
        for part in derived["parts"]:
            yield from _part(view, part)
        listed += derived["parts"]
    known = {part.file for part in listed} | {MANIFEST_FILE, DERIVED_FILE, SOURCE_FILE}
    for path in sorted(view.folder.iterdir()):
        without_list = unlisted and _WRITTEN_BEFORE_DERIVED.fullmatch(path.name)
        if path.name not in known and not without_list:
            yield Found(view.file(path.name), "no manifest lists it")


def _part(view: IterationView, part: Part) -> Iterator[Found]:
    file = view.file(part.file)
    try:
        if part.kind in LISTS:
            read_lines(view.folder, part)
            if bytes_hash([read_part(view.folder, part)]) != part.content:
                yield Found(file, "its content is not what was sealed", field="content")
        else:
            read_columns(view.folder, part)
    except SealError as error:
        yield Found(file, told_by(error))


def anchors(view: IterationView) -> Iterator[Found]:
    """The hashes that journal, ledger, updates and derived.json hold are those of the files."""
    run, number = view.run, view.number
    sealed = view.manifest.experience_hash
    for state in ("EXPERIENCE_SEALED", "UPDATING_FROM"):
        line = run.journal_line(state, number)
        if line is not None and line.told.get("experience_hash") != sealed:
            told = line.told.get("experience_hash")
            what = f"{state} names experience {told}, {view.file(MANIFEST_FILE)} is {sealed}"
            yield Found(line.where, what, field="experience_hash")
    for log in (run.ledger, run.updates):
        for line in log.of(number):
            if line["experience_hash"] != sealed:
                what = f"names experience {line['experience_hash']}, sealed is {sealed}"
                yield Found(line.where, what, field="experience_hash")
    try:
        derived = view.derived
    except SealError:  # `parts` tells it
        return
    if derived is None:
        if number in run.trained:
            yield Found(view.file(DERIVED_FILE), "is missing, though the iteration trained")
        return
    if derived.get("experience_hash") != sealed:
        what = f"derived of {derived.get('experience_hash')}, sealed is {sealed}"
        yield Found(view.file(DERIVED_FILE), what, field="experience_hash")
    hash_ = file_hash(view.folder / DERIVED_FILE)
    lines = [run.journal_line("UPDATING_FROM", number)]
    lines += run.updates.of(number)
    for line in lines:
        if line is not None and line.told.get("derived_hash") != hash_:
            what = f"trained on {line.told.get('derived_hash')}, {DERIVED_FILE} is {hash_}"
            yield Found(line.where, what, field="derived_hash")


def origin(view: IterationView) -> Iterator[Found]:
    """All records are of this run, this iteration and the versions the journal had then."""
    run, header = view.run, view.manifest.header
    file = view.file(MANIFEST_FILE)
    recipe, facts = view.recipe, view.facts_recipe
    name = facts.run.name
    if header.run_id != name:
        yield Found(file, f"of run {header.run_id}, this is {name}", field="run_id")
    if header.iteration != view.number:
        yield Found(file, f"of iteration {header.iteration}", field="iteration")
    if header.recipe_hash != facts.hash:
        what = f"sealed under recipe {header.recipe_hash}, recipe.yaml is {facts.hash}"
        yield Found(file, what, field="recipe_hash")
    derived = view.derived
    if derived is not None and derived.get("recipe_hash") != recipe.hash:
        what = f"derived under recipe {derived.get('recipe_hash')}, not {recipe.hash}"
        yield Found(view.file(DERIVED_FILE), what, field="recipe_hash")
    # The facts that a resume went on from were generated before it.
    state = "EXPERIENCE_SEALED" if view.number in run.reused else "GENERATING"
    generating = run.journal_line(state, view.number)
    for role in ("rollout", "old"):
        made_by = header.producers.get(role)
        if generating is not None and made_by != generating["version"]:
            what = f"made by version {made_by}, {generating.where} had {generating['version']}"
            yield Found(file, what, field=f"producers.{role}")
    for raw in view.rollouts:
        for field, told in (
            ("version_id", header.producers.get("rollout")),
            ("scorer_version", header.scorer_version),
        ):
            if raw.metadata.get(field) != told:
                what = f"{field} {raw.metadata.get(field)}, the manifest says {told}"
                yield Found(view.file(raw.part.file), what, field=field)
    for raw in view.scored:
        if raw.metadata.get("producers") != header.producers:
            what = f"made by {raw.metadata.get('producers')}, the manifest says {header.producers}"
            yield Found(view.file(raw.part.file), what, field="producers")
    yield from _sampling(view)


def _sampling(view: IterationView) -> Iterator[Found]:
    """What the manifest says of the sampling is what the recipe says."""
    recipe, sampling = view.facts_recipe, asdict(view.manifest.header.sampling)
    wanted = {"n": recipe.rollout.group_size, "seed": recipe.seed}
    same = ("temperature", "max_response_tokens", "dtype", "attention_backend", "top_p", "top_k")
    same += ("min_p", "frequency_penalty", "presence_penalty", "repetition_penalty")
    wanted |= {key: getattr(recipe.rollout, key) for key in same}
    for key, value in wanted.items():
        if sampling[key] != value:
            what = f"sampled with {key} {sampling[key]}, the recipe says {value}"
            yield Found(view.file(MANIFEST_FILE), what, field=f"sampling.{key}")


def chain(run: RunView) -> Iterator[Found]:
    """Each manifest names the hash of the one before it."""
    hashes: dict[int, str] = {}
    # Where a run goes on, retention may have let go of all before it.
    resumed = {part.first for part in run.segments if part.first - 1 not in run.sealed}
    alone = {run.first} | resumed
    for number in run.sealed:
        folder = iteration_folder(run.folder, number)
        try:
            read = read_manifest(folder)
        except SealError:
            # `manifest` tells it; what it was called before it was changed, nobody knows.
            if (folder / MANIFEST_FILE).is_file():
                hashes[number] = file_hash(folder / MANIFEST_FILE)
            continue
        file = f"{FOLDER}/{folder.name}/{MANIFEST_FILE}"
        hashes[number] = read.hash
        if number - 1 in hashes and read.previous != hashes[number - 1]:
            what = f"follows manifest {read.previous}, the one before it is {hashes[number - 1]}"
            yield Found(file, what, field="previous")
        if number == run.first and read.previous is not None:
            yield Found(file, f"the first one follows {read.previous}", field="previous")
        if read.previous is None and number not in alone:
            yield Found(file, "follows no manifest, and is not the first", field="previous")


def retention(run: RunView) -> Iterator[Found]:
    """Missing iterations are those a recipe let go, and no iteration is there that never was."""
    sealed = {
        line["iteration"]: line for line in run.journal if line["state"] == "EXPERIENCE_SEALED"
    }
    states = [run, *every_state(run)]
    # Facts that a resume went on from are no more this state's alone.
    later = {resumed.reused for resumed in run.resumes[run.begun :]}
    for number, line in sealed.items():
        if number in run.sealed or number in run.sources or number in later:
            continue
        if not any(_let_go(state, number) for state in states):
            what = f"iteration {number} is sealed, {_name(number)} is missing or has no manifest"
            yield Found(line.where, what)
    for number in run.folders:
        open_end = not run.is_finished and number > max(sealed, default=-1)
        if number not in sealed and not open_end and not run.only_scores:
            yield Found(_name(number), "the journal never sealed this iteration")


def _let_go(state: RunView, number: int) -> bool:
    """Whether a start of a run let an iteration go that it found or made, by its own recipe.
    Retention runs once an iteration is derived: the newest one that then was."""
    last = state.segments[-1]
    if isinstance(state, EarlierView) and number >= state.resumed.cut:
        return False  # another iteration of that number, which was set aside
    updating = [line["iteration"] for line in state.journal if line["state"] == "UPDATING_FROM"]
    newest = max((made for made in updating if made >= last.first), default=-1)
    if newest < 0:
        return False
    section = state.recipe.experience
    return not is_kept(number, newest, section.keep, section.keep_every)


def strays(run: RunView) -> Iterator[Found]:
    """Nothing lies in experience/ but iterations under their own names."""
    places = {path.name for _, path in iteration_folders(run.folder) if path.is_dir()}
    folder = run.folder / FOLDER
    if not folder.is_dir():
        return
    for path in sorted(folder.iterdir()):
        if path.name not in places | {LOCK_FILE}:
            yield Found(f"{FOLDER}/{path.name}", "is no iteration's folder: nothing reads it")


def _name(number: int) -> str:
    return f"{FOLDER}/iter_{number:06d}"
