"""The declared penalty in sealed scores: what is taken for it, and what only sounds like it.

Not covered: sealed runs (`test_recompute.py`, `test_verify.py`).
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from megarl.audit import check_scores
from megarl.audit.again import scored_under
from megarl.contracts.records import RewardRecord, RewardStatus, Scores
from megarl.rewards.score import penalised
from megarl.rewards.scorer import PENALTY
from tests.rewards.make_pool import section

REWARD = section("exact_match", on_status={"error": "penalty"}, penalty=-2.0)


def record(draw: int, total: float | None, detail: str) -> RewardRecord:
    failed = total is None
    components = {} if failed or detail.startswith(PENALTY) else {"exact_match": total}
    status = RewardStatus.ERROR if failed else RewardStatus.OK
    return RewardRecord(draw, 0, total, components, "v", status=status, detail=detail)


RECORDS = [
    record(0, 1.0, "penalty for length"),
    record(1, -2.0, f"{PENALTY}error: ValueError: x"),
    record(2, None, f"{PENALTY}x: ValueError: of a component with such a name"),
    record(3, 0.0, ""),
]
SCORES = Scores.from_records(RECORDS)


def test_only_a_marked_record_with_a_total_got_the_penalty() -> None:
    assert penalised(SCORES).tolist() == [False, True, False, False]
    assert penalised(Scores.from_records([])).tolist() == []


def test_totals_under_another_penalty_differ_only_there() -> None:
    before = SimpleNamespace(reward=REWARD)
    after = SimpleNamespace(reward=REWARD.model_copy(update={"penalty": -5.0}))
    totals = scored_under(SCORES, before, after).total
    assert np.array_equal(totals, [1.0, -5.0, np.nan, 0.0], equal_nan=True)


@pytest.mark.parametrize(("row", "total"), [(0, 3.0), (1, -1.0)])
def test_a_total_that_is_not_the_recipes_is_found(row: int, total: float) -> None:
    def found(records) -> list:
        prompts = [{"reward": ""}] * len(records)
        sealed = SimpleNamespace(prompts=prompts, records=records, sample_id=str)
        recipe = SimpleNamespace(reward=REWARD)
        view = SimpleNamespace(facts_recipe=recipe, sealed=sealed, file=lambda pattern: pattern)
        return list(check_scores.scores(view))

    assert found(RECORDS) == []
    wrong = list(RECORDS)
    wrong[row] = replace(RECORDS[row], total=total)
    assert [finding.sample for finding in found(wrong)] == [str(row)]
