"""`audit` on a real run of ppo: what a critic, passes and a moving KL weight add.

One run on two ranks (actor TP2): four iterations of two passes over two minibatches, the first one
warming the critic up; KL in the reward, its weight steered; a reference that is refreshed before
the last one; importance weights. Oracles are the sealed files as they lie on the disk and formulas
written out here. Not covered: own estimators and objectives, step scores, a critic with packs of
its own.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megarl.audit.view import open_run
from megarl.experience.load import load_iteration
from tests.audit import faults_in_values
from tests.audit.conftest import OVERRIDES
from tests.audit.fault import Fault, faults_of
from tests.audit.forge import Forger
from tests.audit.raw import read_jsonl
from tests.audit.test_verify import ASIDE, found
from tests.launch.runs import make_model, run_warm, settings
from tools.audit import main

pytestmark = pytest.mark.launch

PPO = OVERRIDES | {
    "run.iterations": 4,
    "algorithm.name": "ppo",
    "algorithm.epochs": 2,
    "algorithm.kl.target": 0.01,
    "algorithm.kl.horizon": 100,
    "algorithm.importance.level": "token",
    "critic.warmup_iterations": 1,
    "reference.refresh_every": 3,
}


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Path:
    data = make_model(tmp_path_factory.mktemp("critic_data"))
    runs = tmp_path_factory.mktemp("critic_runs")
    done = run_warm("critic", settings(data, runs, **PPO), runs)
    assert done.code == 0, done.output + done.logs()
    return done.folder


@pytest.fixture
def forger(ran: Path, tmp_path: Path) -> Forger:
    return Forger(Path(shutil.copytree(ran, tmp_path / "moved", ignore=ASIDE)))


def asked(capsys: pytest.CaptureFixture, *words: str) -> dict[str, Any]:
    assert main([*words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_nothing_is_found_in_a_real_run(ran: Path) -> None:
    report = found(ran)
    assert not report.findings
    assert all(outcome.looked_at and not outcome.skipped for outcome in report.outcomes)


@pytest.mark.parametrize("fault", faults_of(faults_in_values), ids=lambda fault: fault.name)
def test_a_planted_fault_is_found_by_the_right_check(fault: Fault, forger: Forger) -> None:
    fault(forger)
    told = [str(finding) for finding in found(forger.run).findings]
    assert {line.partition(":")[0] for line in told} - fault.maybe == fault.checks, told
    assert any(fault.word in line for line in told), told


def test_what_was_trained_on_follows_from_the_facts(
    capsys: pytest.CaptureFixture, ran: Path
) -> None:
    told = asked(capsys, "recompute", str(ran))
    assert told["equal"] is True
    updates = read_jsonl(ran / "updates.jsonl")
    assert [line["first_loss"] is None for line in told["iterations"]] == [True] + [False] * 3
    for line, update in zip(told["iterations"], updates, strict=True):
        # Half the squared error by the sealed numbers, over the tokens of the first minibatch.
        sealed = load_iteration(ran, line["iteration"])
        on = np.repeat(sealed.derived.minibatch == 0, sealed.samples.response_lengths)
        errors = (sealed.values.astype(np.float64) - sealed.derived.columns["returns"])[on]
        assert update["critic"][0]["loss"] == pytest.approx((errors**2).mean() / 2, rel=1e-5)
        assert line["old"]["kl_beta"] == update["kl_beta"] == sealed.derived.kl_beta


def test_another_lambda_is_told_of_the_same_samples(
    capsys: pytest.CaptureFixture, ran: Path
) -> None:
    words = ("algorithm.gae.lam=1", "algorithm.gae.truncation=terminal", "algorithm.whiten=none")
    told = asked(capsys, "recompute", str(ran), *words, "--iterations", "2")
    sealed = load_iteration(ran, 2)
    assert (sealed.old_log_probs != sealed.ref_log_probs).any()
    offsets, sizes = sealed.samples.response_offsets, []
    for row in np.flatnonzero(sealed.derived.minibatch >= 0).tolist():
        span = slice(offsets[row], offsets[row + 1])
        old, ref = (
            c[span].astype(np.float64) for c in (sealed.old_log_probs, sealed.ref_log_probs)
        )
        rewards = -sealed.derived.kl_beta * (old - ref)
        rewards[-1] += sealed.scores.total[row]
        to_go = rewards[::-1].cumsum()[::-1]
        sizes.append(abs((to_go - sealed.values[span]).mean()))
    (line,) = told["iterations"]
    assert line["new"]["advantage_abs_mean"] == pytest.approx(np.mean(sizes), rel=1e-6)
    assert line["changed"] == len(sizes)


@pytest.mark.parametrize(
    ("override", "reason"),
    [
        ("algorithm.kl.beta=0.5", "other betas would have made other policies"),
        ("critic.value_clip=0.1", "acts in forwards and optimizer steps"),
        ("algorithm.epochs=1", "later passes"),
    ],
)
def test_what_needs_another_update_is_refused(
    capsys: pytest.CaptureFixture, ran: Path, override: str, reason: str
) -> None:
    assert main(["recompute", str(ran), override]) == 2
    told = capsys.readouterr().err
    assert override.partition("=")[0] in told and reason in told and told.count("\n") == 1


def test_a_sample_tells_values_rewards_returns_and_every_pass(
    capsys: pytest.CaptureFixture, ran: Path
) -> None:
    sealed = load_iteration(ran, 1)
    row = int(np.flatnonzero(sealed.derived.minibatch == 1)[0])
    words = ("explain", str(ran), sealed.sample_id(row))
    told = asked(capsys, *words)
    at = int(sealed.samples.response_offsets[row])
    for token in told["token_table"]:
        assert token["value"] == float(sealed.values[at])
        for name in ("advantages", "shaped_rewards", "returns"):
            assert token[name] == float(sealed.derived.columns[name][at])
        at += 1
    assert told["advantage"]["equal"] is True
    assert told["advantage"]["estimator"] == "gae"
    update = told["training"]["update"]
    assert [step["epoch"] for step in update["steps"]] == [0, 1]
    assert [step["epoch"] for step in update["critic_steps"]] == [0, 1]
    assert told["versions"]["known"][told["versions"]["roles"]["critic"]]["role"] == "critic"
    assert main(list(words)) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "algorithm.advantage gae, outcome rewards, gamma 1, lam 0.95, less 0.0" in text
    assert "whitened (full); mean of its action tokens" in text
    assert "equal, bit for bit" in text and "pass 1: stepped" in text


def test_runs_part_at_the_critics_values(
    capsys: pytest.CaptureFixture, ran: Path, forger: Forger
) -> None:
    assert main(["diff", str(ran), str(forger.run)]) == 0
    capsys.readouterr()
    faults_in_values.an_edited_value(forger)
    assert main(["diff", str(ran), str(forger.run)]) == 1
    assert "first divergence: iteration 1, log_probs, 1/" in (told := capsys.readouterr().out)
    assert "values[3]" in told
    faults_in_values.an_edited_first_loss_of_the_critic(Forger(forger.run))
    assert (
        open_run(forger.run).updates.lines[1]["critic"][0]["loss"]
        != (read_jsonl(ran / "updates.jsonl")[1]["critic"][0]["loss"])
    )
