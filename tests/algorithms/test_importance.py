"""Importance weights: hand numbers, bounds, masks, extremes and what is reported of them.

Not covered here: their place in the loss (test_objectives.py), gradients (test_gradients.py).
"""

from __future__ import annotations

import math

import pytest
import torch

from megarl.algorithms.importance import (
    effective_share,
    importance_ratios,
    importance_sums,
    importance_weights,
)
from megarl.algorithms.objectives import merge_sums
from tests.algorithms.toy import Importance

ACTIVE = torch.tensor([True, True, False, True, True])
SEQUENCE = torch.tensor([0, 0, 0, 1, 1])
ROLLOUT = torch.tensor([-1.0, -2.0, math.nan, -1.0, -0.5])
OLD = ROLLOUT + torch.tensor([0.5, -0.3, 0.0, 1.0, 0.2])  # products e^0.2 and e^1.2


def _weights(rule: Importance, old=OLD, rollout=ROLLOUT) -> list[float]:
    weights = importance_weights(old, rollout, ACTIVE, SEQUENCE, rule)
    assert weights.dtype == torch.float32 and not weights.requires_grad
    return weights[ACTIVE].tolist()


@pytest.mark.parametrize(
    "level, exponents",
    [
        ("token", [0.5, -0.3, 1.0, 0.2]),
        ("sequence", [0.2, 0.2, 1.2, 1.2]),
        ("sequence_mean", [0.1, 0.1, 0.6, 0.6]),
    ],
)
def test_ratios_are_of_tokens_products_or_geometric_means(level, exponents) -> None:
    expected = [math.exp(x) for x in exponents]
    assert _weights(Importance(level, high=100.0)) == pytest.approx(expected, rel=1e-6)
    assert _weights(Importance(level, high=1.5)) == pytest.approx(
        [min(x, 1.5) for x in expected], rel=1e-6
    )
    masked = [x if 0.8 <= x <= 1.7 else 0.0 for x in expected]
    assert _weights(Importance(level, "mask", 0.8, 1.7)) == pytest.approx(masked, rel=1e-6)
    assert 0.0 in masked


def test_the_bounds_of_a_mask_belong_to_it() -> None:
    rule = Importance("token", "mask", 1.0, 1.0)
    assert _weights(rule, old=ROLLOUT) == [1.0] * 4


def test_truncation_has_no_lower_bound() -> None:
    assert _weights(Importance("token", low=0.9))[1] == pytest.approx(math.exp(-0.3), rel=1e-6)


def test_no_correction_is_no_column() -> None:
    rule = Importance()
    assert importance_weights(OLD, ROLLOUT, ACTIVE, SEQUENCE, rule) is None
    assert importance_sums(OLD, ROLLOUT, ACTIVE, SEQUENCE, rule) == {}


@pytest.mark.parametrize("level", ["token", "sequence", "sequence_mean"])
def test_tokens_that_are_no_action_count_nowhere(level) -> None:
    """A hole's log-probs are not looked at, and a sequence of holes has no ratio of 0/0."""
    hole = ACTIVE & (SEQUENCE == 0)
    ratios = importance_ratios(OLD, ROLLOUT, hole, SEQUENCE, level)
    assert ratios[~hole].tolist() == [1.0] * 3
    expected = importance_ratios(OLD[:2], ROLLOUT[:2], hole[:2], SEQUENCE[:2], level)
    assert torch.equal(ratios[hole], expected)


@pytest.mark.parametrize("level", ["token", "sequence", "sequence_mean"])
@pytest.mark.parametrize("gap", [300.0, -300.0])
def test_extremes_are_clamped_before_exp(level, gap) -> None:
    ratios = importance_ratios(ROLLOUT + gap, ROLLOUT, ACTIVE, SEQUENCE, level)
    assert ratios[ACTIVE].tolist() == pytest.approx([math.exp(math.copysign(20, gap))] * 4)
    assert _weights(Importance(level), old=ROLLOUT + gap) == pytest.approx(
        [2.0 if gap > 0 else math.exp(-20)] * 4
    )


def test_sums_describe_the_weights_in_use() -> None:
    sums = importance_sums(OLD, ROLLOUT, ACTIVE, SEQUENCE, Importance("token", "mask", 0.8, 2.0))
    ratios = [math.exp(x) for x in (0.5, -0.3, 1.0, 0.2)]
    kept = [ratios[0], ratios[3]]
    expected = {
        "importance": sum(kept),
        "importance_squared": sum(w * w for w in kept),
        "importance_max": max(kept),
        "importance_min": 0.0,
        "importance_ratio_max": ratios[2],
        "importance_ratio_min": ratios[1],
        "importance_high": 1,
        "importance_low": 1,
    }
    assert {name: value.item() for name, value in sums.items()} == pytest.approx(expected, rel=1e-6)
    share = effective_share(merge_sums([sums]) | {"tokens": 4.0})
    assert share == pytest.approx(sum(kept) ** 2 / (4 * sum(w * w for w in kept)))


def test_packs_merge_to_the_same_numbers() -> None:
    rule = Importance("sequence", high=1.5)
    whole = merge_sums([importance_sums(OLD, ROLLOUT, ACTIVE, SEQUENCE, rule)])
    parts = [(s == SEQUENCE, torch.zeros_like(SEQUENCE)) for s in range(2)]
    cut = [importance_sums(OLD[p], ROLLOUT[p], ACTIVE[p], zero[p], rule) for p, zero in parts]
    none = slice(0, 0)
    cut.append(importance_sums(OLD[none], ROLLOUT[none], ACTIVE[none], SEQUENCE[none], rule))
    assert merge_sums(cut) == pytest.approx(whole)


def test_all_masked_is_a_weight_of_zero_and_no_division() -> None:
    rule = Importance("token", "mask", 3.0, 4.0)
    assert _weights(rule) == [0.0] * 4
    sums = merge_sums([importance_sums(OLD, ROLLOUT, ACTIVE, SEQUENCE, rule)])
    assert sums["importance"] == sums["importance_squared"] == 0
    assert sums["importance_high"] + sums["importance_low"] == 4
    assert effective_share(sums | {"tokens": 4.0}) == 0.0
    assert effective_share({"tokens": 0.0}) is None and effective_share({"tokens": 4.0}) is None


def test_equal_weights_are_all_effective() -> None:
    sums = importance_sums(ROLLOUT, ROLLOUT, ACTIVE, SEQUENCE, Importance("sequence"))
    assert effective_share(merge_sums([sums]) | {"tokens": 4.0}) == 1.0


def test_unknown_names_are_refused() -> None:
    with pytest.raises(ValueError, match="level is 'row'; use none, token, sequence or"):
        _weights(Importance("row"))
    with pytest.raises(ValueError, match="mode is 'clip'; use truncate or mask"):
        _weights(Importance("token", "clip"))
