"""Whose turn it is, by weight: never a whole turn away from any source's share. How much of an
order a draw looks at.

The orders themselves are tested through the cursor.
"""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.data.streams import Stream, Turns, stream_key

WEIGHTS = st.lists(
    st.one_of(st.integers(1, 100).map(float), st.decimals("0.001", "9.999", places=3).map(float)),
    min_size=1,
    max_size=7,
)


def dealt(weights: list[float], number: int) -> list[int]:
    turns = Turns(weights)
    had = [0] * len(weights)
    order = []
    for _ in range(number):
        order.append(turns.next(had))
        had[order[-1]] += 1
    return order


@settings(max_examples=60, deadline=None)
@given(weights=WEIGHTS, number=st.integers(1, 200))
def test_no_source_is_ever_a_whole_turn_away_from_its_share(weights, number):
    exact = [round(weight * 1000) for weight in weights]
    had = [0] * len(weights)
    for turn, source in enumerate(dealt(weights, number), start=1):
        had[source] += 1
        for count, weight in zip(had, exact, strict=True):
            assert abs(count * sum(exact) - turn * weight) < sum(exact)


def test_many_small_sources_do_not_wait_behind_a_large_one():
    """D'Hondt, which only looks for the smallest (turns + 1) / weight, deals 89 turns to the first
    before any other has one."""
    order = dealt([0.9] + [0.01] * 10, 1000)
    assert order.count(0) == 900 and all(order.count(source) == 10 for source in range(1, 11))
    assert order[:89].count(0) in (80, 81)


def test_turns_come_in_a_known_order_and_equal_sources_in_theirs():
    assert dealt([3.0, 1.0], 8) == [0, 0, 0, 1] * 2
    assert dealt([1.0, 1.0, 1.0], 6) == [0, 1, 2] * 2
    assert dealt([0.3, 0.1], 40) == dealt([3.0, 1.0], 40), "0.3 is meant, not its nearest double"


def test_those_that_stand_in_do_so_by_weight():
    turns, had = Turns([5.0, 2.0, 1.0]), [0, 0, 0]
    for _ in range(9):
        had[turns.stand_in(had, [1, 2])] += 1
    assert had == [0, 6, 3]


class Drawn(set[int]):
    """Counts how often it is asked."""

    asked = 0

    def __contains__(self, row: object) -> bool:
        self.asked += 1
        return super().__contains__(row)


def test_a_row_that_stepped_back_is_looked_at_once_an_iteration():
    stream = Stream(np.arange(500), stream_key(1))
    stream.restore(500, range(400))
    drawn = Drawn(range(400))
    for _ in range(100):
        drawn.add(stream.take(drawn, lambda row: True))
    assert len(drawn) == 500 and drawn.asked <= 400 + 500
    assert stream.back[:400] == list(range(400)) and len(stream.back) == stream.position - 200
    stream.begin()
    assert [stream.take(set(), lambda row: True) for _ in range(3)] == [0, 1, 2]


def test_an_order_without_a_row_left_is_gone_through_once_an_iteration():
    stream, drawn = Stream(np.arange(100), stream_key(1)), Drawn()
    before = stream.position, stream.back
    assert [stream.take(drawn, lambda row: False) for _ in range(5)] == [None] * 5
    assert drawn.asked == 200 and (stream.position, stream.back) == before
    stream.begin()
    assert stream.take(drawn, lambda row: row == 7) == 7
