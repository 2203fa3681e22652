"""Loss and gradient of every objective under every reduction, KL estimator and importance weight.

The toy is a bigram table in float64, through the house's packs, micro-batches and weights; the
oracle is `plain.py`, loops over the papers' formulas, and its central differences. Not covered:
the model's own gradient and float32 rounding (tests/models), own objectives (test_own.py).
"""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from megarl.algorithms.objectives import merge_sums
from megarl.algorithms.reduction import Totals
from megarl.data.minibatch import micro_batches
from megarl.data.packing import build_pack
from tests.algorithms.plain import plain_loss
from tests.algorithms.toy import (
    VOCABULARY,
    Importance,
    Kl,
    Settings,
    loss_of,
    parameters,
    scores,
)
from tests.data.make_samples import make_samples

SAMPLES = make_samples([(0, 0, 2, 4), (0, 1, 1, 3), (1, 0, 3, 1), (1, 1, 2, 6)], holes=True)
LONGEST = 9
OBJECTIVES = ["ppo_clip", "gspo", "cispo"]
REDUCTIONS = ["token_mean", "sequence_mean", "sequence_sum_constant"]
ESTIMATORS = ["k1", "k2", "k3"]
WEIGHTS = [
    Importance(),
    *(Importance(level, "truncate", 0.0, 1.1) for level in ("token", "sequence", "sequence_mean")),
    *(Importance(level, "mask", 0.85, 1.15) for level in ("token", "sequence", "sequence_mean")),
]


def _columns() -> dict[str, np.ndarray]:
    """float32 [R]: log-probs near the toy's own, each column with its own seeded noise."""
    pack = build_pack(SAMPLES, range(len(SAMPLES)))
    own = scores(parameters(1), pack).log_probs_A.detach().numpy()
    noise = np.random.default_rng(3)
    old = own + noise.normal(0, 0.3, len(own))
    return {
        "old": old.astype(np.float32),
        "ref": (own + noise.normal(0, 0.5, len(own))).astype(np.float32),
        "rollout": (old + noise.normal(0, 0.25, len(own))).astype(np.float32),
        "advantages": noise.normal(0, 1, len(own)).astype(np.float32),
    }


COLUMNS = _columns()


def _ours(settings: Settings) -> tuple[float, np.ndarray, dict[str, float]]:
    """Loss, gradient [V, V] and sums over two packs, as the actor gets them."""
    samples = SimpleNamespace(rollout_log_probs=COLUMNS["rollout"])
    experience = SimpleNamespace(
        samples=samples, old_log_probs=COLUMNS["old"], ref_log_probs=COLUMNS["ref"], hash="h"
    )
    derived = SimpleNamespace(experience_hash="h", advantages=COLUMNS["advantages"])
    packs = [build_pack(SAMPLES, rows) for rows in ([0, 2], [1, 3])]
    totals = Totals(int(SAMPLES.action_mask.sum()), len(SAMPLES))
    table, losses, sums = parameters(1), [], []
    for batch in micro_batches(experience, derived, packs, totals, settings, LONGEST):
        loss, told = loss_of(scores(table, batch.pack), batch, settings)
        loss.backward()
        losses.append(loss.item())
        sums.append(told)
    return sum(losses), table.grad.numpy(), merge_sums(sums)


def _differences(settings: Settings, step: float = 1e-5) -> tuple[float, np.ndarray]:
    """The formula's loss and its central differences in every entry of the table."""
    table = parameters(1).detach().numpy()

    def at(moved: np.ndarray) -> float:
        return plain_loss(moved, SAMPLES, COLUMNS, settings, LONGEST, constant_VV=table)

    gradient = np.zeros_like(table)
    for row, column in itertools.product(range(VOCABULARY), repeat=2):
        change = np.zeros_like(table)
        change[row, column] = step
        gradient[row, column] = (at(table + change) - at(table - change)) / (2 * step)
    return at(table), gradient


def _compare(settings: Settings) -> dict[str, float]:
    loss, gradient, sums = _ours(settings)
    expected_loss, expected = _differences(settings)
    # Weights, advantages and importance are float32: 6e-8 of each number, no more.
    assert loss == pytest.approx(expected_loss, rel=1e-6, abs=1e-7)
    np.testing.assert_allclose(gradient, expected, rtol=1e-6, atol=2e-7)
    assert np.abs(expected).max() > 1e-3
    return sums


def _name(value: object) -> str:
    if isinstance(value, Importance):
        return f"{value.level}-{value.mode}"
    return str(value)


def _check(importance: Importance, objective: str, reduction: str, estimator: str) -> None:
    kl = Kl(0.3, estimator)
    sums = _compare(Settings(objective, 0.1, 0.12, 1.3, importance, reduction, 0.05, kl))
    # Each case has tokens on both sides of every bound it has.
    assert 0 < sums["clip_low"] < sums["tokens"] and 0 < sums["clip_high"] < sums["tokens"]
    if importance.level != "none":
        assert 0 < sums["importance_high"] < sums["tokens"]
        assert (sums["importance_low"] > 0) == (importance.mode == "mask")


@pytest.mark.parametrize("reduction, estimator", list(zip(REDUCTIONS, ESTIMATORS, strict=True)))
@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("importance", WEIGHTS, ids=_name)
def test_loss_and_gradient_are_the_formulas(importance, objective, reduction, estimator) -> None:
    _check(importance, objective, reduction, estimator)


@pytest.mark.long
@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("importance", WEIGHTS, ids=_name)
def test_every_combination_is_the_formula(importance, objective, reduction, estimator) -> None:
    _check(importance, objective, reduction, estimator)


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_terms_without_a_coefficient_add_nothing(objective) -> None:
    _compare(Settings(objective))


def test_ratios_and_weights_have_no_gradient_of_their_own() -> None:
    """CISPO: were its ratio not constant, the differences of the whole formula would be ours."""
    settings = Settings("cispo")
    table = parameters(1).detach().numpy()
    change = np.zeros_like(table)
    change[2, 3] = 1e-5
    whole = [
        plain_loss(table + sign * change, SAMPLES, COLUMNS, settings, LONGEST) for sign in (1, -1)
    ]
    ours = _ours(settings)[1][2, 3]
    assert abs((whole[0] - whole[1]) / 2e-5 - ours) > 1e-3


def test_the_toy_has_an_action_in_every_sequence() -> None:
    sequences = torch.from_numpy(np.repeat(np.arange(4), SAMPLES.response_lengths))
    assert len(torch.unique(sequences[torch.tensor(SAMPLES.action_mask)])) == 4
