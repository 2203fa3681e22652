"""Known faults of rewards and verifiers: what is right, with the catalogue's numbers.

Not covered here: the table of mathematical verdicts (there is no mathematical grader).
"""

from __future__ import annotations

import time

import numpy as np
import pytest

from megarl.contracts.records import RewardStatus, Scores
from megarl.rewards import exact
from megarl.rewards.score import RewardError
from megarl.rewards.scorer import Response
from tests.rewards.make_pool import GRADERS, child_processes, left_of, score, scoring


def test_a_crashing_verifier_is_an_error_never_a_0_and_enough_of_them_stop_the_run():
    """Timers off the main thread raise ValueError; scorers themselves run in a main thread."""
    with scoring(f"{GRADERS}:alarmed") as pool:
        assert [record.total for record in score(pool, ["x"])] == [1.0]
    with scoring(f"{GRADERS}:alarmed_in_a_thread", max_error_share=0.5) as pool:
        records = score(pool, ["x", "y"], check_share=False)
        assert [record.status for record in records] == [RewardStatus.ERROR] * 2
        assert all("signal only works in main thread" in record.detail for record in records)
        scores = Scores.from_records(records)
        assert np.isnan(scores.total).all() and not scores.ok.any()
        with pytest.raises(RewardError, match="2 of 2 .*signal only works in main thread"):
            score(pool, ["x", "y"])


def test_a_hung_grader_costs_its_deadline_and_no_more():
    """Limit 2 s, a pool of 2, 10 samples of which 4 never return: about 2 s × ⌈4/2⌉ in all,
    the others scored, the pool serves on, and no process is left."""
    before = child_processes()
    deadline, bad = 2.0, {0: "sleep 3600", 1: "tower", 4: "tower", 9: "sleep 3600"}
    texts = [bad.get(index, "score 1") for index in range(10)]
    with scoring(f"{GRADERS}:obey", workers=2, deadline_seconds=deadline) as pool:
        for _ in range(2):  # the second round meets a pool that knows how fast scoring is
            began = time.monotonic()
            records = score(pool, texts)
            took = time.monotonic() - began
            timeouts = {r.draw_index for r in records if r.status is RewardStatus.TIMEOUT}
            assert timeouts == bad.keys()
            assert [r.total for r in records if r.draw_index not in bad] == [1.0] * 6
            # One after the other they would take 8 s; starting a worker anew takes some of a busy
            # machine's time.
            assert 2 * deadline <= took < 4 * deadline
        assert [record.total for record in score(pool, ["score 3"] * 4)] == [3.0] * 4
        assert not pool.failures.details
    assert left_of(before) == [] and child_processes() == before


def test_saying_nothing_wins_nothing():
    """Gold "golden retriever", answer "": 0; without a gold answer, an error."""
    scorer = exact.make()

    def total(text: str, gold: str) -> float:
        return scorer(Response(text, gold, "Which dog?", True, "eos")).total

    assert total("", "golden retriever") == 0.0
    assert total("golden", "golden retriever") == 0.0
    assert total("golden retriever", "golden retriever") == 1.0
    for empty in ("", "  "):
        with pytest.raises(ValueError, match="no answer to compare with"):
            total("", empty)
