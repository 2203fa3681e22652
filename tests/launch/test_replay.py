"""`--replay RUN@N`: an old iteration's update again from sealed facts, in this and other layouts.

The oracles are what the run itself recorded while it trained (`updates.jsonl`, `versions.jsonl`),
and for whole gradients the same update on one rank, whose own oracle is torch (`test_layouts.py`).
Not covered: GPUs, bfloat16; a resumed run's refusals (`tests/test_modes.py`).
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from megarl.observe.runfolder import read_run
from megarl.observe.summary import summary
from tests.launch.replays import gradients
from tests.launch.resumes import Runs, resumes
from tests.launch.runs import Finished, make_model, read_lines, run_warm, settings, start
from tests.models.support import relative

pytestmark = pytest.mark.launch

SCORERS = "[{name: 'tests.launch.scorers:digit_share'}]"
ONE_RANK = ("world.ranks=1", "actor.tp=1")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """Actor TP2, two iterations of two steps, several micro-batches a step."""
    data = make_model(tmp_path_factory.mktemp("data"))
    runs = tmp_path_factory.mktemp("runs")
    overrides = {
        "reward.scorers": SCORERS,
        "run.iterations": 2,
        "data.eval": "null",
        "actor.lr": 1e-3,
        "actor.tokens_per_micro_batch": 150,
    }
    done = run_warm("then", settings(data, runs, **overrides), runs)
    assert done.code == 0, done.output + done.logs()
    return done


def replay(run: Finished, number: int, *arguments: str) -> Finished:
    """`bash launch/grpo.sh RUN/recipe.yaml --replay RUN@N …`."""
    command = [str(run.folder / "recipe.yaml"), "--replay", f"{run.folder}@{number}", *arguments]
    return start(command, run.folder.with_name(f"{run.folder.name}.replay-{number}"))


def test_in_its_own_layout_every_bit_comes_again(run: Finished) -> None:
    again = replay(run, 1)
    assert again.code == 0, again.output + again.logs()
    assert "weights after every iteration: bit for bit those recorded" in again.output
    told = json.loads((again.folder / "replay.json").read_text())
    assert [gap["iteration"] for gap in told["iterations"]] == [0, 1]
    for gap in told["iterations"]:
        assert gap["same_choice"] is True and gap["same_weights"] is True
        assert gap["old_gap_max"] == 0.0
        for step in gap["steps"]:
            assert step["loss"][0] == step["loss"][1] != 0.0
            assert step["grad_norm"][0] == step["grad_norm"][1] > 0.0
    # What the replay wrote down is what the run wrote down, but for its name and clocks.
    then, now = (read_lines(each.folder / "updates.jsonl") for each in (run, again))
    assert [line["steps"] for line in now] == [line["steps"] for line in then]
    hashes = [
        [
            line["weight_manifest_hash"]
            for line in read_lines(each.folder / "versions.jsonl")
            if line["kind"] == "version"
        ]
        for each in (run, again)
    ]
    assert hashes[0] == hashes[1] and len(set(hashes[0])) == 3
    states = [line["state"] for line in read_lines(again.folder / "journal.jsonl")]
    update = ["EXPERIENCE_SEALED", "UPDATING_FROM", "ACTOR_COMMITTED"]
    assert states == ["ACTOR_COMMITTED", *update, *update]


def test_an_update_of_other_numbers_is_beyond_tolerance(run: Finished) -> None:
    """Asked for, another learning rate: the first step is of the same weights, the second not."""
    asked = replay(run, 0, "actor.lr=2.0e-3")
    assert asked.code == 1, asked.output
    assert "asked for: actor.lr=0.002 (run: 0.001)" in asked.output
    assert "is beyond tolerance: iteration 0 step 1: " in asked.output
    assert asked.output.count("megarl: error: ") == 1
    # Of two ranks' streams, the verdict comes after the table.
    assert asked.output.index("old log-probs recomputed") < asked.output.index("is beyond tol")
    text = summary(read_run(asked.folder))
    assert f"replay of {run.folder}@0: beyond tolerance" in text and "INCOMPLETE" not in text


@pytest.mark.long
@pytest.mark.parametrize(
    "layout",
    [ONE_RANK, ("actor.tp=1",), ("actor.tp=1", "actor.pp=2"), ("actor.tokens_per_micro_batch=64",)],
    ids=["one", "DP2", "PP2", "packs"],
)
def test_in_another_layout_it_is_within_tolerance(run: Finished, layout: tuple[str, ...]) -> None:
    again = replay(run, 1, *layout)
    assert again.code == 0, again.output + again.logs()
    told = json.loads((again.folder / "replay.json").read_text())
    for gap in told["iterations"]:
        assert gap["same_choice"] is True and gap["same_weights"] is False
        for step in gap["steps"]:
            assert step["grad_norm"][1] == pytest.approx(step["grad_norm"][0], rel=1e-4)
            assert step["loss"][1] == pytest.approx(step["loss"][0], abs=1e-5)


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("use", ["regenerate", "reuse_sealed"])
def test_a_resumed_run_comes_again_before_and_after_the_seam(tmp_path: Path, use: str) -> None:
    """Killed in its fourth update, it goes on at position 2, from other attempts' version ids."""
    data = make_model(tmp_path / "data")
    values = {"reward.scorers": SCORERS, "data.eval": "null", "actor.lr": 1e-3, "resume.use": use}
    runs = Runs(data, tmp_path / "runs", values | {"run.iterations": 4})
    runs.kill("cut", "kill@update:visit=4")
    folder = runs.finish("cut")
    (told,) = resumes(folder)
    assert told["iteration"] == 2 and told["attempt"] == 1
    assert told["reused"] == (2 if use == "reuse_sealed" else None)
    for number in (1, 3):
        again = replay(Finished(folder, 0, ""), number)
        assert again.code == 0, again.output + again.logs()
        assert "weights after every iteration: bit for bit those recorded" in again.output
        gaps = json.loads((again.folder / "replay.json").read_text())["iterations"]
        assert [gap["iteration"] for gap in gaps] == list(range(number + 1))
        assert all(gap["same_choice"] and gap["same_weights"] for gap in gaps)
        assert all(step["loss"][0] == step["loss"][1] for gap in gaps for step in gap["steps"])


@pytest.mark.dist
def test_whole_gradients_agree_over_layouts(run: Finished, ranks) -> None:
    one = ranks.run(1, gradients, run.folder, 0, *ONE_RANK)[0]
    recorded = read_lines(run.folder / "updates.jsonl")[0]["steps"]
    for name, layout in (
        ("TP2", ("actor.tp=2",)),
        ("PP2", ("actor.tp=1", "actor.pp=2")),
        ("DP2", ("actor.tp=1",)),
    ):
        found = ranks.run(2, gradients, run.folder, 0, *layout)[0]
        assert found["same_choice"] is True
        for step, then in enumerate(recorded):
            gap = relative(found["gradients"][step], one["gradients"][step])
            print(f"{name} step {step}: relative gradient L2 {gap:.1e}")
            assert gap <= 1e-5, (name, step)
            assert found["norms"][step] == pytest.approx(then["grad_norm"], rel=1e-5)


@pytest.mark.long
def test_changed_facts_and_another_model_are_refused(run: Finished, tmp_path: Path) -> None:
    shutil.copytree(run.folder, tmp_path / "then")
    part = tmp_path / "then" / "experience" / "iter_000000" / "rollout_0.safetensors"
    body = bytearray(part.read_bytes())
    body[-1] ^= 1
    part.chmod(0o644)
    part.write_bytes(body)
    torn = replay(Finished(tmp_path / "then", 0, ""), 0, *ONE_RANK, f"run.folder={tmp_path}")
    assert torn.code == 1
    assert "rollout_0.safetensors: its bytes are not those that were sealed" in torn.output
    other = make_model(tmp_path / "other", seed=2) / "model"
    moved = replay(run, 0, *ONE_RANK, f"model.path={other}")
    assert moved.code == 1
    assert "holds other weights than" in moved.output
