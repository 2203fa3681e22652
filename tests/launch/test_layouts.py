"""Layouts of the ranks in real runs, on a tied model: the same first samples, the same first
updates, and each learns. The last test prints a table (`pytest -m long` on this file).

The oracle of ids and updates is the run on one rank, that of log-probs and gradients HF's model
with torch (`tests/models/support.torch_step`, on its own samples). Not covered: speed (more ranks
than cores wait for one another), GPUs, several machines.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.launch.runs import Finished, launch, make_model, read_lines, settings
from tests.models.runs import several
from tests.models.support import actor_section, relative, torch_step, write_hf_model

pytestmark = [pytest.mark.launch, pytest.mark.long, pytest.mark.timeout(1500)]

ITERATIONS, PROMPTS, GROUP = 15, 16, 4
OPTIONS = {"distributed_optimizer": False, "weight_decay": 0.1, "clip_grad": 0.7}


class Layout(NamedTuple):
    ranks: int
    tp: int
    pp: int
    rollout_tp: int


LAYOUTS = {
    "TP1 → TP1": Layout(1, 1, 1, 1),
    "TP2 → TP1×2": Layout(2, 2, 1, 1),
    "TP1·DP2 → TP2": Layout(2, 1, 1, 2),
    "PP2 → TP1×2": Layout(2, 1, 2, 1),
    "TP2·PP2 → TP2×2": Layout(4, 2, 2, 2),
    "PP2·DP2 → TP1×4": Layout(4, 1, 2, 1),
}


class Ran(NamedTuple):
    run: Finished
    ids: list
    """(prompt, response ids) of the first iteration, sorted."""


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("data"), tied=True)


@pytest.fixture(scope="module")
def runs(data: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Ran]:
    folder = tmp_path_factory.mktemp("runs")
    return {name: _run(data, folder, layout) for name, layout in LAYOUTS.items()}


def _run(data: Path, folder: Path, layout: Layout) -> Ran:
    name = "-".join(str(size) for size in layout)
    file = folder / f"{name}.samples"
    overrides = {
        "reward.scorers": "[{name: 'tests.launch.scorers:digit_share'}, "
        f"{{name: 'tests.launch.scorers:recorded', weight: 0.0, file: '{file}'}}]",
        "run.iterations": ITERATIONS,
        "rollout.prompts_per_iteration": PROMPTS,
        "rollout.group_size": GROUP,
        "actor.lr": 2e-3,
        "actor.tokens_per_micro_batch": 256,  # some micro-batches for each stage
        "data.eval": "null",
        "world.ranks": layout.ranks,
        "actor.tp": layout.tp,
        "actor.pp": layout.pp,
        "rollout.tp": layout.rollout_tp,
        "world.timeout_seconds": 300,
    }
    run = launch(name, settings(data, folder, **overrides), folder, timeout=1200)
    assert run.code == 0, run.output + run.logs()
    # Grading of an iteration ends before the next one's begins.
    first = file.read_text().splitlines()[: PROMPTS * GROUP]
    return Ran(run, sorted(json.loads(line) for line in first))


@pytest.mark.parametrize("name", list(LAYOUTS))
def test_the_first_iteration_is_that_of_one_rank(runs: dict[str, Ran], name: str) -> None:
    mine, one = runs[name], runs["TP1 → TP1"]
    assert len(one.ids) == PROMPTS * GROUP and len({tuple(ids) for _, ids in one.ids}) > GROUP
    assert mine.ids == one.ids
    row, wanted = mine.run.rows[0], one.run.rows[0]
    assert row["reward/mean"] == wanted["reward/mean"]
    for key in ("policy/entropy", "update/grad_norm"):
        assert row[key] == pytest.approx(wanted[key], rel=1e-4), key
    # Two minibatches: the second one's loss is after one update.
    assert row["update/loss"] == pytest.approx(wanted["update/loss"], abs=1e-4)
    first = [
        read_lines(each.run.folder / "versions.jsonl")[0]["weight_manifest_hash"]
        for each in (mine, one)
    ]
    assert first[0] == first[1]


@pytest.mark.parametrize("name", list(LAYOUTS))
def test_every_layout_learns_and_agrees_with_its_generator(runs: dict[str, Ran], name: str) -> None:
    rows = runs[name].run.rows
    rewards = [row["reward/mean"] for row in rows]
    assert sum(rewards[-3:]) > 2 * sum(rewards[:3]), rewards
    for row in rows:
        assert row["policy/first_log_ratio_abs_max"] == 0.0
        assert row["parity/logprob_gap_max"] <= 5e-5


@pytest.fixture(scope="module")
def steps(ranks, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, float]]:
    """One update of each layout against torch: largest gaps of log-probs, gradient and loss."""
    folder = tmp_path_factory.mktemp("model")
    wanted = torch_step(write_hf_model(folder, "qwen2", tied=True), actor_section(**OPTIONS))
    told = {}
    for name, layout in LAYOUTS.items():
        call = (folder, layout.tp, 40, OPTIONS | {"pp": layout.pp})
        run = ranks.run(layout.ranks, several, [call], timeout=600)[0][0]
        told[name] = {
            "log_probs": float((run["log_probs"] - wanted["log_probs"]).abs().max()),
            "gradient": relative(run["gradients"], wanted["gradients"]),
            "loss_after": abs(run["loss_after"] - wanted["loss_after"]),
        }
    return told


def test_table(runs: dict[str, Ran], steps: dict[str, dict[str, float]], capsys: Any) -> None:
    head = (
        f"{'actor → rollout':17} {'ids':>6} {'|old−HF|':>9} {'grad L2':>9} {'|loss−HF|':>9} "
        f"{'parity':>9} {'reward first → last':>20} {'s/iteration':>11}"
    )
    lines = [head]
    for name, (run, ids) in runs.items():
        step, rows = steps[name], run.rows
        rewards = [sum(row["reward/mean"] for row in part) / 3 for part in (rows[:3], rows[-3:])]
        seconds = sorted(row["time/iteration"] for row in rows)[len(rows) // 2]
        same = "equal" if ids == runs["TP1 → TP1"].ids else "DIFFER"
        lines.append(
            f"{name:17} {same:>6} {step['log_probs']:9.1e} {step['gradient']:9.1e} "
            f"{step['loss_after']:9.1e} {max(row['parity/logprob_gap_max'] for row in rows):9.1e} "
            f"{rewards[0]:>11.3f} → {rewards[1]:.3f} {seconds:13.2f}"
        )
        assert step["log_probs"] <= 5e-5 and step["gradient"] <= 1e-5
        assert step["loss_after"] <= 1e-4
    with capsys.disabled():
        print("\n" + "\n".join(lines))
