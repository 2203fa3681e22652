"""The surrogate, entropy and the whole loss of one pack, with what it reports.

Oracles: hand numbers and a scalar formula per token. Not covered here: gradients of every
combination (test_gradients.py), cuts of the batch (test_partition.py), the model's own gradient
(tests/models).
"""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.algorithms.objectives import (
    OBJECTIVES,
    PolicyTokens,
    actor_loss,
    entropy_bonus,
    merge_sums,
    objective_of,
    policy_term,
)
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
    loss, sums = policy_loss(
        log_probs, old, columns[:, 1], columns[:, 2], clip_low=low, clip_high=high, dual_clip=dual
    )
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
    loss, sums = policy_loss(
        log_probs, torch.zeros(6), advantages, weights, clip_high=0.2, dual_clip=1.5
    )
    loss.backward()
    assert (sums["clip_high"], sums["clip_low"], sums["clip_dual"]) == (1, 1, 1)
    assert ((log_probs.grad == 0) == torch.tensor([1, 1, 0, 1, 0, 1], dtype=torch.bool)).all()


def test_before_any_update_the_ratio_is_one_and_the_gradient_is_reinforce() -> None:
    log_probs = torch.tensor([-0.5, -2.0, -0.1], requires_grad=True)
    old = log_probs.detach().clone()
    advantages, weights = torch.tensor([1.5, -0.5, 2.0]), torch.full((3,), 1 / 3)
    loss, sums = policy_loss(log_probs, old, advantages, weights, clip_high=0.2)
    loss.backward()
    assert sums["ratio"] == 3 and sums["ratio_max"] == 1 and sums["log_ratio_abs_max"] == 0
    assert sums["approx_kl"] == 0
    assert torch.equal(log_probs.grad, -advantages * weights)


def test_old_log_probs_and_reference_get_no_gradient() -> None:
    old = torch.tensor([-1.0, -2.0], requires_grad=True)
    new = torch.tensor([-1.1, -1.9], requires_grad=True)
    policy_loss(new, old, torch.ones(2), torch.ones(2))[0].backward()
    assert old.grad is None and new.grad is not None


@pytest.mark.parametrize("log_ratio, advantage", [(25.0, -1.0), (80.0, -1.0), (-200.0, 1.0)])
def test_a_wild_ratio_stays_finite(log_ratio, advantage) -> None:
    log_probs = torch.tensor([log_ratio - 200], requires_grad=True)
    arguments = (torch.tensor([-200.0]), torch.tensor([advantage]), torch.ones(1))
    loss, sums = policy_loss(log_probs, *arguments, clip_high=0.2)
    loss.backward()
    assert math.isfinite(loss.item()) and torch.isfinite(log_probs.grad).all()
    assert sums["log_ratio_abs_max"] == abs(log_ratio)
    dual, _ = policy_loss(log_probs, *arguments, clip_high=0.2, dual_clip=3.0)
    assert dual.item() == pytest.approx(3.0 if advantage < 0 else 0.0, abs=1e-6)
    if log_ratio == 25.0:
        assert loss.item() == pytest.approx(math.exp(-5) * math.exp(25), rel=1e-6)


def test_a_dual_clip_of_one_is_refused() -> None:
    one = torch.ones(1)
    with pytest.raises(ValueError, match="dual_clip is 1.0"):
        policy_loss(one, one, one, one, dual_clip=1.0)


@pytest.mark.parametrize("bad", [math.nan, -math.inf, math.inf])
def test_tokens_that_are_no_action_cannot_poison_the_sum(bad) -> None:
    log_probs = torch.tensor([-1.0, bad], requires_grad=True)
    entropy = torch.tensor([0.5, bad], requires_grad=True)
    batch = flat_batch([-1.2, bad], [1.0, bad], [1.0, 0.0], ref=[-1.5, bad])
    config = Settings(entropy_coefficient=0.1, kl=Kl(beta=0.1))
    loss, sums = loss_of(SimpleNamespace(log_probs_A=log_probs, entropy_A=entropy), batch, config)
    loss.backward()
    assert math.isfinite(loss.item()) and all(math.isfinite(v) for v in sums.values())
    assert log_probs.grad[1] == 0 and entropy.grad[1] == 0 and log_probs.grad[0] != 0
    assert sums["tokens"] == 1 and sums["entropy"] == 0.5


def test_an_action_that_is_no_number_shows_in_loss_and_sums() -> None:
    log_probs = torch.tensor([-1.0, math.nan], requires_grad=True)
    told = SimpleNamespace(log_probs_A=log_probs, entropy_A=torch.zeros(2))
    loss, sums = loss_of(told, flat_batch([-1.0, -1.0], [1.0, 1.0], [0.5, 0.5]), Settings())
    assert math.isnan(loss.item()) and math.isnan(sums["log_ratio_abs_max"])


def test_the_whole_loss_adds_its_terms() -> None:
    new, old, ref = [-0.9, -2.1], [-1.0, -2.0], [-1.3, -1.2]
    entropy = torch.tensor([0.3, 0.8])
    batch = flat_batch(old, [1.0, -1.0], [0.5, 0.5], ref=ref)
    told = SimpleNamespace(log_probs_A=torch.tensor(new), entropy_A=entropy)
    config = Settings(entropy_coefficient=0.01, kl=Kl(beta=0.1, estimator="k3"))
    loss, sums = loss_of(told, batch, config)
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
    loss, sums = loss_of(told, flat_batch([-1.0], [0.0], [1.0], ref=[-2.0]), Settings())
    assert loss == 0 and sums["ref_kl"].item() == pytest.approx(math.exp(-1))
    with pytest.raises(ValueError, match="no reference log-probs"):
        loss_of(told, flat_batch([-1.0], [0.0], [1.0]), Settings(kl=Kl(beta=0.1)))


def test_an_empty_pack_gives_zero_with_a_graph() -> None:
    table = parameters()
    pack = build_pack(make_samples([(0, 0, 2, 2)]), [])
    none, empty = torch.zeros(0), make_samples([]).rollout_log_probs
    loss, sums = loss_of(
        scores(table, pack), micro_batch(pack, empty, empty, empty, none), Settings(kl=Kl(0.1))
    )
    loss.backward()
    assert loss == 0 and torch.equal(table.grad, torch.zeros_like(table))
    assert {name for name, value in sums.items() if value} == {"ratio_min"}
    assert sums["ratio_min"] == math.inf and "ratio_min" not in merge_sums([sums])


def test_entropy_is_subtracted_with_its_gradient() -> None:
    logits = torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.float64, requires_grad=True)
    log_probs = logits.log_softmax(-1)
    entropy = -(log_probs.exp() * log_probs).sum()
    bonus = entropy_bonus(entropy[None], torch.tensor([0.5], dtype=torch.float64))
    assert bonus.item() == pytest.approx(0.5 * 0.947537, abs=1e-6)


def test_merging_adds_sums_and_keeps_largest_and_smallest() -> None:
    merged = merge_sums(
        [
            {"tokens": 2.0, "ratio_max": 1.5, "ratio_min": 0.5},
            {"tokens": torch.tensor(3.0), "ratio_max": 1.2, "ratio_min": 0.7},
            {"ratio_min": math.inf},
            {},
        ]
    )
    assert merged == {"tokens": 5.0, "ratio_max": 1.5, "ratio_min": 0.5}
    for end in ("_max", "_min"):
        for pair in ([1.0, math.nan], [math.nan, 1.0]):
            assert math.isnan(merge_sums({"a" + end: value} for value in pair)["a" + end])


def test_tails_of_the_ratio_are_counted() -> None:
    log_ratio = torch.tensor([2.5, 0.4, 1.0, 2.0, 0.5, 9.0], dtype=torch.float64).log()
    weights = torch.tensor([1.0, 1.0, 1.0, 1.0, 1.0, 0.0])
    zero = torch.zeros(6, dtype=torch.float64)
    _, sums = policy_loss(log_ratio, zero, zero + 1, weights)
    assert (sums["ratio_above_2"], sums["ratio_below_half"]) == (1, 1)
    assert sums["ratio_min"].item() == pytest.approx(0.4)
    assert sums["ratio_max"].item() == pytest.approx(2.5)


def _two_sequences(objective, log_ratios, advantages, **bounds):
    """Losses and gradients of two sequences of 2 and 3 tokens whose old log-probs are −1."""
    log_probs = (torch.tensor(log_ratios, dtype=torch.float64) - 1).requires_grad_()
    tokens = PolicyTokens.of(
        log_probs,
        torch.full_like(log_probs, -1.0),
        torch.tensor(advantages, dtype=torch.float64),
        torch.ones(5, dtype=torch.bool),
        torch.tensor([0, 0, 1, 1, 1]),
    )
    losses, sums = OBJECTIVES[objective](tokens, Settings(objective, **bounds))
    losses.sum().backward()
    return losses.tolist(), log_probs.grad.tolist(), sums


def test_gspo_has_one_ratio_per_sequence_with_the_gradient_of_its_mean() -> None:
    """Means of the log-ratios: 0.1 and −0.2; both sequences inside their bounds."""
    losses, gradient, sums = _two_sequences(
        "gspo", [0.3, -0.1, -0.5, 0.1, -0.2], [1, 1, -2, -2, -2], clip_low=0.3
    )
    first, second = math.exp(0.1), math.exp(-0.2)
    assert losses == pytest.approx([-first] * 2 + [2 * second] * 3)
    # d/dx_t of n · (−s A) is −s A: each token moves the mean by 1/n, and n tokens have it.
    assert gradient == pytest.approx([-first] * 2 + [2 * second] * 3)
    assert sums["sequence_ratio_max"].item() == pytest.approx(first)
    assert sums["sequence_ratio_min"].item() == pytest.approx(second)


def test_gspo_with_advantages_per_token_sends_each_through_the_mean() -> None:
    """s = e^0.1 for A = 3 and 1: −(3 + 1) s over both tokens alike, not −3 s and −1 s."""
    _, gradient, _ = _two_sequences("gspo", [0.2, 0.0, 0, 0, 0], [3, 1, 0, 0, 0])
    assert gradient[:2] == pytest.approx([-2 * math.exp(0.1)] * 2)


def test_gspo_clips_whole_sequences() -> None:
    losses, gradient, sums = _two_sequences(
        "gspo", [0.5, 0.3, -0.6, -0.2, -0.4], [1, 1, -1, -1, -1], clip_low=0.2, clip_high=0.2
    )
    assert losses == pytest.approx([-1.2] * 2 + [0.8] * 3) and gradient == [0.0] * 5
    assert (sums["clip_high"], sums["clip_low"]) == (2, 3)


def test_cispo_weights_log_probs_by_a_bounded_constant() -> None:
    """Ratios e^0.5, e^−0.5 → 1.28, 0.8; a token beyond a bound keeps its gradient."""
    losses, gradient, sums = _two_sequences(
        "cispo", [0.5, -0.5, 0.1, 0.0, -0.1], [1, 1, -1, 2, 1], clip_low=0.2, clip_high=0.28
    )
    weights = [1.28, 0.8, math.exp(0.1), 1.0, math.exp(-0.1)]
    constant = [-w * a for w, a in zip(weights, [1, 1, -1, 2, 1], strict=True)]
    assert gradient == pytest.approx(constant)
    log_probs = [-0.5, -1.5, -0.9, -1.0, -1.1]
    assert losses == pytest.approx([c * x for c, x in zip(constant, log_probs, strict=True)])
    assert (sums["clip_high"], sums["clip_low"]) == (1, 1)


@pytest.mark.parametrize("objective", ["gspo", "cispo"])
@pytest.mark.parametrize("log_ratio", [60.0, -60.0])
def test_a_wild_ratio_stays_finite_in_every_objective(objective, log_ratio) -> None:
    log_probs = torch.tensor([log_ratio - 100, -100.0], requires_grad=True)
    loss, _ = policy_loss(
        log_probs, torch.full((2,), -100.0), -torch.ones(2), torch.ones(2), objective=objective
    )
    loss.backward()
    assert math.isfinite(loss.item()) and torch.isfinite(log_probs.grad).all()


@pytest.mark.parametrize("objective", ["ppo_clip", "gspo", "cispo"])
def test_a_sequence_without_an_action_adds_nothing(objective) -> None:
    log_probs = torch.tensor([-1.0, -2.0, math.nan], requires_grad=True)
    tokens = PolicyTokens.of(
        log_probs,
        torch.tensor([-1.0, -2.0, math.nan]),
        torch.tensor([1.0, 1.0, math.nan]),
        torch.tensor([True, True, False]),
        torch.tensor([0, 0, 1]),
    )
    loss, sums = policy_term(tokens, torch.tensor([0.5, 0.5, 0]), None, Settings(objective))
    loss.backward()
    assert math.isfinite(loss.item()) and log_probs.grad[2] == 0 and sums["tokens"] == 2
    assert all(math.isfinite(value) for value in sums.values())


def test_an_unknown_objective_is_refused() -> None:
    with pytest.raises(ValueError, match="'grpo'; use ppo_clip, gspo, cispo, or your function"):
        objective_of("grpo")


def test_kl_is_in_the_loss_only_where_the_recipe_puts_it() -> None:
    told = SimpleNamespace(log_probs_A=torch.tensor([-1.0]), entropy_A=torch.zeros(1))
    batch = flat_batch([-1.0], [0.0], [1.0], ref=[-2.0])
    k3 = math.exp(-1)
    for in_loss, beta, expected in ((True, 0.3, 0.3 * k3), (True, 0.0, 0), (False, 0.3, 0)):
        settings_ = SimpleNamespace(**vars(Settings()), kl_in_loss=in_loss)
        loss, sums = actor_loss(told, batch, settings_, beta)
        assert loss.item() == pytest.approx(expected) and sums["ref_kl"].item() == pytest.approx(k3)


def test_importance_multiplies_the_policy_term_alone() -> None:
    """KL, entropy, weights and what is reported of the objective stay as they are."""
    told = SimpleNamespace(log_probs_A=torch.tensor([-1.0, -1.5]), entropy_A=torch.ones(2))
    batch = flat_batch([-1.1, -1.4], [1.0, -2.0], [0.5, 0.5], ref=[-2.0, -1.0])
    config = Settings(
        entropy_coefficient=0.1, kl=Kl(0.3, "k2"), importance=Importance("token", high=1.5)
    )
    factors = torch.tensor([1.5, 0.0])
    weighted = replace(batch, importance_A=factors, rollout_log_probs_A=torch.tensor([-2.0, -1.4]))
    losses = [-math.exp(0.1), 2 * math.exp(-0.1)]
    others = 0.3 * (0.5 + 0.125) / 2 - 0.1
    loss, plain = loss_of(told, batch, config)
    assert loss.item() == pytest.approx(sum(losses) / 2 + others, rel=1e-5)
    loss, sums = loss_of(told, weighted, config)
    assert loss.item() == pytest.approx(0.5 * 1.5 * losses[0] + others, rel=1e-5)
    assert sums["policy_loss"] == plain["policy_loss"] and sums["importance_high"] == 1
    assert not [name for name in plain if name.startswith("importance")]
