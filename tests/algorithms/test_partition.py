"""Loss, gradient and reported sums do not depend on how a minibatch is cut, ordered or padded.

A bigram table stands for the model, in float64, so that only the bookkeeping (packs, predictor
positions, weights, totals, sums) can differ. Not covered: the real model's packing, tensor
parallel reductions and float32 rounding (tests/models).
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.algorithms.objectives import merge_sums
from megarl.algorithms.reduction import Totals, count, token_weights
from megarl.data.packing import build_pack, pad_pack, plan_packs, restore
from tests.algorithms.toy import (
    Importance,
    Kl,
    Settings,
    loss_of,
    micro_batch,
    parameters,
    scores,
)
from tests.data.make_samples import make_samples

KINDS = ["token_mean", "sequence_mean", "sequence_sum_constant"]
CONFIG = Settings(
    clip_low=0.05, clip_high=0.08, dual_clip=2.5, entropy_coefficient=0.05, kl=Kl(0.3, "k3")
)
OBJECTIVES = [
    ("ppo_clip", Importance()),
    ("ppo_clip", Importance("token", "mask", 0.8, 1.2)),
    ("gspo", Importance("sequence_mean", "mask", 0.95, 1.05)),
    ("cispo", Importance("sequence", high=1.1)),
]


def _columns(samples) -> dict[str, np.ndarray]:
    """float32 [R]: old log-probs are the policy's shifted by seeded noise, so that ratios differ
    from 1 and from token to token; the generator's are those, shifted again."""
    pack = build_pack(samples, np.arange(len(samples)))
    own = scores(parameters(2), pack).log_probs_A.detach().numpy()
    noise = np.random.default_rng(5)
    old = own + noise.normal(0, 0.3, len(own))
    rollout = old + noise.normal(0, 0.3, len(own))
    columns = {
        "old_R": old,
        "rollout_R": rollout,
        "ref_R": np.full(len(own), -2.0),
        "advantages_R": noise.normal(0, 1, len(own)),
    }
    return {name: values.astype(np.float32) for name, values in columns.items()}


def _run(samples, packs, kind, columns, config=CONFIG, padding=0):
    """Loss, gradient and sums over packs given by rows, with totals counted over all of them;
    `padding`: dummy tokens behind each."""
    table = parameters(2)
    built = [build_pack(samples, rows) for rows in packs]
    built = [pad_pack(pack, len(pack.token_ids_T) + padding) for pack in built]
    counts = [count(pack.action_mask_A, pack.sequence_A) for pack in built]
    totals = Totals(sum(c.tokens for c in counts), sum(c.sequences for c in counts))
    losses, sums = [], []
    for pack in built:
        weights_A = token_weights(kind, pack.action_mask_A, pack.sequence_A, totals, 9)
        batch = micro_batch(pack, **columns, weights_A=weights_A, importance=config.importance)
        loss, told = loss_of(scores(table, pack), batch, config)
        loss.backward()
        losses.append(loss.item())
        sums.append(told)
    return sum(losses), table.grad, merge_sums(sums)


SHAPES = st.lists(st.tuples(st.integers(1, 4), st.integers(1, 9)), min_size=1, max_size=10)


@settings(max_examples=25, deadline=None)
@given(shapes=SHAPES, dp=st.integers(1, 3), budget=st.integers(13, 40), data=st.data())
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("objective, importance", OBJECTIVES)
def test_any_cut_order_and_padding_gives_the_same_loss_gradient_and_sums(
    objective, importance, kind, shapes, dp, budget, data
) -> None:
    config = replace(CONFIG, objective=objective, importance=importance)
    samples = make_samples(((0, i, p, r) for i, (p, r) in enumerate(shapes)), holes=True)
    columns = _columns(samples)
    one = [np.arange(len(samples))]
    lengths = samples.prompt_lengths + samples.response_lengths
    planned = [pack for own in plan_packs(lengths, dp, budget) for pack in own]
    order = data.draw(st.permutations(range(len(samples))))
    at = data.draw(st.integers(0, len(order)))
    shuffled = [np.array(order[:at], dtype=int), np.array(order[at:], dtype=int)]
    expected = _run(samples, one, kind, columns, config)
    for packs in (planned, shuffled, [np.array([row]) for row in order]):
        padding = data.draw(st.integers(0, 5))
        loss, gradient, sums = _run(samples, packs, kind, columns, config, padding)
        assert loss == pytest.approx(expected[0], rel=1e-9, abs=1e-12)
        torch.testing.assert_close(gradient, expected[1], rtol=1e-9, atol=1e-12)
        assert sums == pytest.approx(expected[2], rel=1e-9, abs=1e-9)


def test_the_noise_reaches_every_bound() -> None:
    """Else the test above would say nothing of clips and masks."""
    samples = make_samples(((0, i, 2, 9) for i in range(10)), holes=True)
    for objective, importance in OBJECTIVES:
        config = replace(CONFIG, objective=objective, importance=importance)
        sums = _run(samples, [range(10)], "token_mean", _columns(samples), config)[2]
        names = ["clip_high", "clip_low"] + ["importance_high"] * (importance.level != "none")
        names += ["importance_low"] * (importance.mode == "mask")
        assert all(0 < sums[name] < sums["tokens"] for name in names), sums


@pytest.mark.parametrize("kind", KINDS)
def test_the_loss_is_the_papers_sum_over_sequences(kind) -> None:
    samples = make_samples([(0, 0, 2, 4), (0, 1, 1, 7), (0, 2, 3, 1)], holes=True)
    tokens = len(samples.response_ids)
    columns = _columns(samples)
    loss, _, _ = _run(samples, [np.array([2, 0]), np.array([1])], kind, columns)
    whole = build_pack(samples, [0, 1, 2])
    told = scores(parameters(2), whole)
    per_token = []
    for a in range(tokens):
        one_hot = torch.zeros(tokens)
        one_hot[a] = 1.0
        batch = micro_batch(whole, **columns, weights_A=one_hot)
        per_token.append(loss_of(told, batch, CONFIG)[0].item())
    masked = np.array(per_token) * samples.action_mask
    rows = [
        masked[samples.response_offsets[i] : samples.response_offsets[i + 1]].sum()
        for i in range(3)
    ]
    actions = [int(sample.action_mask.sum()) for sample in samples]
    expected = {
        "token_mean": sum(rows) / sum(actions),
        "sequence_mean": np.mean([row / n for row, n in zip(rows, actions, strict=True)]),
        "sequence_sum_constant": sum(rows) / (3 * 9),
    }[kind]
    assert loss == pytest.approx(expected, rel=1e-6)


def test_old_log_probs_restored_from_the_updates_packs_give_ratio_one() -> None:
    samples = make_samples([(0, i, 2, 1 + i) for i in range(6)])
    lengths = samples.prompt_lengths + samples.response_lengths
    packs = [build_pack(samples, rows) for own in plan_packs(lengths, 2, 14) for rows in own]
    table = parameters(3)
    told = [scores(table.float(), pack) for pack in packs]
    old = restore(packs, [one.log_probs_A for one in told])
    for pack, one in zip(packs, told, strict=True):
        weights = torch.ones(len(pack.target_A))
        batch = micro_batch(pack, old, None, np.ones_like(old), weights)
        _, sums = loss_of(one, batch, Settings())
        assert sums["log_ratio_abs_max"] == 0 and sums["ratio"] == sums["tokens"]
