"""What the console says of iterations that taught little or ended early, and their numbers.

Not covered: that a run says it (tests/launch, by the same functions).
"""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from megarl.algorithms.stopping import moved_too_far
from megarl.models.step import StepResult
from megarl.observe.console import Console
from megarl.observe.notes import ended_early, little_taught
from megarl.observe.row import critic_row, policy_row
from megarl.recipe import load_recipe

QUICKSTART = Path(__file__).resolve().parents[2] / "recipes" / "quickstart.yaml"
TAUGHT = {"iteration": 3, "update/steps": 2.0, "advantage/abs_max": 0.5, "groups/samples": 8.0}
SUMS = {
    "tokens": 4.0,
    "approx_kl": 0.02,
    "policy_loss": 1.0,
    "ratio_max": 1.5,
    "ratio_min": 0.5,
    "log_ratio_abs_max": 0.0,
    "loss": 0.25,
}


def step(reason: str | None = None, stopped: bool = False) -> StepResult:
    return StepResult(reason is None, reason, 1.0, 1e-3, 0.0, {}, stopped)


def notes(row: dict, *overrides: str) -> list[str]:
    return list(little_taught(TAUGHT | row, load_recipe(QUICKSTART, list(overrides))))


def test_the_stopped_step_has_a_number_of_its_own_and_a_note() -> None:
    above = SUMS | {"approx_kl": 2.0, "tokens": 5.0}
    reason = moved_too_far(0.1, above)
    steps = [(step(), SUMS), (step(reason, stopped=True), above)]
    row = policy_row(steps)
    assert row["policy/approx_kl"] == pytest.approx(0.02 / 4)
    assert row["policy/approx_kl_stopped"] == pytest.approx(2.0 / 5)
    assert (row["update/steps"], row["update/stopped"], row["update/skipped"]) == (1, 1, 0)
    assert ended_early(3, [result for result, _ in steps]) == (
        "iteration 3: the updates ended early, after 1 step: approximate KL 0.4 is above "
        "algorithm.target_kl 0.1"
    )


def test_steps_that_were_taken_or_refused_end_nothing_early() -> None:
    assert "policy/approx_kl_stopped" not in policy_row([(step(), SUMS)])
    assert ended_early(3, []) is None
    assert ended_early(3, [step(), step("not finite: loss nan on rank 0")]) is None


def test_the_critics_explained_variance_is_of_its_last_step() -> None:
    # Returns 0, 1, 2 and values 0, 1, 1: errors 0, 0, 1.
    told = {"tokens": 3.0, "return": 3.0, "return_squared": 5.0, "loss": 0.0}
    told |= {"value_error": 1.0, "value_error_squared": 1.0}
    told |= {"value_loss": 0.5, "value_clipped": 0.0, "value": 2.0}
    flat = told | {"return": 3.0, "return_squared": 3.0}
    row = critic_row([(step(), flat), (step(), told)])
    assert row["critic/explained_variance"] == pytest.approx(1 - (2 / 9) / (2 / 3))
    assert "critic/explained_variance" not in critic_row([(step(), told), (step(), flat)])


def test_an_iteration_that_taught_is_not_talked_about() -> None:
    assert notes({}) == []
    assert notes({"update/steps": 0.0, "critic/steps": 2.0, "advantage/abs_max": 0.0}) == []


def test_advantages_that_are_all_0_are_told_with_what_acted_then() -> None:
    nothing = {"advantage/abs_max": 0.0}
    assert notes(nothing) == ["iteration 3 taught the actor nothing: every advantage is 0"]
    assert notes(nothing | {"policy/router_aux": 0.01}) == [
        "iteration 3: every advantage is 0; only the balancing loss (actor.router_aux_loss) acted "
        "on the actor"
    ]
    (line,) = notes(
        nothing | {"kl/beta": 0.1}, "algorithm.kl.beta=0.1", "algorithm.entropy_coefficient=0.01"
    )
    assert "the KL term" in line and "the entropy bonus" in line and "balancing" not in line
    kept_out = ("algorithm.kl.beta=0.1", "algorithm.kl.place=reward")
    assert notes(nothing | {"kl/beta": 0.1}, *kept_out) == [
        "iteration 3 taught the actor nothing: every advantage is 0"
    ]


def test_samples_without_step_scores_are_told_with_what_to_do() -> None:
    row = {"update/steps": 0.0, "groups/samples_no_steps": 8.0}
    (line,) = notes(row)
    assert line == (
        "iteration 3 taught nothing: of 8 samples 8 no steps; no scorer gives step scores: return "
        "RewardParts.steps, or set algorithm.rewards to outcome"
    )
    (line,) = notes(row | {"groups/samples_no_steps": 7.0, "groups/samples_aborted": 1.0})
    assert "RewardParts" not in line


def test_the_consoles_kl_is_the_distance_from_the_reference_before_the_updates() -> None:
    out = io.StringIO()
    Console("plain", 3, stream=out).iteration(
        {"iteration": 0, "reference/kl": 0.125, "policy/kl": 0.5}
    )
    assert "0.1250" in out.getvalue() and "0.5000" not in out.getvalue()
