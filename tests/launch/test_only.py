"""Parts of the loop alone: collect, score again, train on what is sealed; and then both again.

The oracles are the files themselves, read here with `load_iteration`, whose own oracle is
`tests/experience`; digit shares are counted here. Not covered: GPUs, several generators, KL terms.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from megarl.contracts.tokens import Tokens
from megarl.experience.load import load_iteration
from tests.launch.runs import Finished, launch, make_model, read_lines, run_warm, settings

pytestmark = pytest.mark.launch

ONE_RANK = {"world.ranks": 1, "actor.tp": 1, "data.eval": "null", "rollout.dtype": "float32"}
FACTS = ("prompt_ids", "response_ids", "action_mask", "rollout_log_probs", "end_reason", "seed")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def collected(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """Two iterations by one rank, scored by a rule that no random answer meets."""
    runs = tmp_path_factory.mktemp("runs")
    overrides = ONE_RANK | {"run.iterations": 2, "reward.scorers": "[{name: exact_match}]"}
    done = run_warm("collected", [*settings(data, runs, **overrides), "--only", "rollout"], runs)
    assert done.code == 0, done.output + done.logs()
    return done


@pytest.fixture(scope="module")
def scored(data: Path, collected: Finished) -> Finished:
    """The same samples by their share of digits. The model folder is not needed, nor there."""
    runs = collected.folder.parent
    overrides = ONE_RANK | {
        "reward.scorers": "[{name: 'tests.launch.scorers:digit_share'}, "
        "{name: exact_match, weight: 0.0}]",
        "model.path": data / "moved",
    }
    arguments = [*settings(data, runs, **overrides), "--only", "score", "--from", "collected"]
    done = launch("scored", [each for each in arguments if "run.iterations" not in each], runs)
    assert done.code == 0, done.output + done.logs()
    return done


def test_collecting_seals_and_learns_nothing(collected: Finished, data: Path) -> None:
    states = [line["state"] for line in read_lines(collected.folder / "journal.jsonl")]
    cycle = ["EXPORTING", "ROLLOUT_LOADING", "ROLLOUT_READY", "GENERATING", "PREPARING"]
    cycle += ["EXPERIENCE_SEALED", "ACTOR_COMMITTED"]
    assert states == ["ACTOR_COMMITTED", *cycle, *cycle]
    journal = read_lines(collected.folder / "journal.jsonl")
    assert len({line["version"] for line in journal}) == 1
    assert not (collected.folder / "hf").exists()
    assert (collected.folder / "updates.jsonl").read_text() == ""
    for line in read_lines(collected.folder / "ledger.jsonl"):
        assert line["sampled"] == 32 == line["dropped"]["collected"] and line["trained"] == 0
    # Every sound sample has its old log-probs, though no group's rewards differ.
    for number in (0, 1):
        sealed = load_iteration(collected.folder, number)
        assert not np.isnan(sealed.old_log_probs).any() and sealed.derived is None
        assert np.abs(sealed.old_log_probs - sealed.samples.rollout_log_probs).max() < 1e-4


def test_scoring_again_changes_rewards_and_nothing_else(
    collected: Finished, scored: Finished, data: Path
) -> None:
    tokens = Tokens.load(data / "model")
    for number in (0, 1):
        then = load_iteration(collected.folder, number)
        now = load_iteration(scored.folder, number)
        for name in (*FACTS, "draw_index", "candidate", "started", "finished"):
            assert np.array_equal(getattr(then.samples, name), getattr(now.samples, name)), name
        assert np.array_equal(then.old_log_probs, now.old_log_probs)
        assert then.prompts == now.prompts
        assert then.manifest.header.producers == now.manifest.header.producers
        assert then.manifest.header.scorer_version != now.manifest.header.scorer_version
        assert then.manifest.experience_hash != now.manifest.experience_hash
        for row, sample in enumerate(now.samples):
            text = tokens.decode(sample.response_ids.tolist())
            digits = sum(character.isdigit() for character in text) / max(1, len(text))
            assert now.scores.total[row] == pytest.approx(digits)
        source = json.loads((now.folder / "source.json").read_text())
        assert source["experience_hash"] == then.manifest.experience_hash
        assert source["run_id"] == "collected" and source["iteration"] == number
    # exact_match is scored both times, by one rule: no sample's value moved.
    assert "exact_match" in scored.output and "megatron" not in scored.output
    (line,) = [line for line in scored.output.splitlines() if line.startswith("exact_match")]
    assert line.split() == ["exact_match", "0.0000", "→", "0.0000", "0"]
    assert [row["before/reward/mean"] for row in scored.rows] == [0.0, 0.0]
    assert all(row["reward/mean"] > 0 for row in scored.rows)


def test_training_on_sealed_samples_uses_each_once(data: Path, scored: Finished) -> None:
    runs = scored.folder.parent
    overrides = {
        **ONE_RANK,
        "world.ranks": 2,
        "rollout.prompts_per_iteration": 4,  # what the iteration drew then is what trains
    }
    arguments = [each for each in settings(data, runs, **overrides) if "run.iter" not in each]
    done = run_warm("trained", [*arguments, "--only", "train", "--from", "scored"], runs)
    assert done.code == 0, done.output + done.logs()
    states = [line["state"] for line in read_lines(done.folder / "journal.jsonl")]
    update = ["EXPERIENCE_SEALED", "UPDATING_FROM", "ACTOR_COMMITTED"]
    assert states == ["ACTOR_COMMITTED", *update, *update]
    updates = read_lines(done.folder / "updates.jsonl")
    hashes = [load_iteration(scored.folder, n).manifest.experience_hash for n in (0, 1)]
    assert [line["experience_hash"] for line in updates] == hashes
    assert all(step["stepped"] for line in updates for step in line["steps"])
    first, second = done.rows
    # The weights that sampled are those it starts from: exactly 1 only there, and on these packs.
    assert first["policy/first_log_ratio_abs_max"] < 1e-4
    assert second["policy/first_log_ratio_abs_max"] > 1e-3
    assert second["sealed/log_prob_gap_max"] > first["sealed/log_prob_gap_max"]
    assert first["groups/samples_trained"] > 16 and first["groups/samples_surplus"] == 0
    for row in done.rows:
        assert row["parity/tokens"] == 0 and "parity/logprob_gap_max" not in row
        assert row["sealed/tokens_without_old"] == 0
    assert "parity with a generator is not checked" in done.output
    assert (done.folder / "hf" / "config.json").exists()


def test_other_sampling_is_refused(data: Path, scored: Finished) -> None:
    runs = scored.folder.parent
    overrides = ONE_RANK | {"rollout.temperature": 0.5}
    arguments = [each for each in settings(data, runs, **overrides) if "run.iter" not in each]
    done = run_warm("refused", [*arguments, "--only", "train", "--from", "scored@1"], runs)
    assert done.code == 1
    assert (
        "sealed with rollout.temperature 1.0, the recipe has 0.5; set rollout.temperature=1.0"
        in done.output
    )
    assert done.output.count("megarl: error: ") == 1
