"""Columnar samples: views, order, joins, refusals. Exchange between ranks is tests/data."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.contracts.ragged import blocks_of, gather_ragged, lengths_to_offsets
from megarl.contracts.samples import (
    END_OF_REASON,
    End,
    EndReason,
    Samples,
    SamplingContract,
)
from tests.data.make_samples import make_sample, make_samples

SHAPES = [(1, 0, 2, 3), (0, 1, 4, 1), (0, 0, 1, 2)]


def _same(left: Samples, right: Samples) -> bool:
    names = left.__dataclass_fields__
    return all(np.array_equal(getattr(left, name), getattr(right, name)) for name in names)


def test_a_view_is_one_samples_facts() -> None:
    samples = make_samples(SHAPES, holes=True)
    for row, shape in enumerate(SHAPES):
        expected = make_sample(*shape, holes=True)
        view = samples[row]
        for name in expected.__dataclass_fields__:
            assert np.array_equal(getattr(view, name), getattr(expected, name)), name
    assert [view.draw_index for view in samples] == [1, 0, 0]
    assert samples[-1].candidate == 0 and samples[-1].response_ids.tolist() == [1, 2]
    with pytest.raises(IndexError):
        samples[3]


def test_facts_are_read_only() -> None:
    samples = make_samples(SHAPES)
    for array in (samples.response_ids, samples[0].response_ids, samples.rollout_log_probs):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 1


def test_the_callers_arrays_stay_theirs() -> None:
    samples = make_samples(SHAPES)
    ids = samples.response_ids.copy()
    again = replace(samples, response_ids=ids)
    ids[0] = 99
    assert again.response_ids[0] != 99


def test_lengths_and_ends() -> None:
    samples = make_samples(SHAPES)
    assert samples.prompt_lengths.tolist() == [2, 4, 1]
    assert samples.response_lengths.tolist() == [3, 1, 2]
    reasons = [EndReason.MAX_TOKENS, EndReason.ABORT, EndReason.STOP]
    ended = replace(samples, end_reason=np.array(reasons))
    assert ended.end.tolist() == [End.TRUNCATED, End.ABORTED, End.TERMINATED]
    assert ended[0].end is End.TRUNCATED and ended[0].end_reason is EndReason.MAX_TOKENS
    assert set(END_OF_REASON) == set(EndReason)


@given(order=st.permutations(range(6)), cut=st.integers(0, 6))
def test_canonical_order_undoes_any_shuffle_and_split(order, cut) -> None:
    shapes = [
        (draw, candidate, 1 + draw, 2 + candidate) for draw in range(3) for candidate in (0, 1)
    ]
    whole = make_samples(shapes)
    parts = [whole.select(order[:cut]), whole.select(order[cut:])]
    assert _same(Samples.concat(parts).canonical(), whole)


def test_no_samples() -> None:
    none = make_samples([])
    assert len(none) == 0 and list(none) == [] and len(none.end) == 0
    assert _same(none.canonical(), none)
    both = Samples.concat([make_samples([], "old"), make_samples(SHAPES, "new")])
    assert len(both) == 3 and both.version_id == "new"


def test_samples_of_two_versions_do_not_mix() -> None:
    with pytest.raises(ValueError, match=r"several versions.*\['a', 'b'\]"):
        Samples.concat([make_samples(SHAPES[:1], "a"), make_samples(SHAPES[1:], "b")])


@pytest.mark.parametrize(
    "change, message",
    [
        ({"candidate": np.array([0, 0, 0])}, "appears twice"),
        ({"candidate": np.array([0, 1])}, "candidate has 2 rows, expected 3"),
        ({"candidate": np.array([0, -1, 0])}, "must be ≥ 0"),
        ({"response_ids": np.zeros(5)}, "response_ids has 5 tokens, not 6"),
        ({"response_offsets": np.array([0, 3, 3, 6])}, "response_offsets must rise"),
        ({"prompt_offsets": np.array([1, 2, 6, 7])}, "prompt_offsets must rise"),
        ({"end_reason": np.array([0, 0, 8])}, "no EndReason"),
        ({"end_reason": np.array([0, -1, 0])}, "no EndReason"),
        ({"rollout_log_probs": np.full(6, 0.5)}, "finite numbers ≤ 0"),
        ({"rollout_log_probs": np.full(6, np.nan)}, "finite numbers ≤ 0"),
        ({"rollout_log_probs": np.full(6, -np.inf)}, "finite numbers ≤ 0"),
    ],
)
def test_columns_that_contradict_are_refused(change, message) -> None:
    with pytest.raises(ValueError, match=message):
        replace(make_samples(SHAPES), **change)


def test_rows_with_ragged_token_columns_are_refused_by_name() -> None:
    # One mask too short and the next too long: the flat lengths would agree.
    first, second = make_sample(0, 0, 2, 3), make_sample(0, 1, 2, 3)
    rows = [
        replace(first, action_mask=np.ones(2, bool)),
        replace(second, action_mask=np.ones(4, bool)),
    ]
    with pytest.raises(ValueError, match="sample 0/0 has 3 response ids, 2 mask values"):
        Samples.from_rows(rows, "v")


CONTRACT = SamplingContract(
    n=4,
    temperature=1.0,
    max_response_tokens=32,
    stop_token_ids=(2,),
    seed=1,
    dtype="float32",
    attention_backend="torch_native",
)


@pytest.mark.parametrize(
    "change",
    [
        {"top_p": 0.9},
        {"top_k": 50},
        {"min_p": 0.01},
        {"frequency_penalty": 0.1},
        {"presence_penalty": 0.1},
        {"repetition_penalty": 1.1},
        {"temperature": 0.0},
    ],
)
def test_distributions_the_trainer_does_not_score_are_refused(change) -> None:
    CONTRACT.check_trainable()
    with pytest.raises(ValueError, match=next(iter(change))):
        replace(CONTRACT, **change).check_trainable()


def test_a_contracts_hash_is_its_content() -> None:
    assert CONTRACT.hash == replace(CONTRACT).hash
    assert CONTRACT.hash != replace(CONTRACT, seed=2).hash


@settings(max_examples=100, deadline=None)
@given(lengths=st.lists(st.integers(1, 400), min_size=1, max_size=12), data=st.data())
def test_ragged_rows_are_gathered_as_a_loop_would(lengths, data) -> None:
    """Few long rows are copied, many short ones indexed: both are drawn here."""
    offsets = lengths_to_offsets(np.array(lengths))
    flats = [np.arange(offsets[-1], dtype=np.int32), np.arange(offsets[-1]) % 3 == 0]
    rows = np.array(data.draw(st.lists(st.integers(0, len(lengths) - 1))), dtype=np.int64)
    for flat, got in zip(flats, gather_ragged(flats, offsets, rows), strict=True):
        loop = [flat[offsets[row] : offsets[row + 1]] for row in rows]
        expected = np.concatenate([flat[:0], *loop])
        assert got.dtype == flat.dtype and np.array_equal(got, expected)


def test_blocks_hold_all_rows_once() -> None:
    offsets = lengths_to_offsets(np.array([70_000, 5, 65_531, 1, 1, 200_000]))
    assert blocks_of(offsets) == [(0, 1), (1, 3), (3, 5), (5, 6)]


@pytest.mark.parametrize(
    "name", ["prompt_ids", "response_ids", "action_mask", "rollout_log_probs", "end_reason", "seed"]
)
def test_a_fingerprint_sees_every_fact_of_its_row_alone(name: str) -> None:
    samples = make_samples(SHAPES, holes=True)
    column = getattr(samples, name).copy()
    step = {"rollout_log_probs": -1, "action_mask": True}.get(name, 1)
    column[-1] = column[-1] ^ step if name == "action_mask" else column[-1] + step
    changed = replace(samples, **{name: column})
    assert (changed.fingerprints != samples.fingerprints).tolist() == [False, False, True]


def test_a_fingerprint_is_the_rows_own_wherever_it_lies_and_whenever_it_was_made() -> None:
    samples = make_samples(SHAPES, holes=True)
    later = replace(samples, started=samples.started + 1, finished=samples.finished + 1)
    order = [2, 0, 1]
    assert later.select(order).fingerprints.tolist() == samples.fingerprints[order].tolist()
    swapped = replace(samples, response_ids=samples.response_ids[[1, 0, 2, 3, 4, 5]])
    assert swapped.fingerprints[0] != samples.fingerprints[0]
    assert len(make_samples([]).fingerprints) == 0


def test_read_only_columns_are_shared_and_views_are_not() -> None:
    samples = make_samples(SHAPES)
    assert replace(samples, version_id="v1").response_ids is samples.response_ids
    assert Samples.concat([samples, make_samples([])]) is samples
    base = samples.seed.copy()
    view = base[:]
    view.setflags(write=False)
    held = replace(samples, seed=view)
    base[0] = -1
    assert held.seed[0] != -1
