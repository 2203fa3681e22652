"""`audit verify` on a real run: nothing is found in it, and each planted fault by its right check.

Faults are planted at the depth that the check is for: bytes alone, or with every hash above them
made right, so that what is left to find is that things do not follow from each other any more.

Not covered: forgers who also make right what follows (verdicts, advantages, digests, weights): no
check can know; runs over several hosts; `--only` runs; a critic's values.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from megarl.audit.findings import Report
from megarl.audit.verify import verify
from megarl.audit.view import open_run
from tests.audit import faults_in_facts, faults_in_files, faults_in_records
from tests.audit.fault import Fault, faults_of
from tests.audit.forge import Forger
from tools.audit import main

pytestmark = pytest.mark.launch

FAULTS = faults_of(faults_in_files, faults_in_facts, faults_in_records)
# What no check reads is not copied.
UNREAD = ("tensorboard", "logs", "eval", "timeline.json", "report.html")
# Nor are checkpoints: their hashes of all records would find every forger (`test_resumed.py`).
ASIDE = shutil.ignore_patterns(*UNREAD, "checkpoints")


@pytest.fixture
def forger(audited: Path, tmp_path: Path) -> Forger:
    shutil.copytree(audited, tmp_path / "moved", ignore=ASIDE)
    return Forger(tmp_path / "moved")


def found(run: Path) -> Report:
    return verify(open_run(run))


def test_nothing_is_found_in_a_real_run_also_after_it_was_moved(forger: Forger) -> None:
    report = found(forger.run)
    assert not report.findings
    assert not report.notes
    assert all(outcome.looked_at and not outcome.skipped for outcome in report.outcomes)


def test_a_forger_who_changes_nothing_is_not_found(forger: Forger) -> None:
    for iteration in range(3):
        forger.reseal(iteration)
    forger.rechain()
    assert not found(forger.run).findings


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_planted_fault_is_found_by_the_right_check(fault: Fault, forger: Forger) -> None:
    fault(forger)
    told = [str(finding) for finding in found(forger.run).findings]
    assert {line.partition(":")[0] for line in told} - fault.maybe == fault.checks, told
    assert any(fault.word in line for line in told), told


def test_a_finding_names_check_file_sample_and_field(
    forger: Forger, capsys: pytest.CaptureFixture[str]
) -> None:
    faults_in_facts.a_token_beyond_the_vocabulary(forger)
    assert main(["verify", str(forger.run)]) == 1
    prompt = json.loads((forger.folder(1) / "prompts.jsonl").read_text().splitlines()[0])
    columns, _ = forger.read_columns(1, "rollout_0")
    assert columns["draw_index"][0] == 0
    sample = f"audited/1/{prompt['prompt_id']}/{columns['candidate'][0]}"
    file = "experience/iter_000001/rollout_0.safetensors"
    lines = [x for x in capsys.readouterr().out.splitlines() if x.startswith("tokens: ")]
    assert len(lines) == 1
    assert lines[0].startswith(f"tokens: {file}: token 0 is id 1000000, the vocabulary has ")
    assert lines[0].endswith(f", {sample}, response_ids")


def test_json_has_every_check_and_every_finding(
    forger: Forger, capsys: pytest.CaptureFixture[str]
) -> None:
    faults_in_facts.a_mask_with_holes(forger)
    assert main(["verify", str(forger.run), "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert told["ok"] is False
    assert {item["check"] for item in told["findings"]} == faults_in_facts.a_mask_with_holes.checks
    assert sum(check["findings"] for check in told["checks"]) == len(told["findings"])
    assert all(check["looked_at"] for check in told["checks"])


def test_a_failed_run_is_told_as_such_and_its_whole_iterations_verify(forger: Forger) -> None:
    """As a run that failed while it updated from iteration 2 leaves its folder."""

    def fail(lines: list) -> list:
        at = [(s["state"], s["iteration"]) for s in lines].index(("UPDATING_FROM", 2))
        last = lines[at] | {"state": "FAILED", "reason": "the disk is full"}
        return [*lines[: at + 1], last]

    forger.lines("journal.jsonl", fail)
    for file in ("updates.jsonl", "metrics.jsonl"):
        forger.lines(file, lambda lines: lines[:2])
    (forger.run / "finished.json").unlink()
    report = found(forger.run)
    assert not report.findings
    assert report.notes == ["the run FAILED in iteration 2, 2 iterations trained: the disk is full"]


def test_a_killed_run_may_end_in_the_middle_of_anything(forger: Forger) -> None:
    """Iteration 2 has files and no manifest; the journal's last line is cut off."""

    def kill(lines: list) -> list:
        at = [(s["state"], s["iteration"]) for s in lines].index(("PREPARING", 2))
        return lines[: at + 1]

    forger.lines("journal.jsonl", kill)
    forger.write(forger.run / "journal.jsonl", (forger.run / "journal.jsonl").read_bytes()[:-9])
    for file in ("updates.jsonl", "ledger.jsonl", "metrics.jsonl"):
        forger.lines(file, lambda lines: lines[:2])
    for name in ("manifest.json", "derived.json", "selection.safetensors"):
        (forger.folder(2) / name).unlink()
    (forger.run / "finished.json").unlink()
    report = found(forger.run)
    assert not report.findings
    assert report.notes == [
        "the run has not finished; GENERATING in iteration 2, 2 iterations trained"
    ]


def test_iterations_that_the_recipe_lets_go_are_no_finding(forger: Forger) -> None:
    path = forger.run / "recipe.yaml"
    forger.write(path, path.read_text().replace("keep: null", "keep: 1"))
    for iteration in (0, 1):
        shutil.rmtree(forger.folder(iteration))
    report = found(forger.run)
    assert not report.findings
    assert report.notes == ["2 iterations are not kept: 0 … 1"]


def test_what_is_no_run_is_one_line_and_exit_code_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for folder in (tmp_path, tmp_path / "nothing"):
        assert main(["verify", str(folder)]) == 2
        line = capsys.readouterr().err
        assert line.startswith(f"audit verify: {folder}: ") and line.count("\n") == 1
    with pytest.raises(SystemExit) as caught:
        main(["verify"])
    assert caught.value.code == 2


def _kill_in_update(forger: Forger, last: dict | None = None) -> None:
    """As a kill -9 in the update from iteration 2 leaves it: `settle` never came."""

    def cut(lines: list) -> list:
        at = [(s["state"], s["iteration"]) for s in lines].index(("UPDATING_FROM", 2))
        return lines[: at + 1] + ([] if last is None else [lines[at] | last])

    def versions(lines: list) -> list:
        journal = [json.loads(x) for x in (forger.run / "journal.jsonl").read_text().splitlines()]
        known = {line["version"] for line in journal}
        kept = [line for line in lines if line["id"] in known or line.get("role") == "reference"]
        return [line for line in kept if line["kind"] == "version" or line["iteration"] <= 2]

    forger.lines("journal.jsonl", cut)
    forger.lines("versions.jsonl", versions)
    for file in ("updates.jsonl", "metrics.jsonl"):
        forger.lines(file, lambda lines: lines[:2])
    for name in ("finished.json", "experience/iter_000002/derived.json"):
        (forger.run / name).unlink()
    shutil.rmtree(forger.run / "hf")
    selection = forger.folder(2) / "selection.safetensors"
    selection.rename(forger.folder(2) / "selection.safetensors.tmp")


@pytest.mark.parametrize("last", [None, {"state": "FAILED", "reason": "rank 1 ended"}])
def test_a_run_killed_in_an_update_is_no_finding_and_its_facts_are_verified(
    forger: Forger, last: dict | None, capsys: pytest.CaptureFixture[str]
) -> None:
    _kill_in_update(forger, last)
    report = found(forger.run)
    assert not report.findings
    told = "its update had begun and was not committed; derived.json was not written"
    assert report.notes[1:] == [f"iteration 2: {told}"]
    assert {outcome.name: outcome.skipped for outcome in report.outcomes if outcome.skipped} == {}
    assert main(["verify", str(forger.run)]) == 0
    assert told in capsys.readouterr().out
    forger.columns(2, "rollout_0", lambda c, _: c["response_ids"].__setitem__(0, 10**6))
    assert {finding.check for finding in found(forger.run).findings} == {"parts"}


def test_the_same_of_a_committed_iteration_is_a_finding(forger: Forger) -> None:
    (forger.folder(2) / "derived.json").unlink()
    assert {finding.check for finding in found(forger.run).findings} == {"parts", "anchors"}


def test_the_same_of_an_iteration_before_the_last_is_a_finding(forger: Forger) -> None:
    (forger.folder(1) / "derived.json").unlink()
    (forger.run / "finished.json").unlink()
    assert {finding.check for finding in found(forger.run).findings} == {"parts", "anchors"}


def test_a_last_line_that_the_journal_had_no_time_for_is_no_finding(forger: Forger) -> None:
    """versions.jsonl comes first: a kill between the two leaves one line more."""
    forger.lines("journal.jsonl", lambda lines: [line for line in lines if line["iteration"] < 2])

    def cut(lines: list) -> list:
        at = [(v["kind"], v["iteration"]) for v in lines].index(("loaded", 2))
        return lines[: at + 1]

    def exporting(lines: list) -> list:
        again = {"iteration": 2, "time": lines[-1]["time"]}
        steps = [line for line in lines if line["state"] in ("EXPORTING", "ROLLOUT_LOADING")]
        version = {k: lines[-1][k] for k in ("version", "optimizer_step", "update_attempt")}
        return [*lines, *(line | again | version for line in steps[-2:])]

    forger.lines("versions.jsonl", cut)
    forger.lines("journal.jsonl", exporting)
    for file in ("updates.jsonl", "ledger.jsonl", "metrics.jsonl"):
        forger.lines(file, lambda lines: lines[:2])
    (forger.run / "finished.json").unlink()
    shutil.rmtree(forger.folder(2))
    report = found(forger.run)
    assert not report.findings
    forger.lines("versions.jsonl", lambda lines: lines.append(lines[-1]))
    assert {finding.check for finding in found(forger.run).findings} == {"handovers"}


def test_a_replay_is_told_as_such(forger: Forger) -> None:
    (forger.run / "replay.json").write_text("{}")
    (forger.run / "finished.json").unlink()
    assert found(forger.run).notes[0] == (
        "a replay of another run's updates (replay.json): 3 were redone"
    )


def test_no_finding_is_told_in_words_of_the_interpreter(forger: Forger) -> None:
    forger.lines("versions.jsonl", lambda lines: [])
    forger.lines("journal.jsonl", lambda lines: lines.pop())
    forger.json(forger.folder(1) / "derived.json", lambda told: told.update(parts=None))
    forger.write(forger.run / "finished.json", "[]")
    told = "\n".join(str(finding) for finding in found(forger.run).findings)
    for word in ("<State.", "NoneType", "Error(", "ends at None", "list ind"):
        assert word not in told


@pytest.mark.parametrize(
    "fault",
    [
        faults_in_files.a_derived_list_that_is_empty,
        faults_in_files.a_derived_list_of_nothing,
        faults_in_files.a_manifest_that_is_a_folder,
        faults_in_files.a_manifest_without_end,
    ],
    ids=lambda fault: fault.name,
)
def test_a_list_that_cannot_be_read_is_one_finding_and_one_line_elsewhere(
    fault: Fault, forger: Forger, capsys: pytest.CaptureFixture[str]
) -> None:
    fault(forger)
    assert len(found(forger.run).findings) == 1
    for words in (["recompute"], ["diff", str(forger.run)]):
        assert main([words[0], str(forger.run), *words[1:]]) == 1
        assert capsys.readouterr().err.count("\n") == 1
