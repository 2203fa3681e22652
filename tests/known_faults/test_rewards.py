"""Known faults of rewards and verifiers: what is right, with the catalogue's numbers.

Not covered here: other mathematical verdicts than the catalogue's (tests/rewards).
"""

from __future__ import annotations

import time

import numpy as np
import pytest

from megarl.contracts.records import RewardStatus, Scores
from megarl.rewards import exact, math_answer
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


@pytest.mark.parametrize(
    ("gold", "answer", "right"),
    [
        ("1/2", r"\frac12", True),
        ("1/2", r"\dfrac{1}{2}", True),
        ("1/2", "0.5", True),
        ("1000", "1,000", True),
        ("1000", "10^{3}", True),
        ("-3", "3", False),
        ("5", r"5\text{ cm}", True),
        ("5", "x=5", True),
        ("90", r"90^\circ", True),
        ("1.5", r"1\frac{1}{2}", True),
        ("(1,2)", "(2,1)", False),
        (r"\{1,2\}", r"\{2,1\}", True),
        ("50", "0.5", False),
        (r"28\%", "0.28", True),
        ("4", r"4\sqrt{2}", False),
        ("4", r"4\sqrt(2)", False),
        ("1/2004!", "1/2006!", False),
        ("2^{-99}", "2^{-98}", False),
        ("3*x-1*y+13=0", "3x+4y+14=0", False),
    ],
)
def test_mathematical_answers_are_judged_by_their_value(gold, answer, right):
    """The four that graders with an absolute numeric tolerance or unmarked expressions accept are
    among them: factorials, small powers, another line, a multiple."""
    scorer = math_answer.make()
    for text in (rf"\boxed{{{answer}}}", f"The answer is ${answer}$."):
        assert scorer(Response(text, gold, "", True, "eos")).total == float(right)


def test_percent_is_a_value_unless_the_recipe_says_a_number():
    response = Response(r"\boxed{28}", r"28\%", "", True, "eos")
    assert math_answer.make()(response).total == 0.0
    assert math_answer.make(percent="number")(response).total == 1.0
