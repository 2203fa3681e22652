"""Faults in who made what: versions, runs, tokenizer, recipe, journal, ledger, updates."""

from __future__ import annotations

import json
import shutil

from megarl.contracts.version import PolicyVersion, TensorEntry, WeightManifest
from tests.audit.fault import fault
from tests.audit.forge import Forger


@fault("origin", "run_id")
def an_iteration_of_another_run(forger: Forger) -> None:
    forger.manifest(1, lambda told: told.update(run_id="another"))
    forger.all_hashes(1)


@fault("parts", "rollout_0")
def a_part_of_another_run(forger: Forger) -> None:
    forger.columns(1, "rollout_0", lambda _, told: told.update(version_id="0123456789ab"))


@fault("origin", "version_id")
def a_part_of_another_run_that_the_manifest_lists(forger: Forger) -> None:
    forger.columns(1, "rollout_0", lambda _, told: told.update(version_id="0123456789ab"))
    forger.all_hashes(1)


@fault("origin seeds anchors chain", "iteration 0", maybe="clocks")
def another_iteration_in_its_place(forger: Forger) -> None:
    shutil.rmtree(forger.folder(1))
    shutil.copytree(forger.folder(0), forger.folder(1))


@fault("origin", "producers")
def a_version_of_another_iteration(forger: Forger) -> None:
    first = json.loads((forger.folder(0) / "manifest.json").read_text())["producers"]
    for part in ("rollout_0", "rollout_1"):
        forger.columns(1, part, lambda _, told: told.update(version_id=first["rollout"]))
    forger.columns(1, "scored_0", lambda _, told: told.update(producers=first))
    forger.manifest(1, lambda told: told.update(producers=first))
    forger.all_hashes(1)
    forger.lines("ledger.jsonl", lambda lines: lines[1].update(version=first["rollout"]))


@fault("origin contracts", "temperature")
def samples_of_another_temperature(forger: Forger) -> None:
    forger.manifest(1, lambda told: told["sampling"].update(temperature=0.7))
    forger.all_hashes(1)


@fault("versions producers", "no entry")
def a_version_without_an_entry(forger: Forger) -> None:
    used = json.loads((forger.folder(1) / "manifest.json").read_text())["producers"]["rollout"]
    forger.lines(
        "versions.jsonl",
        lambda lines: [v for v in lines if v["id"] != used or v["kind"] != "version"],
    )


@fault("versions updates", "not that of its fields")
def a_version_with_an_edited_step(forger: Forger) -> None:
    def edit(lines: list) -> None:
        [line for line in lines if line["kind"] == "version"][-1]["optimizer_step"] += 1

    forger.lines("versions.jsonl", edit)


@fault("versions digests", "tensors hash to")
def a_digest_edited_on_the_trainers_side(forger: Forger) -> None:
    forger.lines("versions.jsonl", lambda lines: _edit_digest(lines, "version"))


@fault("digests", "loaded other weights")
def a_digest_edited_on_the_generators_side(forger: Forger) -> None:
    forger.lines("versions.jsonl", lambda lines: _edit_digest(lines, "loaded"))


@fault("digests", "loaded other weights")
def digests_edited_on_the_generators_side_with_their_hash(forger: Forger) -> None:
    def edit(lines: list) -> None:
        line = _edit_digest(lines, "loaded")
        line["weight_manifest_hash"] = _manifest_of(line).hash

    forger.lines("versions.jsonl", edit)


@fault("versions producers handovers", "no entry")
def a_version_made_again_for_other_weights(forger: Forger) -> None:
    def edit(lines: list) -> None:
        line = _edit_digest(lines, "version")
        line["weight_manifest_hash"] = _manifest_of(line).hash
        fields = {name: line[name] for name in PolicyVersion.__dataclass_fields__}
        line["id"] = PolicyVersion(**fields).id

    forger.lines("versions.jsonl", edit)


def _edit_digest(lines: list, kind: str) -> dict:
    actors = [line for line in lines if line.get("role", "actor") == "actor"]
    line = [line for line in actors if line["kind"] == kind][1]
    line["tensors"][0][3] = f"{int(line['tensors'][0][3], 16) ^ 1:#x}"
    return line


def _manifest_of(line: dict) -> WeightManifest:
    entries = (TensorEntry(n, tuple(s), d, int(x, 16)) for n, s, d, x in line["tensors"])
    return WeightManifest(tuple(entries))


@fault("tokenizer", "tokenizer_hash")
def an_edited_tokenizer(forger: Forger) -> None:
    path = forger.run / "tokenizer" / "tokenizer_config.json"
    template = json.loads(path.read_text())
    template["chat_template"] = template.get("chat_template", "") + " "
    forger.write(path, json.dumps(template))


@fault("origin", "recipe_hash")
def an_edited_recipe(forger: Forger) -> None:
    path = forger.run / "recipe.yaml"
    forger.write(path, path.read_text().replace("clip_high: 0.28", "clip_high: 0.3"))


@fault("recipe", "algorithm")
def a_recipe_that_is_none(forger: Forger) -> None:
    path = forger.run / "recipe.yaml"
    forger.write(path, path.read_text().replace("clip_high", "clip_hihg"))


@fault("journal", "not legal")
def a_skipped_state(forger: Forger) -> None:
    forger.lines(
        "journal.jsonl",
        lambda lines: [s for s in lines if (s["state"], s["iteration"]) != ("PREPARING", 1)],
    )


@fault("journal finished rows", "not legal")
def a_journal_that_knows_of_no_update(forger: Forger) -> None:
    forger.lines("journal.jsonl", lambda lines: [s for s in lines if s["state"] != "UPDATING_FROM"])
    forger.lines("updates.jsonl", lambda lines: [])


@fault("journal once", "not legal")
def a_doubled_update(forger: Forger) -> None:
    def edit(lines: list) -> None:
        at = [line["state"] for line in lines].index("UPDATING_FROM")
        lines.insert(at, dict(lines[at]))

    forger.lines("journal.jsonl", edit)


@fault("journal once", "of iteration 1")
def an_iteration_that_ran_twice(forger: Forger) -> None:
    def edit(lines: list) -> list:
        cycle = _cycle(lines, 1)
        at = lines.index(cycle[-1]) + 1
        again = [line | {"time": cycle[-1]["time"]} for line in cycle]
        return lines[:at] + again + lines[at:]

    forger.lines("journal.jsonl", edit)


@fault("journal retention updates finished handovers rows", "expected 1")
def a_gap_in_the_journal(forger: Forger) -> None:
    def edit(lines: list) -> list:
        cycle = _cycle(lines, 1)
        return [line for line in lines if line not in cycle]

    forger.lines("journal.jsonl", edit)


def _cycle(lines: list, iteration: int) -> list:
    """From EXPORTING to the commit after its update; not the evaluation's hand-over."""
    mine = [line for line in lines if line["iteration"] == iteration]
    start = [line["state"] for line in mine].index("EXPORTING")
    return mine[start : start + 8]


@fault("times", "before journal.jsonl")
def a_clock_that_jumps_in_the_journal(forger: Forger) -> None:
    def edit(lines: list) -> None:
        line = [line for line in lines if line["state"] == "EXPORTING"][1]
        line["time"] -= 3600

    forger.lines("journal.jsonl", edit)


@fault("ledger", "trained")
def an_edited_ledger(forger: Forger) -> None:
    forger.lines("ledger.jsonl", lambda lines: lines[1].update(trained=lines[1]["trained"] - 4))


@fault("ledger", "the facts give")
def an_edited_ledger_that_closes(forger: Forger) -> None:
    def edit(lines: list) -> None:
        lines[1]["trained"] -= 4
        lines[1]["dropped"]["incomplete_group"] = 4

    forger.lines("ledger.jsonl", edit)


@fault("ledger", "rounds")
def a_ledger_of_more_rounds(forger: Forger) -> None:
    forger.lines("ledger.jsonl", lambda lines: lines[1].update(rounds=lines[1]["rounds"] + 1))


@fault("ledger", "joined")
def a_ledger_of_results_that_came_late(forger: Forger) -> None:
    forger.lines("ledger.jsonl", lambda lines: lines[1]["joined"].update(late=1))


@fault("ledger", "no line")
def a_ledger_without_an_iteration(forger: Forger) -> None:
    forger.lines("ledger.jsonl", lambda lines: lines.pop(1) and None)


@fault("once", "again")
def an_update_told_twice(forger: Forger) -> None:
    forger.lines("updates.jsonl", lambda lines: lines.append(lines[-1]))


@fault("updates", "no line")
def an_update_that_is_not_told(forger: Forger) -> None:
    forger.lines("updates.jsonl", lambda lines: lines.pop(1) and None)


@fault("updates metrics", "1 steps")
def a_step_is_missing(forger: Forger) -> None:
    forger.lines("updates.jsonl", lambda lines: lines[1]["steps"].pop())


@fault("updates metrics", "steps")
def a_step_that_was_skipped_and_taken(forger: Forger) -> None:
    forger.lines("updates.jsonl", lambda lines: lines[1]["steps"][0].update(stepped=False))


@fault("denominators", "counted")
def a_step_with_another_denominator(forger: Forger) -> None:
    forger.lines("updates.jsonl", lambda lines: lines[1]["steps"][0].update(tokens=7))


@fault("finished", "names version")
def a_run_that_finished_with_another_version(forger: Forger) -> None:
    path = forger.run / "finished.json"
    forger.json(path, lambda told: told.update(version="0123456789ab"))


@fault("retention", "missing")
def a_deleted_iteration(forger: Forger) -> None:
    shutil.rmtree(forger.folder(1))


@fault("retention", "no manifest")
def a_deleted_manifest(forger: Forger) -> None:
    (forger.folder(2) / "manifest.json").unlink()


@fault("records ledger", "not JSON")
def a_line_that_is_no_json(forger: Forger) -> None:
    path = forger.run / "ledger.jsonl"
    forger.write(path, path.read_text().replace('"iteration": 1', '"iteration" 1'))


@fault("journal", "again, at the same time")
def a_last_state_told_twice(forger: Forger) -> None:
    forger.lines("journal.jsonl", lambda lines: lines.append(dict(lines[-1])))


@fault("handovers", "once more than journal.jsonl has ACTOR_COMMITTED")
def a_last_version_told_twice(forger: Forger) -> None:
    forger.lines("versions.jsonl", lambda lines: lines.append(dict(lines[-1])))


@fault("handovers", "once more than journal.jsonl has ROLLOUT_READY")
def a_hand_over_told_twice(forger: Forger) -> None:
    def edit(lines: list) -> None:
        lines.append(dict([line for line in lines if line["kind"] == "loaded"][-1]))

    forger.lines("versions.jsonl", edit)


@fault("read_back", "is not verified, it is number")
def a_version_that_was_not_read_back(forger: Forger) -> None:
    def edit(lines: list) -> None:
        ready = [line for line in lines if line["state"] == "ROLLOUT_READY"]
        ready[-1].update(verified=False)

    forger.lines("journal.jsonl", edit)


@fault("losses metrics", "recorded, the facts give")
def an_edited_first_loss(forger: Forger) -> None:
    def edit(lines: list) -> None:
        lines[1]["steps"][0]["loss"] += 0.1

    forger.lines("updates.jsonl", edit)


@fault("metrics", "reward/mean")
def an_edited_metric_of_rewards(forger: Forger) -> None:
    _edit_metric(forger, "reward/mean")


@fault("metrics", "groups/groups_trained")
def an_edited_metric_of_groups(forger: Forger) -> None:
    _edit_metric(forger, "groups/groups_trained")


@fault("metrics", "response/tokens")
def an_edited_metric_of_responses(forger: Forger) -> None:
    _edit_metric(forger, "response/tokens")


@fault("metrics", "update/grad_norm")
def an_edited_metric_of_the_update(forger: Forger) -> None:
    _edit_metric(forger, "update/grad_norm")


def _edit_metric(forger: Forger, key: str) -> None:
    forger.lines("metrics.jsonl", lambda lines: lines[1].update({key: lines[1][key] + 0.01}))


@fault("rows", "no row of iteration 1")
def metrics_without_an_iteration(forger: Forger) -> None:
    forger.lines("metrics.jsonl", lambda lines: lines.pop(1) and None)


@fault("rows", "iteration 2 after 2")
def metrics_with_an_iteration_twice(forger: Forger) -> None:
    forger.lines("metrics.jsonl", lambda lines: lines.append(dict(lines[-1])))
