"""Faults in a run that was resumed once, at iteration 2 of 4: its checkpoints, what its resume says
of itself, and what it set aside (iterations 2 and 3)."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from megarl.contracts.hashes import file_hash
from tests.audit.fault import fault
from tests.audit.forge import Forger

ASIDE = "resumes/001"


def _checkpoint(forger: Forger, number: int = 2) -> Path:
    return forger.run / "checkpoints" / f"iter_{number:06d}"


def _position(forger: Forger, edit, number: int = 2) -> None:
    """Change a position, and commit it as a forger would."""
    folder = _checkpoint(forger, number)
    forger.json(folder / "position.json", edit, indent=1)

    def commit(told: dict) -> None:
        told["position_hash"] = file_hash(folder / "position.json")
        told["files"]["position.json"] = (folder / "position.json").stat().st_size

    forger.json(folder / "COMMIT.json", commit, indent=1)


def _resume(forger: Forger, **changes) -> None:
    path = forger.run / ASIDE / "resume.json"
    forger.json(path, lambda told: told.update(changes), indent=1)


@fault("checkpoints", "bytes, ")
def a_checkpoint_that_was_cut_off(forger: Forger) -> None:
    file = next(_checkpoint(forger).glob("actor/*.distcp"))
    forger.write(file, file.read_bytes()[:-1])


@fault("checkpoints", "missing, COMMIT.json lists it")
def a_checkpoint_without_a_file(forger: Forger) -> None:
    next(_checkpoint(forger).glob("actor/*.distcp")).unlink()


@fault("checkpoints", "half-written, there is no COMMIT.json")
def a_checkpoint_without_commit_in_a_finished_run(forger: Forger) -> None:
    (_checkpoint(forger) / "COMMIT.json").unlink()


@fault("checkpoints", "position.json: not the one that was committed")
def an_edited_position(forger: Forger) -> None:
    path = _checkpoint(forger) / "position.json"
    forger.write(path, path.read_text().replace('"position": ', '"position":  ')[:-1])
    body = path.read_bytes()
    size = json.loads((path.parent / "COMMIT.json").read_text())["files"]["position.json"]
    forger.write(path, (body + b" " * size)[:size])


@fault("checkpoints", "COMMIT.json does not list it")
def a_file_in_a_checkpoint_that_nobody_committed(forger: Forger) -> None:
    forger.write(_checkpoint(forger) / "actor" / "__7_0.distcp", b"x")


@fault("checkpoints", "is no checkpoint's folder")
def a_checkpoint_under_another_name(forger: Forger) -> None:
    shutil.copytree(_checkpoint(forger), forger.run / "checkpoints" / "best")


@fault("checkpoints", "COMMIT.json is of iteration 2")
def a_checkpoint_of_another_iteration(forger: Forger) -> None:
    shutil.copytree(_checkpoint(forger), _checkpoint(forger, 3))


@fault("checkpoints", "none of the end")
def a_finished_run_without_its_last_checkpoint(forger: Forger) -> None:
    shutil.rmtree(_checkpoint(forger, 4))


@fault("positions", "actor.id")
def a_position_of_another_version(forger: Forger) -> None:
    other = json.loads((_checkpoint(forger, 4) / "position.json").read_text())
    names = ("actor", "trainer")
    _position(forger, lambda told: told.update({name: other[name] for name in names}))
    path = _checkpoint(forger) / "COMMIT.json"
    forger.json(path, lambda told: told.update(version=other["actor"]["id"]), indent=1)


@fault("checkpoints", "position.json tells of the reference")
def a_position_with_another_reference(forger: Forger) -> None:
    _position(forger, lambda told: told.update(reference=told["actor"]))


@fault("positions", "trainer.steps")
def a_position_that_took_other_steps(forger: Forger) -> None:
    _position(forger, lambda told: told["trainer"].update(steps=told["trainer"]["steps"] + 1))


@fault("positions", "attempt")
def a_position_of_another_attempt(forger: Forger) -> None:
    _position(forger, lambda told: told.update(attempt=1))


@fault("positions", "recipe then was")
def a_position_of_another_recipe(forger: Forger) -> None:
    _position(forger, lambda told: told["recipe"]["actor"].update(lr=0.5))


@fault("positions", "layout")
def a_position_of_another_layout(forger: Forger) -> None:
    _position(forger, lambda told: told["layout"].update(tp=1, dp=2))


@fault("positions", "left")
def a_position_whose_cursor_stands_elsewhere(forger: Forger) -> None:
    _position(forger, lambda told: told["cursor"].update(position=3))


@fault("positions", "contracts.tokenizer")
def a_position_with_another_tokenizer(forger: Forger) -> None:
    _position(forger, lambda told: told["contracts"].update(tokenizer="sha256:0"))


@fault("positions", "cursor.fingerprint")
def a_position_with_other_data(forger: Forger) -> None:
    _position(forger, lambda told: told["contracts"].update(data="blake3:0"))


@fault("positions", "contracts.scorer")
def a_position_with_another_scorer(forger: Forger) -> None:
    _position(forger, lambda told: told["contracts"].update(scorer="sha256:0"))


@fault("positions", "of metrics.jsonl are others now")
def a_row_that_was_edited_after_its_checkpoint(forger: Forger) -> None:
    forger.lines("metrics.jsonl", lambda lines: lines[0].update({"time/iteration": 99.0}))


@fault("resumes", "is resume 2")
def a_resume_with_another_number(forger: Forger) -> None:
    _resume(forger, number=2)


@fault("resumes", "one is missing")
def a_resume_that_is_missing(forger: Forger) -> None:
    (forger.run / ASIDE).rename(forger.run / "resumes" / "002")
    path = forger.run / "resumes" / "002" / "resume.json"
    forger.json(path, lambda told: told.update(number=2), indent=1)


@fault("resumes", "from checkpoint")
def a_resume_of_another_checkpoint(forger: Forger) -> None:
    _resume(forger, checkpoint="checkpoints/iter_000004")


@fault("resumes", "went on with recipe")
def a_resume_with_another_recipe(forger: Forger) -> None:
    _resume(forger, recipe_hash="sha256:0")


@fault("attempts positions", "is done again", maybe="journal")
def a_redone_update_without_a_new_attempt(forger: Forger) -> None:
    """Nothing was redone under the attempt that the resume now claims."""
    _resume(forger, attempt=0)


@fault("attempts positions", "its start had 1", maybe="journal")
def a_journal_whose_redone_update_has_the_old_attempt(forger: Forger) -> None:
    def edit(lines: list) -> None:
        for line in lines:
            line["update_attempt"] = 0

    forger.lines("journal.jsonl", edit)


@fault("attempts positions digests", "goes on with")
def a_resume_that_went_on_with_other_weights(forger: Forger) -> None:
    def edit(lines: list) -> None:
        at = [line["state"] for line in lines].index("EXPORTING")
        found = [n for n, line in enumerate(lines) if line["iteration"] == 2 and n > at]
        lines[found[0] - 1]["weight_manifest_hash"] = lines[0]["weight_manifest_hash"]

    forger.lines("journal.jsonl", edit)


@fault("aside", "which is not there", maybe="retention")
def a_rolled_back_iteration_that_is_gone(forger: Forger) -> None:
    shutil.rmtree(forger.run / ASIDE / "experience" / "iter_000002")


@fault("parts", "resumes/001/experience/iter_000002/rollout_0")
def a_bit_of_a_rolled_back_iteration(forger: Forger) -> None:
    path = forger.run / ASIDE / "experience" / "iter_000002" / "rollout_0.safetensors"
    body = bytearray(path.read_bytes())
    body[-1] ^= 1
    forger.write(path, bytes(body))


@fault("journal", "resumes/001/journal.jsonl")
def a_set_aside_journal_with_a_state_left_out(forger: Forger) -> None:
    def edit(lines: list) -> None:
        lines.pop([line["state"] for line in lines].index("PREPARING"))

    forger.lines(f"{ASIDE}/journal.jsonl", edit)


@fault("aside times", "the position was 2", maybe="journal attempts once handovers versions")
def a_set_aside_journal_that_begins_too_early(forger: Forger) -> None:
    def edit(lines: list) -> list:
        whole = (forger.run / "journal.jsonl").read_text().splitlines()
        return [json.loads(whole[-1]) | {"iteration": 1}, *lines]

    forger.lines(f"{ASIDE}/journal.jsonl", edit)


@fault("versions", "resumes/001/versions.jsonl", maybe="producers digests updates attempts")
def a_set_aside_version_with_an_edited_step(forger: Forger) -> None:
    def edit(lines: list) -> None:
        [line for line in lines if line["kind"] == "version"][0]["optimizer_step"] += 1

    forger.lines(f"{ASIDE}/versions.jsonl", edit)


@fault("chain anchors producers parts", "iter_000003", maybe="clocks updates ledger")
def an_iteration_that_was_rolled_back_in_its_place(forger: Forger) -> None:
    """Of the lower attempt's version."""
    shutil.rmtree(forger.folder(3))
    shutil.copytree(forger.run / ASIDE / "experience" / "iter_000003", forger.folder(3))
