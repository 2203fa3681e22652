"""KL estimators per token: values, expected values and gradients, extremes."""

from __future__ import annotations

import math

import pytest
import torch

from megarl.algorithms.kl import kl_estimate


@pytest.mark.parametrize(
    "kind, formula",
    [
        ("k1", lambda x: x),
        ("k2", lambda x: x * x / 2),
        ("k3", lambda x: math.exp(-x) + x - 1),
    ],
)
def test_values_are_the_formulas(kind, formula) -> None:
    ratios = [-19.5, -3.0, -1e-3, 0.0, 1e-4, 2.0, 15.0]
    log_probs = torch.tensor(ratios, dtype=torch.float64) - 20
    got = kl_estimate(kind, log_probs, torch.full_like(log_probs, -20.0))
    for value, ratio in zip(got.tolist(), ratios, strict=True):
        assert value == pytest.approx(formula(ratio), rel=1e-9, abs=1e-15)


def test_k3_keeps_small_ratios_in_fp32() -> None:
    # exp(−ℓ) + ℓ − 1 evaluated as written is 0 or 1.2e-7 here; the true value is ℓ²/2.
    got = kl_estimate("k3", torch.tensor([1e-3]), torch.tensor([0.0]))
    assert got.item() == pytest.approx(4.998e-7, rel=0.15)


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
@pytest.mark.parametrize("log_ratio", [30.0, -30.0, 100.0, -100.0])
def test_extremes_stay_finite_in_fp32(kind, log_ratio) -> None:
    log_probs = torch.tensor([log_ratio - 100], requires_grad=True)
    value = kl_estimate(kind, log_probs, torch.tensor([-100.0]))
    value.sum().backward()
    assert torch.isfinite(value).all() and torch.isfinite(log_probs.grad).all()
    if kind == "k3" and log_ratio < -20:
        assert value.item() == pytest.approx(math.exp(20) - 21, rel=1e-6)
        assert log_probs.grad == 0


def test_the_reference_is_constant() -> None:
    ref = torch.tensor([-1.0], requires_grad=True)
    new = torch.tensor([-2.0], requires_grad=True)
    kl_estimate("k2", new, ref).sum().backward()
    assert ref.grad is None and new.grad.item() == -1.0


def test_an_unknown_kind_is_refused() -> None:
    with pytest.raises(ValueError, match="'low_var_kl'; use k1, k2 or k3"):
        kl_estimate("low_var_kl", torch.zeros(1), torch.zeros(1))
