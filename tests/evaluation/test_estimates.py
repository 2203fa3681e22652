"""pass@k and intervals, against enumeration, numbers worked out by hand, and a simulation.

Not covered: that prompts of a benchmark are a fair sample of those it stands for.
"""

from __future__ import annotations

import math
from itertools import combinations

import numpy as np
import pytest

from megarl.evaluation.intervals import estimate, interval, wilson
from megarl.evaluation.pass_at_k import pass_at_k

Z95 = 1.959963984540054


@pytest.mark.parametrize("responses", range(1, 8))
def test_pass_at_k_is_the_share_of_choices_that_hold_a_right_one(responses: int) -> None:
    for right in range(responses + 1):
        told = [True] * right + [False] * (responses - right)
        for k in range(1, responses + 1):
            choices = list(combinations(told, k))
            share = sum(map(any, choices)) / len(choices)
            assert pass_at_k(responses, right, k) == pytest.approx(share, abs=1e-15)


def test_pass_at_k_of_many_responses_is_exact() -> None:
    # By the paper's running product, in floats; C(1000, 500) has 300 digits.
    product = math.prod(1 - 500 / i for i in range(998, 1001))
    assert pass_at_k(1000, 3, 500) == pytest.approx(1 - product, rel=1e-12)
    assert pass_at_k(1000, 501, 500) == 1.0 and pass_at_k(1000, 0, 500) == 0.0
    assert 0.0 < pass_at_k(10**5, 1, 1) == 1e-5


@pytest.mark.parametrize(
    ("responses", "right", "k"), [(3, 1, 4), (3, 1, 0), (3, 4, 1), (3, -1, 1), (0, 0, 1)]
)
def test_pass_at_k_refuses_what_is_no_draw(responses: int, right: int, k: int) -> None:
    with pytest.raises(ValueError, match="cannot be"):
        pass_at_k(responses, right, k)


@pytest.mark.parametrize(
    ("right", "prompts", "low", "high"),
    [
        # Newcombe 1998, Statistics in Medicine 17, 857-872, table I, method 3.
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ],
)
def test_one_binary_response_a_prompt_is_wilsons_interval(
    right: int, prompts: int, low: float, high: float
) -> None:
    told = estimate([1.0] * right + [0.0] * (prompts - right), prompts, 0.95, binary=True)
    assert told.value == pytest.approx(right / prompts)
    assert (told.low, told.high) == pytest.approx((low, high), abs=5e-5)
    assert (told.prompts, told.responses) == (prompts, prompts)
    mirrored = estimate([0.0] * right + [1.0] * (prompts - right), prompts, 0.95, binary=True)
    assert (mirrored.low, mirrored.high) == pytest.approx((1 - told.high, 1 - told.low))


def test_at_nothing_and_at_all_right_the_interval_is_not_empty() -> None:
    for value in (0.0, 1.0):
        told = estimate([value] * 10, 40, 0.95, binary=True)
        assert told.low <= value <= told.high and told.high - told.low > 0.05
        far = told.high if value == 0.0 else 1 - told.low
        assert far == pytest.approx(Z95**2 / (40 + Z95**2))  # the formula at p = 0, by hand


def test_a_trial_of_pass_at_k_takes_k_responses() -> None:
    told = estimate([0.0] * 10, 40, 0.95, binary=True, draw=4)
    assert told.high == pytest.approx(Z95**2 / (10 + Z95**2))


def test_several_responses_count_as_prompts_that_hang_together() -> None:
    # All responses to a prompt alike: four of them tell no more than one.
    values = [1.0, 1.0, 0.0, 1.0, 0.0]
    assert interval(np.array(values), 20, 0.95, True) == pytest.approx(
        interval(np.array(values), 5, 0.95, True)
    )
    # p = 0.5, prompts' variance 0.05, so n = 0.25 · 4 / 0.05 = 20 (of 4 prompts, 5 responses each).
    spread = math.sqrt(0.05)
    values = np.array([0.5 - spread, 0.5 + spread] * 2)
    assert interval(values, 40, 0.95, False) == pytest.approx(wilson(0.5, 20, Z95))
    # Right-or-wrong responses are at most as many as they are.
    assert interval(values, 16, 0.95, True) == pytest.approx(wilson(0.5, 16, Z95))


def test_scores_beyond_one_have_the_normal_interval() -> None:
    # Mean 2, ddof-1 variance 4, SE 1.
    low, high = interval(np.array([0.0, 2.0, 2.0, 4.0]) * math.sqrt(1.5) + 2, 4, 0.9, False)
    centre = 2 * math.sqrt(1.5) + 2
    assert (low, high) == pytest.approx((centre - 1.6448536, centre + 1.6448536))
    assert interval(np.array([3.0]), 1, 0.95, False) == (None, None)
    assert estimate([], 0, 0.95, binary=True) is None


def test_the_interval_covers_as_often_as_it_says() -> None:
    """40 prompts of 4 responses, each with a chance of its own; mean 0.3."""
    random = np.random.default_rng(0)
    covered = 0
    for _ in range(2000):
        chances = random.beta(0.6, 1.4, size=40)
        values = random.binomial(4, chances) / 4
        low, high = interval(values, 160, 0.9, True)
        covered += low <= 0.3 <= high
    assert 0.87 < covered / 2000 < 0.93
