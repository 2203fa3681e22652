"""Evaluations in the loop and by themselves: real ranks, real checkpoints, real refusals.

The oracles: a run without evaluations for what training may not notice, the loop's own numbers for
the command's, the run's records for whose weights were generated with.
Not covered: GPUs; how good an interval is (`tests/evaluation`); a run that trains meanwhile but for
its lock and files.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from filelock import FileLock

from megarl import evaluate
from megarl.contracts.hashes import file_hash
from megarl.evaluation.targets import find_targets
from megarl.experience.load import load_iteration
from megarl.recipe import load_recipe
from tests.launch import watched
from tests.launch.runs import ROOT, environment, make_model, read_lines, run_warm, settings
from tests.launch.runs import Finished as Run
from tests.warm import run_ranks

pytestmark = pytest.mark.launch

RECIPE = "recipes/quickstart.yaml"
SCORED = {"reward.scorers": "[{name: 'tests.launch.scorers:digit_share'}]"}
EVALUATED = SCORED | {
    "eval.every": 1,
    "eval.samples": 4,
    "eval.pass_at": "[1, 4]",
    "eval.solved_at": 0.05,
    "eval.probes": "[{name: format, pattern: '.*'}, {name: 'tests.launch.scorers:broken'}]",
}
ALONE = EVALUATED | {"data.train": "/not/there.jsonl"}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Half of the held-out prompts are of another source."""
    folder = make_model(tmp_path_factory.mktemp("data"))
    lines = (folder / "eval.jsonl").read_text().splitlines(keepends=True)
    (folder / "eval.jsonl").write_text("".join(lines[:12]))
    (folder / "more.jsonl").write_text("".join(lines[12:]))
    return folder


def given(data: Path, runs: Path, **overrides: Any) -> list[str]:
    eval_ = f"[{{path: {data / 'eval.jsonl'}}}, {{path: {data / 'more.jsonl'}, name: more}}]"
    return settings(data, runs, **({"data.eval": eval_} | overrides))


@pytest.fixture(scope="module")
def run(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Actor TP2, two replicas, three iterations, evaluated before each but the last and at the
    end, with a checkpoint after each. `watched` ends it where an evaluation leaves a prefix cache
    or moves a random generator."""
    runs = tmp_path_factory.mktemp("runs")
    kept = {"checkpoint.every": 1, "checkpoint.keep": 3}
    arguments = given(data, runs, **EVALUATED, **kept)
    done = run_warm("loop", arguments, runs, entry=watched.main)
    assert done.code == 0, done.output + done.logs()
    return done


def _without(row: dict, *prefixes: str) -> dict:
    return {key: value for key, value in row.items() if not key.startswith(prefixes)}


def test_training_does_not_notice_evaluations(run: Run, data: Path, tmp_path: Path) -> None:
    overrides = SCORED | {"data.eval": "null"}
    quiet = run_warm("quiet", settings(data, tmp_path, **overrides), tmp_path)
    assert quiet.code == 0, quiet.output + quiet.logs()
    assert not any(key.startswith("eval/") for row in quiet.rows for key in row)
    assert [_without(row, "time/", "eval/") for row in run.rows] == [
        _without(row, "time/") for row in quiet.rows
    ]
    digests = [
        [(line["kind"], line["tensors"]) for line in read_lines(each.folder / "versions.jsonl")]
        for each in (run, quiet)
    ]
    last = digests[0].pop()  # the final evaluation has the last weights handed over
    assert last[0] == "loaded" and digests[0] == digests[1]
    for number in range(3):
        mine, theirs = (load_iteration(each.folder, number) for each in (run, quiet))
        for name in ("response_ids", "rollout_log_probs", "seed"):
            a, b = getattr(mine.samples, name), getattr(theirs.samples, name)
            assert np.array_equal(a, b), name
        assert np.array_equal(mine.old_log_probs, theirs.old_log_probs, equal_nan=True)


def test_an_evaluation_leaves_its_generations_and_its_numbers(run: Run) -> None:
    row, told = run.rows[0], json.loads((run.folder / "eval" / "step_0.json").read_text())
    lines = read_lines(run.folder / "eval" / "step_0.jsonl")
    assert len(lines) == 24 * 5 and told["all"]["prompts"] == row["eval/prompts"] == 24
    # Counted again from the generations.
    sampled = [line for line in lines if line["mode"] == "sampled"]
    scores = [line["components"]["digit_share"] for line in sampled]
    assert np.mean(scores) == pytest.approx(row["eval/accuracy_sampled"])
    assert sum(score >= 0.05 for score in scores) / 96 == pytest.approx(row["eval/pass@1"])
    more = [line["components"]["digit_share"] for line in sampled if line["source"] == "more"]
    assert np.mean(more) == pytest.approx(row["eval/accuracy_sampled/source/more"])
    lucky = {line["prompt_id"] for line in sampled if line["components"]["digit_share"] >= 0.05}
    assert len(lucky) / 24 == row["eval/pass@4"]
    interval = told["all"]["greedy"]["accuracy"]
    assert interval["low"] == row["eval/accuracy/low"] <= interval["value"] <= interval["high"]
    version = read_lines(run.folder / "versions.jsonl")[0]
    assert told["version"] == version["id"] == lines[0]["version"]
    assert told["weight_manifest_hash"] == version["weight_manifest_hash"]
    assert told["sampling"]["sampled"]["n"] == 4


def test_a_probe_that_fails_is_counted_and_stops_nothing(run: Run) -> None:
    for row in run.rows[:2]:
        assert row["eval/probe/broken/unscored"] == 24 and "eval/probe/broken" not in row
        assert row["eval/probe/broken/unscored_sampled"] == 96
        assert 0 <= row["eval/probe/format"] <= 1 and row["eval/probe/format/unscored"] == 0
        assert "eval/probe/format/source/more" in row and row["eval/unscored"] == 0
    (line, *_) = read_lines(run.folder / "eval" / "step_0.jsonl")
    assert line["probes"]["broken"]["status"] == "error"
    assert "no such answer" in line["probes"]["broken"]["detail"]
    assert line["status"] == "ok" and "broken" not in line["components"]


def test_the_command_finds_the_loops_numbers(run: Run, data: Path) -> None:
    """Ranks that it starts itself, of another layout; the newest checkpoint, one before it, hf/."""
    runs, before = run.folder.parent, _contents(run.folder)
    arguments = ["run.name=loop", *given(data, runs, **ALONE, **{"rollout.tp": 2, "actor.tp": 1})]
    first = run.folder / "checkpoints" / "iter_000001"
    named = ["--checkpoint", "loop", f"--checkpoint={first}", f"--checkpoint={run.folder / 'hf'}"]
    with FileLock(runs / ".loop.lock").acquire(timeout=0):  # as if it were still training
        done = subprocess.run(
            [sys.executable, "-m", "megarl.evaluate", RECIPE, *arguments, *named, "--json"],
            cwd=ROOT,
            env=environment(),
            text=True,
            capture_output=True,
            timeout=150,
            check=False,
        )
    assert done.returncode == 0, done.stderr + done.stdout
    assert _contents(run.folder) == before
    results = json.loads(done.stdout.splitlines()[-1])
    out = runs / "loop.eval-iter_000003+2"
    assert json.loads((out / "results.json").read_text()) == results
    newest, earlier, folder = results["evaluations"]
    assert [one["label"] for one in results["evaluations"]] == ["iter_000003", "iter_000001", "hf"]
    hashes = {one[k] for one in (newest, folder) for k in ("tokenizer_hash", "own_tokenizer_hash")}
    assert len(hashes) == 1 and None not in hashes and "own are used" not in done.stdout
    assert newest["all"] == folder["all"] and newest["sources"] == folder["sources"]
    finished = json.loads((run.folder / "finished.json").read_text())
    assert newest["version"] == finished["version"]
    assert newest["weight_manifest_hash"] == finished["weight_manifest_hash"]
    assert folder["weight_manifest_hash"] == finished["weight_manifest_hash"]
    _same_numbers(newest, {k.replace("eval/final/", "eval/"): v for k, v in run.rows[2].items()})
    _same_numbers(earlier, run.rows[1])
    assert "iter_000003" in done.stdout and "95 % interval" in done.stdout
    read_back = [line for line in read_lines(out / "versions.jsonl") if line["kind"] == "loaded"]
    assert [line["weight_manifest_hash"] for line in read_back] == [
        one["weight_manifest_hash"] for one in results["evaluations"]
    ]
    generations = read_lines(out / "iter_000003.jsonl")
    loops = read_lines(run.folder / "eval" / "step_6.jsonl")
    assert [line["response"] for line in generations] == [line["response"] for line in loops]


def _same_numbers(told: dict, row: dict) -> None:
    numbers = told["all"]
    for mode, suffix in (("greedy", ""), ("sampled", "_sampled")):
        for key in ("value", "low", "high"):
            name = f"eval/accuracy{suffix}" + ("" if key == "value" else f"/{key}")
            assert numbers[mode]["accuracy"][key] == row[name], name
        assert numbers[mode]["length"] == row[f"eval/response_length{suffix}"]
        more = told["sources"]["more"][mode]["accuracy"]["value"]
        assert more == row[f"eval/accuracy{suffix}/source/more"]
    assert numbers["pass_at"]["4"]["chance"]["value"] == row["eval/pass@4"]


def _contents(folder: Path) -> dict[str, str]:
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {str(path): file_hash(path) if path.stat().st_size else "" for path in files}


def test_one_rank_finds_them_too_and_a_second_evaluation_is_refused(
    run: Run, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """One of them is a folder with a chat template of its own, which is not used, and told."""
    other = tmp_path / "other"
    shutil.copytree(run.folder / "hf", other)
    file = other / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"chat_template": "Q"}))
    overrides = ALONE | {"world.ranks": 1, "actor.tp": 1}
    arguments = [RECIPE, "run.name=loop", *given(data, run.folder.parent, **overrides)]
    out = tmp_path / "out"
    arguments += ["--checkpoint", "loop", f"--checkpoint={other}", f"--out={out}"]
    code, output = run_ranks(arguments, environment(), 150, evaluate.main, world=1)
    assert code == 0, output
    for told in (evaluations := json.loads((out / "results.json").read_text())["evaluations"]):
        _same_numbers(told, {k.replace("eval/final/", "eval/"): v for k, v in run.rows[2].items()})
    used, own = (evaluations[1][key] for key in ("tokenizer_hash", "own_tokenizer_hash"))
    assert used == evaluations[0]["own_tokenizer_hash"] != own
    assert output.count(f"{other} has another chat template than model.path") == 1
    assert _refused(capsys, arguments) == (
        f"megarl: error: {out} holds a finished evaluation; --overwrite sets it aside, "
        "--out FOLDER writes elsewhere"
    )


def _refused(capsys: pytest.CaptureFixture, arguments: list[str]) -> str:
    """What is told; nothing is started."""
    assert evaluate.main(arguments) == 2
    told = capsys.readouterr()
    assert told.out == "" and len(told.err.splitlines()) == 1
    return told.err.strip()


def test_bad_inputs_are_told_in_one_line_before_anything_starts(
    run: Run, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    plain = [RECIPE, *given(data, run.folder.parent, **ALONE)]
    assert "data.eval is not set" in _refused(capsys, [*plain, "data.eval=null"])
    assert "there is no folder nix nor" in _refused(capsys, [*plain, "--checkpoint", "nix"])
    told = _refused(capsys, [*plain, f"--checkpoint={tmp_path}"])
    assert f"{tmp_path} is no run (recipe.yaml), checkpoint (COMMIT.json) or Hugging" in told
    assert "--checkpoint needs a value" in _refused(capsys, [*plain, "--checkpoint"])
    assert "unknown option --foo; options are" in _refused(capsys, [*plain, "--foo"])
    told = _refused(capsys, [*plain, "--checkpoint", "loop", f"--checkpoint={run.folder}"])
    assert "is named twice" in told
    (tmp_path / "mine.txt").touch()
    told = _refused(capsys, [*plain, f"--out={tmp_path}"])
    assert told.endswith("something else than an evaluation (mine.txt); give another --out")


def test_half_written_and_other_models_are_refused(
    run: Run, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    plain = [RECIPE, *given(data, run.folder.parent, **ALONE)]
    cut = tmp_path / "cut" / "checkpoints" / "iter_000002"
    shutil.copytree(run.folder / "checkpoints" / "iter_000002", cut)
    (cut / "COMMIT.json").unlink()
    told = _refused(capsys, [*plain, f"--checkpoint={cut}"])
    assert f"{cut}: half-written, there is no COMMIT.json; name a whole one" in told
    told = _refused(capsys, [*plain, f"--checkpoint={tmp_path / 'cut'}"])
    assert f"holds no whole checkpoint ({cut}: half-written" in told
    shutil.copytree(run.folder / "checkpoints" / "iter_000001", cut.with_name("iter_000001"))
    (target,) = find_targets([str(tmp_path / "cut")], load_recipe(RECIPE, plain[1:]))
    assert (target.path, target.iteration) == (cut.with_name("iter_000001"), 1)
    (passed,) = target.passed_over
    assert passed.endswith(f"passed over {cut}: half-written, there is no COMMIT.json")
    other = tmp_path / "other"
    shutil.copytree(data / "model", other)
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 3}))
    told = _refused(capsys, [*plain, f"--checkpoint={other}"])
    assert f"num_hidden_layers 3, model.path {data / 'model'} has num_hidden_layers 2" in told
    told = _refused(capsys, [*plain, f"model.path={other}", "--checkpoint", "loop"])
    assert "the checkpoint's model has num_hidden_layers 2" in told


@pytest.mark.long
def test_weights_that_changed_on_disk_are_not_evaluated(
    run: Run, data: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "iter_000002"
    shutil.copytree(run.folder / "checkpoints" / "iter_000002", folder)
    file = max((folder / "actor").glob("*.distcp"), key=lambda path: path.stat().st_size)
    body = bytearray(file.read_bytes())
    for place in range(len(body) // 4, len(body) // 2, 997):
        body[place] ^= 1
    file.write_bytes(body)
    arguments = [RECIPE, *given(data, tmp_path, **ALONE), f"--checkpoint={folder}"]
    out = tmp_path / "out"
    out.mkdir()
    (out / "recipe.yaml").write_text("# evaluation\n")
    (out / "results.json").write_text("an earlier one")
    arguments += [f"--out={out}", "--overwrite"]
    code, output = run_ranks(arguments, environment(), 150, evaluate.main, world=2)
    assert code == 2 and f"{folder / 'actor'}" in output, output
    assert (out / "results.json").read_text() == "an earlier one"
    assert not list(tmp_path.glob("out.replaced*"))
