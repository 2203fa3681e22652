"""The join itself, on columns of any role. Samples and rewards: test_join_properties."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.contracts.ids import pair_keys
from megarl.data.join import JoinCounts, JoinError, Origin, Ragged, Results, join

ORIGIN = Origin("run", 3, "old", "v3", attempt=1)
NAN = float("nan")


def _results(rows: dict[int, list[float]], origin: Origin = ORIGIN, clock: float = 0.0) -> Results:
    """Log-probs of candidate 0 of some draws."""
    draws = np.array(list(rows), dtype=np.int64)
    lengths = [len(values) for values in rows.values()]
    flat = np.array([value for values in rows.values() for value in values], dtype=np.float32)
    return Results(
        origin,
        pair_keys(draws, np.zeros(len(draws), dtype=np.int64)),
        {
            "log_probs": Ragged(flat, np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])),
            "value": np.array([values[0] for values in rows.values()]),
        },
        {"finished": np.full(len(draws), clock)},
    )


def test_rows_meet_by_id_and_repeats_change_nothing() -> None:
    parts = [
        _results({4: [-1.0, -2.0], 1: [-3.0]}, clock=5.0),
        _results({1: [-3.0], 0: [NAN, -1.0]}, clock=1.0),
        _results({0: [NAN, -1.0]}, clock=2.0),
    ]
    joined = join(ORIGIN, parts)
    assert (joined.keys >> 32).tolist() == [0, 1, 4]
    # Of what came twice the earlier stays, whatever the order of the parts.
    assert joined.part.tolist() == [1, 1, 0] and joined.row.tolist() == [1, 0, 0]
    column = joined.take(parts, "log_probs")
    np.testing.assert_equal(column.flat, np.array([NAN, -1, -3, -1, -2], np.float32))
    assert column.offsets.tolist() == [0, 2, 3, 5]
    assert joined.counts == JoinCounts(2, 0, ("old 0/0", "old 1/0"))
    turned = join(ORIGIN, parts[::-1])
    assert turned.counts == joined.counts and turned.part.tolist() == [1, 1, 2]


@pytest.mark.parametrize(
    "change, told",
    [
        ({"run_id": "b"}, "old 2/0 of run_id b, expected run"),
        ({"iteration": 2}, "old 2/0 of iteration 2, expected 3"),
        ({"iteration": 4}, "old 2/0 of iteration 4, expected 3"),
        ({"version": "v2"}, "old 2/0 of version v2, expected v3"),
        ({"attempt": 0}, "old 2/0 of attempt 0, expected 1"),
    ],
)
def test_results_of_something_else_are_late(change, told) -> None:
    late = _results({2: [-9.0]}, replace(ORIGIN, **change))
    for parts in ([late, _results({2: [-1.0]})], [_results({2: [-1.0]}), late]):
        joined = join(ORIGIN, parts)
        assert joined.take(parts, "value").tolist() == [-1.0]
        assert joined.counts == JoinCounts(late=1, late_names=(told,))


def test_what_is_missing_is_told_and_what_nobody_asked_for_is_late() -> None:
    wanted = pair_keys(np.array([5, 1, 3]), np.zeros(3))
    joined = join(ORIGIN, [_results({1: [0.0], 7: [0.0]})], wanted)
    assert (joined.missing >> 32).tolist() == [3, 5] and (joined.keys >> 32).tolist() == [1]
    assert joined.counts.late_names == ("old 7/0 of a sample nobody asked for",)
    assert (join(ORIGIN, [], wanted).missing >> 32).tolist() == [1, 3, 5]


@pytest.mark.parametrize(
    "other, told",
    [
        ([-1.0, -2.5], "log_probs is -2.0 and -2.5 at position 1"),
        ([-1.0], "log_probs is 2 and 1 values long"),
        ([-1.0, NAN], "log_probs is -2.0 and nan at position 1"),
    ],
)
def test_a_contradiction_names_sample_and_field(other, told) -> None:
    with pytest.raises(JoinError, match=f"two different old results of sample 6/0: {told}"):
        join(ORIGIN, [_results({6: [-1.0, -2.0], 1: [0.0]}), _results({6: other})])


def test_another_role_or_a_later_attempt_is_refused() -> None:
    with pytest.raises(ValueError, match="role ref in a join of role old"):
        join(ORIGIN, [_results({0: [0.0]}, replace(ORIGIN, role="ref"))])
    with pytest.raises(ValueError, match="attempt 1 is running: this rank missed a roll-back"):
        join(ORIGIN, [_results({0: [0.0]}, replace(ORIGIN, attempt=2))])


@settings(max_examples=100, deadline=None)
@given(st.lists(st.lists(st.integers(0, 9), max_size=6), max_size=5), st.data())
def test_it_joins_as_a_dictionary_would(parts, data) -> None:
    values = data.draw(st.lists(st.lists(st.floats(-1, 0), min_size=1), min_size=10, max_size=10))
    delivered = [_results({draw: values[draw] for draw in set(part)}) for part in parts]
    joined = join(ORIGIN, delivered)
    expected = sorted({draw for part in parts for draw in part})
    assert (joined.keys >> 32).tolist() == expected
    assert joined.counts.duplicates == sum(len(set(part)) for part in parts) - len(expected)
    if expected:
        column = joined.take(delivered, "log_probs")
        flat = np.array([v for draw in expected for v in values[draw]], dtype=np.float32)
        assert np.array_equal(column.flat, flat)
