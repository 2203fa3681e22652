"""Group-relative advantages against a plain loop in exact-mean float64 and published numbers."""

from __future__ import annotations

import statistics

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.algorithms.advantages import per_token
from megarl.algorithms.group import STD_KINDS, grpo_advantages, rloo_advantages

EPS = 1e-6


def _plain(total, group, ok, std, eps) -> list[float]:
    """The formula, one sample at a time, with the standard library's exact statistics."""
    result = []
    for row, (reward, name) in enumerate(zip(total, group, strict=True)):
        rows = [at for at in range(len(total)) if group[at] == name and ok[at]]
        scored = [total[at] for at in rows]
        if not ok[row] or len(scored) < 2 or max(scored) == min(scored):
            result.append(0.0)
            continue
        others = [total[at] for at in rows if at != row]
        if std == "rloo":
            result.append(reward - statistics.fmean(others))
        elif std == "leave_one_out":
            same = max(others) == min(others)
            scale = 1.0 if same else statistics.stdev(others) + eps
            result.append((reward - statistics.fmean(others)) / scale)
        else:
            deviation = {"sample": statistics.stdev, "population": statistics.pstdev}.get(std)
            scale = 1.0 if deviation is None else deviation(scored) + eps
            result.append((reward - statistics.fmean(scored)) / scale)
    return result


def _group(*rewards: float, std: str = "sample", eps: float = EPS) -> list[float]:
    values = np.array(rewards, dtype=np.float64)
    return grpo_advantages(values, np.zeros(len(values)), np.isfinite(values), std, eps).tolist()


ROWS = st.lists(
    st.tuples(
        st.one_of(st.sampled_from([0.0, 0.1, 0.95, 1.0]), st.floats(-5, 5, width=16)),
        st.integers(0, 4),
        st.booleans(),
    ),
    max_size=40,
)


@settings(max_examples=400, deadline=None)
@given(rows=ROWS, std=st.sampled_from([*STD_KINDS, "rloo"]))
def test_any_groups_agree_with_the_plain_loop(rows, std) -> None:
    total = np.array([row[0] for row in rows], dtype=np.float64)
    group = np.array([row[1] for row in rows], dtype=np.int32)
    ok = np.array([row[2] for row in rows], dtype=bool)
    if std == "rloo":
        got = rloo_advantages(total, group, ok)
    else:
        got = grpo_advantages(total, group, ok, std, EPS)
    expected = _plain(total.tolist(), group.tolist(), ok.tolist(), std, EPS)
    assert got.dtype == np.float64
    np.testing.assert_allclose(got, expected, rtol=1e-9, atol=1e-9)
    if std not in ("rloo", "leave_one_out"):
        # What is exactly 0 by the rules is 0 in every bit, not to a tolerance.
        assert all(value == 0.0 for value, exact in zip(got, expected, strict=True) if exact == 0)


def test_statistics_are_the_prompts_own_groups() -> None:
    values, group = np.array([1.0, 0.0, 1.0, 1.0]), np.array([0, 0, 1, 1])
    got = grpo_advantages(values, group, np.ones(4, bool), "sample", EPS)
    assert got == pytest.approx([0.7071, -0.7071, 0, 0], abs=1e-4)


def test_published_numbers_of_each_deviation() -> None:
    assert _group(1, 0, 0, 0) == pytest.approx([1.5, -0.5, -0.5, -0.5], abs=1e-4)
    third = pytest.approx([1.7320, -0.5773, -0.5773, -0.5773], abs=1e-4)
    assert _group(1, 0, 0, 0, std="population") == third
    assert _group(1, 0, 0, 0, std="none") == [0.75, -0.25, -0.25, -0.25]
    eight = _group(1, 0, 1, 1, 0, 0, 0, 0)
    assert sorted(set(np.round(eight, 4))) == [-0.7246, 1.2076]
    half = _group(1, 1, 0, 0, std="leave_one_out")
    assert half == pytest.approx([1.1547, 1.1547, -1.1547, -1.1547], abs=1e-4)
    assert _group(1, 1, 0, 0) == pytest.approx([0.86602, 0.86602, -0.86602, -0.86602], abs=1e-5)


def test_others_that_agree_do_not_divide() -> None:
    lone = _group(1, 0, 0, 0, std="leave_one_out")
    assert lone[0] == 1.0 and lone[1:] == pytest.approx([-0.57735] * 3, abs=1e-4)
    dusty = [0.0] + [float(np.float32(0.95))] * 7
    assert _group(*dusty, std="leave_one_out")[0] == -float(np.float32(0.95))
    # Unequal by rounding alone beside one far off: their deviation is theirs, not a difference.
    near = [1.0, 1.0 + 1e-9, 1.0 + 2e-9]
    got = _group(0.0, *near, std="leave_one_out", eps=0.0)[0]
    assert got == pytest.approx(-statistics.fmean(near) / statistics.stdev(near), rel=1e-6)
    for size in (2, 3, 8):
        for std in STD_KINDS:
            assert _group(*[0.95] * size, std=std) == [0.0] * size
    assert _group(1, 0, std="leave_one_out") == [1.0, -1.0]


def test_rloo_is_the_reward_less_the_others_mean() -> None:
    def rloo(*rewards: float) -> list[float]:
        values = np.array(rewards)
        return rloo_advantages(values, np.zeros(len(values)), np.isfinite(values)).tolist()

    assert rloo(1, 0, 0, 0) == pytest.approx([1, -1 / 3, -1 / 3, -1 / 3])
    assert rloo(3, 1, 2) == pytest.approx([1.5, -1.5, 0])
    assert rloo(1, np.nan, 0) == pytest.approx([1, 0, -1])
    assert rloo(5) == [0.0] and rloo(*[0.1 + 0.2] * 3) == [0.0] * 3


def test_close_but_unequal_rewards_keep_their_advantage() -> None:
    pairs = np.float32([[1.00000, 1.00001], [2.00000, 2.00001]]).astype(np.float64).ravel()
    got = grpo_advantages(pairs, np.array([0, 0, 1, 1]), np.ones(4, bool), "sample", EPS)
    # fp32 spaces values near 2 by 2.4e-7, so the second pair is 1.001e-5 apart instead of 1e-5.
    assert got == pytest.approx([-0.6196, 0.6196, -0.6196, 0.6196], abs=3e-4)


def test_eps_is_added_to_the_sample_std() -> None:
    for eps, largest in ((1e-6, 0.999001), (1e-4, 0.909091), (1e-9, 0.999999)):
        assert _group(1.0, 1.001, 1.002, eps=eps) == pytest.approx([-largest, 0, largest], abs=1e-6)


def test_an_unscored_sample_enters_no_statistic() -> None:
    nan = float("nan")
    got = _group(1, 0, nan, 0)
    assert got == pytest.approx([1.1547, -0.5773, 0, -0.5773], abs=1e-4)
    assert _group(1, nan, nan) == [0, 0, 0] and _group(1.0) == [0.0]


def test_interleaved_groups_and_failures() -> None:
    total = np.array([1.0, 5.0, np.nan, 7.0, 0.0, np.inf])
    group = np.array([3, 1, 3, 1, 3, 1])
    got = grpo_advantages(total, group, np.array([1, 1, 0, 1, 1, 0], bool), "none", EPS)
    assert got.tolist() == [0.5, -1.0, 0.0, 1.0, -0.5, 0.0]


def test_what_cannot_be_compared_is_refused() -> None:
    both = np.ones(2, bool)
    with pytest.raises(ValueError, match=r"rows \[1\]"):
        grpo_advantages(np.array([1.0, np.nan]), np.zeros(2), both, "sample", EPS)
    with pytest.raises(ValueError, match="one column each"):
        grpo_advantages(np.zeros(2), np.zeros(3), both, "sample", EPS)
    with pytest.raises(ValueError, match="algorithm.group_std is 'std'"):
        grpo_advantages(np.zeros(2), np.zeros(2), both, "std", EPS)


@pytest.mark.parametrize("std", STD_KINDS)
def test_nothing_scored_and_nothing_at_all(std) -> None:
    assert _group(float("nan"), std=std) == [0.0]
    nothing = np.zeros(0)
    assert grpo_advantages(nothing, nothing, np.zeros(0, bool), std, EPS).shape == (0,)
    assert rloo_advantages(nothing, nothing, np.zeros(0, bool)).shape == (0,)


def test_each_response_token_gets_its_samples_value() -> None:
    got = per_token(np.array([0.5, -1 / 3, 2.0]), np.array([2, 1, 3]))
    assert got.dtype == np.float32
    assert got.tolist() == np.float32([0.5, 0.5, -1 / 3, 2, 2, 2]).tolist()
