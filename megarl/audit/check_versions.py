"""Checks of policy versions: identities, digests on both sides, what updates made of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from megarl.audit.findings import Found
from megarl.audit.logs import Line, tensors_of, version_of
from megarl.audit.view import IterationView, RunView
from megarl.checkpoint.segments import segment_of
from megarl.contracts.states import State
from megarl.contracts.version import WeightManifest
from megarl.experience.manifest import MANIFEST_FILE, fault
from megarl.experience.versions import LOADED, VERSION
from megarl.recipe import RecipeError

_ENTERED = {VERSION: State.ACTOR_COMMITTED, LOADED: State.ROLLOUT_READY}
"""The state that follows a line of versions.jsonl, by its kind."""
MOST_TENSORS = 4
"""Tensors of one version that are told one by one."""


def versions(run: RunView) -> Iterator[Found]:
    """A version's id is the hash of its fields, its manifest hash that of its tensors; an id is
    never given twice for other contents, and every id that a record names is here."""
    seen: dict[str, tuple[str, Mapping[str, Any]]] = {}
    for line in run.versions:
        if line["kind"] != "version":
            continue
        try:
            version, tensors = version_of(line.told), tensors_of(line.told)
        except (KeyError, TypeError, ValueError) as error:
            yield Found(line.where, f"describes no version: {fault(error)}")
            continue
        if version.id != line["id"]:
            yield Found(line.where, f"id {line['id']} is not that of its fields", field="id")
        if tensors.hash != version.weight_manifest_hash:
            what = f"its tensors hash to {tensors.hash}, it says {version.weight_manifest_hash}"
            yield Found(line.where, what, field="weight_manifest_hash")
        name = run.recipe_of(line["iteration"]).run.name
        if version.run_id != name and not run.only_scores:
            yield Found(line.where, f"of run {version.run_id}", field="run_id")
        content = {k: v for k, v in line.told.items() if k != "iteration"}
        where, before = seen.setdefault(line["id"], (line.where, content))
        if before != content:
            yield Found(line.where, f"the same id as {where} with other contents", field="id")
    known = set(run.policy_versions)
    for where, field, id_ in _named(run):
        if id_ not in known:
            yield Found(where, f"version {id_} has no entry in {run.versions.file}", field=field)


def producers(view: IterationView) -> Iterator[Found]:
    """Every version that a sealed iteration names is in versions.jsonl, in its role; there is a
    reference and a critic where the recipe has one, and they are those of then."""
    header, known = view.manifest.header, view.run.policy_versions
    file, algorithm = view.file(MANIFEST_FILE), view.facts_recipe.algorithm
    for role, needed in (("ref", algorithm.needs_reference), ("critic", algorithm.needs_values)):
        if (role in header.producers) != needed and not view.run.only_scores:
            what = "are needed by the recipe" if needed else "are sealed, the recipe needs none"
            yield Found(file, f"{_MADE[role]} {what}", field=f"producers.{role}")
    for role, id_ in header.producers.items():
        field = f"producers.{role}"
        if id_ not in known:
            yield Found(file, f"version {id_} has no entry in versions.jsonl", field=field)
            continue
        wanted = {"rollout": "actor", "old": "actor", "ref": "reference"}.get(role, role)
        if known[id_].role != wanted:
            yield Found(file, f"version {id_} is the {known[id_].role}'s", field=field)
        elif wanted != "actor" and not view.run.only_scores:  # `origin` tells of the actor's
            last = _last_before(view.run, wanted, view.number)
            if last is not None and last["id"] != id_:
                what = f"made by version {id_}, {last.where} is the {wanted} of then"
                yield Found(file, what, field=field)


def _last_before(run: RunView, role: str, iteration: int) -> Line | None:
    """The line of the version that `role` had when `iteration` was made: a line of an update says
    which iteration it came after, the first one of a start is of the iteration that comes next."""
    told = [line for line in run.versions if line.told.get("role") == role]
    if iteration in {segment.first for segment in run.segments}:
        begun = [line for line in told if line["iteration"] == iteration]
        if begun:
            return begun[0]
    before = [line for line in told if line["iteration"] < iteration]
    return before[-1] if before else next(iter(told), None)


_MADE = {"ref": "reference log-probs", "critic": "values of a critic"}
"""What a role's version made."""


def _named(run: RunView) -> Iterator[tuple[str, str, str]]:
    """(where, field, version id) of every log line that names one."""
    for line in run.journal:
        yield line.where, "version", line["version"]
        if "critic" in line.told:
            yield line.where, "critic", line["critic"]
    for line in run.ledger:
        yield line.where, "version", line["version"]
    for line in run.updates:
        for field in ("from", "to"):
            yield line.where, field, line[field]
    for line in run.versions:
        if line["kind"] != "version":
            yield line.where, "id", line["id"]


def digests(run: RunView) -> Iterator[Found]:
    """What the generator's own parameters digested to is what the trainer committed, tensor by
    tensor, for every version that generated."""
    committed: dict[str, tuple[Line, WeightManifest]] = {}
    loaded: set[str] = set()
    for line in run.versions:
        try:
            tensors = tensors_of(line.told)
        except (TypeError, ValueError) as error:
            yield Found(line.where, f"its tensors cannot be read: {fault(error)}", field="tensors")
            continue
        if line["kind"] == "version":
            committed[line["id"]] = (line, tensors)
            continue
        loaded.add(line["id"])
        if tensors.hash != line.told.get("weight_manifest_hash"):
            yield Found(line.where, "its tensors do not hash to it", field="weight_manifest_hash")
        if line["id"] not in committed:
            continue  # `versions` tells it
        where, mine = committed[line["id"]]
        for difference in mine.differences(tensors)[:MOST_TENSORS]:
            what = f"loaded other weights than {where.where} committed: {difference}"
            yield Found(line.where, what, field="tensors")
    for line in run.journal:
        hash_ = line.told.get("weight_manifest_hash")
        version = run.policy_versions.get(line["version"])
        if hash_ is not None and version is not None and hash_ != version.weight_manifest_hash:
            what = f"{hash_}, version {version.id} has {version.weight_manifest_hash}"
            yield Found(line.where, what, field="weight_manifest_hash")
        ready = line["state"] == "ROLLOUT_READY" and line.told.get("verified")
        if ready and line["version"] not in loaded:
            what = f"version {line['version']} was verified, but no loaded digests are recorded"
            yield Found(line.where, what, field="verified")


def read_back(run: RunView) -> Iterator[Found]:
    """Of the versions that a start of the run handed over, the first and every
    `rollout.verify_every`-th were read back from the generator, and the others are marked."""
    counted: dict[int, list[str]] = {}
    for line in run.journal:
        if line["state"] != "ROLLOUT_READY":
            continue
        start = segment_of(run.segments, line["iteration"])
        handed = counted.setdefault(start.first, [])
        if line["version"] not in handed[-1:]:
            handed.append(line["version"])
        every = run.recipe_of(line["iteration"]).rollout.verify_every
        due = (len(handed) - 1) % every == 0
        if bool(line.told.get("verified")) != due:
            what = (
                f"version {line['version']} is "
                + ("not verified" if due else "verified")
                + f", it is number {len(handed)} of its start and rollout.verify_every is {every}"
            )
            yield Found(line.where, what, field="verified")


def handovers(run: RunView) -> Iterator[Found]:
    """No version is told more often than the journal committed it, and none more often loaded than
    the generator was ready with it. A run that ended between the two has told one more."""
    if run.only_scores:
        return
    told: Counter[tuple[str, str]] = Counter()
    entered = Counter((line["state"], line["version"]) for line in run.journal)
    entered += Counter(
        (line["state"], line["critic"]) for line in run.journal if "critic" in line.told
    )
    references = len(run.segments) + _refreshes(run)
    last = run.versions.lines[-1] if run.versions.lines else None
    for line in run.versions:
        state = _ENTERED.get(line["kind"])
        if state is None:
            yield Found(line.where, f"{line['kind']} is no kind of line", field="kind")
            continue
        told[state, line["id"]] += 1
        known = references if line.told.get("role") == "reference" else entered[state, line["id"]]
        # The generator of facts that are used again was ready before the resume.
        known += line["kind"] == LOADED and line["iteration"] in run.reused
        open_end = line is last and not run.is_finished
        if told[state, line["id"]] > known + open_end:
            what = f"tells version {line['id']} once more than {run.journal.file} has {state} of it"
            yield Found(line.where, what, field="id")


def _refreshes(run: RunView) -> int:
    """How often the reference took the actor's weights."""
    try:
        every = {number: run.recipe_of(number).reference.refresh_every for number in run.trained}
    except RecipeError:  # `recipe` tells it
        return 0
    return sum(bool(n) and (number + 1) % n == 0 for number, n in every.items())


def updates(run: RunView) -> Iterator[Found]:
    """Every iteration that trained has one line; it leads from the version that generated to the
    one committed next, by as many steps as it says were taken: pass by pass over the minibatches,
    all of them or up to a stop. So it is with the critic's, of which there is no stop."""
    lines: dict[int, Line] = {}
    for line in run.updates:
        lines.setdefault(line["iteration"], line)
    trained = sorted(run.trained)
    for number in trained:
        line = lines.get(number)
        last_words = not run.is_finished and number == trained[-1]
        if line is None and not last_words:
            yield Found(run.updates.file, f"no line of iteration {number}, which trained")
    for number in sorted(lines.keys() - run.trained):
        yield Found(lines[number].where, f"iteration {number} never trained by the journal")
    for number in sorted(lines.keys() & run.trained):
        yield from _update(run, lines[number])


def _update(run: RunView, line: Line) -> Iterator[Found]:
    number, known = line["iteration"], run.policy_versions
    updating = run.journal_line("UPDATING_FROM", number)
    if updating is not None and updating["version"] != line["from"]:
        what = f"from version {line['from']}, {updating.where} says {updating['version']}"
        yield Found(line.where, what, field="from")
    committed = run.commits.get(number)
    if committed is not None and committed["version"] != line["to"]:
        what = f"to version {line['to']}, {committed.where} committed {committed['version']}"
        yield Found(line.where, what, field="to")
    yield from _steps(run, line)
    critic = None if committed is None else committed.told.get("critic")
    for field, old, new in (
        ("steps", line["from"], line["to"]),
        ("critic", _critic_before(run, updating), critic),
    ):
        if old in known and new in known:
            rise = known[new].optimizer_step - known[old].optimizer_step
            taken = sum(bool(step.get("stepped")) for step in line.told.get(field, []))
            if rise != taken:
                what = f"{taken} steps were taken, the optimizer step rose by {rise}"
                yield Found(line.where, what, field=field)


def _critic_before(run: RunView, updating: Line | None) -> str | None:
    """The critic that the journal committed last before an update."""
    told = None
    for line in run.journal:
        if line is updating:
            return told
        told = line.told.get("critic", told)
    return None


def _steps(run: RunView, line: Line) -> Iterator[Found]:
    """Which steps there are, and their order."""
    recipe = run.recipe_of(line["iteration"])
    algorithm, critic = recipe.algorithm, line.told.get("critic", [])
    order = [(e, m) for e in range(algorithm.epochs) for m in range(algorithm.minibatches)]
    warming = algorithm.needs_values and line["iteration"] < recipe.critic.warmup_iterations
    whole = f"{algorithm.epochs} × {algorithm.minibatches} minibatches"
    whole = f"{algorithm.minibatches} minibatches" if algorithm.epochs == 1 else whole
    for field, steps, wanted in (
        ("steps", line["steps"], [] if warming else order),
        ("critic", critic, order if algorithm.needs_values else []),
    ):
        told = [(step.get("epoch", 0), step.get("minibatch")) for step in steps]
        stopped = [at for at, step in enumerate(steps) if step.get("stopped")]
        if stopped and (field == "critic" or algorithm.target_kl is None):
            yield Found(line.where, "a step was stopped, and nothing stops these", field=field)
        elif stopped and (stopped[0] != len(steps) - 1 or steps[-1].get("stepped")):
            yield Found(line.where, "a step was stopped, and steps went on", field=field)
        ends = len(steps) if stopped else len(wanted)
        if told != wanted[:ends]:
            has = f"the recipe has {whole}" if wanted else "there should be none"
            has = "the critic was warming up" if warming and field == "steps" else has
            out_of_order = len(told) == ends and wanted
            what = f"{len(steps)} steps" + (" out of order" if out_of_order else "")
            yield Found(line.where, f"{what}, {has}", field=field)


def once(run: RunView) -> Iterator[Found]:
    """No experience trains twice: its hash stands once in the journal's updates, in updates.jsonl
    and in the ledger, and no two iterations hold the same experience."""
    updating = [line for line in run.journal if line["state"] == "UPDATING_FROM"]
    for lines in (updating, run.updates, run.ledger):
        hashes: dict[str, Line] = {}
        numbers: dict[int, Line] = {}
        for line in lines:
            hash_ = line.told.get("experience_hash")
            first = hashes.setdefault(hash_, line)
            if hash_ is not None and first is not line:
                what = f"experience {hash_} of {first.where} again"
                yield Found(line.where, what, field="experience_hash")
            first = numbers.setdefault(line["iteration"], line)
            if first is not line:
                what = f"iteration {line['iteration']} of {first.where} again"
                yield Found(line.where, what, field="iteration")
