"""Runs whose first iteration goes on from sealed facts, against the run that had sealed them.

The oracle is the uninterrupted run: what it wrote must be written again, bit for bit in its own
layout. Two rounds, a lost response, unscorable prompts that go into quarantine, a KL term and an
evaluation that is due make sure that nothing is told by samples and rewards alone.
Not covered: GPUs; which checkpoint a resume takes and what it cuts back (`tests/checkpoint`).
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from megarl.experience.load import load_iteration
from megarl.faults import PERMISSION, VARIABLE
from tests.launch.reuse_entry import main_from_sealed
from tests.launch.runs import Finished, launch, make_model, read_lines, run_warm, settings

pytestmark = pytest.mark.launch

GROUP = 4
SAME = {
    "reward.scorers": "[{name: 'tests.launch.scorers:choosy'}]",
    "reward.max_error_share": 0.9,
    "reward.quarantine_after": GROUP,
    "rollout.max_lost_share": 0.05,
    "algorithm.dynamic_sampling.max_rounds": 2,
    "algorithm.kl.beta": 0.02,
    "actor.lr": 1e-3,
    "actor.tokens_per_micro_batch": 150,
    "world.timeout_seconds": 120,
}
UPDATE = ["EXPERIENCE_SEALED", "UPDATING_FROM", "ACTOR_COMMITTED"]
DERIVED = ("derived.json", "derived_", "selection.")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def whole(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """Three iterations by two ranks (actor TP2, two replicas), the first one loses a response."""
    runs = tmp_path_factory.mktemp("whole")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(VARIABLE, "lose@generate:rank=1:visit=1")
        patch.setenv(PERMISSION, "1")
        done = launch("run", settings(data, runs, **SAME), runs)
    assert done.code == 0, done.output + done.logs()
    return done


def go_on(whole: Finished, data: Path, runs: Path, ranks: int = 2, **more: Any) -> Finished:
    """A run that finds the first iteration of `whole` sealed, as far as its facts go."""
    facts = whole.folder / "experience" / "iter_000000"
    folder = runs / "run"
    target = folder / "experience" / "iter_000000"
    target.parent.mkdir(parents=True)
    shutil.copytree(
        facts, target, ignore=lambda _, names: [n for n in names if n.startswith(DERIVED)]
    )
    values = settings(data, runs, **(SAME | {"world.ranks": ranks} | more))
    return run_warm("run", values, runs, entry=main_from_sealed)


def _without_times(rows: list[dict]) -> list[dict]:
    return [{k: v for k, v in row.items() if not k.startswith("time")} for row in rows]


def _states(run: Finished, iteration: int) -> list[str]:
    lines = read_lines(run.folder / "journal.jsonl")
    return [line["state"] for line in lines if line["iteration"] == iteration]


def test_in_its_own_layout_every_bit_comes_again(
    whole: Finished, data: Path, tmp_path: Path
) -> None:
    again = go_on(whole, data, tmp_path)
    assert again.code == 0, again.output + again.logs()
    first, *_ = read_lines(whole.folder / "ledger.jsonl")
    assert first["rounds"] == 2 and first["lost"] == 1  # the whole run is as it is meant to be
    assert whole.rows[-1]["rollout/quarantined"] > 0 and "eval/exact_match" not in whole.rows[1]
    assert _without_times(again.rows) == _without_times(whole.rows)
    assert "time/generate" not in again.rows[0] and "time/generate" in again.rows[1]
    for name in ("ledger.jsonl", "updates.jsonl", "quarantine.jsonl"):
        assert (again.folder / name).read_bytes() == (whole.folder / name).read_bytes(), name
    for iteration in range(3):
        then, now = (load_iteration(run.folder, iteration) for run in (whole, again))
        assert now.manifest.experience_hash == then.manifest.experience_hash
        derived = [each.folder / "derived.json" for each in (then, now)]
        assert derived[0].read_bytes() == derived[1].read_bytes()
    for name in sorted(os.listdir(whole.folder / "hf")):
        files = [run.folder / "hf" / name for run in (whole, again)]
        assert files[0].read_bytes() == files[1].read_bytes(), name
    # The evaluation that was due is done again, and nothing else by the generator.
    assert {key for key in again.rows[0] if key.startswith("eval/")}
    evaluation = ["EXPORTING", "ROLLOUT_LOADING", "ROLLOUT_READY", "ACTOR_COMMITTED"]
    assert _states(again, 0) == ["ACTOR_COMMITTED", *evaluation, *UPDATE]
    assert "old log-probs differ from those of the weights at hand by at most 0.0e+00" in (
        " ".join(again.output.split())
    )


def test_another_layout_learns_the_same_within_roundings(
    whole: Finished, data: Path, tmp_path: Path
) -> None:
    """On one rank, with nothing to evaluate: the generator sleeps until the second iteration."""
    again = go_on(
        whole, data, tmp_path, ranks=1, **{"actor.tp": 1, "data.eval": "null", "run.iterations": 2}
    )
    assert again.code == 0, again.output + again.logs()
    assert _states(again, 0) == ["ACTOR_COMMITTED", *UPDATE]
    lines = [read_lines(run.folder / "ledger.jsonl")[0] for run in (whole, again)]
    assert lines[0] == lines[1]
    then, now = (read_lines(run.folder / "updates.jsonl")[0]["steps"] for run in (whole, again))
    for step, wanted in zip(now, then, strict=True):
        for key in ("stepped", "tokens", "sequences", "lr"):
            assert step[key] == wanted[key]
        assert step["grad_norm"] == pytest.approx(wanted["grad_norm"], rel=1e-4)
        assert step["loss"] == pytest.approx(wanted["loss"], abs=1e-5)
    sealed = [load_iteration(run.folder, 0).derived for run in (whole, again)]
    assert (sealed[0].minibatch == sealed[1].minibatch).all()
    assert 0.0 < again.rows[0]["policy/first_log_ratio_abs_max"] < 1e-4
    assert again.rows[0]["parity/logprob_gap_max"] == whole.rows[0]["parity/logprob_gap_max"]
    assert again.rows[1]["rollout/epoch"] == whole.rows[1]["rollout/epoch"]


def test_other_sampling_is_refused_in_one_line(whole: Finished, data: Path, tmp_path: Path) -> None:
    again = go_on(whole, data, tmp_path, **{"rollout.max_response_tokens": 11})
    assert again.code == 1
    assert again.output.count("megarl: error: ") == 1
    told = " ".join(again.output.split())
    assert "sealed with sampling.max_response_tokens 12, this run has 11" in told
    assert "set resume.use=regenerate to sample the iteration again" in told
