"""Group-relative advantages against a plain loop in exact-mean float64 and published numbers."""

from __future__ import annotations

import statistics

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.algorithms.advantages import grpo_advantages, per_token


def _plain(total, group, ok, normalize_std, eps) -> list[float]:
    """The formula, one sample at a time, with the standard library's exact statistics."""
    result = []
    for row, (reward, name) in enumerate(zip(total, group, strict=True)):
        scored = [r for r, g, o in zip(total, group, ok, strict=True) if g == name and o]
        if not ok[row] or len(scored) < 2 or max(scored) == min(scored):
            result.append(0.0)
            continue
        scale = statistics.stdev(scored) + eps if normalize_std else 1.0
        result.append((reward - statistics.fmean(scored)) / scale)
    return result


ROWS = st.lists(
    st.tuples(
        st.one_of(st.sampled_from([0.0, 0.1, 0.95, 1.0]), st.floats(-5, 5, width=16)),
        st.integers(0, 4),
        st.booleans(),
    ),
    max_size=40,
)


@settings(max_examples=300, deadline=None)
@given(rows=ROWS, normalize_std=st.booleans())
def test_any_groups_agree_with_the_plain_loop(rows, normalize_std) -> None:
    total = np.array([row[0] for row in rows], dtype=np.float64)
    group = np.array([row[1] for row in rows], dtype=np.int32)
    ok = np.array([row[2] for row in rows], dtype=bool)
    got = grpo_advantages(total, group, ok, normalize_std, 1e-6)
    expected = _plain(total.tolist(), group.tolist(), ok.tolist(), normalize_std, 1e-6)
    assert got.dtype == np.float64
    np.testing.assert_allclose(got, expected, rtol=1e-9, atol=1e-9)
    # What is exactly 0 by the rules is 0 in every bit, not to a tolerance.
    assert all(value == 0.0 for value, exact in zip(got, expected, strict=True) if exact == 0.0)


def test_eps_is_added_to_the_sample_std() -> None:
    rewards = np.array([1.0, 1.001, 1.002])  # std 1e-3
    for eps, largest in ((1e-6, 0.999001), (1e-4, 0.909091), (1e-9, 0.999999)):
        got = grpo_advantages(rewards, np.zeros(3), np.ones(3, bool), True, eps)
        np.testing.assert_allclose(got, [-largest, 0, largest], atol=1e-6)


def test_interleaved_groups_and_failures() -> None:
    total = np.array([1.0, 5.0, np.nan, 7.0, 0.0, np.inf])
    group = np.array([3, 1, 3, 1, 3, 1])
    got = grpo_advantages(total, group, np.array([1, 1, 0, 1, 1, 0], bool), False, 1e-6)
    assert got.tolist() == [0.5, -1.0, 0.0, 1.0, -0.5, 0.0]


def test_a_scored_reward_that_is_no_number_is_refused() -> None:
    with pytest.raises(ValueError, match=r"rows \[1\]"):
        grpo_advantages(np.array([1.0, np.nan]), np.zeros(2), np.ones(2, bool), True, 1e-6)
    with pytest.raises(ValueError, match="one column each"):
        grpo_advantages(np.zeros(2), np.zeros(3), np.ones(2, bool), True, 1e-6)


def test_nothing_scored_and_nothing_at_all() -> None:
    nothing = grpo_advantages(np.array([np.nan]), np.zeros(1), np.zeros(1, bool), True, 1e-6)
    assert nothing.tolist() == [0.0]
    assert grpo_advantages(np.zeros(0), np.zeros(0), np.zeros(0, bool), True, 1e-6).shape == (0,)


def test_each_response_token_gets_its_samples_value() -> None:
    got = per_token(np.array([0.5, -1 / 3, 2.0]), np.array([2, 1, 3]))
    assert got.dtype == np.float32
    assert got.tolist() == np.float32([0.5, 0.5, -1 / 3, 2, 2, 2]).tolist()
