"""What a launch is asked to do: `--replay`, `--only`, `--from`, and each way to ask wrongly.

Not covered here: what the modes then do (`tests/launch/test_replay.py`, `test_only.py`).
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from megarl.modes.launch import Source, Work, read_launch, sealed_numbers, spans
from megarl.process import main
from megarl.recipe import RecipeError, load_recipe
from megarl.recipe.differences import update_differences

QUICKSTART = "recipes/quickstart.yaml"


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """Two runs' folders as far as reading a command line looks: recipe, and which are sealed.

    `old` has 0-3, `kept` lost 0 and 1 to `experience.keep`.
    """
    for name, numbers, overrides in (
        ("old", range(4), []),
        ("kept", (2, 3), ["experience.keep=2"]),
    ):
        recipe = load_recipe(QUICKSTART, [f"run.name={name}", f"run.folder={tmp_path}", *overrides])
        for number in numbers:
            folder = tmp_path / name / "experience" / f"iter_{number:06d}"
            folder.mkdir(parents=True)
            (folder / "manifest.json").write_text("{}")
        # Never sealed: it has no manifest.
        (tmp_path / name / "experience" / "iter_000004").mkdir()
        (tmp_path / name / "recipe.yaml").write_text(recipe.resolved_yaml())
    return tmp_path


def asked(runs: Path, *arguments: str):
    return read_launch([QUICKSTART, f"run.folder={runs}", *arguments])


def test_nothing_asked_is_the_whole_loop() -> None:
    launch = read_launch([QUICKSTART, "seed=3"])
    assert launch.work is Work.LOOP and launch.sources == () and launch.recipe.seed == 3
    assert not launch.work.reads_sealed


def test_a_replay_takes_every_iteration_before_it(runs: Path) -> None:
    for launch in (
        asked(runs, "--replay", "old@2"),
        asked(runs, "--replay=old@2"),
        asked(runs, "--replay", f"{runs}/old@2"),
    ):
        assert launch.work is Work.REPLAY
        assert launch.sources == tuple(Source(runs / "old", number) for number in range(3))
        assert launch.recipe.run.name == "old.replay-2"
    assert asked(runs, "--replay", "old@2", "run.name=mine").recipe.run.name == "mine"


def test_training_and_scoring_use_each_iteration_once(runs: Path) -> None:
    launch = asked(runs, "--only", "train", "--from", "old@1-2", "--from", "kept")
    assert launch.work is Work.TRAIN
    assert list(map(str, launch.sources)) == [
        f"{runs}/old@1",
        f"{runs}/old@2",
        f"{runs}/kept@2",
        f"{runs}/kept@3",
    ]
    assert launch.recipe.run.iterations == 4
    launch = asked(runs, "--only=score", "--from=old@3")
    assert [source.iteration for source in launch.sources] == [3]
    assert launch.recipe.run.iterations == 1
    assert asked(runs, "--only", "rollout").recipe.run.iterations == 40


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--replay", "old"], "--replay old: write RUN@N, iterations are whole numbers from 0"),
        (["--replay", "old@x"], "--replay old@x: write RUN@N"),
        (["--replay", "old@-1"], "--replay old@-1: write RUN@N"),
        (["--replay", "@1"], "--replay @1: nothing is no run"),
        (["--replay", "new@1"], "--replay new@1: new is no run: neither new nor "),
        (["--replay", "old@4"], "iteration 4 of .*old is not sealed, 0-3 are"),
        (
            ["--replay", "kept@3"],
            r"iteration 0 of .*kept was dropped by retention \(experience.keep 2, keep_every 0\), "
            "2-3 are; the weights before iteration 3 come from replaying those before it",
        ),
        (["--replay"], "--replay needs RUN@N, a run and the iteration to redo"),
        (
            ["--replay", "old@1", "--only", "rollout"],
            "one mode at a time: --replay old@1 and --only rollout; start two launches",
        ),
        (["--only", "train", "--only", "score"], "one mode at a time: "),
        (["--only", "grade"], "--only grade: there is no such part; use rollout, score or train"),
        (["--only", "train"], "--only train needs --from RUN or RUN@A-B"),
        (["--only", "score", "--from", "old", "--from", "kept"], "--only score takes one --from"),
        (["--only", "rollout", "--from", "old"], "--from old goes with --only score or --only"),
        (["--from", "old"], "--from old goes with --only score or --only train"),
        (["--only", "train", "--from", "old@2-1"], "--from old@2-1: 1 lies before 2"),
        (["--only", "train", "--from", "old@1-"], "write RUN, RUN@N or RUN@A-B"),
        (["--only", "train", "--from", "kept@1-3"], "iteration 1 of .*kept was dropped by"),
        (
            ["--only", "train", "--from", "old@1-2", "--from", "old@2"],
            "old@2 is named twice; each experience is used once",
        ),
        (
            ["--only", "train", "--from", "old", "run.iterations=9"],
            "override run.iterations=9: --from names 4 sealed iterations, each is used once",
        ),
        (["--reply", "old@1"], "unknown option --reply; options are --replay, --only, --from"),
    ],
)
def test_each_wrong_way_to_ask_is_one_line(runs: Path, arguments: list[str], says: str) -> None:
    with pytest.raises(RecipeError, match=says) as refused:
        asked(runs, *arguments)
    assert "\n" not in str(refused.value)


def test_a_refusal_ends_with_two_before_anything_is_written(runs: Path) -> None:
    before = sorted(runs.iterdir())
    arguments = [QUICKSTART, f"run.folder={runs}", "--replay", "old@9"]
    done = subprocess.run(
        [sys.executable, "-m", "megarl.train", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2
    assert done.stderr == (
        f"megarl: error: --replay old@9: iteration 9 of {runs}/old is not sealed, 0-3 are\n"
    )
    assert sorted(runs.iterdir()) == before


def test_help_teaches_the_modes(capsys: pytest.CaptureFixture) -> None:
    assert main(["--help"]) == 0
    told = capsys.readouterr().out
    for words in ("--replay RUN@N", "--only rollout", "--only score --from", "--only train --from"):
        assert words in told


def test_a_recipe_that_computes_another_update_is_refused_unless_asked_for(
    runs: Path, tmp_path: Path
) -> None:
    edited = tmp_path / "edited.yaml"
    edited.write_text(
        f"base: {runs}/old/recipe.yaml\nactor: {{lr: 1.0e-3}}\nalgorithm: {{clip_high: 0.2}}\n"
    )
    with pytest.raises(RecipeError) as refused:
        read_launch([str(edited), "--replay", "old@0"])
    assert "actor.lr 0.001 (run: 0.0002), algorithm.clip_high 0.2 (run: 0.28)" in str(refused.value)
    overrides = ["actor.lr=1.0e-3", "algorithm.clip_high=0.2"]
    launch = read_launch([str(edited), "--replay", "old@0", *overrides])
    assert launch.what_if == (
        "actor.lr=0.001 (run: 0.0002)",
        "algorithm.clip_high=0.2 (run: 0.28)",
    )


def resumed(run: Path, iteration: int, *overrides: str, **told: object) -> Path:
    """The first resume of `run`, as far as reading a command line looks; returns its folder."""
    aside = run / "resumes" / "001"
    aside.mkdir(parents=True)
    before = (run / "recipe.yaml").read_text()
    (aside / "recipe.yaml").write_text(before)
    claim = {"number": 1, "iteration": iteration, "attempt": 1, "own": True, "time": 1.0}
    claim |= {"checkpoint": f"checkpoints/iter_{iteration:06d}", "reused": None}
    claim |= {"allowed": [], "meant": [], "changes": {}, "contents": {}, "records": {}}
    (aside / "resume.json").write_text(json.dumps(claim | told))
    after = load_recipe(aside / "recipe.yaml", list(overrides))
    (run / "recipe.yaml").write_text(after.resolved_yaml())
    return aside


def test_a_run_resumed_with_the_same_update_has_no_seam(runs: Path) -> None:
    resumed(runs / "old", 2, "run.iterations=50", "actor.tp=1", "resume.use=reuse_sealed")
    for number in (1, 3):
        launch = read_launch([f"{runs}/old/recipe.yaml", "--replay", f"old@{number}"])
        assert len(launch.sources) == number + 1 and launch.what_if == ()


def test_a_run_resumed_with_another_update_is_replayed_up_to_there(runs: Path) -> None:
    aside = resumed(runs / "old", 2, "actor.lr=1.0e-3")
    now, before = f"{runs}/old/recipe.yaml", f"{aside}/recipe.yaml"
    for given in (now, before):
        with pytest.raises(RecipeError) as refused:
            read_launch([given, "--replay", "old@2"])
        told = str(refused.value)
        assert "resumed at iteration 2 with another recipe" in told and "\n" not in told
        assert "actor.lr 0.001 (before: 0.0002)" in told
        assert f"replay an iteration before 2 with {before}" in told
    with pytest.raises(RecipeError, match=re.escape(f"replay with {before}")):
        read_launch([now, "--replay", "old@1"])
    assert read_launch([before, "--replay", "old@1"]).what_if == ()
    asked = read_launch([now, "--replay", "old@3", "actor.lr=1.0e-3"])
    assert asked.what_if == ("actor.lr=0.001 (run: 0.0002)",)


def test_a_run_that_began_with_anothers_weights_is_not_replayed(runs: Path) -> None:
    resumed(runs / "kept", 2, own=False, checkpoint="/elsewhere/checkpoints/iter_000002")
    with pytest.raises(RecipeError) as refused:
        asked(runs, "--replay", "kept@3")
    told = str(refused.value)
    assert "began at iteration 2 with the weights of /elsewhere/checkpoints/iter_000002" in told
    assert "\n" not in told
    # What needs no weights of the past is as it was.
    assert len(asked(runs, "run.name=new", "--only", "train", "--from", "kept").sources) == 2


def test_layout_rewards_and_data_change_no_update() -> None:
    ran = load_recipe(QUICKSTART)
    same = [
        "world.ranks=4",
        "actor.tp=1",
        "actor.pp=2",
        "actor.tokens_per_micro_batch=999",
        "actor.recompute=full",
        "actor.distributed_optimizer=false",
        "rollout.max_total_tokens=4096",
        "reward.scorers=[{name: exact_match}]",
        "run.iterations=3",
        "seed=1",
        "data.eval=null",
    ]
    assert update_differences(load_recipe(QUICKSTART, same), ran) == {}
    for key, value in (
        ("actor.lr", 1e-3),
        ("actor.betas", [0.9, 0.99]),
        ("algorithm.kl.beta", 0.1),
        ("algorithm.minibatches", 1),
        ("rollout.temperature", 0.9),
        ("model.dtype", "bfloat16"),
    ):
        found = update_differences(load_recipe(QUICKSTART, [f"{key}={value}"]), ran)
        assert list(found) == [key] and found[key][0] == value
    decay = ["actor.lr_schedule=linear"]
    found = update_differences(
        load_recipe(QUICKSTART, [*decay, "run.iterations=3"]), load_recipe(QUICKSTART, decay)
    )
    assert found == {"run.iterations": (3, 40)}  # it ends the decay


def test_which_iterations_are_sealed(runs: Path) -> None:
    for name in ("iter_abc", "iter_", "iter_5", "iter_000004.tmp"):
        (runs / "old" / "experience" / name).mkdir()
        (runs / "old" / "experience" / name / "manifest.json").touch()
    assert sealed_numbers(runs / "old") == [0, 1, 2, 3]
    assert spans([5, 0, 1, 2]) == "0-2, 5" and spans([]) == ""
