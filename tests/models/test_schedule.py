"""The learning rate as a function of the step."""

from __future__ import annotations

import pytest

from megarl.models.schedule import learning_rate

SETTINGS = {"lr": 1e-3, "warmup_steps": 4, "total_steps": 14, "min_lr": 1e-4}


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
def test_warm_up_rises_to_the_full_rate(schedule: str) -> None:
    rates = [learning_rate(step, schedule=schedule, **SETTINGS) for step in range(1, 5)]
    assert rates == pytest.approx([2.5e-4, 5e-4, 7.5e-4, 1e-3])


def test_decay_ends_at_the_lowest_rate_and_stays() -> None:
    def at(schedule: str, *steps: int) -> list[float]:
        return [learning_rate(step, schedule=schedule, **SETTINGS) for step in steps]

    assert at("constant", 5, 14, 99) == [1e-3] * 3
    assert at("linear", 5, 9, 14, 99) == pytest.approx([9.1e-4, 5.5e-4, 1e-4, 1e-4])
    assert at("cosine", 9, 14, 99) == pytest.approx([5.5e-4, 1e-4, 1e-4])
    # cos 60° = 1/2: a third of the way down the cosine has fallen by a quarter.
    third = SETTINGS | {"total_steps": 13}
    assert learning_rate(7, schedule="cosine", **third) == pytest.approx(7.75e-4)


def test_without_warm_up_the_first_step_has_the_full_rate() -> None:
    options = {"lr": 3e-4, "warmup_steps": 0, "total_steps": 10, "min_lr": 0.0}
    assert learning_rate(1, schedule="constant", **options) == 3e-4
    assert learning_rate(10, schedule="linear", **options) == 0.0


@pytest.mark.parametrize("step, schedule", [(0, "constant"), (1, "polynomial")])
def test_what_is_no_step_or_schedule_is_refused(step: int, schedule: str) -> None:
    with pytest.raises(ValueError, match="no learning rate"):
        learning_rate(step, schedule=schedule, **SETTINGS)
