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
    told = estimate([1.0] * right + [0.0] * (prompts - right), prompts, 0.95)
    assert told.value == pytest.approx(right / prompts)
    assert (told.low, told.high) == pytest.approx((low, high), abs=5e-5)
    assert (told.prompts, told.responses) == (prompts, prompts)
    mirrored = estimate([0.0] * right + [1.0] * (prompts - right), prompts, 0.95)
    assert (mirrored.low, mirrored.high) == pytest.approx((1 - told.high, 1 - told.low))


@pytest.mark.parametrize("responses", [10, 1000])
def test_where_prompts_agree_they_count_and_not_their_responses(responses: int) -> None:
    """Ten prompts of which all is right, by one response each or by a hundred."""
    for value in (0.0, 1.0):
        told = estimate([value] * 10, responses, 0.95)
        assert told.low <= value <= told.high and told.responses == responses
        far = told.high if value == 0.0 else 1 - told.low
        assert far == pytest.approx(Z95**2 / (10 + Z95**2))  # the formula at p = 0, by hand
        assert far == pytest.approx(0.278, abs=5e-4)
    same = estimate([0.9] * 10, responses, 0.95)
    assert (same.low, same.high) == pytest.approx(wilson(0.9, 10, Z95))


def test_a_single_prompt_tells_nothing_of_others() -> None:
    for values, responses in (([0.75], 8), ([1.0], 1), ([3.0], 1)):
        told = estimate(values, responses, 0.95)
        assert (told.value, told.low, told.high) == (values[0], None, None)
    assert estimate([], 0, 0.95) is None


def test_scores_beyond_one_have_the_normal_interval() -> None:
    # Mean 2, ddof-1 variance 4, SE 1.
    low, high = interval(np.array([0.0, 2.0, 2.0, 4.0]) * math.sqrt(1.5) + 2, 0.9)
    centre = 2 * math.sqrt(1.5) + 2
    assert (low, high) == pytest.approx((centre - 1.6448536, centre + 1.6448536))
    # Prompts that agree do not say how far others may be.
    assert interval(np.array([3.0, 3.0]), 0.95) == (None, None)


RUNS = 2000


@pytest.mark.parametrize(
    ("prompts", "samples", "alpha", "beta", "least", "most"),
    [
        # Prompts that are always or never right are draws of one trial each: 0.93 is Wilson's
        # own coverage for 10 trials at 0.9, from the binomial.
        (10, 8, 0.0, 0.9, 0.92, 0.94),
        (100, 8, 0.0, 0.3, 0.93, 0.97),
        # Chances of their own, from a beta distribution: covered more often.
        (10, 8, 0.9, 0.1, 0.92, 1.0),
        (10, 100, 1.8, 0.2, 0.92, 1.0),
        (40, 4, 0.6, 1.4, 0.95, 1.0),
        (200, 2, 0.1, 0.9, 0.94, 1.0),
    ],
)
def test_the_interval_covers_as_often_as_it_says(
    prompts: int, samples: int, alpha: float, beta: float, least: float, most: float
) -> None:
    """`alpha` 0: a share `beta` of all prompts is always right, the others never."""
    random = np.random.default_rng(0)
    shape = (RUNS, prompts)
    chances = random.beta(alpha, beta, shape) if alpha else random.random(shape) < beta
    mean = alpha / (alpha + beta) if alpha else beta
    right = random.binomial(samples, chances)
    intervals = [interval(values, 0.95) for values in right / samples]
    covered = sum(low <= mean <= high for low, high in intervals) / RUNS
    assert least < covered <= most


@pytest.mark.parametrize("k", [1, 4])
def test_the_interval_of_pass_at_k_covers_as_often_as_it_says(k: int) -> None:
    """10 prompts of 8 responses; nine prompts in ten are right in half of them, the others never:
    pass@k is 0.9 (1 − 2⁻ᵏ)."""
    random = np.random.default_rng(1)
    right = random.binomial(8, 0.5 * (random.random((RUNS, 10)) < 0.9))
    chance = np.array([pass_at_k(8, count, k) for count in range(9)])
    told = [estimate(values, 80, 0.95) for values in chance[right]]
    covered = sum(one.low <= 0.9 * (1 - 0.5**k) <= one.high for one in told) / RUNS
    assert covered > 0.92
