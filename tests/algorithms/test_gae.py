"""Sums along responses against loops over single tokens and hand numbers; rewards on tokens.

Not covered: the values themselves (tests/models).
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.algorithms.gae import gae, returns_to_go
from megarl.algorithms.shaping import (
    kl_penalty,
    last_actions,
    outcome_rewards,
    overlong_penalty,
    shaped_totals,
    step_rewards,
)
from megarl.contracts.steps import Steps


def _offsets(*lengths: int) -> np.ndarray:
    return np.cumsum([0, *lengths])


def _loop(rewards, values, following, mask, gamma, lam) -> list[float]:
    """GAE of one response, token by token from behind, skipping what is no action."""
    result, carried, after = [0.0] * len(mask), 0.0, following
    for at in reversed(range(len(mask))):
        if not mask[at]:
            continue
        carried = rewards[at] + gamma * after - values[at] + gamma * lam * carried
        result[at], after = carried, values[at]
    return result


NUMBER = st.floats(-3, 3, width=32)
TOKEN = st.tuples(st.booleans(), NUMBER, NUMBER)
SHARE = st.sampled_from([0.0, 0.5, 0.95, 1.0])


@settings(max_examples=200, deadline=None)
@given(
    responses=st.lists(st.tuples(st.lists(TOKEN, min_size=1, max_size=9), NUMBER), max_size=7),
    gamma=SHARE,
    lam=SHARE,
)
def test_any_responses_agree_with_the_loop_and_stand_alone(responses, gamma, lam) -> None:
    tokens = [token for row, _ in responses for token in row]
    mask = np.array([token[0] for token in tokens], dtype=bool)
    rewards, values = (np.array([token[at] for token in tokens], np.float64) for at in (1, 2))
    following = np.array([after for _, after in responses], dtype=np.float64)
    offsets = _offsets(*(len(row) for row, _ in responses))
    got = gae(rewards, values, following, mask, offsets, gamma, lam)
    sums = returns_to_go(rewards, mask, offsets, gamma)
    for row in range(len(responses)):
        span = slice(offsets[row], offsets[row + 1])
        own = (rewards[span], values[span], following[row], mask[span])
        np.testing.assert_allclose(got[span], _loop(*own, gamma, lam), rtol=1e-12, atol=1e-12)
        plain = _loop(rewards[span], 0 * values[span], 0.0, mask[span], gamma, 1.0)
        np.testing.assert_allclose(sums[span], plain, rtol=1e-12, atol=1e-12)
        alone = gae(own[0], own[1], own[2][None], own[3], _offsets(len(own[0])), gamma, lam)
        assert alone.tobytes() == got[span].tobytes()


def test_observation_tokens_take_no_step_and_no_value() -> None:
    mask = np.array([1, 1, 0, 0, 1], bool)
    values = np.array([0.5, 0.6, 0.3, 0.2, 0.7])
    rewards = outcome_rewards(np.array([1.0]), mask, _offsets(5))
    got = gae(rewards, values, np.zeros(1), mask, _offsets(5), 1.0, 0.9)
    assert got == pytest.approx([0.433, 0.37, 0, 0, 0.3], abs=1e-12)


def test_a_cut_off_response_goes_on_with_the_value_after_it() -> None:
    """One token, V 0.5, reward 0, γ 0.9: terminated −0.5, cut off before a state worth 2: 1.3."""
    one, mask = _offsets(1, 1), np.ones(2, bool)
    got = gae(np.zeros(2), np.full(2, 0.5), np.array([0.0, 2.0]), mask, one, 0.9, 0.95)
    assert got == pytest.approx([-0.5, 1.3])


def test_returns_are_discounted_per_action() -> None:
    mask = np.array([1, 0, 1, 1, 1], bool)
    rewards = np.array([1.0, 9.0, 0.0, 4.0, 2.0])
    got = returns_to_go(rewards, mask, _offsets(4, 1), 0.5)
    assert got.tolist() == [2.0, 0.0, 2.0, 4.0, 2.0]


def test_responses_without_an_action_and_no_responses() -> None:
    offsets, mask = _offsets(2, 1), np.zeros(3, bool)
    assert gae(np.ones(3), np.ones(3), np.ones(2), mask, offsets, 1.0, 1.0).tolist() == [0.0] * 3
    assert last_actions(mask, offsets).tolist() == [-1, -1]
    assert last_actions(np.array([1, 0, 0], bool), _offsets(1, 2)).tolist() == [0, -1]
    assert outcome_rewards(np.ones(2), mask, offsets).tolist() == [0.0] * 3
    nothing = np.zeros(0)
    empty = (nothing, nothing, nothing, np.zeros(0, bool), _offsets(), 1.0, 1.0)
    assert gae(*empty).shape == (0,)
    assert outcome_rewards(nothing, np.zeros(0, bool), _offsets()).shape == (0,)


def test_an_outcome_sits_on_the_last_action() -> None:
    """[a, b, EOS] and a full response without one: the last real token; behind it tool output."""
    mask = np.array([1, 1, 1, 1, 1, 1, 1, 0], bool)
    got = outcome_rewards(np.array([1.0, 2.0, 3.0]), mask, _offsets(3, 3, 2))
    assert got.tolist() == [0, 0, 1, 0, 0, 2, 3, 0]


def test_a_step_counts_on_the_action_it_ends_at_or_the_one_before() -> None:
    mask = np.array([0, 1, 0, 1, 1, 1], bool)
    steps = Steps.from_pairs([[(0, 9.0), (1, 1.0), (2, 0.5), (3, 0.25)], [(1, 2.0)]])
    assert step_rewards(steps, mask, _offsets(4, 2)).tolist() == [0, 1.5, 0, 0.25, 0, 2]
    # What comes before a response's first action is not the response's before it either.
    early = Steps.from_pairs([[(0, 1.0)], [(0, 5.0), (1, 2.0)]])
    assert step_rewards(early, np.array([1, 0, 1], bool), _offsets(1, 2)).tolist() == [1, 0, 2]
    with pytest.raises(ValueError, match="token 1 of a response of 1 tokens"):
        step_rewards(Steps.from_pairs([[(1, 2.0)]]), np.ones(1, bool), _offsets(1))


def test_overlong_responses_lose_linearly() -> None:
    """DAPO's own lengths: L_max 20480, L_cache 4096."""
    lengths = np.array([1, 16384, 16385, 18432, 20480, 30000])
    got = overlong_penalty(lengths, 20480, 4096)
    assert got.tolist() == [0, 0, -1 / 4096, -0.5, -1, -1]
    totals = np.array([1.0, 1.0, 1.0, 1.0, np.nan, 1.0])
    np.testing.assert_equal(
        shaped_totals(totals, lengths, 20480, 4096, 0.5), totals + 0.5 * np.array(got)
    )
    assert shaped_totals(totals, lengths, 20480, 0, 0.5).tobytes() == totals.tobytes()
    assert not overlong_penalty(lengths, 20480, 0).any()


def test_the_kl_of_a_token_is_the_sealed_gap_in_float64() -> None:
    old, ref = np.float32([-1.0, -2.0, -0.1]), np.float32([-1.5, -1.0, -0.3])
    got = kl_penalty(old, ref, np.array([1, 1, 0], bool))
    assert got.dtype == np.float64 and got.tolist() == [0.5, -1.0, 0.0]
