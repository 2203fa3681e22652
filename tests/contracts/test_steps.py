"""Step scores as columns. Not covered: how they are trained on (test_credit.py)."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from megarl.contracts.records import Scores
from megarl.contracts.steps import Steps
from tests.algorithms.make_credit import Row, make_facts
from tests.data.make_samples import make_record

ROWS = [[(0, 1.0), (2, -0.5)], [], [(1, 0.25)]]


def _pairs(steps: Steps) -> list[list[tuple[int, float]]]:
    both = list(zip(steps.token.tolist(), steps.value.tolist(), strict=True))
    offsets = steps.offsets.tolist()
    return [both[a:b] for a, b in zip(offsets, offsets[1:], strict=False)]


def test_rows_go_in_and_come_out() -> None:
    steps = Steps.from_pairs(ROWS)
    assert _pairs(steps) == ROWS and len(steps) == 3
    assert steps.counts.tolist() == [2, 0, 1] and steps.row.tolist() == [0, 0, 2]
    assert steps.totals.tolist() == [0.5, 0.0, 0.25]
    assert _pairs(steps.select([2, 0])) == [ROWS[2], ROWS[0]]
    assert _pairs(Steps.concat([steps, Steps.none(1), steps.select([0])])) == [*ROWS, [], ROWS[0]]
    assert len(Steps.concat([])) == len(Steps.from_pairs([])) == 0


@pytest.mark.parametrize(
    "offsets, token, value, told",
    [
        ([1, 2], [0], [1.0], "begin with 0"),
        ([0, 2, 1], [0], [1.0], "never fall"),
        ([0, 2], [0], [1.0], "end at 2 for 1 tokens"),
        ([0, 1], [-1], [1.0], "indices ≥ 0"),
        ([0, 1], [0], [np.inf], "finite"),
    ],
)
def test_columns_that_contradict_are_refused(offsets, token, value, told) -> None:
    with pytest.raises(ValueError, match=told):
        Steps(np.array(offsets), np.array(token), np.array(value))


def test_scores_carry_the_steps_of_their_rows() -> None:
    records = [
        replace(make_record(0, at, 1.0), step_rewards=tuple(row)) for at, row in enumerate(ROWS)
    ]
    scores = Scores.from_records(records[::-1])
    assert _pairs(scores.steps) == ROWS
    assert _pairs(scores.select([1, 2]).steps) == ROWS[1:]
    halves = [scores.select([0]), scores.select([1, 2])]
    assert _pairs(Scores.concat(halves).steps) == ROWS
    assert len(Scores.from_records([make_record(0, 0, 1.0)]).steps) == 1
    with pytest.raises(ValueError, match="step scores of 2 rows for 3 totals"):
        replace(scores, steps=Steps.none(2))


def test_a_step_beyond_its_response_is_refused_in_the_table() -> None:
    with pytest.raises(ValueError, match="token 2 of sample 0/1, whose response has 2 tokens"):
        make_facts([Row(0, 0, 1.0), Row(0, 1, 1.0, steps=[(2, 1.0)])])
