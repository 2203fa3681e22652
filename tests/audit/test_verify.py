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
ASIDE = shutil.ignore_patterns("hf", "tensorboard", "logs", "eval", "timeline.json", "report.html")


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
    forger.lines("updates.jsonl", lambda lines: lines[:2])
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
    for file in ("updates.jsonl", "ledger.jsonl"):
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
