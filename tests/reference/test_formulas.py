"""The reference's own formulas on hand numbers, so that it can be trusted to judge.

Not covered: the house (`test_iteration.py`, `test_variants.py`).
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.reference.formulas import credit, gae, rewards_to_go, shaped, whitened
from tests.reference.plain import divisor, importance, kl_terms, policy_terms
from tests.reference.rules import Row, Rules


def _row(
    length: int, reward: float | None = 1.0, group: int = 0, candidate: int = 0, **more
) -> Row:
    facts = {
        "prompt": np.array([1, 2]),
        "response": np.arange(length),
        "acts": np.ones(length, bool),
        "rollout": np.zeros(length, np.float32),
        "truncated": False,
    }
    return Row(group=group, candidate=candidate, reward=reward, **facts | more)


def _of_group(rewards: list[float | None], **rules) -> list[float | None]:
    """One advantage per row, None where it does not train."""
    rows = [_row(1, reward, candidate=at) for at, reward in enumerate(rewards)]
    told = credit(rows, Rules(**rules), [np.zeros(1)] * len(rows), None, None, None)
    return [None if column is None else float(column[0]) for column in told.advantages]


@pytest.mark.parametrize(
    ("rules", "wanted"),
    [
        ({}, [1.5, -0.5, -0.5, -0.5]),
        ({"group_std": "population"}, [1.73205, -0.57735, -0.57735, -0.57735]),
        ({"group_std": "none"}, [0.75, -0.25, -0.25, -0.25]),
        ({"group_std": "leave_one_out"}, [1.0, -0.57735, -0.57735, -0.57735]),
        ({"advantage": "rloo"}, [1.0, -1 / 3, -1 / 3, -1 / 3]),
        ({"advantage": "reinforce_baseline"}, [0.75, -0.25, -0.25, -0.25]),
    ],
)
def test_one_of_four_is_right(rules: dict, wanted: list[float]) -> None:
    assert _of_group([1.0, 0.0, 0.0, 0.0], **rules) == pytest.approx(wanted, abs=1e-5)


def test_failed_and_equal_rewards() -> None:
    assert _of_group([1.0, 0.0, None, 0.0]) == [None] * 4
    scored = _of_group([1.0, 0.0, None, 0.0], drop_partial=False)
    assert scored.pop(2) is None and scored == pytest.approx([1.1547, -0.57735, -0.57735], abs=1e-5)
    assert _of_group([0.1, 0.1, 0.1, 0.1]) == [None] * 4
    assert _of_group([0.1, 0.1, 0.1, 0.1], drop_equal=False) == [0.0] * 4


def test_process_rewards_sum_the_steps_ahead() -> None:
    """Step scores 1, 0 | 1 | 0, 0: mean 0.4, deviation 0.5477."""
    steps = (((1, 1.0), (3, 0.0)), ((0, 1.0),), ((1, 0.0), (2, 0.0)), ())
    rows = [_row(4, candidate=at, steps=pairs) for at, pairs in enumerate(steps)]
    rules = Rules(process=True)
    told = credit(rows, rules, [np.zeros(4)] * 4, None, None, None).advantages
    high, low = 0.6 / np.sqrt(0.3), -0.4 / np.sqrt(0.3)
    assert told[0] == pytest.approx([high + low, high + low, low, low], abs=1e-5)
    assert told[1] == pytest.approx([high, 0, 0, 0], abs=1e-5)
    assert told[2] == pytest.approx([2 * low, 2 * low, low, 0], abs=1e-5)


def test_gae_skips_foreign_tokens_and_may_look_ahead() -> None:
    acts = np.array([True, True, False, False, True])
    row = _row(5, acts=acts)
    values, rewards = np.array([0.5, 0.6, 0.3, 0.2, 0.7]), np.array([0, 0, 0, 0, 1.0])
    rules = Rules(gamma=1.0, lam=0.9)
    assert gae(row, rewards, values, 9.0, rules)[acts] == pytest.approx([0.433, 0.37, 0.3])
    cut = replace(row, truncated=True)
    assert gae(cut, rewards, values, 2.0, rules)[acts] == pytest.approx([2.053, 2.17, 2.3])
    terminal = replace(rules, bootstrap=False)
    assert gae(cut, rewards, values, 2.0, terminal)[acts] == pytest.approx([0.433, 0.37, 0.3])
    to_go = rewards_to_go(row, rewards, replace(rules, gamma=0.5))
    assert to_go.tolist() == [0.25, 0.5, 0, 0, 1.0]


def test_whitening_and_overlong() -> None:
    rows = [_row(2), _row(2, candidate=1)]
    columns = [np.array([1.0, 2.0]), np.array([3.0, 4.0])]
    full = np.concatenate(whitened(columns, rows, "full"))
    assert full == pytest.approx([-1.1619, -0.3873, 0.3873, 1.1619], abs=1e-4)
    scale = np.concatenate(whitened(columns, rows, "scale"))
    assert scale == pytest.approx([0.7746, 1.5492, 2.3238, 3.0984], abs=1e-4)
    rules = Rules(buffer_tokens=4, penalty=0.5)  # of at most 12 tokens
    assert [shaped(_row(n), rules) for n in (8, 9, 12)] == [1.0, 0.875, 0.5]


def test_clips_and_their_gradients() -> None:
    ratios, advantages = torch.tensor([2.0, 2.0, 0.5]), torch.tensor([2.0, -2.0, 2.0])
    now = ratios.double().log()
    none, rules = torch.zeros(3, dtype=torch.float64), Rules()
    assert policy_terms(now, none, advantages, rules).tolist() == pytest.approx([-2.4, 4, -1])
    dual = policy_terms(now, none, advantages, replace(rules, dual_clip=1.5))
    assert dual.tolist() == pytest.approx([-2.4, 3, -1])
    table = {(0.5, 1.0): -1.0, (0.5, -1.0): 0.0, (2.0, 1.0): 0.0, (2.0, -1.0): 1.0}
    for (ratio, advantage), wanted in table.items():
        now = torch.tensor([ratio], dtype=torch.float64).log().requires_grad_()
        policy_terms(now, none[:1], torch.tensor([advantage]), rules).sum().backward()
        assert now.grad.item() == pytest.approx(wanted * ratio)  # d/d log ρ = ρ · d/dρ
    now = torch.tensor([0.1, 0.5, -0.3], dtype=torch.float64, requires_grad=True)
    told = policy_terms(now, none, torch.ones(3), replace(rules, objective="gspo"))
    assert told.tolist() == pytest.approx([-np.exp(0.1)] * 3)
    told = policy_terms(now, none, torch.ones(3), replace(rules, objective="cispo"))
    assert told.tolist() == pytest.approx([-np.exp(0.1) * 0.1, -1.2 * 0.5, 0.8 * 0.3])


def test_kl_estimators() -> None:
    now, ref = torch.tensor([0.5, 0.5]).log(), torch.tensor([0.8, 0.2]).log()
    wanted = {"k1": [-0.47, 0.9163], "k2": [0.1105, 0.4198], "k3": [0.13, 0.3163]}
    for kind, numbers in wanted.items():
        assert kl_terms(now, ref, kind).tolist() == pytest.approx(numbers, abs=1e-4)


def test_reductions() -> None:
    """Lengths 2 and 8, losses −1 and +1; the longest allowed is 12."""
    rows = [_row(2), _row(8, candidate=1), _row(5, candidate=2, acts=np.zeros(5, bool))]

    def of(kind: str) -> float:
        by = [divisor(row, rows, Rules(reduction=kind)) for row in rows[:2]]
        return -2 / by[0] + 8 / by[1]

    assert of("token_mean") == pytest.approx(0.6)
    assert of("sequence_mean") == pytest.approx(0)
    assert of("sequence_sum_constant") == pytest.approx(6 / 24)


def test_importance() -> None:
    row = _row(3, acts=np.array([True, False, True]))
    old = np.log(np.array([2.0, 9.0, 0.8]))
    rules = Rules(importance="token", importance_high=1.5)
    assert importance(row, old, rules) == pytest.approx([1.5, 0, 0.8])
    rules = Rules(importance="sequence", importance_high=5.0)
    assert importance(row, old, rules) == pytest.approx([1.6, 0, 1.6])
    rules = Rules(importance="sequence_mean", importance_mode="mask", importance_high=1.2)
    assert importance(row, old, rules).tolist() == [0, 0, 0]
