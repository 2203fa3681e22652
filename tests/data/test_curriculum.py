"""A curriculum of one's own: what it is told, what it keeps from being drawn, how it fails.

Not covered: ranks that disagree (`tests/rollout/test_rounds.py`), whole runs that are resumed
(`tests/launch/test_sources.py`).
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.contracts.errors import InputError
from megarl.contracts.records import Prompt, RewardRecord, RewardStatus, Scores
from megarl.contracts.samples import EndReason
from megarl.data.curriculum import Curriculum, CurriculumError, PromptHistory, Seen
from megarl.data.cursor import PromptCursor
from megarl.data.table import SampleTable
from megarl.rewards.scorer import PENALTY
from tests.data.test_cursor import draw, iteration, prompt_set, weighted

HERE = "tests.data.test_curriculum"
PROMPTS = tuple(Prompt(name, "s", "x", (1,), "1") for name in "abcd")
ASKED: list[tuple[str, Seen, int]] = []
COUNTER = itertools.count()


def even_only(prompt: Prompt, seen: Seen, iteration: int) -> bool:
    ASKED.append((prompt.prompt_id, seen, iteration))
    return int(prompt.prompt_id) % 2 == 0


def unsolved(prompt: Prompt, seen: Seen, iteration: int) -> bool:
    """Until a prompt was solved twice in a row it comes again; hard ones from iteration 2 on."""
    if prompt.source == "b" and iteration < 2:
        return False
    return seen.last_reward != 1.0


def none_at_all(prompt: Prompt, seen: Seen, iteration: int) -> bool:
    return False


def a_number(prompt: Prompt, seen: Seen, iteration: int) -> float:
    return 0.5


def raising(prompt: Prompt, seen: Seen, iteration: int) -> bool:
    return seen.mean_reward < 1


def fickle(prompt: Prompt, seen: Seen, iteration: int) -> bool:
    return next(COUNTER) % 2 == 0


def table(*rows: tuple[int, float | None, str]) -> SampleTable:
    """One row per (draw index, total or None, detail), draws rising."""
    records, seen = [], {}
    for draw_index, total, detail in rows:
        seen[draw_index] = seen.get(draw_index, -1) + 1
        status = RewardStatus.ERROR if total is None else RewardStatus.OK
        records.append(
            RewardRecord(draw_index, seen[draw_index], total, {}, "s1", status, detail=detail)
        )
    scores, count = Scores.from_records(records), len(rows)
    return SampleTable(
        draw_index=scores.draw_index,
        candidate=scores.candidate,
        prompt_length=np.full(count, 2),
        response_length=np.full(count, 3),
        actions=np.full(count, 3),
        end_reason=np.full(count, EndReason.EOS),
        replica=np.zeros(count),
        started=np.zeros(count),
        finished=np.zeros(count),
        scores=scores,
        version_id="v",
    )


def cursor_of(rows, function: str, size: int = 1) -> PromptCursor:
    return PromptCursor(rows, 1, size, Curriculum(f"{HERE}:{function}"))


def test_what_was_not_scored_is_in_no_mean() -> None:
    """Prompt a: 1 and 0.5, then once all in vain, then 0; b got a penalty; c lost every response;
    d was not drawn."""
    history = PromptHistory()
    penalty = f"{PENALTY}timeout: slow"
    history.note(
        table((0, 1.0, ""), (0, None, "KeyError"), (0, 0.5, ""), (1, -1.0, penalty)), PROMPTS[:3]
    )
    assert history.seen("a") == Seen(draws=1, scored=2, mean_reward=0.75, last_reward=0.75)
    assert history.seen("b") == history.seen("c") == Seen(draws=1)
    history.note(table((0, None, "KeyError")), PROMPTS[:1])
    assert history.seen("a") == Seen(draws=2, scored=2, mean_reward=0.75, last_reward=0.75)
    history.note(table((0, 0.25, "penalty for x"), (1, 0.0, "")), (PROMPTS[1], PROMPTS[0]))
    assert history.seen("a") == Seen(draws=3, scored=3, mean_reward=0.5, last_reward=0.0)
    assert history.seen("b") == Seen(draws=2, scored=1, mean_reward=0.25, last_reward=0.25)
    assert history.seen("d") == Seen() and history.known == 3


@settings(max_examples=50, deadline=None)
@given(
    st.lists(
        st.lists(
            st.tuples(st.integers(0, 3), st.none() | st.floats(-1e9, 1e9, allow_subnormal=False)),
            max_size=6,
        ),
        max_size=4,
    )
)
def test_a_history_comes_back_bit_for_bit(iterations) -> None:
    def noted(history: PromptHistory, rows) -> None:
        told = [(at, total, "") for at, total in sorted(rows, key=lambda row: row[0])]
        history.note(table(*told), PROMPTS)

    whole, halves = PromptHistory(), PromptHistory()
    for rows in iterations:
        noted(whole, rows)
        noted(halves, rows)
        state = json.loads(json.dumps(halves.state))
        halves = PromptHistory()
        halves.restore(state)
    assert halves.state == whole.state
    assert [halves.seen(each) for each in "abcd"] == [whole.seen(each) for each in "abcd"]


def test_a_prompt_that_is_refused_is_passed_over_and_asked_about_once_an_iteration() -> None:
    cursor = cursor_of(prompt_set(10), "even_only")
    ASKED.clear()
    cursor.begin(7)
    got = draw(cursor, 2) + draw(cursor, 1)
    order = list("9874203651")  # frozen in test_cursor.py
    assert got == [row for row in order if int(row) % 2 == 0][:3]
    assert [each for each, _, _ in ASKED] == order[: order.index(got[-1]) + 1]
    assert all(seen == Seen() and number == 7 for _, seen, number in ASKED)
    assert cursor.state["position"] == len(ASKED) and cursor.epoch == len(ASKED) / 10


def test_a_whole_pass_without_a_hit_ends_a_draw_and_consumes_nothing() -> None:
    cursor = cursor_of(prompt_set(10), "even_only")
    assert sorted(iteration(cursor, 4, 4)) == list("02468")
    state = cursor.state
    assert draw(cursor, 3) == [] and cursor.state == state
    cursor = cursor_of(prompt_set(10), "none_at_all")
    state = cursor.state
    assert iteration(cursor, 4) == [] and cursor.state == state


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 99), rounds=st.lists(st.integers(1, 4), min_size=1, max_size=30))
def test_kept_rows_come_equally_often_whatever_is_refused(seed, rounds) -> None:
    cursor = PromptCursor(prompt_set(11), seed, 1, Curriculum(f"{HERE}:even_only"))
    times = dict.fromkeys(map(str, range(0, 11, 2)), 0)
    for count in rounds:
        got = iteration(cursor, count)
        assert len(set(got)) == len(got) == count
        for prompt_id in got:
            times[prompt_id] += 1
        assert len(cursor.state["back"]) <= 2 * len(times)
    assert max(times.values()) - min(times.values()) <= 1


def simulate(cursor: PromptCursor, first: int, last: int) -> list[list[str]]:
    """Iterations of 4 prompts, of which rewards follow from the id and how often it was drawn."""
    drawn = []
    for number in range(first, last):
        cursor.begin(number)
        prompts = cursor.draw(4)
        drawn.append([prompt.prompt_id for prompt in prompts])
        totals = [
            1.0 if (int(prompt.prompt_id[1:]) + number) % 3 == 0 else 0.1 * number
            for prompt in prompts
        ]
        cursor.note(table(*((at, total, "") for at, total in enumerate(totals))), prompts)
    return drawn


@pytest.mark.parametrize("stopped", range(1, 12))
def test_draws_after_a_stop_are_those_of_an_uninterrupted_run(stopped) -> None:
    rows = weighted({"a": 9, "b": 8}, 3, 1)
    whole = simulate(cursor_of(rows, "unsolved", 4), 0, 12)
    first, then = (cursor_of(rows, "unsolved", 4) for _ in range(2))
    before = simulate(first, 0, stopped)
    then.restore(json.loads(json.dumps(first.state)))
    then.restore_history(json.loads(json.dumps(first.history)))
    assert before + simulate(then, stopped, 12) == whole
    # Source b comes from iteration 2 on, in its turns alone: nothing is made up for.
    told = ["".join(each[0] for each in got) for got in whole]
    assert all(each == "aaaa" for each in told[:2])
    assert all(each.count("b") == 1 for each in told[2:4])
    assert len(whole[4]) == 4 and min(map(len, whole)) < 4, "in the end too few are unsolved"


def test_without_a_history_a_resumed_run_would_draw_others() -> None:
    """What the tests above would not show if it made no difference."""
    rows = weighted({"a": 9, "b": 8}, 3, 1)
    whole = simulate(cursor_of(rows, "unsolved", 4), 0, 12)
    first, then = (cursor_of(rows, "unsolved", 4) for _ in range(2))
    before = simulate(first, 0, 6)
    then.restore(first.state)
    assert before + simulate(then, 6, 12) != whole


@pytest.mark.parametrize(
    ("function", "says"),
    [
        ("a_number", "asked about prompt 0 in iteration 0, answered 0.5; answer True .* or False"),
        ("raising", "asked about prompt 0 in iteration 0, raised TypeError: '<' not supported"),
        ("fickle", "answers otherwise when asked again about prompt 0: a run could not be resumed"),
    ],
)
def test_a_function_that_cannot_be_used_is_refused_at_start_in_one_line(function, says) -> None:
    with pytest.raises(CurriculumError, match=f"^data.curriculum: {HERE}:{function}.*{says}") as e:
        Curriculum(f"{HERE}:{function}").check(prompt_set(2).rows[:1])
    assert "\n" not in str(e.value)
    Curriculum(f"{HERE}:even_only").check(prompt_set(2).rows)


def test_a_function_that_is_not_there_is_refused() -> None:
    for name, says in (
        ("nowhere.at_all:keep", "cannot import nowhere.at_all:keep: ModuleNotFoundError"),
        (f"{HERE}:HERE", f"{HERE}:HERE is a str, not a function"),
        ("keep", "'keep' is no import path"),
    ):
        with pytest.raises(InputError, match=f"^data.curriculum: {says}"):
            Curriculum(name)
    assert Curriculum.of(None) is None


def test_the_code_of_the_function_has_a_hash(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    for name, body in (("one", "True"), ("two", "False"), ("three", "True")):
        text = f"def keep(prompt, seen, iteration):\n    return {body}\n"
        (tmp_path / f"curriculum_{name}.py").write_text(text)
    one, two, three = (
        Curriculum(f"curriculum_{name}:keep").code_hash for name in ("one", "two", "three")
    )
    assert one == three != two and one.startswith("sha256:")
