"""Batched and async scorers: several responses at once, and only the guilty carries a status.

Not covered: an async scorer's throughput against a real server.
"""

from __future__ import annotations

import time

import pytest

from megarl.contracts.records import RewardStatus
from megarl.rewards.judge import Judge, Loaded
from megarl.rewards.scorer import Response
from tests.rewards import together
from tests.rewards.make_pool import child_processes, left_of, prompt, sample, score, scoring

HERE = "tests.rewards.together"
BATCHED = {"name": f"{HERE}:batched", "batch": 4}
BOTH = {"name": f"{HERE}:both", "batch": 3}


def totals(records) -> list[float | None]:
    return [record.total for record in records]


def shaped(*texts: str):
    """Outcomes of one batch, without processes."""
    judge = Judge([Loaded("shaped", together.shaped, frozenset(), len(texts), False)])
    tasks = [(at, Response(text, "", "", True, "eos", (1,))) for at, text in enumerate(texts)]
    return [case.outcome(judge.titles) for case in judge.ask(tasks, lambda numbers: None)]


def wait_for_a_batch(pool, texts):
    """Records of `texts` that come while the one worker is busy, so that they share batches."""
    return score(pool, ["block", *texts])[1:]


@pytest.fixture(scope="module")
def batching():
    with scoring(BATCHED, deadline_seconds=1.0) as pool:
        yield pool


@pytest.fixture(scope="module")
def awaiting():
    with scoring(f"{HERE}:awaited", deadline_seconds=1.0, concurrency=8, memory_gb=0.3) as pool:
        yield pool


def test_a_batch_holds_up_to_so_many(batching):
    records = wait_for_a_batch(batching, [f"score {number}" for number in range(10)])
    assert totals(records) == [float(number) for number in range(10)]
    assert max(record.detail for record in records) == "of 4"
    assert batching.times["batched"].count == 10


@pytest.mark.parametrize(
    ("text", "status", "detail"),
    [
        ("raise", "error", "batched: RuntimeError: it (together.py:"),
        ("leave", "error", "batched: SystemExit: 3"),
        ("kill", "error", "the scorer ended its process with exit code -9"),
        ("block", "timeout", "no score within 1 s"),
    ],
)
def test_only_the_guilty_of_a_batch_carries_the_status(batching, text, status, detail):
    before = child_processes()
    good = [f"score {number}" for number in range(5)]
    records = wait_for_a_batch(batching, [*good[:2], text, *good[2:]])
    failed = records.pop(2)
    assert str(failed.status) == status and failed.detail.startswith(detail)
    assert failed.total is None and totals(records) == [0.0, 1.0, 2.0, 3.0, 4.0]
    assert all(record.status is RewardStatus.OK for record in records)
    assert len(left_of(before, seconds=0.0)) <= 1


def test_scoring_alone_is_no_try():
    """With the rule retry the guilty one is scored twice alone, after it was scored with others."""
    rules = {"error": "retry", "timeout": "retry"}
    with scoring(BATCHED, deadline_seconds=1.0, on_status=rules) as pool:
        began = time.monotonic()
        records = score(pool, ["score 1", "block", "score 3", "kill", "score 4"])
        assert totals(records) == [1.0, None, 3.0, None, 4.0]
        assert time.monotonic() - began < 8.0


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("short", "shaped: ValueError: returned 3 scores for 4 responses"),
        ("long", "shaped: ValueError: returned 5 scores for 4 responses"),
        ("one", "shaped: TypeError: returned 3.0, not a list with one score per response"),
        ("none", "shaped: TypeError: returned None, not a list"),
        ("dict", "shaped: TypeError: returned {0: 1.0"),
        ("square", "shaped: TypeError: returned array("),
        ("text", "shaped: TypeError: returned '1111', not a list"),
        ("yield", "shaped: TypeError: returned a generator (it has a yield; a scorer returns)"),
    ],
)
def test_an_answer_that_fits_no_batch_is_everyones_error(text, told):
    outcomes = shaped(text, "a", "b", "c")
    assert all(outcome.components == {} for outcome in outcomes)
    assert all(outcome.error.startswith(told) for outcome in outcomes), outcomes[0].error


def test_arrays_and_tuples_are_lists():
    for text in ("array", "tuple"):
        outcomes = shaped(text, "ab", "", "d")
        assert [one.components for one in outcomes] == [{"shaped": n} for n in (5.0, 2.0, 0.0, 1.0)]


def test_a_score_that_is_none_in_a_batch_is_its_own_error():
    first, *others = shaped("nan", "ab", "", "d")
    assert first.error == "shaped: ValueError: returned nan, not a finite number"
    assert [one.components["shaped"] for one in others] == [2.0, 0.0, 1.0]


def test_async_scorers_are_awaited_together(awaiting):
    began = time.monotonic()
    records = score(awaiting, ["wait 0.2"] * 24)
    assert totals(records) == [1.0] * 24
    assert time.monotonic() - began < 24 * 0.2 / 2
    assert max(int(record.detail) for record in records) == 8  # `concurrency`


@pytest.mark.parametrize(
    ("text", "status", "detail"),
    [
        ("raise", "error", "awaited: RuntimeError: it (together.py:"),
        ("leave", "error", "awaited: SystemExit: 3"),
        ("cancel", "error", "awaited: CancelledError"),
        ("bytes", "error", "awaited: MemoryError"),
        ("kill", "error", "the scorer ended its process with exit code -9"),
        ("wait 3600", "timeout", "no score within 1 s"),
        ("stubborn", "timeout", "no score within 1 s"),
        ("block", "timeout", "no score within 1 s"),
    ],
)
def test_only_the_guilty_of_those_awaited_carries_the_status(awaiting, text, status, detail):
    records = score(awaiting, ["wait 0.1", "score 2", text, "wait 0.3", "score 3"])
    failed = records.pop(2)
    assert str(failed.status) == status and failed.detail.startswith(detail), failed.detail
    assert failed.total is None and totals(records) == [1.0, 2.0, 1.0, 3.0]


def test_a_call_that_ends_when_it_is_cancelled_disturbs_nobody(awaiting):
    """What else is on its way goes on in the same worker; one that does not end takes it along."""
    before, _, after = totals(score(awaiting, ["pid", "wait 3600", "pid"]))
    assert before == after == totals(score(awaiting, ["pid"]))[0]
    score(awaiting, ["stubborn"])
    assert before != totals(score(awaiting, ["pid"]))[0]


def test_children_of_async_scorers_disturb_nobody():
    before = child_processes()
    with scoring(f"{HERE}:awaited") as pool:
        assert totals(score(pool, ["fork", "spawn", "wait 0.1", "fork"])) == [1.0] * 4
    assert left_of(before) == []


def test_async_and_batched_together():
    with scoring(BOTH, deadline_seconds=1.0, concurrency=6) as pool:
        texts = ["wait 0.1"] * 5 + ["wait 3600", "raise", "score 4"]
        records = score(pool, texts)
    assert totals(records) == [1.0] * 5 + [None, None, 4.0]
    assert [str(record.status) for record in records[5:7]] == ["timeout", "error"]


def test_time_that_plain_scorers_take_is_none_of_an_async_ones_deadline():
    """A worker that awaits some is given more, whose plain scorers keep the loop for a while."""
    with scoring(f"{HERE}:busy", f"{HERE}:in_steps", deadline_seconds=0.9, concurrency=4) as pool:
        for draw in range(5):
            pool.submit(sample(str(draw), draw), prompt())
            time.sleep(0.05)
        records = pool.collect([(draw, 0) for draw in range(5)])
        assert [record.detail for record in records] == [""] * 5
        assert totals(records) == [2.0] * 5
        assert pool.times["in_steps"].longest < 0.9


def test_large_answers_and_large_top_ups_pass_each_other():
    with scoring(f"{HERE}:stepping", deadline_seconds=5.0, concurrency=3) as pool:
        records = score(pool, ["x" * 40_000] * 6)
    assert totals(records) == [1.0] * 6
    assert {len(record.step_rewards) for record in records} == {40_000}


def test_kinds_of_scorers_work_side_by_side():
    """A plain one may run a loop of its own; components are in the recipe's order."""
    scorers = (
        f"{HERE}:an_object",
        BATCHED | {"weight": 0.5},
        f"{HERE}:running_a_loop",
        BOTH,
        "tests.rewards.graders:length",
    )
    with scoring(*scorers, workers=2) as pool:
        records = score(pool, [f"score {number}" for number in range(9)])
        times = pool.times
    for number, record in enumerate(records):
        assert record.components == {
            "an_object": 2.0,
            "batched": float(number),
            "running_a_loop": 1.0,
            "both": float(number),
            "length": 7.0,
        }
        assert list(record.components) == list(times)
        assert record.total == 10.0 + 1.5 * number
    assert {time.count for time in times.values()} == {9}


def test_a_coroutine_or_a_generator_in_place_of_a_score_says_what_to_change():
    with scoring(f"{HERE}:not_async") as pool:
        (record,) = score(pool, ["wait 0"])
    assert "returned a coroutine (declare the function itself async def" in record.detail
    with scoring(f"{HERE}:generating") as pool:
        (record,) = score(pool, ["x"])
    assert "returned a generator (it has a yield; a scorer returns)" in record.detail
