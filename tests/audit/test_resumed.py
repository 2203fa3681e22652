"""`audit` on a run that was killed in an update and resumed: nothing is found in either, and each
planted fault by its right check. Also what a resume leaves that is killed while it sets aside.

Not covered: tensors of checkpoints (a resume digests them), exports on the way. What a resume lets
through: `test_allowed.py`.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megarl.audit.earlier import before
from megarl.audit.verify import verify
from megarl.audit.view import open_run
from megarl.checkpoint.begin import begin
from megarl.checkpoint.resume import decide
from megarl.observe.summary import main as summary
from megarl.recipe import load_recipe
from tests.audit import faults_in_resumes
from tests.audit.conftest import Interrupted
from tests.audit.fault import Fault, faults_of
from tests.audit.forge import Forger
from tests.audit.test_verify import UNREAD
from tests.launch.runs import start
from tools.audit import main

pytestmark = pytest.mark.launch

ASIDE = shutil.ignore_patterns(*UNREAD)
LAYOUT = {"ranks": 2, "tp": 2, "pp": 1, "dp": 1, "rollout_tp": 1}


@pytest.fixture
def forger(interrupted: Interrupted, tmp_path: Path) -> Forger:
    shutil.copytree(interrupted.resumed, tmp_path / "moved", ignore=ASIDE)
    return Forger(tmp_path / "moved")


def told(run: Path) -> list[str]:
    return [str(finding) for finding in verify(open_run(run)).findings]


def test_nothing_is_found_in_a_resumed_run_and_the_resume_is_told(forger: Forger) -> None:
    report = verify(open_run(forger.run))
    assert not report.findings
    assert report.notes == ["resume 1: iteration 2 from checkpoints/iter_000002"]
    looked = {outcome.name: outcome.looked_at for outcome in report.outcomes}
    # Four iterations, and the two that were rolled back.
    assert looked["advantages"] in (5, 6) and looked["seeds"] == 6


def test_nothing_is_found_in_the_run_as_the_kill_left_it(interrupted: Interrupted) -> None:
    assert not told(interrupted.killed)


@pytest.mark.parametrize("fault", faults_of(faults_in_resumes), ids=lambda fault: fault.name)
def test_a_planted_fault_is_found_by_the_right_check(fault: Fault, forger: Forger) -> None:
    fault(forger)
    lines = told(forger.run)
    assert {line.partition(":")[0] for line in lines} - fault.maybe == fault.checks, lines
    assert any(fault.word in line for line in lines), lines


def test_what_is_half_written_is_told_and_no_finding_while_the_run_is_unfinished(
    interrupted: Interrupted, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    shutil.copytree(interrupted.killed, run, ignore=ASIDE)
    (run / "checkpoints" / "iter_000004" / "actor").mkdir(parents=True)
    report = verify(open_run(run))
    assert not report.findings
    note = "checkpoints/iter_000004 is half-written: nothing resumes from it"
    assert note in report.notes


def _cut_commit(checkpoint: Path) -> None:
    path = checkpoint / "COMMIT.json"
    path.write_text(path.read_text()[:-20])


def _flip_index(checkpoint: Path) -> None:
    path = checkpoint / "actor" / ".metadata"
    body = bytearray(path.read_bytes())
    body[len(body) // 2] ^= 1
    path.write_bytes(body)


def _shorten_tensors(checkpoint: Path) -> None:
    path = next((checkpoint / "actor").glob("*.distcp"))
    os.truncate(path, path.stat().st_size - 1)


DAMAGES = {
    _cut_commit: "COMMIT.json: not readable",
    _flip_index: ".metadata: not the one that was committed",
    _shorten_tensors: "were committed",
}


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__.strip("_"))
def test_a_damaged_checkpoint_is_a_finding_and_once_set_aside_a_note(
    damage: Callable[[Path], None], interrupted: Interrupted, tmp_path: Path
) -> None:
    """The last checkpoint of a finished run; the next start falls back to the one before."""
    run = Path(shutil.copytree(interrupted.resumed, tmp_path / "interrupted", ignore=ASIDE))
    damage(run / "checkpoints" / "iter_000004")
    (line,) = told(run)
    assert line.startswith("checkpoints: checkpoints/iter_000004") and DAMAGES[damage] in line
    recipe = load_recipe(run / "recipe.yaml", [f"run.folder={tmp_path}", "run.iterations=5"])
    resume = decide(recipe, run)
    assert resume.iteration == 2 and any(DAMAGES[damage] in note for note in resume.notes)
    begin(recipe, resume, run, LAYOUT, {})
    report = verify(open_run(run))
    assert not report.findings
    (note,) = [note for note in report.notes if DAMAGES[damage] in note]
    assert note.startswith("resumes/002/checkpoints/iter_000004/")
    assert note.endswith("a resume has set it aside")


class Killed(BaseException):
    """Stands in for a kill: nothing catches it."""


@pytest.mark.parametrize("use", ["regenerate", "reuse_sealed"])
def test_a_resume_killed_after_any_rename_leaves_a_run_that_verifies(
    use: str, interrupted: Interrupted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first kill is before any rename; the last resume comes to its end."""
    ended, renames = False, 0
    while not ended:
        runs = tmp_path / str(renames)
        run = runs / "interrupted"
        shutil.copytree(interrupted.killed, run, ignore=ASIDE)
        recipe = load_recipe(run / "recipe.yaml", [f"run.folder={runs}", f"resume.use={use}"])
        resume = decide(recipe, run)
        with monkeypatch.context() as patch:
            left = [renames]
            for name in ("rename", "replace"):
                patch.setattr(os, name, killing(getattr(os, name), left))
            try:
                begin(recipe, resume, run, LAYOUT, {})
                ended = True
            except Killed:
                ended = False
        assert not told(run), f"after {renames} renames"
        shutil.rmtree(runs)
        renames += 1
    assert renames > 8


def killing(call: Callable[..., Any], left: list[int]) -> Callable[..., Any]:
    def counted(*arguments: Any, **options: Any) -> Any:
        if not left[0]:
            raise Killed
        left[0] -= 1
        return call(*arguments, **options)

    return counted


def test_each_iteration_has_the_recipe_that_it_ran_under(forger: Forger) -> None:
    old = forger.run / "resumes" / "001" / "recipe.yaml"
    forger.write(old, old.read_text().replace("lr: 0.0002", "lr: 0.0003"))
    run = open_run(forger.run)
    rates = [run.recipe_of(iteration).actor.lr for iteration in range(4)]
    assert rates == [0.0003, 0.0003, 0.0002, 0.0002]
    # Of iterations 0 and 1, sealed and derived, and of the two that were rolled back.
    lines = told(forger.run)
    assert {line.partition(":")[0] for line in lines} == {"origin", "positions", "contracts"}
    assert len([line for line in lines if line.startswith("origin")]) == 7


def test_a_rolled_back_sample_can_be_explained(
    interrupted: Interrupted, capsys: pytest.CaptureFixture[str]
) -> None:
    run = str(interrupted.resumed)
    numbers = ["--iteration", "3", "--draw", "0", "--candidate", "1"]
    assert main(["explain", run, *numbers]) == 0
    now = capsys.readouterr().out
    assert "after resume 1, update attempt 1" in now and "--before 1" in now
    assert main(["explain", run, "--before", "1", *numbers]) == 0
    then = capsys.readouterr().out
    assert "resumes/001/experience/iter_000003" in "".join(then.split())
    assert "attempt 1" not in then
    assert main(["explain", run, "--before", "7", *numbers]) == 2
    assert "no resume 7; resumes: 1" in capsys.readouterr().err


def test_an_iteration_that_lies_only_among_what_was_rolled_back_says_so(
    forger: Forger, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.rmtree(forger.folder(3))
    numbers = ["--iteration", "3", "--draw", "0", "--candidate", "1"]
    assert main(["explain", str(forger.run), *numbers]) == 2
    assert "lies in resumes/001 (--before 1)" in capsys.readouterr().err


def test_the_earlier_run_has_the_lines_that_were_cut(interrupted: Interrupted) -> None:
    """Oracle: the folder as it was before the resume."""
    view = before(open_run(interrupted.resumed), 1)
    for file in ("journal", "versions", "updates", "ledger", "metrics"):
        whole = (interrupted.killed / f"{file}.jsonl").read_bytes()
        assert view.bytes_of(f"{file}.jsonl") == whole
        assert len(getattr(view, file)) == whole.count(b"\n")


def test_the_summary_tells_resumes_and_checkpoints(
    interrupted: Interrupted, capsys: pytest.CaptureFixture[str]
) -> None:
    assert summary([str(interrupted.resumed)]) == 0
    out = capsys.readouterr().out
    assert "resumed once from iteration 2 (checkpoints/iter_000002)" in out
    assert "Checkpoints after iterations: 2, 4" in out


@pytest.mark.long
@pytest.mark.parametrize(
    "changes",
    [
        {"actor.tp": 1},
        {"resume.use": "reuse_sealed", "algorithm.clip_high": 0.3,
         "resume.allow": "[algorithm.clip_high]"},
        {"run.iterations": 6, "experience.keep": 1},
    ],
    ids=["another_layout", "reused_with_another_recipe", "longer"],
)  # fmt: skip
def test_nothing_is_found_after_other_resumes(
    changes: dict[str, Any], interrupted: Interrupted, tmp_path: Path
) -> None:
    shutil.copytree(interrupted.killed, tmp_path / "interrupted")
    words = [f"{key}={value}" for key, value in changes.items()]
    recipe = tmp_path / "recipe.yaml"
    shutil.copy(interrupted.killed / "recipe.yaml", recipe)
    done = start([str(recipe), f"run.folder={tmp_path}", *words], tmp_path / "interrupted")
    assert done.code == 0, done.output
    assert not told(done.folder)


@pytest.mark.long
def test_nothing_is_found_in_a_run_that_began_with_anothers_checkpoint(
    interrupted: Interrupted, tmp_path: Path
) -> None:
    recipe, checkpoint = tmp_path / "recipe.yaml", interrupted.resumed / "checkpoints/iter_000002"
    shutil.copy(interrupted.resumed / "recipe.yaml", recipe)
    words = [f"run.folder={tmp_path}", "run.name=fork", f"resume.from={checkpoint}"]
    done = start([str(recipe), *words], tmp_path / "fork")
    assert done.code == 0, done.output
    assert not told(done.folder)
