"""Plans and packed tensors.

Not covered: that the model keeps packed sequences apart (tests/models).
"""

from __future__ import annotations

import time

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.contracts.samples import Samples
from megarl.data.packing import (
    MicroBatch,
    UpdatePlan,
    build_pack,
    pad_pack,
    plan_own_packs,
    plan_packs,
    plan_update,
    restore,
)
from tests.data.make_samples import make_sample, make_samples

LENGTHS = st.lists(st.integers(1, 40), max_size=60)


@settings(max_examples=200, deadline=None)
@given(lengths=LENGTHS, dp=st.integers(1, 5), budget=st.integers(40, 90))
def test_each_sample_is_in_one_pack_and_every_rank_has_as_many_packs(lengths, dp, budget) -> None:
    plan = plan_packs(lengths, dp, budget)
    rows = [row for own in plan for pack in own for row in pack.tolist()]
    assert sorted(rows) == list(range(len(lengths)))
    assert len(plan) == dp and len({len(own) for own in plan}) == 1 and len(plan[0]) >= 1
    for pack in (pack for own in plan for pack in own):
        assert pack.dtype == np.int64 and (np.diff(pack) > 0).all()
        assert sum(lengths[row] for row in pack) <= budget
    again = plan_packs(np.array(lengths, dtype=int), dp, budget)
    assert [[p.tolist() for p in own] for own in plan] == [[p.tolist() for p in o] for o in again]


def _loads(lengths: np.ndarray, plan: list) -> tuple[np.ndarray, np.ndarray]:
    packs = np.array([[lengths[pack].sum() for pack in own] for own in plan])
    return packs, packs.sum(axis=1)


def test_tokens_are_balanced_over_packs_and_ranks() -> None:
    generator = np.random.default_rng(3)
    for dp, budget in ((2, 2048), (4, 2048), (8, 1024)):
        lengths = generator.integers(14, 300, size=256)
        packs, ranks = _loads(lengths, plan_packs(lengths, dp, budget))
        least = -(-lengths.sum() // (dp * budget))
        assert packs.shape[1] <= least + 1
        assert packs.max() / packs.mean() < 1.05 and ranks.max() / ranks.mean() < 1.01


def test_attention_is_work_too() -> None:
    """Many reasoning traces among short answers: the few long ones are spread over the ranks."""
    generator = np.random.default_rng(5)
    even_length, dp, worst = 16000, 8, {None: 0.0, 16000: 0.0}
    for _ in range(5):
        lengths = np.minimum(generator.lognormal(np.log(4000), 1.0, 512), 32768).astype(int) + 1
        work = lengths * (1 + lengths / even_length)
        for told in worst:
            plan = plan_packs(lengths, dp, 33000, even_length=told)
            loads = [sum(work[pack].sum() for pack in own) for own in plan]
            worst[told] = max(worst[told], max(loads) / np.mean(loads))
            assert len({len(own) for own in plan}) == 1
    assert worst[even_length] < 1.01 < worst[None]


def test_best_fit_is_used_where_balancing_needs_more_packs() -> None:
    # Lightest pack first gives 3 2 2 | 3 2, above 6; best fit gives 3 3 | 2 2 2.
    lengths = np.array([3, 2, 3, 2, 2])
    plan = plan_packs(lengths, 1, 6)
    assert [pack.tolist() for pack in plan[0]] == [[0, 2], [1, 3, 4]]
    assert _loads(lengths, plan)[0].tolist() == [[6, 6]]


def test_a_sample_above_the_budget_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"sample 1 \(130 tokens\).*tokens_per_micro_batch"):
        plan_packs([10, 130], 1, 100)
    with pytest.raises(ValueError, match=r"row7 \(101 tokens\)"):
        plan_update([1] * 7 + [101], [np.array([2, 7])], 1, 100, "row{}".format)


def test_no_samples_give_one_empty_pack_per_rank() -> None:
    plan = plan_packs([], 3, 10)
    assert [[len(pack) for pack in own] for own in plan] == [[0], [0], [0]]


def test_an_update_plan_names_owners_and_local_rows() -> None:
    lengths = np.array([5, 9, 5, 9, 5, 9, 3, 3])
    plan = plan_update(lengths, [np.array([0, 1, 2, 3]), np.array([], int), np.array([7, 5])], 2, 9)
    assert (plan.owner[[4, 6]] == -1).all() and plan.packed.sum() == 6
    for dp_index in range(2):
        own = np.flatnonzero(plan.owner == dp_index)
        local = plan.local_packs(dp_index)
        assert len(local) == 3 and [len(p) for p in local[1]] == [0]
        taken = np.concatenate([pack for part in local for pack in part])
        assert sorted(own[taken].tolist()) == own.tolist()
        for part, packs in zip(plan.packs, local, strict=True):
            for rows, pack in zip(part[dp_index], packs, strict=True):
                assert own[pack].tolist() == rows.tolist()
    with pytest.raises(ValueError, match="two minibatches"):
        plan_update(lengths, [np.array([0, 1]), np.array([1])], 1, 20)


@settings(max_examples=200, deadline=None)
@given(lengths=LENGTHS, dp=st.integers(1, 4), budget=st.integers(40, 200), own=st.integers(40, 200))
def test_packs_of_its_own_keep_rows_owners_and_minibatches(lengths, dp, budget, own) -> None:
    half = len(lengths) // 2
    minibatches = [np.arange(half), np.arange(half, len(lengths)), np.array([], int)]
    update = plan_update(lengths, minibatches, dp, budget)
    plan = plan_own_packs(update, lengths, own)
    assert np.array_equal(plan.owner, update.owner) and len(plan.packs) == 3
    for parts, before in zip(plan.packs, update.packs, strict=True):
        assert len(parts) == dp and len({len(packs) for packs in parts}) == 1
        assert len(parts[0]) >= 1
        needed = []
        for packs, theirs in zip(parts, before, strict=True):
            assert all(pack.dtype == np.int64 and (np.diff(pack) > 0).all() for pack in packs)
            assert all(sum(lengths[row] for row in pack) <= own for pack in packs)
            rows = np.sort(np.concatenate(theirs))
            assert np.array_equal(np.sort(np.concatenate(packs)), rows)
            needed.append(len(plan_packs(np.array(lengths, int)[rows], 1, own)[0]))
        assert len(parts[0]) == max(needed), "no more packs than the fullest part needs"


def test_a_part_with_fewer_packs_spreads_them_or_has_empty_ones() -> None:
    def own(lengths: list[int], parts: list[list[int]], budget: int) -> list[list[list[int]]]:
        owner = np.zeros(len(lengths), dtype=np.int64)
        update = UpdatePlan((tuple((np.array(rows),) for rows in parts),), owner)
        (packs,) = plan_own_packs(update, lengths, budget, name="row{}".format).packs
        return [[pack.tolist() for pack in held] for held in packs]

    # One part needs two packs of 12 tokens, the other one.
    lengths = [9, 9, 4, 4, 4, 6]
    assert own(lengths, [[0, 1], [2, 3, 4]], 12) == [[[0], [1]], [[2, 4], [3]]]
    assert own(lengths, [[0, 1], [5]], 9) == [[[0], [1]], [[5], []]]
    # 3 3 | 2 2 2 fill eight packs of 6; longest first into nine of them would make one of 7.
    full = [3] * 8 + [2] * 12 + [6] * 9
    first, second = own(full, [list(range(20)), list(range(20, 29))], 6)
    assert len(first) == len(second) == 9 and first[-1] == [] and [] not in first[:-1]
    with pytest.raises(ValueError, match=r"row5 \(6 tokens\).*critic\.tokens_per_micro_batch"):
        own([1, 1, 1, 1, 1, 6], [[0, 1], [5]], 5)


def test_the_example_of_the_module() -> None:
    samples = make_samples([(0, 0, 3, 3), (0, 1, 2, 1)])
    pack = build_pack(samples, [0, 1])
    assert pack.token_ids_T.tolist() == [0, 1, 2, 3, 4, 5, 100, 101, 102]
    assert pack.positions_T.tolist() == [0, 1, 2, 3, 4, 5, 0, 1, 2]
    assert pack.cu_seqlens.tolist() == [0, 6, 9] and pack.cu_seqlens.dtype == torch.int32
    assert pack.predictor_A.tolist() == [2, 3, 4, 7]
    assert pack.target_A.tolist() == [3, 4, 5, 102]
    assert pack.sequence_A.tolist() == [0, 0, 0, 1]
    assert pack.response_A.tolist() == [0, 1, 2, 3] and pack.max_length == 6


SHAPES = st.lists(st.tuples(st.integers(1, 6), st.integers(1, 7)), min_size=1, max_size=12)


@settings(max_examples=100, deadline=None)
@given(shapes=SHAPES, data=st.data())
def test_packs_hold_what_a_loop_over_samples_gives(shapes, data) -> None:
    samples = make_samples(((0, i, p, r) for i, (p, r) in enumerate(shapes)), holes=True)
    chosen = data.draw(st.lists(st.integers(0, len(shapes) - 1), unique=True, min_size=1))
    pack = build_pack(samples, chosen)
    tokens, positions, predictors, targets, mask, sequence = [], [], [], [], [], []
    for at, row in enumerate(chosen):
        sample = samples[row]
        start = len(tokens)
        for i, token in enumerate(sample.response_ids):
            predictors.append(start + len(sample.prompt_ids) + i - 1)
            targets.append(token)
            mask.append(sample.action_mask[i])
            sequence.append(at)
        tokens += [*sample.prompt_ids, *sample.response_ids]
        positions += range(len(tokens) - start)
    assert pack.token_ids_T.tolist() == tokens and pack.positions_T.tolist() == positions
    assert pack.predictor_A.tolist() == predictors and pack.target_A.tolist() == targets
    assert pack.action_mask_A.tolist() == mask and pack.sequence_A.tolist() == sequence
    assert pack.rows.tolist() == chosen and pack.cu_seqlens[-1] == len(tokens)
    expected = np.concatenate([samples[row].rollout_log_probs for row in chosen])
    assert np.array_equal(pack.take(samples.rollout_log_probs).numpy(), expected)


def test_the_dummy_pack_runs_and_scores_nothing() -> None:
    pack = build_pack(make_samples([(0, 0, 2, 2)]), [])
    assert pack.is_empty and pack.token_ids_T.tolist() == [0] and pack.cu_seqlens.tolist() == [0, 1]
    assert len(pack.predictor_A) == len(pack.target_A) == len(pack.response_A) == 0
    assert pack.to("cpu").max_length == 1
    assert build_pack(make_samples([]), []).is_empty


@settings(max_examples=60, deadline=None)
@given(shapes=SHAPES, missing=st.integers(0, 50))
def test_padding_is_sequences_of_its_own_and_scores_nothing(shapes, missing) -> None:
    samples = make_samples((0, i, p, r) for i, (p, r) in enumerate(shapes))
    for pack in (build_pack(samples, range(len(samples))), build_pack(samples, [])):
        tokens, sequences = len(pack.token_ids_T), len(pack.cu_seqlens)
        padded = pad_pack(pack, tokens + missing)
        lengths = padded.cu_seqlens.diff()
        assert padded.cu_seqlens.dtype == torch.int32 and padded.cu_seqlens[0] == 0
        assert len(padded.token_ids_T) == len(padded.positions_T) == lengths.sum()
        assert lengths.sum() == tokens + missing
        assert lengths.min() >= 1 and lengths.max() <= padded.max_length == pack.max_length
        assert torch.equal(padded.cu_seqlens[:sequences], pack.cu_seqlens)
        assert torch.equal(padded.token_ids_T[:tokens], pack.token_ids_T)
        positions = [position for length in lengths.tolist() for position in range(length)]
        assert padded.positions_T.tolist() == positions
        assert not padded.token_ids_T[tokens:].any()
        for name in ("rows", "predictor_A", "target_A", "sequence_A", "response_A"):
            assert torch.equal(getattr(padded, name), getattr(pack, name))
    with pytest.raises(ValueError, match="does not fit"):
        pad_pack(pack, 0)


@settings(max_examples=60, deadline=None)
@given(shapes=SHAPES, dp=st.integers(1, 3))
def test_restoring_gives_the_samples_order(shapes, dp) -> None:
    samples = make_samples((0, i, p, r) for i, (p, r) in enumerate(shapes))
    lengths = samples.prompt_lengths + samples.response_lengths
    packs = [build_pack(samples, rows) for own in plan_packs(lengths, dp, 20) for rows in own]
    values = [pack.take(samples.rollout_log_probs) for pack in packs]
    assert np.array_equal(restore(packs, values), samples.rollout_log_probs)


def test_restoring_refuses_gaps_and_doubles() -> None:
    samples = make_samples([(0, 0, 1, 2), (0, 1, 1, 3)])
    one, both = build_pack(samples, [1]), build_pack(samples, [0, 1])
    with pytest.raises(ValueError, match="exactly once"):
        restore([one], [torch.zeros(3)])
    with pytest.raises(ValueError, match="exactly once"):
        restore([one, both], [torch.zeros(3), torch.zeros(5)])
    with pytest.raises(ValueError, match="2 values for 3"):
        restore([one], [torch.zeros(2)])
    assert restore([], []).shape == (0,)


def test_a_micro_batch_checks_its_columns() -> None:
    pack = build_pack(make_samples([(0, 0, 2, 2)]), [0])
    good = torch.zeros(2)
    MicroBatch(pack, good, None, good, good, good)
    with pytest.raises(ValueError, match="advantages_A is torch.float64"):
        MicroBatch(pack, good, None, good, good.double(), good)
    with pytest.raises(ValueError, match=r"weights_A is torch.float32\[3\]"):
        MicroBatch(pack, good, None, good, good, torch.zeros(3))


def test_packing_many_samples_is_quick() -> None:
    rows = [make_sample(i // 8, i % 8, 20, 60) for i in range(2048)]
    samples = Samples.from_rows(rows, "v")
    start = time.perf_counter()
    plan = plan_packs(samples.prompt_lengths + samples.response_lengths, 2, 8192)
    packs = [build_pack(samples, pack) for own in plan for pack in own]
    assert sum(len(pack.target_A) for pack in packs) == 2048 * 60
    assert time.perf_counter() - start < 2.0
