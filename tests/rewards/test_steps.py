"""Step scores on their way from scorers, in processes of their own, into reward records.

Not covered: statuses and totals (test_score.py); training on steps (tests/algorithms).
"""

from __future__ import annotations

from megarl.contracts.records import RewardStatus
from tests.rewards.make_pool import GRADERS, score, scoring

WORDS = f"{GRADERS}:words"


def test_step_scores_are_weighted_as_their_scorers() -> None:
    """Characters are tokens: the words of `ab c` end at tokens 1 and 3."""
    with scoring({"name": WORDS, "weight": 0.5, "score": 3.0}, f"{GRADERS}:length") as pool:
        (record,) = score(pool, ["ab c"])
    assert record.step_rewards == ((1, 0.0), (3, 1.5))
    assert record.components == {"words": 2.0, "length": 4.0} and record.total == 5.0


def test_steps_of_several_scorers_are_in_the_order_of_their_tokens() -> None:
    other = {"name": f"{GRADERS}:last", "weight": -1.0}
    unheard = {"name": f"{GRADERS}:first", "weight": 0.0}
    with scoring(other, WORDS, unheard) as pool:
        (record,) = score(pool, ["ab c d"])
    assert record.step_rewards == ((1, 0.0), (3, 1.0), (5, -7.0), (5, 2.0))


def test_a_violated_constraint_leaves_the_steps() -> None:
    with scoring({"name": WORDS, "at_least": 3.0}, violated=-1.0) as pool:
        (record,) = score(pool, ["ab c"])
    assert record.total == -1.0 and record.step_rewards == ((1, 0.0), (3, 1.0))


def test_a_step_that_cannot_be_is_an_error() -> None:
    told = {
        "single": "returned the step (3,), not (token index, score)",
        "beyond": "returned a step at token 6 of a response of 6 tokens",
        "before": "returned a step at token -1 of a response of 6 tokens",
        "float": "returned a step at token 1.0, which is no index",
        "infinite": "returned inf for the step at token 1, not a finite number",
        "none": "returned None for the step at token 1, not a number",
        "number": "returned the step 3, not (token index, score)",
    }
    with scoring(f"{GRADERS}:stepping") as pool:
        records = score(pool, list(told))
    for text, record in zip(told, records, strict=True):
        assert record.status is RewardStatus.ERROR and record.total is None, text
        assert told[text] in record.detail and record.step_rewards == ()
