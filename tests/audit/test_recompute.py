"""`audit recompute` on a real run: bit-equal to what was trained on, and what other settings make.

Oracles are the sealed files (`raw.py`) and formulas written out here. Not covered: dynamic
sampling; the loss after the first update of an iteration, which needs a forward.
"""

from __future__ import annotations

import json
import math
import shutil
import statistics
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from megarl.audit.whatif import RECOMPUTABLE, Refused, check_recomputable
from megarl.recipe import load_recipe
from megarl.recipe.reference import key_table
from tests.audit.forge import Columns, Forger
from tests.audit.raw import groups, read_jsonl, read_samples
from tools.audit import main

pytestmark = pytest.mark.launch

QUICKSTART = Path(__file__).parents[2] / "recipes" / "quickstart.yaml"


def recompute(capsys: pytest.CaptureFixture, run: Path, *words: str) -> dict[str, Any]:
    assert main(["recompute", str(run), *words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_every_iteration_is_bit_equal_to_what_was_trained_on(
    capsys: pytest.CaptureFixture, audited: Path
) -> None:
    told = recompute(capsys, audited)
    assert told["equal"] is True
    assert [line["iteration"] for line in told["iterations"]] == [0, 1, 2]
    assert all(line["problems"] == [] and line["compared"] for line in told["iterations"])
    for line in told["iterations"]:
        trained = [s for s in read_samples(audited, line["iteration"]).values() if s.minibatch >= 0]
        assert line["old"]["samples_trained"] == len(trained) > 0
        assert line["old"]["tokens_trained"] == sum(len(sample.ids) for sample in trained)
    assert main(["recompute", str(audited)]) == 0
    assert "3 of 3 iterations" in capsys.readouterr().out


def test_the_first_loss_is_the_recorded_one(capsys: pytest.CaptureFixture, audited: Path) -> None:
    recorded = [line["steps"][0]["loss"] for line in read_jsonl(audited / "updates.jsonl")]
    losses = [line["first_loss"] for line in recompute(capsys, audited)["iterations"]]
    assert [loss["recorded"] for loss in losses] == recorded
    # Mean |A| is about 0.8: a float32 sum of some hundred such terms that cancels to 1e-5.
    assert [loss["recomputed"] for loss in losses] == pytest.approx(recorded, abs=1e-6)


def test_another_first_loss_than_the_recorded_one_is_told(
    capsys: pytest.CaptureFixture, audited: Path, tmp_path: Path
) -> None:
    forger = Forger(Path(shutil.copytree(audited, tmp_path / "copy")))
    forger.lines("updates.jsonl", lambda lines: lines[1]["steps"][0].update(loss=0.5))
    assert main(["recompute", str(forger.run)]) == 1
    told = capsys.readouterr().out.splitlines()
    assert [line.split()[-1] for line in told[2:5]] == ["bit-equal", "DIFFERENT", "bit-equal"]
    assert any("iteration 1: loss of step 0: 0.5 recorded, the facts give" in line for line in told)
    assert told[-1].startswith("2 of 3 iterations")


def test_a_first_loss_with_an_entropy_bonus_is_not_compared(
    capsys: pytest.CaptureFixture, audited: Path, tmp_path: Path
) -> None:
    forger = Forger(Path(shutil.copytree(audited, tmp_path / "copy")))
    recipe = forger.run / "recipe.yaml"
    told = recipe.read_text()
    assert "entropy_coefficient: 0.0" in told
    forger.write(recipe, told.replace("entropy_coefficient: 0.0", "entropy_coefficient: 0.01"))
    assert main(["recompute", str(forger.run)]) == 0
    assert "iterations 0-2 not compared: algorithm.entropy_coefficient" in capsys.readouterr().out


def test_a_changed_advantage_is_found_and_named(
    capsys: pytest.CaptureFixture, audited: Path, tmp_path: Path
) -> None:
    copy = Path(shutil.copytree(audited, tmp_path / "copy"))
    forger = Forger(copy)

    def edit(columns: Columns, _: dict) -> None:
        columns["advantages"][3] = np.nextafter(columns["advantages"][3], np.float32(9))

    forger.columns(1, "derived_0", edit)
    assert main(["recompute", str(copy)]) == 1  # the hash alone gives it away
    assert "derived_0.safetensors" in capsys.readouterr().err
    forger.reseal(1)
    assert main(["recompute", str(copy)]) == 1
    told = capsys.readouterr().out
    assert "iteration 1: advantages of audited/1/" in told
    assert "2 of 3 iterations" in told
    assert main(["recompute", str(copy), "--iterations", "0"]) == 0


def test_keeping_equal_groups_trains_them_with_advantages_of_zero(
    capsys: pytest.CaptureFixture, audited: Path, tmp_path: Path
) -> None:
    out = tmp_path / "new.safetensors"
    words = ("--out", str(out), "algorithm.zero_variance=keep", "algorithm.group_std=none")
    told = recompute(capsys, audited, *words)
    columns = load_file(out)
    rows = iter(range(len(columns["iteration"])))
    for line in told["iterations"]:
        by_draw = groups(read_samples(audited, line["iteration"]))
        whole = [g for g in by_draw.values() if all(s.status == "ok" for s in g.values())]
        assert line["new"]["groups_trained"] == len(whole)
        for draw, group in by_draw.items():
            mean = statistics.mean([s.reward for s in group.values() if s.reward is not None])
            for candidate, sample in group.items():
                row = next(rows)
                key = ("iteration", "draw_index", "candidate")
                assert [columns[name][row] for name in key] == [line["iteration"], draw, candidate]
                start, stop = columns["response_offsets"][row : row + 2]
                advantages = columns["advantages"][start:stop]
                assert len(advantages) == len(sample.ids)
                kept = group in whole
                expected = np.float32(sample.reward - mean) if kept else np.float32(0)
                assert (advantages == expected).all()
                assert (columns["minibatch"][row] >= 0) == kept
    assert next(rows, None) is None


def test_kl_terms_are_the_formula_over_sealed_log_probs(
    capsys: pytest.CaptureFixture, audited: Path
) -> None:
    told = recompute(capsys, audited, "algorithm.kl.beta=0.5", "algorithm.kl.estimator=k2")
    for line in told["iterations"]:
        samples = read_samples(audited, line["iteration"]).values()
        terms = {"old": [], "new": []}
        for minibatch in (0, 1):
            pairs = [
                (float(old), float(ref))
                for sample in samples
                if sample.minibatch == minibatch
                for old, ref in zip(
                    sample.columns["old_log_probs"], sample.columns["ref_log_probs"], strict=True
                )
            ]
            if pairs:
                k3 = [math.exp(ref - old) + (old - ref) - 1 for old, ref in pairs]
                terms["old"].append(0.02 * statistics.mean(k3))
                k2 = [(old - ref) ** 2 / 2 for old, ref in pairs]
                terms["new"].append(0.5 * statistics.mean(k2))
        for side, values in terms.items():
            expected = statistics.mean(values)
            assert line[side]["kl_term"] == pytest.approx(expected, rel=1e-3, abs=1e-8)
        assert line["changed"] == 0


def test_reward_weights_and_constraints_are_recomputed_from_components(
    capsys: pytest.CaptureFixture, audited: Path
) -> None:
    name = "tests.audit.scorers:by_thirds"
    half = f"reward.scorers=[{{name: '{name}', weight: 1.0}}, {{name: exact_match, weight: 0}}]"
    told = recompute(capsys, audited, half, "algorithm.group_std=none")
    plain = recompute(capsys, audited, "algorithm.group_std=none")
    for line, other in zip(told["iterations"], plain["iterations"], strict=True):
        assert line["new"]["advantage_abs_mean"] == other["new"]["advantage_abs_mean"] / 2
    below = f"reward.scorers=[{{name: '{name}', weight: 2, at_least: 0.5}}, "
    below += "{name: exact_match, weight: 0}]"
    told = recompute(capsys, audited, below, "reward.violated=2.0")
    assert all(line["new"]["groups_trained"] == 0 for line in told["iterations"])
    assert all(line["new"]["advantage_abs_mean"] is None for line in told["iterations"])


@pytest.mark.parametrize(
    ("override", "reason"),
    [
        ("rollout.temperature=0.7", "needs a new rollout"),
        ("rollout.group_size=2", "needs a new rollout"),
        ("seed=2", "needs a new rollout"),
        ("actor.tp=1", "acts in forwards and optimizer steps"),
        ("algorithm.clip_high=0.3", "whose log-probs are not sealed"),
        ("algorithm.epochs=2", "later passes are of ratios that are not sealed"),
        ("algorithm.target_kl=0.1", "by ratios that are not sealed"),
        ("algorithm.kl.target=0.1", "other betas would have made other policies"),
        ("algorithm.name=ppo", "grpo reads no values"),
        ("reference.refresh_every=1", "the reference's log-probs, which need its forward"),
        ("algorithm.entropy_coefficient=0.1", "only the sampled token's log-prob is sealed"),
        ("reward.scorers=[{name: exact_match}]", "need the responses scored again"),
        ("parity.max=1.0", "no number that is derived"),
        ("algorithm.nonsense=1", "unknown key"),
        ("algorithm.minibatches=0", "greater than 0"),
        ("algorithm", "key=value"),
    ],
)
def test_a_key_that_cannot_be_recomputed_is_refused_by_name(
    capsys: pytest.CaptureFixture, audited: Path, override: str, reason: str
) -> None:
    assert main(["recompute", str(audited), override]) == 2
    told = capsys.readouterr().err
    assert override.partition("=")[0] in told
    assert reason in told
    assert told.count("\n") == 1


def test_kl_without_sealed_reference_log_probs_is_refused() -> None:
    before = load_recipe(QUICKSTART)
    after = load_recipe(QUICKSTART, ["algorithm.kl.beta=0.01"])
    with pytest.raises(Refused, match=r"algorithm\.kl\.beta 0\.01: no reference log-probs"):
        check_recomputable(before, after, {"old"})
    check_recomputable(before, after, {"old", "ref"})
    check_recomputable(before, before, {"old"})


def test_recomputable_keys_are_keys() -> None:
    assert set(RECOMPUTABLE) <= {row.key for row in key_table()} | {"reward.scorers"}


def test_other_wrong_arguments(
    capsys: pytest.CaptureFixture, audited: Path, tmp_path: Path
) -> None:
    there = tmp_path / "there"
    there.touch()
    for words, reason in (
        (["--iterations", "7"], "sealed are 0-2"),
        (["--iterations", "x"], "write 3, 2-5"),
        (["--out", str(there)], "exists"),
        (["--out", str(tmp_path / "no" / "file")], "no folder"),
        (["--out", str(audited / "experience" / "x")], "among sealed files"),
    ):
        assert main(["recompute", str(audited), *words]) == 2
        assert reason in capsys.readouterr().err
    assert main(["recompute", str(tmp_path)]) == 2
    with pytest.raises(SystemExit, match="2"):
        main(["recompute", str(audited), "--iterations", "0", "word"])
