"""`audit explain` on a real run: the numbers it tells, how samples are found, what it refuses.

Oracles are the sealed files as they lie on the disk (`raw.py`) and formulas written out here.
Not covered: process rewards and tool output, which no run makes; the wording of the text.
"""

from __future__ import annotations

import hashlib
import json
import math
import shutil
import statistics
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megarl.audit.explain import parse
from megarl.audit.source import NotThere
from megarl.audit.tell import tell
from megarl.audit.view import open_run
from tests.audit.raw import RawSample, groups, read_jsonl, read_prompts, read_samples
from tools.audit import main

pytestmark = pytest.mark.launch

ITERATION = 1


def explain(capsys: pytest.CaptureFixture, run: Path, *words: str) -> dict[str, Any]:
    assert main(["explain", str(run), *words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def refusal(capsys: pytest.CaptureFixture, run: Path, *words: str) -> str:
    assert main(["explain", str(run), *words]) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.count("\n") == 1
    return told.err


def place(run: Path, draw: int, candidate: int) -> str:
    return f"{ITERATION}/{read_prompts(run, ITERATION)[draw]['prompt_id']}/{candidate}"


@pytest.fixture(scope="module")
def sampled(audited: Path) -> dict[int, dict[int, RawSample]]:
    return groups(read_samples(audited, ITERATION))


@pytest.fixture(scope="module")
def trained(sampled: dict[int, dict[int, RawSample]]) -> tuple[int, int]:
    """(draw index, candidate) of a sample that trained and whose reward is above its siblings'."""
    return next(
        (draw, candidate)
        for draw, group in sampled.items()
        for candidate, sample in group.items()
        if sample.minibatch >= 0 and sample.reward == 2.0
    )


def test_the_advantage_is_the_formula_over_the_siblings_rewards(
    capsys: pytest.CaptureFixture, audited: Path, sampled: Any, trained: tuple[int, int]
) -> None:
    draw, candidate = trained
    rewards = [sample.reward for sample in sampled[draw].values()]
    expected = (2.0 - statistics.mean(rewards)) / (statistics.stdev(rewards) + 1e-6)
    told = explain(capsys, audited, place(audited, draw, candidate))
    assert told["group"]["mean"] == statistics.mean(rewards)
    assert told["group"]["std"] == pytest.approx(statistics.stdev(rewards), rel=1e-12)
    assert [other["reward"] for other in told["group"]["siblings"]] == rewards
    assert told["advantage"]["recomputed"] == pytest.approx(expected, rel=1e-12)
    sealed = sampled[draw][candidate].columns["advantages"]
    assert told["advantage"]["trained_on"] == float(sealed[0]) == float(np.float32(expected))
    assert told["advantage"]["equal"] is True


def test_every_token_has_its_log_probs_gap_and_kl(
    capsys: pytest.CaptureFixture, audited: Path, sampled: Any, trained: tuple[int, int]
) -> None:
    sample = sampled[trained[0]][trained[1]]
    table = explain(capsys, audited, place(audited, *trained))["token_table"]
    assert [token["id"] for token in table] == sample.ids
    for at, token in enumerate(table):
        rollout, old, ref, advantage = (
            float(sample.columns[name][at])
            for name in ("rollout_log_probs", "old_log_probs", "ref_log_probs", "advantages")
        )
        assert token["rollout_log_prob"] == rollout
        assert token["old_log_prob"] == old
        assert token["ref_log_prob"] == ref
        assert token["gap"] == old - rollout
        assert token["kl"] == pytest.approx(math.exp(ref - old) + (old - ref) - 1, abs=1e-6)
        assert token["advantages"] == advantage
        assert token["action"] is True


def test_seed_reward_prompt_and_versions_are_those_of_the_files(
    capsys: pytest.CaptureFixture, audited: Path, sampled: Any, trained: tuple[int, int]
) -> None:
    draw, candidate = trained
    told = explain(capsys, audited, place(audited, draw, candidate))
    prompt = read_prompts(audited, ITERATION)[draw]
    assert {name: told["prompt"][name] for name in prompt} == prompt
    text = f"1\x1f{ITERATION}\x1f{prompt['prompt_id']}\x1f{candidate}"
    seed = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1
    assert told["generation"]["seed"] == told["generation"]["seed_recomputed"] == seed
    assert told["reward"]["components"]["by_thirds"]["score"] == 1.0
    assert told["reward"]["weighted_sum"] == told["reward"]["total"] == 2.0
    update = read_jsonl(audited / "updates.jsonl")[ITERATION]
    assert told["training"]["update"]["to"] == update["to"]
    assert told["versions"]["roles"]["rollout"] == update["from"]
    assert told["versions"]["known"][update["to"]]["optimizer_step"] == 4
    step = update["steps"][told["training"]["minibatch"]]
    assert told["training"]["update"]["step"] == step
    assert told["training"]["token_weight_is_one_over"] == step["tokens"]
    assert told["recipe_is_sealed_one"] is True


def test_a_sample_that_did_not_train_says_why(
    capsys: pytest.CaptureFixture, audited: Path, sampled: Any
) -> None:
    seen = set()
    for draw, group in sampled.items():
        failed = any(sample.status == "error" for sample in group.values())
        for candidate, sample in group.items():
            if sample.minibatch >= 0 or (sample.status, failed) in seen:
                continue
            seen.add((sample.status, failed))
            told = explain(capsys, audited, place(audited, draw, candidate))
            verdict = "incomplete_group" if failed else "zero_variance"
            verdict = "reward_error" if sample.status == "error" else verdict
            assert told["training"]["verdict"] == verdict
            assert told["training"]["update"] is None
            assert told["advantage"]["trained_on"] is None
            assert told["reward"]["total"] == sample.reward
            if sample.status == "error":
                assert "first id is a multiple of 9" in told["reward"]["detail"]
                assert told["advantage"]["recomputed"] is None
                assert told["token_table"][0]["old_log_prob"] is None
    assert ("error", True) in seen


def test_a_sample_is_found_by_every_way_to_name_it(
    capsys: pytest.CaptureFixture, audited: Path, trained: tuple[int, int]
) -> None:
    draw, candidate = map(str, trained)
    short = place(audited, *trained)
    told = explain(capsys, audited, short)
    assert told["sample_id"] == f"audited/{short}"
    assert explain(capsys, audited, f"audited/{short}") == told
    by_number = ("--iteration", str(ITERATION), "--draw", draw, "--candidate", candidate)
    assert explain(capsys, audited, *by_number) == told


def test_prompt_ids_may_hold_slashes(audited: Path) -> None:
    run = open_run(audited)
    assert parse(run, "audited/0/a/b/1/2") == (0, "a/b/1", 2)
    assert parse(run, "0/a/b/1/2") == (0, "a/b/1", 2)
    for wrong in ("a", "0/1", "0/a/b", "audited/x/y/0", "-1/a/0"):
        with pytest.raises(NotThere, match="a sample id is"):
            parse(run, wrong)


def test_what_is_not_there_is_refused_with_what_is_near(
    capsys: pytest.CaptureFixture, audited: Path
) -> None:
    prompt = read_prompts(audited, ITERATION)[0]["prompt_id"]
    elsewhere = read_prompts(audited, 0)[0]["prompt_id"]
    assert prompt in refusal(capsys, audited, f"{ITERATION}/{prompt}x/0")
    told = refusal(capsys, audited, f"{ITERATION}/{elsewhere}/0")
    assert "it was drawn in iteration 0" in told
    assert "there are 0-3" in refusal(capsys, audited, f"{ITERATION}/{prompt}/7")
    assert "has 0-2" in refusal(capsys, audited, f"9/{prompt}/0")
    assert "a sample of run other" in refusal(capsys, audited, f"other/0/{prompt}/0")
    assert "draws 0 to 7" in refusal(
        capsys, audited, "--iteration", "0", "--draw", "8", "--candidate", "0"
    )
    assert "name a sample" in refusal(capsys, audited)
    assert "not both" in refusal(capsys, audited, f"{ITERATION}/{prompt}/0", "--draw", "1")
    assert "no such folder" in refusal(capsys, audited / "nowhere", "0/a/0")
    assert "not a run" in refusal(capsys, audited.parent, "0/a/0")


def test_the_text_is_readable_and_nothing_in_it_steers_a_terminal(
    capsys: pytest.CaptureFixture, audited: Path, trained: tuple[int, int]
) -> None:
    told = explain(capsys, audited, place(audited, *trained))
    told["response"]["text"] = "so \x1b[2J80\nsecond line"
    told["token_table"][0]["piece"] = "\x1b"
    told["reward"]["detail"] = "bad\x07"
    lines = list(tell(told, width=80))
    assert all(line.isprintable() for line in lines)
    whole = "\n".join(lines)
    assert "│ so \\x1b[2J80\n  │ second line" in whole
    flat = " ".join(whole.split())
    assert "A = (r − mean) / (std + eps) = (2 − " in flat
    assert "equal, bit for bit" in flat
    assert max(map(len, lines)) <= 110
    cut = list(tell(told, width=80, most_tokens=10))
    assert any("2 tokens left out" in line for line in cut)


def test_a_run_without_its_tokenizer_is_told_in_ids(
    capsys: pytest.CaptureFixture, audited: Path, trained: tuple[int, int], tmp_path: Path
) -> None:
    aside = shutil.ignore_patterns("hf", "tensorboard", "logs", "eval", "tokenizer")
    copy = Path(shutil.copytree(audited, tmp_path / "moved", ignore=aside))
    whole = explain(capsys, audited, place(audited, *trained))
    told = explain(capsys, copy, place(audited, *trained))
    assert told["words"] != whole["words"]  # the model folder's tokenizer has the sealed hash
    assert told["response"] == whole["response"]
    recipe = (copy / "recipe.yaml").read_text()
    path = next(line for line in recipe.splitlines() if line.startswith("  path:"))
    (copy / "recipe.yaml").write_text(recipe.replace(path, "  path: nowhere"))
    told = explain(capsys, copy, place(audited, *trained))
    assert told["words"].startswith("token ids only: ")
    assert told["response"]["text"] is None
    assert told["recipe_is_sealed_one"] is False
    assert [token["piece"] for token in told["token_table"]] == [None] * 12
    assert main(["explain", str(copy), place(audited, *trained)]) == 0
    assert "token ids only" in capsys.readouterr().out
