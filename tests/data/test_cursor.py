"""Which prompts are drawn: once an epoch, once an iteration, and a function of the state alone; of
weighted sources each one on its own.

Not covered: that a run keeps the state and continues from it (`tests/launch/test_sources.py`).
"""

from __future__ import annotations

import hashlib
import json
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.contracts.records import Prompt
from megarl.data.cursor import PromptCursor
from megarl.data.prompts import PromptError, PromptSet


def prompt_set(count: int) -> PromptSet:
    rows = tuple(Prompt(str(i), "s", "x", (1,), "1") for i in range(count))
    return PromptSet(rows, (), {}, "blake3:x")


def weighted(sizes: dict[str, int], *weights: float) -> PromptSet:
    """Rows `a0` … of source a, `b0` … of source b, in the order of `sizes`."""
    names = [name for name, size in sizes.items() for _ in range(size)]
    ids = [f"{name}{i}" for name, size in sizes.items() for i in range(size)]
    rows = tuple(Prompt(i, name, "x", (1,), "1") for i, name in zip(ids, names, strict=True))
    index = np.array([list(sizes).index(name) for name in names])
    return PromptSet(
        rows, (), {}, "blake3:w", weights=weights, sources=tuple(sizes), source_of_row=index
    )


def draw(cursor: PromptCursor, count: int, excluded: tuple[str, ...] = ()) -> list[str]:
    return [row.prompt_id for row in cursor.draw(count, excluded)]


def iteration(cursor: PromptCursor, *rounds: int, excluded: tuple[str, ...] = ()) -> list[str]:
    cursor.begin()
    return [prompt_id for count in rounds for prompt_id in draw(cursor, count, excluded)]


@settings(deadline=None)
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


@settings(max_examples=200, deadline=None)
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


@settings(max_examples=200, deadline=None)
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


def test_draws_of_rows_alike_are_what_they_always_were():
    """Frozen: draws, states and epochs of five cursors over 60 iterations of several rounds, with
    rows that go into quarantine on the way. Runs that are resumed go on with these."""
    told: list[object] = []
    for rows, seed in ((1, 0), (7, 3), (40, 2**63 + 5), (12, 99), (100, 1)):
        cursor, chance, barred = PromptCursor(prompt_set(rows), seed, 1), random.Random(rows), []
        for number in range(60):
            cursor.begin()
            if number % 17 == 16:
                barred.append(str(chance.randrange(rows)))
            for _ in range(chance.randrange(1, 4)):
                told.append(draw(cursor, chance.randrange(0, rows // 2 + 2), tuple(barred)))
            told += [cursor.state, cursor.epoch]
    digest = hashlib.sha256(repr(told).encode()).hexdigest()
    assert digest == "a25186c65b99b5653417dd360065b968a85f24a81911680aa4428ba624d04200"


SIZES = st.lists(st.integers(3, 12), min_size=1, max_size=4)


@settings(max_examples=100, deadline=None)
@given(sizes=SIZES, seed=st.integers(0, 99), data=st.data())
def test_weighted_sources_get_their_shares_and_each_goes_through_its_own_epochs(sizes, seed, data):
    names = {"abcd"[at]: size for at, size in enumerate(sizes)}
    weights = [data.draw(st.integers(1, 9)) for _ in sizes]
    # So few that no source is asked for more rows than it has.
    size = data.draw(st.integers(1, 2))
    cursor = PromptCursor(weighted(names, *weights), seed, size)
    drawn: list[str] = []
    for _ in range(40):
        got = iteration(cursor, size)
        assert len(set(got)) == len(got) == size
        drawn += got
        for name, weight in zip(names, weights, strict=True):
            count = sum(each.startswith(name) for each in drawn)
            assert abs(count - len(drawn) * weight / sum(weights)) < 1
    for name, rows in names.items():
        mine = [each for each in drawn if each.startswith(name)]
        times = [mine.count(f"{name}{row}") for row in range(rows)]
        assert max(times) - min(times) <= 1
        assert cursor.epochs[name] == pytest.approx(len(mine) / rows)
    assert cursor.epoch == pytest.approx(len(drawn) / sum(sizes))


@settings(max_examples=100, deadline=None)
@given(
    seed=st.integers(0, 99),
    before=st.lists(st.lists(st.integers(0, 9), max_size=3), max_size=6),
    after=st.lists(st.lists(st.integers(0, 9), max_size=3), max_size=6),
    excluded=st.sets(st.sampled_from(["a0", "a1", "b0", "c0", "c1", "c2"]), max_size=6),
)
def test_weighted_draws_follow_from_the_state_alone(seed, before, after, excluded):
    rows = weighted({"a": 2, "b": 4, "c": 3}, 0.2, 0.5, 0.3)
    cursor, other = (PromptCursor(rows, seed, 1) for _ in range(2))
    for rounds in before:
        iteration(cursor, *rounds)
    other.restore(json.loads(json.dumps(cursor.state)))
    assert other.state == cursor.state
    for rounds in after:
        got = iteration(cursor, *rounds, excluded=tuple(excluded))
        assert got == iteration(other, *rounds, excluded=tuple(excluded))
        assert len(set(got)) == len(got) == min(sum(rounds), 9 - len(excluded))
        assert not set(got) & excluded


def test_the_turns_of_a_source_that_has_no_row_left_go_to_the_others_and_are_not_made_up_for():
    rows = weighted({"a": 6, "b": 9, "c": 9}, 3, 2, 1)
    cursor = PromptCursor(rows, 1, 6)
    barred = tuple(f"a{row}" for row in range(6))
    drawn = [iteration(cursor, 6, excluded=barred) for _ in range(4)]
    told = "".join(each[0] for got in drawn for each in got)
    assert (told.count("a"), told.count("b"), told.count("c")) == (0, 16, 8)
    streams = {each["source"]: each for each in cursor.state["streams"]}
    assert [streams[name]["taken"] for name in "abc"] == [12, 8, 4]
    assert [streams[name]["stood_in"] for name in "abc"] == [0, 8, 4]
    assert cursor.emptied(["a3"], barred) == [
        "every prompt of source a is in quarantine: other sources fill its turns"
    ]
    assert cursor.emptied(["b1"], (*barred, "b1")) == cursor.emptied([], barred) == []
    # Back again, it gets its share and no more.
    told = "".join(each[0] for _ in range(2) for each in iteration(cursor, 6))
    assert (told.count("a"), told.count("b"), told.count("c")) == (6, 4, 2)


def test_an_iteration_of_many_rounds_draws_every_row_of_every_source_and_then_none():
    cursor = PromptCursor(weighted({"a": 2, "b": 5}, 1, 1), 1, 4)
    assert len(iteration(cursor, 4, 4, 4)) == 7 and draw(cursor, 1) == []
    assert sorted(iteration(cursor, 7)) == ["a0", "a1", "b0", "b1", "b2", "b3", "b4"]


def test_equal_sources_are_shuffled_apart_and_a_known_order_stays_what_it_is():
    cursor = PromptCursor(weighted({"a": 6, "b": 6}, 1, 1), 1, 12)
    got = iteration(cursor, 12)
    assert [each[1] for each in got[::2]] != [each[1] for each in got[1::2]]
    assert "".join(got) == "a1b2a4b5a3b0a2b3a0b1a5b4"


def test_a_source_with_fewer_rows_than_an_iteration_draws_of_it_is_refused():
    says = (
        "source b has 2 usable prompts, but by its weight an iteration draws 3 of .* = 4 .*"
        "lower its weight or rollout.prompts_per_iteration, or give it more rows"
    )
    with pytest.raises(PromptError, match=says):
        PromptCursor(weighted({"a": 9, "b": 2}, 1, 2), 1, 4)
    with pytest.raises(PromptError, match="source b has 0 usable prompts"):
        PromptCursor(weighted({"a": 9, "b": 0}, 9, 1), 1, 4)
    PromptCursor(weighted({"a": 9, "b": 3}, 1, 2), 1, 4)


def test_a_cursor_of_other_sources_is_not_gone_on_from():
    one, two = prompt_set(4), weighted({"a": 2, "b": 2}, 1, 1)
    for mine, other in ((one, two), (two, one)):
        state = PromptCursor(mine, 1, 1).state
        with pytest.raises(PromptError, match="with fingerprint 'blake3:.*resume with the same"):
            PromptCursor(other, 1, 1).restore(state)
        with pytest.raises(PromptError, match=r"(all rows alike|sources a, b), this one from "):
            PromptCursor(other, 1, 1).restore(state | {"fingerprint": other.fingerprint})
