"""Which scorers a row is scored by, what that leaves in its record; waiting; times.

Not covered: how a row comes by its reward name (tests/data).
"""

from __future__ import annotations

import threading
import time
from dataclasses import replace

import pytest

from megarl.rewards.score import first_component
from megarl.rewards.scorer import ScorerError
from tests.rewards.make_pool import GRADERS, prompt, sample, score, scoring, section

LENGTH = {"name": f"{GRADERS}:length", "component": "long", "only": ["essay", "both"]}
EXACT = {"name": "exact_match", "only": ["sum", "both"], "weight": 2.0}
REPORTED = {"name": f"{GRADERS}:length", "component": "reported", "weight": 0.0}


def records_of(pool, *rewards: str, text: str = "46"):
    for draw, reward in enumerate(rewards):
        pool.submit(sample(text, draw), replace(prompt(), reward=reward))
    return pool.collect([(draw, 0) for draw in range(len(rewards))])


def test_a_row_is_scored_by_the_scorers_of_its_reward():
    with scoring(LENGTH, EXACT, REPORTED, workers=2) as pool:
        essay, total, both = records_of(pool, "essay", "sum", "both")
        times = pool.times
    assert essay.components == {"long": 2.0, "reported": 2.0} and essay.total == 2.0
    assert total.components == {"exact_match": 1.0, "reported": 2.0} and total.total == 2.0
    assert both.components == {"long": 2.0, "exact_match": 1.0, "reported": 2.0}
    assert both.total == 4.0
    assert {title: time.count for title, time in times.items()} == {
        "long": 2,
        "exact_match": 2,
        "reported": 3,
    }


def test_a_constraint_and_steps_are_of_the_scorers_that_apply():
    bound = {"name": f"{GRADERS}:words", "only": ["essay"], "at_least": 2.0}
    with scoring(bound, {"name": f"{GRADERS}:last"}, violated=-1.0) as pool:
        essay, other = records_of(pool, "essay", "sum", text="word")
    assert essay.total == -1.0 and essay.step_rewards == ((3, 0.0), (3, 7.0))
    assert other.total == 0.0 and other.step_rewards == ((3, 7.0),) and other.detail == ""


def test_a_batch_holds_only_rows_that_the_scorer_scores():
    batched = {"name": "tests.rewards.together:batched", "batch": 8, "only": ["essay"]}
    with scoring(batched, {"name": f"{GRADERS}:length"}) as pool:
        records = records_of(pool, *(["essay", "sum"] * 4), text="score 3")
    assert [record.total for record in records] == [10.0, 7.0] * 4


def test_a_row_that_nothing_with_a_weight_scores_is_refused():
    with scoring(EXACT, REPORTED) as pool:
        with pytest.raises(ValueError, match="prompt p: no scorer with a weight scores.*'essay'"):
            records_of(pool, "essay")
        assert records_of(pool, "sum")[0].total == 2.0


def test_accuracy_is_the_first_scorers_that_applies():
    reward = section(LENGTH, EXACT, REPORTED)
    told = {name: first_component(reward, name) for name in ("essay", "sum", "both", "none")}
    assert told == {"essay": "long", "sum": "exact_match", "both": "long", "none": "reported"}
    assert first_component(section(EXACT), "essay") is None


def test_what_scores_what_is_part_of_the_version():
    versions = set()
    for item, keys in (
        (EXACT, {}),
        (EXACT | {"only": ["sum"]}, {}),
        (EXACT, {"memory_gb": 1.0}),
        (EXACT, {"memory_gb": None}),
    ):
        with scoring(item, **keys) as pool:
            versions.add(pool.version)
    assert len(versions) == 4


def test_submitting_waits_while_too_many_have_no_outcome():
    with scoring(f"{GRADERS}:obey", max_pending=3) as pool:
        began = time.monotonic()
        for draw in range(3):
            pool.submit(sample("sleep 0.2", draw), prompt())
        assert time.monotonic() - began < 0.2
        pool.submit(sample("sleep 0.2", 3), prompt())
        assert time.monotonic() - began >= 0.2
        pool.submit(sample("sleep 0.2", 4), prompt())
        assert time.monotonic() - began >= 0.4
        assert [record.total for record in pool.collect([(d, 0) for d in range(5)])] == [1.0] * 5


def test_a_pool_that_fails_wakes_who_waits_to_submit():
    with scoring("tests.rewards.rude:rude", max_pending=1) as pool:
        pool.submit(sample("sleep 0.3"), prompt())
        killer = threading.Timer(0.1, pool._pool._keeper._process.kill)
        killer.start()
        with pytest.raises(ScorerError, match="keeps the scoring workers ended with exit code -9"):
            pool.submit(sample("score 1", 1), prompt())
        killer.join()


def test_times_are_of_the_last_collection():
    with scoring(f"{GRADERS}:obey") as pool:
        score(pool, ["sleep 0.1", "score 1", "raise it"])
        count, total, longest = pool.times["obey"]
        assert count == 3 and 0.1 <= longest <= total < 0.3
        score(pool, ["score 1"])
        assert pool.times["obey"].count == 1 and pool.times["obey"].total < 0.1
