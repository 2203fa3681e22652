"""What went wrong elsewhere in losses: reductions, KL, clips, entropy, ratios, with right numbers.

Not covered here: advantages and grouping (`test_algorithms.py`), the gradient through a cut
vocabulary and log-probs at a temperature (`test_models.py`), context parallelism (not offered).
"""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from megarl.algorithms.importance import importance_weights
from megarl.algorithms.kl import kl_estimate
from megarl.algorithms.objectives import entropy_bonus
from megarl.algorithms.reduction import Totals, count, token_weights
from megarl.data.packing import build_pack
from tests.algorithms.toy import (
    Importance,
    Kl,
    Settings,
    flat_batch,
    loss_of,
    micro_batch,
    parameters,
    policy_loss,
    scores,
)
from tests.data.make_samples import make_samples


def test_the_token_mean_is_global() -> None:
    ranks = [([1.0] * 2), ([3.0] * 6)]
    total = 0.0
    for losses in ranks:
        n = len(losses)
        weights = token_weights(
            "token_mean", torch.ones(n).bool(), torch.zeros(n).long(), Totals(8, 2), 8
        )
        total += (weights * torch.tensor(losses)).sum().item()
    assert total == 2.5


def test_accumulation_does_not_divide_again() -> None:
    samples = make_samples([(0, i, 2, 3 + i) for i in range(4)])
    old = np.full(len(samples.response_ids), -2.0, dtype=np.float32)
    advantages = np.linspace(-1, 1, len(old), dtype=np.float32)

    def gradient(cuts: list[list[int]]) -> torch.Tensor:
        table = parameters()
        for rows in cuts:
            pack = build_pack(samples, rows)
            weights = token_weights(
                "token_mean", pack.action_mask_A, pack.sequence_A, Totals(len(old), 4), 8
            )
            batch = micro_batch(pack, old, None, advantages, weights)
            loss_of(scores(table, pack), batch, Settings())[0].backward()
        return table.grad

    torch.testing.assert_close(gradient([[0, 1, 2, 3]]), gradient([[0], [1], [2], [3]]))


def test_each_reduction_has_its_own_divisor_and_none_is_the_padding() -> None:
    lengths = torch.tensor([2, 8])
    sequence = torch.repeat_interleave(torch.arange(2), lengths)
    losses = torch.repeat_interleave(torch.tensor([-1.0, 1.0]), lengths)
    mask = torch.ones(10, dtype=torch.bool)
    for kind, expected in (
        ("token_mean", 0.6),
        ("sequence_mean", 0.0),
        ("sequence_sum_constant", 0.375),
    ):
        weights = token_weights(kind, mask, sequence, count(mask, sequence), 8)
        assert (weights * losses).sum().item() == pytest.approx(expected, abs=1e-6)
        apart = [
            token_weights(kind, mask[part], sequence[part] * 0, Totals(10, 2), 8)
            for part in (slice(0, 2), slice(2, 10))
        ]
        assert torch.equal(torch.cat(apart), weights)


def test_kl_raises_the_loss() -> None:
    # π = (0.5, 0.5) against ref = (0.8, 0.2): the mean of k1 over both actions is the KL, 0.22314.
    log_probs = torch.tensor([math.log(0.5)] * 2, requires_grad=True)
    batch = flat_batch(
        [math.log(0.5)] * 2, [-0.5, -0.5], [0.5, 0.5], ref=[math.log(0.8), math.log(0.2)]
    )
    told = SimpleNamespace(log_probs_A=log_probs, entropy_A=torch.zeros(2))
    loss, sums = loss_of(told, batch, Settings(kl=Kl(0.1, "k1")))
    assert loss.item() == pytest.approx(0.52231, abs=1e-5)
    assert sums["ref_kl"].item() / 2 == pytest.approx(0.22314, abs=1e-5)
    # The sign by gradient: going further from the reference must cost more.
    for kind in ("k1", "k2", "k3"):
        further = torch.tensor([math.log(0.9)], requires_grad=True)
        no_gain = flat_batch([math.log(0.9)], [0.0], [1.0], ref=[math.log(0.5)])
        told = SimpleNamespace(log_probs_A=further, entropy_A=torch.zeros(1))
        loss_of(told, no_gain, Settings(kl=Kl(0.1, kind)))[0].backward()
        assert further.grad.item() > 0


@pytest.mark.parametrize(
    "kind, per_token_values, value, gradient",
    [
        ("k1", (-0.4700, 0.9163), 0.223144, 0.0),
        ("k2", (0.1105, 0.4198), 0.265123, -0.346574),
        ("k3", (0.1300, 0.3163), 0.223144, -0.3),
    ],
)
def test_kl_estimators_have_their_own_gradient(kind, per_token_values, value, gradient) -> None:
    theta = torch.zeros((), dtype=torch.float64, requires_grad=True)
    log_probs = torch.stack([theta, theta * 0]).log_softmax(-1)
    ref = torch.tensor([0.8, 0.2], dtype=torch.float64).log()
    estimate = kl_estimate(kind, log_probs, ref)
    assert estimate.tolist() == pytest.approx(per_token_values, abs=1e-4)
    expected = (log_probs.exp().detach() * estimate).sum()  # over samples of π, on-policy
    expected.backward()
    assert expected.item() == pytest.approx(value, abs=1e-6)
    assert theta.grad.item() == pytest.approx(gradient, abs=1e-6)


def test_a_log_ratio_of_thirty_stays_finite() -> None:
    for kind in ("k1", "k2", "k3"):
        for sign in (-30.0, 30.0):
            value = kl_estimate(kind, torch.tensor([sign]), torch.zeros(1))
            assert torch.isfinite(value).all() and value.abs().item() < 1e9


@pytest.mark.parametrize("kind", ["token_mean", "sequence_mean", "sequence_sum_constant"])
def test_a_fully_masked_batch_is_zero_and_counted(kind) -> None:
    table = parameters()
    samples = make_samples([(0, 0, 2, 3)])
    pack = build_pack(samples, [0])
    masked = torch.zeros(3, dtype=torch.bool)
    totals = count(masked, pack.sequence_A)
    weights = token_weights(kind, masked, pack.sequence_A, totals, 8)
    old = samples.rollout_log_probs
    batch = micro_batch(pack, old, old, np.ones(3, np.float32), weights)
    config = Settings(entropy_coefficient=0.1, kl=Kl(0.1))
    loss, sums = loss_of(scores(table, pack), batch, config)
    loss.backward()
    assert loss.item() == 0 and torch.equal(table.grad, torch.zeros_like(table))
    assert totals == Totals(0, 0) and sums["tokens"] == 0


def _losses(ratios, advantages, dual) -> tuple[list[float], list[float]]:
    losses, gradients = [], []
    for ratio, advantage in zip(ratios, advantages, strict=True):
        log_probs = torch.tensor([math.log(ratio)], dtype=torch.float64, requires_grad=True)
        zero, one = torch.zeros(1, dtype=torch.float64), torch.ones(1, dtype=torch.float64)
        loss, _ = policy_loss(log_probs, zero, advantage * one, one, clip_high=0.2, dual_clip=dual)
        loss.backward()
        losses.append(loss.item())
        gradients.append(log_probs.grad.item() / ratio)  # d loss / d ratio
    return losses, gradients


def test_clips_act_on_their_own_sign() -> None:
    ratios, advantages = [2, 2, 0.5], [2.0, -2.0, 2.0]
    assert _losses(ratios, advantages, 1.5)[0] == pytest.approx([-2.4, 3.0, -1.0])
    assert _losses(ratios, advantages, None)[0] == pytest.approx([-2.4, 4.0, -1.0])
    gradients = _losses([0.5, 0.5, 2, 2], [1.0, -1.0, 1.0, -1.0], None)[1]
    assert gradients == pytest.approx([-1, 0, 0, 1])


def test_the_entropy_bonus_moves_the_weights() -> None:
    logits = torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.float64, requires_grad=True)
    log_probs = logits.log_softmax(-1)
    entropy = -(log_probs.exp() * log_probs).sum()
    bonus = entropy_bonus(entropy[None], torch.ones(1))
    bonus.backward(retain_graph=True)
    expected = [0.07991, 0.13008, 0.11670, -0.32669]
    assert bonus.item() == pytest.approx(0.947537, abs=1e-6)
    assert logits.grad.tolist() == pytest.approx(expected, abs=1e-5)
    logits.grad = None
    told = SimpleNamespace(log_probs_A=torch.tensor([-1.0]), entropy_A=entropy[None])
    batch = flat_batch([-1.0], [0.0], [1.0])
    loss, _ = loss_of(told, batch, Settings(entropy_coefficient=0.5))
    loss.backward()
    assert loss.item() == pytest.approx(-0.5 * 0.947537, abs=1e-6)
    assert logits.grad.tolist() == pytest.approx([-0.5 * g for g in expected], abs=1e-5)


def test_log_probs_at_two_temperatures_show_in_the_first_ratio() -> None:
    """Logits [2, 0], old at T = 0.7 and new at T = 1: ratios 0.931 and 2.195 where 1 is right."""
    logits = torch.tensor([2.0, 0.0], dtype=torch.float64)
    at_one, at_07 = logits.log_softmax(-1), (logits / 0.7).log_softmax(-1)
    ones = torch.ones(2, dtype=torch.float64)
    _, sums = policy_loss(at_one, at_07, ones, ones)
    assert sums["ratio_min"].item() == pytest.approx(0.931, abs=1e-3)
    assert sums["ratio_max"].item() == pytest.approx(2.195, abs=1e-3)
    assert policy_loss(at_one, at_one, ones, ones)[1]["log_ratio_abs_max"] == 0


def test_importance_weights_do_not_hide_log_probs_of_a_kept_set() -> None:
    """p = (.6, .3, .1) at top-p 0.9: every ratio would be the kept mass, 0.9, a bias that a weight
    only passes on. (Such sampling is refused: `test_recipe.py`.)"""
    full = torch.tensor([0.6, 0.3]).log()
    kept = (torch.tensor([0.6, 0.3]) / 0.9).log()
    both, one = torch.ones(2, dtype=torch.bool), torch.zeros(2, dtype=torch.int64)
    weights = importance_weights(full, kept, both, one, Importance("token"))
    assert weights.tolist() == pytest.approx([0.9, 0.9], rel=1e-6)
    assert importance_weights(full, full, both, one, Importance("token")).tolist() == [1.0, 1.0]


@pytest.mark.parametrize("level", ["token", "sequence", "sequence_mean"])
def test_a_batch_whose_importance_is_all_rejected_is_zero_and_finite(level) -> None:
    table = parameters()
    samples = make_samples([(0, 0, 2, 3), (0, 1, 2, 2)])
    pack = build_pack(samples, [0, 1])
    old = samples.rollout_log_probs
    rule = Importance(level, "mask", 0.5, 2.0)
    weights = token_weights("token_mean", pack.action_mask_A, pack.sequence_A, Totals(5, 2), 8)
    batch = micro_batch(pack, old, None, old * 0 + 1, weights, old - 5, rule)
    loss, sums = loss_of(scores(table, pack), batch, Settings(importance=rule))
    loss.backward()
    assert loss.item() == 0 and torch.equal(table.grad, torch.zeros_like(table))
    assert sums["importance"] == 0 and sums["importance_high"] == sums["tokens"] == 5
