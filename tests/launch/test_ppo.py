"""Whole runs with a critic, a steered and refreshed KL term, several passes, and own functions.

Oracles: log-probs of the other library at every iteration (parity), `audit verify` and `recompute`,
and an uninterrupted run against one that is killed and goes on. Not covered: that PPO learns (the
quickstart does), numbers of the update (`tests/reference`), more than two ranks, kills
(`test_resume.py`, `tests/checkpoint`).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megarl.audit.verify import verify
from megarl.audit.view import open_run
from megarl.experience.load import load_iteration
from megarl.modes.launch import read_launch
from megarl.recipe import RecipeError
from tests.launch.runs import Finished, make_model, read_lines, run_warm, settings, start
from tools.audit import main

pytestmark = pytest.mark.launch

SCORERS = "[{name: 'tests.launch.scorers:digit_share'}]"
PPO = {
    "algorithm.name": "ppo",
    "algorithm.epochs": 2,
    "algorithm.target_kl": 0.5,
    "algorithm.kl": "{beta: 0.05, target: 0.5, horizon: 100}",
    "algorithm.importance.level": "token",
    "reference.refresh_every": 2,
    "reference.offload": "weights",
    "critic.lr": 1e-3,
    "critic.warmup_iterations": 1,
    "critic.tokens_per_micro_batch": 128,
    "critic.offload": "optimizer",
    "run.iterations": 4,
    "checkpoint.every": 1,
    "checkpoint.keep": 9,
    "eval.every": 10,
    "eval.sampled": False,
    "reward.scorers": SCORERS,
}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def whole(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Finished:
    runs = tmp_path_factory.mktemp("runs")
    return run_warm("ppo", settings(data, runs, **PPO), runs)


def _steps(run: Finished) -> list[dict[str, Any]]:
    return read_lines(run.folder / "updates.jsonl")


def _is_sound(run: Finished) -> None:
    assert run.code == 0, run.output + run.logs()
    assert all(row["parity/logprob_gap_max"] <= 1e-4 for row in run.rows)
    assert verify(open_run(run.folder)).findings == []


def test_a_run_of_ppo_proves_itself(whole: Finished, capsys) -> None:
    _is_sound(whole)
    first = [row.get("policy/first_log_ratio_abs_max") for row in whole.rows]
    assert first == [None, 0.0, 0.0, 0.0]  # the critic alone learns at first
    assert [len(line["steps"]) for line in _steps(whole)] == [0, 4, 4, 4]
    assert [len(line["critic"]) for line in _steps(whole)] == [4, 4, 4, 4]
    order = [(step["epoch"], step["minibatch"]) for step in _steps(whole)[1]["steps"]]
    assert order == [(0, 0), (0, 1), (1, 0), (1, 1)]
    for row in whole.rows:
        assert {"critic/value_loss", "return/mean", "importance/mean"} <= row.keys() | (
            {"importance/mean"} if row["iteration"] == 0 else set()
        )
    assert main(["recompute", str(whole.folder), "--json"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["equal"]


def test_the_kl_term_is_steered_and_looks_back_at_newer_weights(whole: Finished) -> None:
    betas = [line["kl_beta"] for line in _steps(whole)]
    assert betas[0] == 0.05 and len(set(betas)) == 4
    kl = [row["reference/kl"] for row in whole.rows]
    assert kl[0] == kl[1] == 0.0  # the actor is the reference until its first step
    assert kl[2] == 0.0 and kl[3] != 0.0  # refreshed after two iterations, and then left behind
    versions = read_lines(whole.folder / "versions.jsonl")
    steps = {line["optimizer_step"] for line in versions if line.get("role") == "reference"}
    assert steps == {0, 4, 12}


def test_an_update_is_replayed_bit_for_bit(whole: Finished, data: Path) -> None:
    command = [str(whole.folder / "recipe.yaml"), "--replay", f"{whole.folder}@1"]
    again = start(command, whole.folder.with_name("ppo.replay-1"))
    assert again.code == 0, again.output + again.logs()
    assert "weights after every iteration: bit for bit those recorded" in again.output
    numbers = ("kl_beta", "steps", "critic")
    for then, now in zip(_steps(whole)[:2], _steps(again), strict=True):
        assert [now[name] for name in numbers] == [then[name] for name in numbers]


def test_a_run_that_is_killed_goes_on_bit_for_bit(whole: Finished, data: Path, tmp_path) -> None:
    killed = {"MEGARL_FAULT": "kill@update:visit=4", "MEGARL_FAULT_TESTING": "1"}
    first = run_warm("ppo", settings(data, tmp_path, **PPO), tmp_path, **killed)
    assert first.code == 137, first.output
    again = run_warm("ppo", settings(data, tmp_path, **PPO), tmp_path)
    assert "going on at iteration" in again.output
    _is_sound(again)
    numbers = ("kl_beta", "steps", "critic")
    assert [[line[name] for name in numbers] for line in _steps(again)] == [
        [line[name] for name in numbers] for line in _steps(whole)
    ]
    mine, theirs = (_last_position(run) for run in (again, whole))
    for name in ("tensor_digests", "critic_tensor_digests", "kl", "reference_refreshed_at"):
        assert mine[name] == theirs[name], name
    weights = "weight_manifest_hash"
    for role in ("actor", "critic", "reference"):
        assert mine[role][weights] == theirs[role][weights], role


def _last_position(run: Finished) -> dict[str, Any]:
    return json.loads((run.folder / "checkpoints/iter_000004/position.json").read_text())


def test_a_pipeline_and_groups_of_one(data: Path, tmp_path) -> None:
    keys = PPO | {
        "actor.tp": 1,
        "actor.pp": 2,
        "rollout.group_size": 1,
        "rollout.prompts_per_iteration": 16,
        "algorithm.minibatch_groups": "split",
        "critic.warmup_iterations": 0,
        "run.iterations": 2,
    }
    run = run_warm("pipeline", settings(data, tmp_path, **keys), tmp_path)
    _is_sound(run)
    assert [row["groups/samples_trained"] for row in run.rows] == [16.0, 16.0]


def test_a_policy_that_moved_too_far_is_left_alone(data: Path, tmp_path) -> None:
    keys = {
        "actor.lr": 5e-3,
        "algorithm.epochs": 3,
        "algorithm.target_kl": 1e-3,
        "run.iterations": 1,
        "eval.every": 10,
        "reward.scorers": SCORERS,
    }
    run = run_warm("stopped", settings(data, tmp_path, **keys), tmp_path)
    _is_sound(run)
    (update,) = _steps(run)
    taken = [step["stepped"] for step in update["steps"]]
    assert taken[0] and not taken[-1] and len(taken) < 6
    assert "above algorithm.target_kl 0.001" in update["steps"][-1]["skipped_reason"]
    assert run.rows[0]["update/stopped"] == 1.0 and run.rows[0]["update/skipped"] == 0.0


def test_own_functions_train_and_are_part_of_the_run(data: Path, tmp_path) -> None:
    keys = {
        "algorithm.advantage": "tests.launch.own_functions.over_all",
        "algorithm.objective": "tests.launch.own_functions:plain_ratio",
        "run.iterations": 2,
        "checkpoint.every": 1,
        "eval.every": 10,
        "reward.scorers": SCORERS,
    }
    run = run_warm("own", settings(data, tmp_path, **keys), tmp_path)
    _is_sound(run)
    assert run.rows[0]["update/steps"] == 2.0
    position = json.loads((run.folder / "checkpoints/iter_000001/position.json").read_text())
    assert position["contracts"]["algorithm"].startswith("sha256:")
    bad = keys | {"algorithm.advantage": "tests.launch.own_functions.too_few"}
    refused = run_warm("few", settings(data, tmp_path, **bad), tmp_path)
    assert refused.code == 2
    assert "algorithm.advantage: tests.launch.own_functions.too_few gave" in refused.output
    assert not (tmp_path / "few").exists()


def test_collected_samples_with_values_train_a_critic(data: Path, tmp_path) -> None:
    keys = {
        "algorithm.name": "ppo",
        "critic.lr": 1e-3,
        "critic.warmup_iterations": 0,
        "world.ranks": 1,
        "actor.tp": 1,
        "data.eval": "null",
        "run.iterations": 1,
        "reward.scorers": SCORERS,
    }
    arguments = settings(data, tmp_path, **keys)
    collected = run_warm("collected", [*arguments, "--only", "rollout"], tmp_path)
    assert collected.code == 0, collected.output + collected.logs()
    sealed = load_iteration(collected.folder, 0)
    assert (sealed.values == 0).all() and (sealed.last_values == 0).all()  # a fresh head's
    later = [each for each in arguments if "run.iterations" not in each]
    trained = run_warm("trained", [*later, "--only", "train", "--from", "collected"], tmp_path)
    assert trained.code == 0, trained.output + trained.logs()
    (update,) = _steps(trained)
    assert [step["stepped"] for step in update["critic"]] == [True, True]
    steered = ["recipes/quickstart.yaml", *later, "algorithm.kl={beta: 0.1, target: 1.0}"]
    with pytest.raises(RecipeError, match=r"^algorithm.kl.target: --only train has sealed KL"):
        read_launch([*steered, "--only", "train", "--from", "collected"])
    assert verify(open_run(trained.folder)).findings == []
