"""Which prompts are drawn: once an epoch, once an iteration, and a function of the state alone.

Not covered: that a run keeps the state and continues from it.
"""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.contracts.records import Prompt
from megarl.data.cursor import PromptCursor
from megarl.data.prompts import PromptError, PromptSet


def prompt_set(count: int) -> PromptSet:
    rows = tuple(Prompt(str(i), "s", "x", (1,), "1") for i in range(count))
    return PromptSet(rows, (), {}, "blake3:x")


def draw(cursor: PromptCursor, count: int, excluded: tuple[str, ...] = ()) -> list[str]:
    return [row.prompt_id for row in cursor.draw(count, excluded)]


def iteration(cursor: PromptCursor, *rounds: int, excluded: tuple[str, ...] = ()) -> list[str]:
    cursor.begin()
    return [prompt_id for count in rounds for prompt_id in draw(cursor, count, excluded)]


@given(
    rows=st.integers(1, 40),
    share=st.floats(0.01, 1.0),
    seed=st.integers(0, 2**63),
    epochs=st.integers(1, 4),
)
def test_each_row_once_an_epoch_and_at_most_once_a_draw(rows, share, seed, epochs):
    size = max(1, int(rows * share))
    cursor = PromptCursor(prompt_set(rows), seed, size)
    draws = [iteration(cursor, size) for _ in range(-(-rows * epochs // size))]
    assert all(len(set(ids)) == size for ids in draws)
    stream = [prompt_id for ids in draws for prompt_id in ids]
    for epoch in range(epochs):
        assert len(set(stream[epoch * rows : (epoch + 1) * rows])) == rows
    assert cursor.epoch == len(stream) / rows


@settings(max_examples=200)
@given(
    rows=st.integers(1, 12),
    seed=st.integers(0, 99),
    iterations=st.lists(st.lists(st.integers(0, 9), max_size=4), max_size=12),
)
def test_rounds_of_any_size_never_repeat_a_row_and_owe_none(rows, seed, iterations):
    """The oracle: rows are drawn equally often, up to one, but for what an iteration had to leave
    because it had drawn it; and an iteration gets all it wants while there are rows."""
    cursor = PromptCursor(prompt_set(rows), seed, 1)
    times = dict.fromkeys(map(str, range(rows)), 0)
    for rounds in iterations:
        got = iteration(cursor, *rounds)
        assert len(set(got)) == len(got) == min(rows, sum(rounds))
        for prompt_id in got:
            times[prompt_id] += 1
        assert max(times.values()) - min(times.values()) <= 1
    assert cursor.epoch * rows == pytest.approx(sum(times.values()))


@settings(max_examples=200)
@given(
    rows=st.integers(2, 12),
    seed=st.integers(0, 99),
    before=st.lists(st.lists(st.integers(0, 9), max_size=3), max_size=6),
    after=st.lists(st.lists(st.integers(0, 9), max_size=3), max_size=6),
    excluded=st.sets(st.integers(0, 11), max_size=4),
)
def test_draws_follow_from_the_state_alone(rows, seed, before, after, excluded):
    barred = tuple(str(row) for row in excluded if row < rows)
    cursor, other = (PromptCursor(prompt_set(rows), seed, 1) for _ in range(2))
    for rounds in before:
        iteration(cursor, *rounds)
    other.restore(json.loads(json.dumps(cursor.state)))
    for rounds in after:
        got = iteration(cursor, *rounds, excluded=barred)
        assert got == iteration(other, *rounds, excluded=barred)
        assert not set(got) & set(barred)
        assert len(got) == min(sum(rounds), rows - len(barred))


def test_a_row_that_comes_up_again_is_the_first_of_the_next_iteration():
    """Ten rows in the frozen order 9 8 7 4 2 0 3 6 5 1; the second epoch's is read off first."""
    whole = PromptCursor(prompt_set(10), 1, 1)
    first, second = iteration(whole, 10), iteration(whole, 10)
    assert first == list("9874203651")
    cursor = PromptCursor(prompt_set(10), 1, 1)
    assert iteration(cursor, 3) == first[:3]
    # Seven rows are left of the epoch, then one that was not among them.
    drawn = iteration(cursor, 7, 1)
    late = [row for row in second if row not in first[3:]]
    assert drawn == first[3:] + late[:1]
    rest = [row for row in second if row != late[0]]
    assert iteration(cursor, 9) == rest


def test_nothing_is_left_to_an_iteration_that_has_drawn_all_or_to_one_in_quarantine():
    cursor = PromptCursor(prompt_set(4), 1, 4)
    cursor.begin()
    assert len(draw(cursor, 3)) == 3 and len(draw(cursor, 3)) == 1 and draw(cursor, 3) == []
    assert iteration(cursor, 4, excluded=("0", "1", "2", "3")) == []
    assert iteration(cursor, 4, excluded=("0", "2", "3")) == ["1"]


def test_epochs_and_seeds_shuffle_differently():
    def stream(seed: int) -> list[list[str]]:
        cursor = PromptCursor(prompt_set(50), seed, 50)
        return [iteration(cursor, 50) for _ in range(2)]

    orders = [*stream(1), *stream(2), [str(i) for i in range(50)]]
    assert len({tuple(order) for order in orders}) == 5


def test_a_known_order_stays_what_it_is():
    """A frozen example: the order of a run must survive upgrades of Python and numpy."""
    cursor = PromptCursor(prompt_set(10), 1, 5)
    assert iteration(cursor, 5) + iteration(cursor, 5) == list("9874203651")


def test_more_prompts_than_rows_are_refused():
    with pytest.raises(PromptError, match="prompts_per_iteration is 4, but there are only 3"):
        PromptCursor(prompt_set(3), 1, 4)
