"""Changes across a resume, at iteration 2 of 4, that it was not allowed, or does not tell of; all
hashes are made right."""

from __future__ import annotations

import json
import shutil
from typing import Any

from megarl.checkpoint.records import RecordPositions, check_records
from tests.audit.fault import fault
from tests.audit.faults_in_resumes import ASIDE, _position, _resume
from tests.audit.forge import Forger

OTHER = "sha256:" + "0" * 64


def tell(forger: Forger) -> dict[str, Any]:
    return json.loads((forger.run / ASIDE / "resume.json").read_text())


def _edit_facts(forger: Forger, *numbers: int, **told: Any) -> None:
    for number in numbers:
        for path in sorted(forger.folder(number).glob("rollout_*.safetensors")):
            known = {key: value for key, value in told.items() if key == "scorer_version"}
            forger.columns(number, path.stem, lambda _, of, known=known: of.update(known))
        forger.manifest(number, lambda of: of.update(told))
        forger.all_hashes(number)
    _records_again(forger)


def _records_again(forger: Forger) -> None:
    """Positions hold what the records were: those of a forger who rewrote them."""
    for number in (2, 4):
        position = json.loads(
            (forger.run / f"checkpoints/iter_{number:06d}/position.json").read_text()
        )
        records = position["records"]
        for name in check_records(forger.run, records):
            if number == 4:
                records[name] = RecordPositions(forger.run).take()[name]
        _position(forger, lambda told, records=records: told.update(records=records), number)


def another_scorer(forger: Forger, *numbers: int) -> None:
    """Scored by another one, and every hash and position says so."""
    _edit_facts(forger, *numbers, scorer_version=OTHER)
    if 3 in numbers:
        _position(forger, lambda told: told["contracts"].update(scorer=OTHER), 4)


def _old(forger: Forger, name: str) -> str:
    path = forger.run / "checkpoints/iter_000002/position.json"
    return json.loads(path.read_text())["contracts"][name]


def says(forger: Forger, name: str, new: str = OTHER) -> None:
    """The resume tells that the contract differed."""
    _resume(forger, contents=tell(forger)["contents"] | {name: [_old(forger, name), new]})


def names(forger: Forger, *allowed: str) -> None:
    """The recipe, and the resume, name them."""
    path = forger.run / "recipe.yaml"
    forger.write(path, path.read_text().replace("allow: []", f"allow: [{', '.join(allowed)}]"))
    _resume(forger, allowed=list(allowed))


def allow(forger: Forger, name: str) -> None:
    names(forger, name)
    says(forger, name)


def _data(forger: Forger, *numbers: int) -> None:
    """Drawn from other data, with the position and data.json of it."""
    for number in numbers:
        forger.drawn(number, lambda told: told["cursor"].update(fingerprint=OTHER))
        forger.all_hashes(number)
    _records_again(forger)
    forger.json(forger.run / "data.json", lambda told: told.update(fingerprint=OTHER))

    def edit(told: dict) -> None:
        told["contracts"]["data"] = told["cursor"]["fingerprint"] = OTHER

    _position(forger, edit, 4)


@fault("scorer", "iter_000002")
def another_scorer_that_the_resume_does_not_tell(forger: Forger) -> None:
    another_scorer(forger, 2, 3)


@fault("contracts", "was not allowed to, scorer")
def another_scorer_that_was_not_named(forger: Forger) -> None:
    another_scorer(forger, 2, 3)
    says(forger, "scorer")


@fault("contracts", "its recipe []")
def another_scorer_that_the_recipe_does_not_name(forger: Forger) -> None:
    another_scorer(forger, 2, 3)
    says(forger, "scorer")
    _resume(forger, allowed=["scorer"])


@fault("scorer", "iter_000002")
def another_scorer_only_from_the_iteration_after(forger: Forger) -> None:
    """At the resume it would have been allowed."""
    another_scorer(forger, 3)
    allow(forger, "scorer")


@fault("scorer positions", "iter_000001")
def another_scorer_already_before_the_resume(forger: Forger) -> None:
    another_scorer(forger, 1, 2, 3)
    allow(forger, "scorer")


@fault("contracts", "data")
def other_data_that_the_resume_does_not_tell(forger: Forger) -> None:
    shutil.copyfile(forger.run / "data.json", forger.run / ASIDE / "data.json")
    _data(forger, 2, 3)


@fault("contracts", "not allowed to, data")
def other_data_that_were_not_named(forger: Forger) -> None:
    _data(forger, 2, 3)
    says(forger, "data")


@fault("positions", "contracts.data")
def data_that_are_not_those_of_the_position_before(forger: Forger) -> None:
    def edit(told: dict) -> None:
        told["fingerprint"] = OTHER

    forger.json(forger.run / ASIDE / "data.json", edit)


@fault("contracts tokenizer positions", "the run's copies are")
def another_tokenizer_before_the_resume(forger: Forger) -> None:
    copy = forger.run / ASIDE / "tokenizer"
    shutil.copytree(forger.run / "tokenizer", copy)
    forger.write(copy / "special_tokens_map.json", "{}")


@fault("contracts", "went on from sha256:0")
def a_tokenizer_that_is_told_and_was_not(forger: Forger) -> None:
    names(forger, "tokenizer")
    _resume(forger, contents={"tokenizer": [OTHER, _old(forger, "tokenizer")]})


@fault("contracts", "contracts.sampling")
def other_stop_ids_that_no_recipe_key_tells(forger: Forger) -> None:
    def edit(told: dict) -> None:
        told["sampling"]["stop_token_ids"] = [*told["sampling"]["stop_token_ids"], 99999]

    for number in (2, 3):
        forger.manifest(number, edit)
        forger.all_hashes(number)
    _records_again(forger)
    sampling = json.loads((forger.folder(3) / "manifest.json").read_text())["sampling_hash"]
    _position(forger, lambda told: told["contracts"].update(sampling=sampling), 4)


@fault("positions", "contracts.eval_data")
def held_out_data_that_no_resume_tells(forger: Forger) -> None:
    _position(forger, lambda told: told["contracts"].update(eval_data=OTHER), 4)


@fault("contracts positions origin", "not allowed to, actor.lr", maybe="versions resumes")
def a_recipe_that_differs_and_was_not_named(forger: Forger) -> None:
    path = forger.run / ASIDE / "recipe.yaml"
    forger.write(path, path.read_text().replace("lr: 0.0002", "lr: 0.0003"))


@fault("contracts", "the recipes differ in")
def a_resume_that_tells_of_a_key_that_does_not_differ(forger: Forger) -> None:
    names(forger, "actor.lr")
    _resume(forger, meant=["actor.lr"])


@fault("contracts", "does not tell which contracts")
def a_resume_that_does_not_tell_its_contracts(forger: Forger) -> None:
    _resume(forger, contents=None)


@fault("contracts positions", "metrics.jsonl was changed")
def records_that_were_not_named(forger: Forger) -> None:
    forger.lines("metrics.jsonl", lambda lines: lines[0].update({"time/iteration": 99.0}))
    _resume(forger, records={"metrics.jsonl": {"position": 1, "kept": 1}})
