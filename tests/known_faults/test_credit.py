"""What went wrong elsewhere in baselines, whitening, returns and the place of a reward, with the
right numbers.

Not covered here: GRPO's own statistics (test_algorithms.py), losses (test_losses.py), ranks (the
same bits on 1, 2 and 4: tests/algorithms/test_credit.py).
"""

from __future__ import annotations

import numpy as np
import pytest

from tests.algorithms.make_credit import Row, credit_of


def _group(*rewards: float, **algorithm: object) -> list[float]:
    rows = [Row(0, candidate, reward, mask=(1,)) for candidate, reward in enumerate(rewards)]
    return credit_of(rows, group_size=len(rewards), **algorithm).advantages.tolist()


def test_the_odd_one_out_is_not_divided_by_the_agreement_of_the_others() -> None:
    first = _group(1, 0, 0, 0, group_std="leave_one_out")[0]
    assert first == 1.0
    high = float(np.float32(0.95))
    assert _group(0, *[high] * 7, group_std="leave_one_out")[0] == pytest.approx(-0.95, abs=1e-7)


def test_a_leave_one_out_baseline_is_the_mean_of_the_others() -> None:
    assert _group(1, 0, 0, 1, advantage="rloo") == pytest.approx([2 / 3, -2 / 3, -2 / 3, 2 / 3])


def _whitened(values: list[float], kind: str) -> np.ndarray:
    rows = [Row(draw, 0, value, mask=(1,)) for draw, value in enumerate(values)]
    keys = {"advantage": "reinforce", "whiten": kind}
    return credit_of(rows, group_size=1, **keys).derived.advantages


def test_whitening_is_over_everything_that_trains() -> None:
    full = _whitened([1, 2, 3, 4], "full")
    assert full == pytest.approx([-1.1619, -0.3873, 0.3873, 1.1619], abs=1e-4)
    scale = _whitened([1, 2, 3, 4], "scale")
    assert scale == pytest.approx([0.7746, 1.5492, 2.3238, 3.0984], abs=1e-4)


@pytest.mark.parametrize("kind", ["full", "scale"])
def test_a_single_token_is_left_as_it_is(kind: str) -> None:
    assert _whitened([3], kind).tolist() == [3.0]


def test_a_score_sits_on_the_last_real_token() -> None:
    rows = [Row(0, 0, 1.0, mask=(1, 1, 1)), Row(1, 0, 1.0, mask=(1, 1, 0))]
    shaped = credit_of(rows, group_size=1, advantage="reinforce").derived.shaped_rewards
    # The end-of-sequence token is an action; what a tool said behind it is none.
    assert shaped.tolist() == [0, 0, 1, 0, 1, 0]


def test_observations_take_no_part_in_returns() -> None:
    row = Row(0, 0, 1.0, mask=(1, 1, 0, 0, 1), values=(0.5, 0.6, 0.3, 0.2, 0.7))
    keys = {"name": "ppo", "whiten": "none", "gae": {"lam": 0.9}}
    derived = credit_of([row], group_size=1, **keys).derived
    trained = derived.advantages[[0, 1, 4]]
    assert trained == pytest.approx([0.433, 0.37, 0.3], abs=1e-6)
    assert derived.advantages[[2, 3]].tolist() == [0.0, 0.0]
    assert derived.returns[[0, 1, 4]] == pytest.approx([0.933, 0.97, 1.0], abs=1e-6)


def test_what_was_cut_off_goes_on_and_what_ended_does_not() -> None:
    def first(cut: bool, truncation: str) -> float:
        row = Row(0, 0, 0.0, mask=(1,), cut=cut, values=(0.25,), last_value=2.0)
        gae = {"lam": 1.0, "truncation": truncation}
        keys = {"name": "ppo", "whiten": "none", "gae": gae}
        return float(credit_of([row], group_size=1, **keys).derived.advantages[0])

    assert first(cut=False, truncation="bootstrap") == -0.25
    assert first(cut=True, truncation="bootstrap") == 1.75
    assert first(cut=True, truncation="terminal") == -0.25
