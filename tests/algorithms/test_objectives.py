"""The surrogate, entropy and the whole loss of one pack, with what it reports.

Oracles: hand numbers, a scalar formula per token, finite differences in float64. Not covered
here: cuts of the batch (test_partition.py), the model's own gradient (tests/models).
"""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.algorithms.objectives import entropy_bonus, grpo_loss, merge_sums, policy_loss
from megarl.data.packing import build_pack
from tests.algorithms.toy import Kl, Settings, flat_batch, micro_batch, parameters, scores
from tests.data.make_samples import make_samples


def _scalar_loss(log_ratio, advantage, low, high, dual) -> float:
    ratio = math.exp(min(max(log_ratio, -20.0), 20.0))
    objective = min(ratio * advantage, min(max(ratio, 1 - low), 1 + high) * advantage)
    if dual is not None and advantage < 0:
        objective = max(objective, dual * advantage)
    return -objective


TOKENS = st.lists(
    st.tuples(st.floats(-25, 25), st.floats(-3, 3), st.sampled_from([0.0, 0.25, 1.0])), max_size=12
)


@settings(max_examples=200, deadline=None)
@given(tokens=TOKENS, low=st.floats(0, 0.5), high=st.floats(0, 0.5))
@pytest.mark.parametrize("dual", [None, 3.0])
def test_the_surrogate_is_the_scalar_formula(dual, tokens, low, high) -> None:
    columns = torch.tensor(tokens, dtype=torch.float64).reshape(-1, 3)
    log_probs = columns[:, 0] - 30
    old = torch.full_like(log_probs, -30.0)
    loss, sums = policy_loss(log_probs, old, columns[:, 1], columns[:, 2], low, high, dual)
    parts = [_scalar_loss(x, a, low, high, dual) for x, a, _ in tokens]
    expected = sum(w * part for part, (_, _, w) in zip(parts, tokens, strict=True))
    assert loss.item() == pytest.approx(expected, rel=1e-9, abs=1e-9)
    active = [at for at, (_, _, w) in enumerate(tokens) if w]
    assert sums["tokens"] == len(active)
    assert sums["policy_loss"].item() == pytest.approx(sum(parts[at] for at in active), rel=1e-9)
    most = max((abs(tokens[at][0]) for at in active), default=0.0)
    assert sums["log_ratio_abs_max"].item() == pytest.approx(most)
    ratios = [math.exp(min(max(tokens[at][0], -20), 20)) for at in active]
    assert sums["ratio_max"].item() == pytest.approx(max(ratios, default=0.0))


def test_counts_name_the_bound_that_cut_the_gradient() -> None:
    log_ratio = torch.tensor([2.0, 2.0, 0.5, 0.5, 1.1, 2.0]).log()
    log_probs = log_ratio.clone().requires_grad_()
    advantages = torch.tensor([1.0, -1.0, 1.0, -1.0, 1.0, -1.0])
    weights = torch.tensor([1.0, 1.0, 1.0, 1.0, 1.0, 0.0])
    loss, sums = policy_loss(log_probs, torch.zeros(6), advantages, weights, 0.2, 0.2, 1.5)
    loss.backward()
    assert (sums["clip_high"], sums["clip_low"], sums["clip_dual"]) == (1, 1, 1)
    assert ((log_probs.grad == 0) == torch.tensor([1, 1, 0, 1, 0, 1], dtype=torch.bool)).all()


def test_before_any_update_the_ratio_is_one_and_the_gradient_is_reinforce() -> None:
    log_probs = torch.tensor([-0.5, -2.0, -0.1], requires_grad=True)
    old = log_probs.detach().clone()
    advantages, weights = torch.tensor([1.5, -0.5, 2.0]), torch.full((3,), 1 / 3)
    loss, sums = policy_loss(log_probs, old, advantages, weights, 0.2, 0.2, None)
    loss.backward()
    assert sums["ratio"] == 3 and sums["ratio_max"] == 1 and sums["log_ratio_abs_max"] == 0
    assert sums["approx_kl"] == 0
    assert torch.equal(log_probs.grad, -advantages * weights)


def test_old_log_probs_and_reference_get_no_gradient() -> None:
    old = torch.tensor([-1.0, -2.0], requires_grad=True)
    new = torch.tensor([-1.1, -1.9], requires_grad=True)
    policy_loss(new, old, torch.ones(2), torch.ones(2), 0.2, 0.2, None)[0].backward()
    assert old.grad is None and new.grad is not None


@pytest.mark.parametrize("log_ratio, advantage", [(25.0, -1.0), (80.0, -1.0), (-200.0, 1.0)])
def test_a_wild_ratio_stays_finite(log_ratio, advantage) -> None:
    log_probs = torch.tensor([log_ratio - 200], requires_grad=True)
    arguments = (torch.tensor([-200.0]), torch.tensor([advantage]), torch.ones(1))
    loss, sums = policy_loss(log_probs, *arguments, 0.2, 0.2, None)
    loss.backward()
    assert math.isfinite(loss.item()) and torch.isfinite(log_probs.grad).all()
    assert sums["log_ratio_abs_max"] == abs(log_ratio)
    dual, _ = policy_loss(log_probs, *arguments, 0.2, 0.2, 3.0)
    assert dual.item() == pytest.approx(3.0 if advantage < 0 else 0.0, abs=1e-6)
    if log_ratio == 25.0:
        assert loss.item() == pytest.approx(math.exp(-5) * math.exp(25), rel=1e-6)


def test_a_dual_clip_of_one_is_refused() -> None:
    one = torch.ones(1)
    with pytest.raises(ValueError, match="dual_clip is 1.0"):
        policy_loss(one, one, one, one, 0.2, 0.2, 1.0)


@pytest.mark.parametrize("bad", [math.nan, -math.inf, math.inf])
def test_tokens_that_are_no_action_cannot_poison_the_sum(bad) -> None:
    log_probs = torch.tensor([-1.0, bad], requires_grad=True)
    entropy = torch.tensor([0.5, bad], requires_grad=True)
    batch = flat_batch([-1.2, bad], [1.0, bad], [1.0, 0.0], ref=[-1.5, bad])
    config = Settings(entropy_coefficient=0.1, kl=Kl(beta=0.1))
    loss, sums = grpo_loss(SimpleNamespace(log_probs_A=log_probs, entropy_A=entropy), batch, config)
    loss.backward()
    assert math.isfinite(loss.item()) and all(math.isfinite(v) for v in sums.values())
    assert log_probs.grad[1] == 0 and entropy.grad[1] == 0 and log_probs.grad[0] != 0
    assert sums["tokens"] == 1 and sums["entropy"] == 0.5


def test_an_action_that_is_no_number_shows_in_loss_and_sums() -> None:
    log_probs = torch.tensor([-1.0, math.nan], requires_grad=True)
    told = SimpleNamespace(log_probs_A=log_probs, entropy_A=torch.zeros(2))
    loss, sums = grpo_loss(told, flat_batch([-1.0, -1.0], [1.0, 1.0], [0.5, 0.5]), Settings())
    assert math.isnan(loss.item()) and math.isnan(sums["log_ratio_abs_max"])


def test_the_whole_loss_adds_its_terms() -> None:
    new, old, ref = [-0.9, -2.1], [-1.0, -2.0], [-1.3, -1.2]
    entropy = torch.tensor([0.3, 0.8])
    batch = flat_batch(old, [1.0, -1.0], [0.5, 0.5], ref=ref)
    told = SimpleNamespace(log_probs_A=torch.tensor(new), entropy_A=entropy)
    config = Settings(entropy_coefficient=0.01, kl=Kl(beta=0.1, estimator="k3"))
    loss, sums = grpo_loss(told, batch, config)
    surrogate = -0.5 * (math.exp(0.1) * 1.0 + math.exp(-0.1) * -1.0)
    kl = [math.exp(-(n - r)) + (n - r) - 1 for n, r in zip(new, ref, strict=True)]
    assert loss.item() == pytest.approx(surrogate + 0.1 * sum(kl) / 2 - 0.01 * 0.55, rel=1e-5)
    assert sums["loss"].item() == pytest.approx(loss.item())
    assert sums["ref_kl"].item() == pytest.approx(sum(kl), rel=1e-5)
    assert sums["entropy"].item() == pytest.approx(1.1)
    assert sums["ratio"].item() == pytest.approx(math.exp(0.1) + math.exp(-0.1), rel=1e-5)
    approx = sum(math.exp(x) - 1 - x for x in (0.1, -0.1))
    assert sums["approx_kl"].item() == pytest.approx(approx, rel=1e-4)
    assert all(not value.requires_grad and value.dtype == torch.float64 for value in sums.values())


def test_reference_kl_is_measured_without_a_coefficient_and_needs_log_probs_with_one() -> None:
    told = SimpleNamespace(log_probs_A=torch.tensor([-1.0]), entropy_A=torch.zeros(1))
    loss, sums = grpo_loss(told, flat_batch([-1.0], [0.0], [1.0], ref=[-2.0]), Settings())
    assert loss == 0 and sums["ref_kl"].item() == pytest.approx(math.exp(-1))
    with pytest.raises(ValueError, match="no reference log-probs"):
        grpo_loss(told, flat_batch([-1.0], [0.0], [1.0]), Settings(kl=Kl(beta=0.1)))


def test_an_empty_pack_gives_zero_with_a_graph() -> None:
    table = parameters()
    pack = build_pack(make_samples([(0, 0, 2, 2)]), [])
    none, empty = torch.zeros(0), make_samples([]).rollout_log_probs
    loss, sums = grpo_loss(
        scores(table, pack), micro_batch(pack, empty, empty, empty, none), Settings(kl=Kl(0.1))
    )
    loss.backward()
    assert loss == 0 and torch.equal(table.grad, torch.zeros_like(table))
    assert all(value == 0 for value in sums.values())


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_gradients_match_finite_differences(estimator) -> None:
    samples = make_samples([(0, 0, 2, 4), (0, 1, 1, 3)], holes=True)
    pack = build_pack(samples, [0, 1])
    actions = pack.action_mask_A.double()
    old = scores(parameters(0), pack).log_probs_A.detach()
    ref = scores(parameters(5), pack).log_probs_A.detach()
    advantages = torch.linspace(-2, 2, len(old), dtype=torch.float64)

    def whole(table):
        told = scores(table, pack)
        batch = SimpleNamespace(
            old_log_probs_A=old,
            ref_log_probs_A=ref,
            advantages_A=advantages,
            weights_A=actions / actions.sum(),
        )
        config = Settings(dual_clip=2.0, entropy_coefficient=0.3, kl=Kl(0.2, estimator))
        return grpo_loss(told, batch, config)[0]

    assert torch.autograd.gradcheck(whole, (parameters(1),), eps=1e-6, atol=1e-7)


def test_entropy_is_subtracted_with_its_gradient() -> None:
    logits = torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.float64, requires_grad=True)
    log_probs = logits.log_softmax(-1)
    entropy = -(log_probs.exp() * log_probs).sum()
    bonus = entropy_bonus(entropy[None], torch.tensor([0.5], dtype=torch.float64))
    assert bonus.item() == pytest.approx(0.5 * 0.947537, abs=1e-6)


def test_merging_adds_sums_and_keeps_maxima() -> None:
    merged = merge_sums(
        [{"tokens": 2.0, "ratio_max": 1.5}, {"tokens": torch.tensor(3.0), "ratio_max": 1.2}, {}]
    )
    assert merged == {"tokens": 5.0, "ratio_max": 1.5}
    assert math.isnan(merge_sums([{"a_max": 1.0}, {"a_max": math.nan}])["a_max"])
    assert math.isnan(merge_sums([{"a_max": math.nan}, {"a_max": 1.0}])["a_max"])
