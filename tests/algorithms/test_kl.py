"""KL estimators per token: values, expected values and gradients, extremes.

Not covered here: KL in the loss (test_objectives.py), its gradient there (test_gradients.py).
"""

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


@pytest.mark.parametrize("seed", range(3))
def test_expected_values_and_gradients_are_of_the_kl_that_the_docstring_names(seed) -> None:
    """Over five actions, all of them enumerated; the exact divergences are differentiated."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(5, dtype=torch.float64, generator=generator, requires_grad=True)
    ref = torch.randn(5, dtype=torch.float64, generator=generator).log_softmax(-1)

    def slope(value: torch.Tensor) -> torch.Tensor:
        return torch.autograd.grad(value, logits)[0]

    log_probs = logits.log_softmax(-1)
    forward = (log_probs.exp() * (log_probs - ref)).sum()
    toward_ref = slope(forward)
    expected = {
        "k1": (forward, torch.zeros(5, dtype=torch.float64)),
        "k2": (None, toward_ref),
        "k3": (forward, slope((ref.exp() * (ref - logits.log_softmax(-1))).sum())),
    }
    for kind, (value, gradient) in expected.items():
        log_probs = logits.log_softmax(-1)
        mean = (log_probs.exp().detach() * kl_estimate(kind, log_probs, ref)).sum()
        torch.testing.assert_close(slope(mean), gradient, rtol=1e-10, atol=1e-12)
        assert value is None or mean.item() == pytest.approx(value.item(), rel=1e-10)


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
