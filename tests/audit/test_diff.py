"""`audit diff`: real runs that are the same, and where real and planted differences part them.

Not covered: runs in other layouts (their last bits differ, see `--tolerance`); runs whose
retention let different iterations go.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from megarl.audit.compare import Ragged, Rows, tokens, values
from megarl.audit.diff import Parting, compare_runs
from megarl.audit.view import open_run
from tests.audit.conftest import OVERRIDES
from tests.audit.forge import Forger
from tests.launch.runs import run_warm, settings
from tools.audit import main

pytestmark = pytest.mark.launch

ASIDE = shutil.ignore_patterns("hf", "tensorboard", "logs", "eval")


@pytest.fixture(scope="module")
def others(audited: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The same run again; with another rate; with another seed. The latter two end early."""
    data = Path(open_run(audited).recipe.model.path).parent
    runs = tmp_path_factory.mktemp("others")
    made = {}
    for name, changed in (
        ("again", {}),
        ("rate", {"actor.lr": 1e-4, "run.iterations": 1}),
        ("seed", {"seed": 2, "run.iterations": 1}),
    ):
        done = run_warm(name, settings(data, runs, **OVERRIDES | changed), runs)
        assert done.code == 0, done.output + done.logs()
        made[name] = done.folder
    return made


@pytest.fixture
def forger(audited: Path, tmp_path: Path) -> Forger:
    shutil.copytree(audited, tmp_path / "copy", ignore=ASIDE)
    return Forger(tmp_path / "copy")


def parting(a: Path, b: Path, tolerance: float = 0.0) -> Parting:
    return compare_runs(open_run(a), open_run(b), tolerance)


def test_two_runs_with_one_seed_are_equal(
    audited: Path, others: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    found = parting(audited, others["again"])
    assert found.stage is None and not found.recipe and not found.notes
    assert found.compared == [0, 1, 2]
    assert main(["diff", str(audited), str(others["again"])]) == 0
    assert "no difference in 3 iterations" in capsys.readouterr().out


def test_another_rate_parts_runs_at_the_first_update(
    audited: Path, others: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    found = parting(audited, others["rate"])
    assert found.recipe["actor.lr"] == (2e-4, 1e-4)
    assert (found.iteration, found.stage) == (0, "update")
    first = found.fields[0]
    assert (first.field, first.where, first.a, first.b) == ("lr", "step 0", 2e-4, 1e-4)
    assert first.size == pytest.approx(1e-4) and first.count == first.of == 2
    # Loss and gradient of the first step are the same, those of the second are not.
    assert {item.field: item.where for item in found.fields}["loss"] == "step 1"
    # And so version 1 has other weights.
    assert found.fields[-1].field == "weights" and found.fields[-1].count > 10
    assert main(["diff", str(audited), str(others["rate"])]) == 1
    out = capsys.readouterr().out
    assert "  actor.lr: 0.0002 | 0.0001\n" in out
    told = "first divergence: iteration 0, update, step 0, lr: 0.0002 | 0.0001 (differ by 0.0001)"
    assert told in out


def test_where_steps_are_told_alike_the_digests_of_version_1_part(
    audited: Path, others: dict[str, Path], tmp_path: Path
) -> None:
    """Lines of updates.jsonl made the same: what is left are the digests."""
    shutil.copytree(others["rate"], tmp_path / "copy")
    told = json.loads((audited / "updates.jsonl").read_text().splitlines()[0])
    forger = Forger(tmp_path / "copy")
    forger.lines("updates.jsonl", lambda lines: lines[0].update(steps=told["steps"]))
    found = parting(audited, forger.run)
    assert (found.iteration, found.stage) == (0, "update")
    assert [item.field for item in found.fields] == ["weights"]
    assert found.fields[0].count == found.fields[0].of > 10
    assert parting(audited, forger.run, tolerance=1e-9).stage is None


def test_another_seed_parts_runs_at_the_prompts(audited: Path, others: dict[str, Path]) -> None:
    found = parting(audited, others["seed"])
    assert found.recipe["seed"] == (1, 2)
    assert (found.iteration, found.stage) == (0, "prompts")
    assert (found.fields[0].field, found.fields[0].where) == ("prompt_id", "draw 0")


@pytest.mark.parametrize(
    ("stage", "part", "column", "value"),
    [
        ("generation", "rollout_0", "rollout_log_probs", -3.0),
        ("generation", "rollout_0", "seed", 7),
        ("scoring", "rollout_0", "reward.component.exact_match", 0.5),
        ("log_probs", "scored_0", "old_log_probs", -3.0),
        ("log_probs", "scored_0", "ref_log_probs", -3.0),
        ("selection", "selection", "verdict", 7),
        ("advantages", "derived_0", "advantages", 9.0),
    ],
)
def test_a_planted_difference_is_told_by_iteration_stage_sample_and_field(
    audited: Path, forger: Forger, stage: str, part: str, column: str, value: float
) -> None:
    before, _ = forger.read_columns(1, part)
    at = int(np.flatnonzero(np.isfinite(before[column]))[-1])
    forger.columns(1, part, lambda columns, _: columns[column].__setitem__(at, value))
    forger.all_hashes(1)
    found = parting(audited, forger.run)
    assert (found.iteration, found.stage) == (1, stage)
    first = found.fields[0]
    assert first.field == column.replace("reward.component.", "component ")
    row = at
    if len(before[column]) != len(before["draw_index"]):
        offsets = before["response_offsets"]
        row = int(np.searchsorted(offsets, at, side="right") - 1)
        assert first.token == at - offsets[row]
    prompts = (forger.folder(1) / "prompts.jsonl").read_text().splitlines()
    name = json.loads(prompts[before["draw_index"][row]])["prompt_id"]
    assert first.where == f"1/{name}/{before['candidate'][row]}"
    assert first.count == 1
    if before[column].dtype.kind == "f":
        assert (first.a, first.b) == (before[column][at].item(), value)
        assert first.size == first.largest == pytest.approx(abs(before[column][at] - value))


def test_a_missing_sample_is_told(audited: Path, forger: Forger) -> None:
    def rename(columns: dict, _: dict) -> None:
        columns["candidate"][-1] = 99

    for part in ("rollout_1", "selection"):
        forger.columns(2, part, rename)
    scored, _ = forger.read_columns(2, "scored_0")
    rollout, _ = forger.read_columns(2, "rollout_1")
    for part in ("scored_0", "derived_0"):
        columns, metadata = forger.read_columns(2, part)
        same = columns["draw_index"] == rollout["draw_index"][-1]
        last = np.flatnonzero(same)[-1:]
        if len(last) and columns["candidate"][last[0]] == 3:
            columns["candidate"][last[0]] = 99
            forger.write_columns(2, part, columns, metadata)
    forger.all_hashes(2)
    found = parting(audited, forger.run)
    assert (found.iteration, found.stage, found.fields[0].field) == (2, "generation", "sample")
    assert {(item.a, item.b) for item in found.fields} == {
        ("sampled", "missing"),
        ("missing", "sampled"),
    }


def test_run_ids_and_times_are_set_aside(audited: Path, forger: Forger) -> None:
    def rename(told: dict) -> None:
        told["run_id"] = "other"
        told["sealed_at"] += 99.0

    for iteration in range(3):
        forger.manifest(iteration, rename)
        forger.columns(iteration, "rollout_0", lambda c, _: c["started"].__isub__(5.0))
        forger.reseal(iteration)
    forger.rechain()
    assert parting(audited, forger.run).stage is None


def test_json_says_where(audited: Path, forger: Forger, capsys: pytest.CaptureFixture[str]) -> None:
    forger.columns(1, "scored_0", lambda c, _: c["old_log_probs"].__setitem__(0, np.nan))
    forger.all_hashes(1)
    assert main(["diff", str(audited), str(forger.run), "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert (told["iteration"], told["stage"]) == (1, "log_probs")
    assert told["fields"][0]["field"] == "old_log_probs" and told["fields"][0]["b"] == "nan"


def test_a_damaged_run_is_told_and_not_compared(
    audited: Path, forger: Forger, capsys: pytest.CaptureFixture[str]
) -> None:
    forger.flip(1, "rollout_0", "response_ids")
    assert main(["diff", str(audited), str(forger.run)]) == 1
    assert "rollout_0.safetensors: its bytes" in capsys.readouterr().err


def test_rows_join_by_id_and_floats_within_the_tolerance_are_equal() -> None:
    rows = Rows(np.array([0, 1, 2]), np.array([2, 0, 1]), ("x", "y", "z"))
    a, b = np.array([1.0, np.nan, 3.0]), np.array([np.nan, 3.5, 1.25])
    assert values("f", rows, a, b, tolerance=0.5) is None
    found = values("f", rows, a, b, tolerance=0.25)
    assert (found.where, found.a, found.b, found.size) == ("z", 3.0, 3.5, 0.5)
    assert (found.count, found.of, found.largest) == (1, 3, 0.5)


def test_ragged_rows_differ_in_values_and_in_length() -> None:
    rows = Rows(np.array([0, 1, 2]), np.array([2, 1, 0]), ("x", "y", "z"))
    a = Ragged(np.array([1, 2, 3, 4, 5, 6]), np.array([0, 2, 5, 6]))
    b = Ragged(np.array([6, 3, 4, 1, 2]), np.array([0, 1, 3, 5]))
    found = tokens("ids", rows, a, b, tolerance=0.0)
    assert (found.where, found.token, found.a, found.b) == ("y", 2, 5, "no such token")
    assert (found.count, found.of, found.size) == (1, 3, None)
    b.flat[4] = 9
    found = tokens("ids", rows, a, b, tolerance=0.0)
    assert (found.where, found.token, found.a, found.b, found.count) == ("x", 1, 2, 9, 2)


def test_two_runs_with_nothing_in_common_are_not_equal(
    audited: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    shutil.copy(audited / "recipe.yaml", empty)
    assert main(["diff", str(audited), str(empty)]) == 1
    told = capsys.readouterr().out
    assert "note: empty has no sealed iteration" in told
    assert told.splitlines()[-1].startswith("nothing to compare: ")
    assert main(["diff", str(empty), str(empty), "--json"]) == 1


def test_what_is_compared_with_a_replay_is_its_updates(
    audited: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = Path(shutil.copytree(audited, tmp_path / "again", ignore=ASIDE))
    shutil.rmtree(copy / "experience")
    (copy / "replay.json").write_text("{}")
    assert main(["diff", str(audited), str(copy)]) == 0
    told = capsys.readouterr().out
    assert "note: again is a replay" in told
    assert "no difference in 0 iterations and 3 updates" in told


@pytest.mark.parametrize("tolerance", ["nan", "-1", "inf", "x"])
def test_a_tolerance_that_is_none_is_refused(audited: Path, tolerance: str) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["diff", str(audited), str(audited), f"--tolerance={tolerance}"])
    assert caught.value.code == 2
