"""The critic's loss: hand numbers, gradients, clipping, cuts, explained variance.

Not covered here: the values themselves (tests/models), the returns (test_gae.py).
"""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from megarl.algorithms.objectives import merge_sums
from megarl.algorithms.reduction import Totals, count, token_weights
from megarl.algorithms.values import critic_loss, explained_variance
from megarl.data.packing import ValueBatch, build_pack, pad_pack
from tests.data.make_samples import make_samples

CLIP, FREE = SimpleNamespace(value_clip=0.2), SimpleNamespace(value_clip=None)


def _loss(values, old, returns, weights, settings=CLIP):
    columns = [torch.tensor(column, dtype=torch.float64) for column in (old, returns, weights)]
    batch = SimpleNamespace(values_A=columns[0], returns_A=columns[1], weights_A=columns[2])
    values_A = torch.tensor(values, dtype=torch.float64, requires_grad=True)
    loss, sums = critic_loss(values_A, batch, settings)
    loss.backward()
    return loss.item(), values_A.grad.tolist(), {name: v.item() for name, v in sums.items()}


def test_the_larger_of_both_errors_counts() -> None:
    """V_old = 0, ε = 0.2. V = 1 towards R = 2: clipped 0.2 is further off. V = 1 beyond R = 0.3:
    unclipped is. V = 0.1: within reach. V = −1 away from R = 1: unclipped is."""
    loss, gradient, sums = _loss([1, 1, 0.1, -1], [0] * 4, [2, 0.3, 1, 1], [0.25] * 4)
    errors = [1.8**2, 0.7**2, 0.9**2, 2.0**2]
    assert loss == pytest.approx(sum(errors) / 8)
    assert gradient == pytest.approx([0, 0.7 / 4, -0.9 / 4, -2 / 4])
    assert sums["value_loss"] == pytest.approx(sum(errors) / 2) and sums["value_clipped"] == 1
    assert sums["loss"] == loss and sums["tokens"] == 4


def test_without_a_clip_it_is_half_the_squared_error() -> None:
    loss, gradient, sums = _loss([1, 1], [0, 0], [2, 0.3], [0.5, 0.5], FREE)
    assert loss == pytest.approx((1 + 0.49) / 4) and gradient == pytest.approx([-0.5, 0.35])
    assert sums["value_clipped"] == 0


def test_gradients_are_the_finite_differences() -> None:
    noise = np.random.default_rng(0)
    old, returns, weights = noise.normal(size=(3, 40))
    values = old + noise.normal(0, 0.3, 40)

    def formula(at: np.ndarray) -> float:
        near = np.clip(at, old - 0.2, old + 0.2)
        return float((weights / 2 * np.maximum((at - returns) ** 2, (near - returns) ** 2)).sum())

    loss, gradient, sums = _loss(values, old, returns, weights)
    assert loss == pytest.approx(formula(values), rel=1e-12) and 0 < sums["value_clipped"] < 40
    for token in range(40):
        step = np.zeros(40)
        step[token] = 1e-6
        slope = (formula(values + step) - formula(values - step)) / 2e-6
        assert gradient[token] == pytest.approx(slope, abs=1e-8)


def test_before_any_update_nothing_is_clipped() -> None:
    """V is V_old bit for bit in float32, so no rounding of V_old + (V − V_old) may count."""
    old = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    batch = SimpleNamespace(
        values_A=old, returns_A=torch.zeros(1000), weights_A=torch.full((1000,), 1e-3)
    )
    values = old.clone().requires_grad_()
    loss, sums = critic_loss(values, batch, CLIP)
    loss.backward()
    assert sums["value_clipped"] == 0
    torch.testing.assert_close(values.grad, old / 1000)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_tokens_that_are_no_action_add_nothing(bad) -> None:
    loss, gradient, sums = _loss([1, bad], [bad and 0, bad], [2, bad], [1, 0], FREE)
    assert loss == 0.5 and gradient == [-1, 0] and sums["tokens"] == 1
    assert all(math.isfinite(value) for value in sums.values())


def test_an_action_that_is_no_number_shows() -> None:
    loss, _, sums = _loss([math.nan, 1], [0, 0], [1, 1], [0.5, 0.5])
    assert math.isnan(loss) and math.isnan(sums["value_loss"])


@pytest.mark.parametrize("kind", ["token_mean", "sequence_mean", "sequence_sum_constant"])
def test_any_cut_gives_the_same_loss_gradient_and_sums(kind) -> None:
    samples = make_samples([(0, i, 1 + i % 3, 1 + 2 * i) for i in range(5)], holes=True)
    noise, tokens = np.random.default_rng(1), len(samples.response_ids)
    old, returns = noise.normal(size=(2, tokens)).astype(np.float32)
    weights_of = torch.tensor(noise.normal(size=11), dtype=torch.float64)  # the toy's whole critic

    def run(cuts: list[list[int]], padding: int):
        head, losses, sums = weights_of.clone().requires_grad_(), [], []
        totals = Totals(int(samples.action_mask.sum()), 5)
        for rows in cuts:
            pack = build_pack(samples, rows)
            pack = pad_pack(pack, len(pack.token_ids_T) + padding)
            assert count(pack.action_mask_A, pack.sequence_A).tokens <= totals.tokens
            batch = ValueBatch(
                pack=pack,
                values_A=pack.take(old),
                returns_A=pack.take(returns),
                weights_A=token_weights(kind, pack.action_mask_A, pack.sequence_A, totals, 9),
            )
            loss, told = critic_loss(head[pack.target_A % 11], batch, CLIP)
            loss.backward()
            losses.append(loss.item())
            sums.append(told)
        return sum(losses), head.grad, merge_sums(sums)

    loss, gradient, sums = run([[0, 1, 2, 3, 4]], 0)
    assert 0 < sums["value_clipped"] < sums["tokens"]
    for cuts, padding in (
        ([[4, 0], [2, 1, 3]], 3),
        ([[i] for i in range(5)], 1),
        ([[], [3, 2, 1, 4, 0]], 0),
    ):
        again = run(cuts, padding)
        assert again[0] == pytest.approx(loss, rel=1e-12)
        torch.testing.assert_close(again[1], gradient, rtol=1e-12, atol=1e-14)
        assert again[2] == pytest.approx(sums, rel=1e-9)


def test_explained_variance_is_one_less_the_unexplained_share() -> None:
    values, returns = np.array([0.5, 1.5, 2.0, 4.0]), np.array([1.0, 2.0, 3.0, 4.5])
    _, _, sums = _loss(values, values, returns, [0.25] * 4)
    expected = 1 - np.var(returns - values) / np.var(returns)
    assert explained_variance(sums) == pytest.approx(expected)
    assert explained_variance(_loss(returns, returns, returns, [1] * 4)[2]) == 1
    assert explained_variance(_loss([0.1] * 4, [0.1] * 4, returns, [1] * 4)[2]) == pytest.approx(0)


def test_returns_that_do_not_vary_have_no_explained_variance() -> None:
    assert explained_variance(_loss([1, 2, 3], [0] * 3, [0.1] * 3, [1] * 3)[2]) is None
    assert explained_variance(_loss([1.0], [0], [5], [1])[2]) is None
    assert explained_variance({"tokens": 0.0}) is None


def test_a_clip_of_zero_is_refused() -> None:
    with pytest.raises(ValueError, match="critic.value_clip is 0"):
        _loss([1], [1], [1], [1], SimpleNamespace(value_clip=0))
