"""Micro-batches of actor and critic: whose columns, which weights, which importance.

Not covered here: the numbers of weights and importance (tests/algorithms).
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from megarl.algorithms.reduction import Totals
from megarl.contracts.records import Derived, Experience, Scores
from megarl.data.minibatch import micro_batches, value_batches
from megarl.data.packing import ValueBatch, build_pack
from tests.algorithms.toy import Importance, Settings
from tests.data.make_samples import make_record, make_samples

SAMPLES = make_samples([(0, 0, 2, 3), (0, 1, 1, 2), (1, 0, 2, 4)], holes=True)
TOKENS = len(SAMPLES.response_ids)
TOTALS = Totals(tokens=int(SAMPLES.action_mask.sum()), sequences=3)
PACKS = [build_pack(SAMPLES, [0, 2]), build_pack(SAMPLES, [1]), build_pack(SAMPLES, [])]


def _column(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(-1, 0.3, TOKENS).astype(np.float32)


def _experience(**changes) -> Experience:
    records = [make_record(*key, 1.0) for key in ((0, 0), (0, 1), (1, 0))]
    facts = {
        "samples": replace(SAMPLES, rollout_log_probs=_column(2)),
        "scores": Scores.from_records(records),
        "old_log_probs": _column(0),
        "ref_log_probs": None,
        "values": _column(1),
        "producers": {"rollout": "v0", "old": "v0", "critic": "c0"},
        "hash": "h",
        "last_values": np.zeros(3, np.float32),
    }
    return Experience(**(facts | changes))


def _derived(**changes) -> Derived:
    facts = {"experience_hash": "h", "recipe_hash": "r", "advantages": _column(3)}
    return Derived(**(facts | {"returns": _column(4)} | changes))


def test_every_token_gets_its_own_columns() -> None:
    experience, derived = _experience(), _derived()
    actor = micro_batches(experience, derived, PACKS, TOTALS, Settings(), 9)
    critic = value_batches(experience, derived, PACKS, TOTALS, Settings(), 9)
    for pack, batch, values in zip(PACKS, actor, critic, strict=True):
        at = pack.response_A.numpy()
        for column, facts in (
            (batch.old_log_probs_A, experience.old_log_probs),
            (batch.rollout_log_probs_A, experience.samples.rollout_log_probs),
            (batch.advantages_A, derived.advantages),
            (values.values_A, experience.values),
            (values.returns_A, derived.returns),
        ):
            assert column.tolist() == facts[at].tolist()
        assert batch.ref_log_probs_A is None and batch.importance_A is None
        assert torch.equal(values.weights_A, batch.weights_A)
        expected = SAMPLES.action_mask[at] / TOTALS.tokens
        assert batch.weights_A.tolist() == pytest.approx(expected.tolist())


def test_importance_is_of_whole_sequences_whatever_shares_their_pack() -> None:
    experience = _experience()
    gaps = experience.old_log_probs.astype(np.float64) - experience.samples.rollout_log_probs
    settings = Settings(importance=Importance("sequence", high=1.3))
    for packs in (PACKS, [build_pack(SAMPLES, [2, 1, 0])]):
        for batch in micro_batches(experience, _derived(), packs, TOTALS, settings, 9):
            for row, token in zip(
                batch.pack.rows[batch.pack.sequence_A].tolist(),
                range(len(batch.pack.target_A)),
                strict=True,
            ):
                of_row = slice(*SAMPLES.response_offsets[row : row + 2])
                acted = gaps[of_row][SAMPLES.action_mask[of_row]]
                expected = min(np.exp(acted.sum()), 1.3) if batch.weights_A[token] else 1.0
                assert batch.importance_A[token].item() == pytest.approx(expected, rel=1e-6)


def test_a_minibatch_without_tokens_has_no_weight_for_actor_and_critic() -> None:
    for batches in (micro_batches, value_batches):
        told = batches(_experience(), _derived(), PACKS, Totals(0, 0), Settings(), 9)
        assert not any(batch.weights_A.any() for batch in told)


def test_weights_follow_the_recipes_reduction() -> None:
    for kind, divisor in (("sequence_mean", 3 * 2), ("sequence_sum_constant", 3 * 9)):
        settings = Settings(reduction=kind)
        batch = value_batches(_experience(), _derived(), PACKS, TOTALS, settings, 9)[0]
        assert batch.weights_A[0].item() == pytest.approx(1 / divisor)


def test_columns_of_another_experience_and_missing_ones_are_refused() -> None:
    for batches in (micro_batches, value_batches):
        with pytest.raises(ValueError, match="advantages of experience other for experience h"):
            other = _derived(experience_hash="other")
            batches(_experience(), other, PACKS, TOTALS, Settings(), 9)
    with pytest.raises(ValueError, match="experience h has no returns for a critic"):
        value_batches(_experience(), _derived(returns=None), PACKS, TOTALS, Settings(), 9)
    with pytest.raises(ValueError, match="experience h has no values for a critic"):
        no_values = _experience(values=None, last_values=None)
        value_batches(no_values, _derived(), PACKS, TOTALS, Settings(), 9)


def test_a_value_column_that_is_not_float32_is_refused() -> None:
    pack = PACKS[1]
    good = torch.zeros(2)
    ValueBatch(pack, good, good, good)
    with pytest.raises(ValueError, match=r"returns_A is torch.float64\[2\]"):
        ValueBatch(pack, good, good.double(), good)
    assert ValueBatch(pack, good, good, good).to("cpu").weights_A.shape == (2,)
