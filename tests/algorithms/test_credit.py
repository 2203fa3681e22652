"""Credit joins advantages to a rank's own samples by id and builds micro-batches from facts."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from megarl.algorithms.credit import credit
from megarl.algorithms.reduction import Totals
from megarl.contracts.records import Experience, Scores
from megarl.data.minibatch import micro_batches
from megarl.data.packing import build_pack
from megarl.data.table import SampleTable
from tests.data.make_samples import make_record, make_samples

SHAPES = [(d, c, 2, 1 + d + c) for d in range(3) for c in range(2)]
TOTALS = [1.0, 0.0, 5.0, 5.0, 0.0, 2.0]


def _table() -> SampleTable:
    samples = make_samples(SHAPES)
    records = [make_record(d, c, t) for (d, c, _, _), t in zip(SHAPES, TOTALS, strict=True)]
    return SampleTable(
        draw_index=samples.draw_index,
        candidate=samples.candidate,
        prompt_length=samples.prompt_lengths,
        response_length=samples.response_lengths,
        actions=samples.response_lengths,
        end_reason=samples.end_reason,
        replica=np.zeros(6),
        started=samples.started,
        finished=samples.finished,
        scores=Scores.from_records(records),
        version_id="v0",
    )


def _experience(rows: list[int]) -> Experience:
    samples = make_samples(SHAPES).select(rows)
    tokens = len(samples.response_ids)
    return Experience(
        samples=samples,
        scores=_table().scores.select(rows),
        old_log_probs=-np.arange(tokens, dtype=np.float32),
        ref_log_probs=None,
        values=None,
        producers={"rollout": "v0", "old": "v0"},
        hash="h",
    )


SETTINGS = SimpleNamespace(normalize_std=False, advantage_eps=1e-6)
TRAINED = np.array([1, 1, 0, 0, 1, 1], bool)


def test_siblings_count_wherever_they_train() -> None:
    derived, advantages = credit(_experience([1, 4]), "r", _table(), TRAINED, SETTINGS)
    np.testing.assert_equal(advantages, [0.5, -0.5, np.nan, np.nan, -1.0, 1.0])
    # Row 1 has 2 response tokens, row 4 has 3; their siblings 0 and 5 are on another rank.
    assert derived.advantages.tolist() == [-0.5, -0.5, -1.0, -1.0, -1.0]
    assert derived.advantages.dtype == np.float32
    assert (derived.experience_hash, derived.recipe_hash) == ("h", "r")


def test_rows_that_do_not_train_enter_no_statistic() -> None:
    trained = np.array([1, 1, 0, 0, 1, 0], bool)
    _, advantages = credit(_experience([]), "r", _table(), trained, SETTINGS)
    np.testing.assert_equal(advantages, [0.5, -0.5, np.nan, np.nan, 0.0, np.nan])


def test_tokens_that_are_no_action_get_no_credit() -> None:
    experience = _experience([0, 5])
    mask = np.array([True, True, False, True, True])
    samples = replace(experience.samples, action_mask=mask)
    derived, _ = credit(replace(experience, samples=samples), "r", _table(), TRAINED, SETTINGS)
    assert derived.advantages.tolist() == [0.5, 1.0, 0.0, 1.0, 1.0]


def test_micro_batches_take_their_tokens_from_the_facts() -> None:
    experience = _experience([0, 1, 4])
    derived, _ = credit(experience, "r", _table(), TRAINED, SETTINGS)
    packs = [build_pack(experience.samples, [2, 0]), build_pack(experience.samples, [])]
    batch, empty = micro_batches(experience, derived, packs, Totals(8, 3), "token_mean", 16)
    assert batch.old_log_probs_A.tolist() == [-3.0, -4.0, -5.0, 0.0]
    assert batch.advantages_A.tolist() == [-1.0, -1.0, -1.0, 0.5]
    assert torch.equal(batch.rollout_log_probs_A, -torch.tensor([0.01, 0.02, 0.03, 0.01]))
    assert batch.weights_A.tolist() == [0.125] * 4 and batch.ref_log_probs_A is None
    assert len(empty.weights_A) == 0
    other = replace(derived, experience_hash="other")
    with pytest.raises(ValueError, match="experience other for experience h"):
        micro_batches(experience, other, packs, Totals(8, 3), "token_mean", 16)
