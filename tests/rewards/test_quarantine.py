"""Which prompts are drawn no more. Not covered: a run that goes on after a stop."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.contracts.records import UNKNOWN_TOKEN, Prompt, RewardRecord, RewardStatus, Scores
from megarl.contracts.samples import EndReason
from megarl.data.table import SampleTable
from megarl.rewards.quarantine import Quarantine, quarantine_notes

OK, TIMEOUT, ERROR = RewardStatus.OK, RewardStatus.TIMEOUT, RewardStatus.ERROR
PROMPTS = tuple(Prompt(name, "s", "x", (1,), "1") for name in "abcd")


def _record(draw: int, candidate: int, told: RewardStatus | float, detail: str) -> RewardRecord:
    failed = isinstance(told, RewardStatus)
    return RewardRecord(
        draw_index=draw,
        candidate=candidate,
        total=None if failed else told,
        components={},
        scorer_version="s1",
        status=told if failed else OK,
        detail=detail,
    )


def _table(*rows: tuple[int, RewardStatus | float, str]) -> SampleTable:
    """One row per (draw index, status or total, detail)."""
    seen: dict[int, int] = {}
    records = []
    for draw, told, detail in rows:
        seen[draw] = seen.get(draw, -1) + 1
        records.append(_record(draw, seen[draw], told, detail))
    scores = Scores.from_records(records)
    count = len(records)
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


def test_unscored_responses_add_up_over_the_run(tmp_path: Path) -> None:
    quarantine = Quarantine(3, tmp_path)
    first = _table((0, ERROR, "x"), (0, TIMEOUT, "slow"), (0, 1.0, ""), (1, ERROR, "x"))
    assert quarantine.note(0, first, PROMPTS) == [] and quarantine.prompt_ids == set()
    assert not (tmp_path / "quarantine.jsonl").exists()
    # Draw indices are the iteration's own: the same prompt is another one's second.
    (found,) = quarantine.note(1, _table((1, ERROR, "x"), (0, 0.0, "")), PROMPTS[1::-1])
    assert (found.prompt_id, found.iteration) == ("a", 1)
    assert found.counts == {"error": 2, "timeout": 1} and found.detail == "x"
    assert quarantine.prompt_ids == {"a"}
    assert quarantine.note(2, _table((0, ERROR, "x")), PROMPTS) == []
    lines = [json.loads(line) for line in (tmp_path / "quarantine.jsonl").read_text().splitlines()]
    assert lines == [
        {"prompt_id": "a", "iteration": 1, "counts": {"error": 2, "timeout": 1}, "detail": "x"}
    ]


def test_a_penalty_is_a_failure_and_an_unknown_token_or_a_wrong_answer_is_none() -> None:
    quarantine = Quarantine(1, None)
    table = _table(
        (0, -1.0, "[penalty] timeout: no score within 2 s"),
        (1, ERROR, UNKNOWN_TOKEN),
        (2, 0.0, "no_answer"),
        (3, 0.0, "penalty for length"),
    )
    (found,) = quarantine.note(0, table, PROMPTS)
    assert found.prompt_id == "a" and found.counts == {"timeout": 1}
    assert found.detail == "no score within 2 s"


@pytest.mark.parametrize("after, expected", [(0, set()), (1, {"a", "b"}), (2, {"a"})])
def test_how_often_is_the_recipes(after: int, expected: set[str]) -> None:
    quarantine = Quarantine(after, None)
    quarantine.note(0, _table((0, ERROR, "x"), (0, ERROR, "y"), (1, ERROR, "x")), PROMPTS)
    assert quarantine.prompt_ids == expected


def test_people_are_told_of_the_first_prompts_and_how_many_there_are_more() -> None:
    rows = [(draw, ERROR, "x") for draw in range(4)]
    found = Quarantine(1, None).note(0, _table(*rows), PROMPTS)
    assert [item.prompt_id for item in found] == list("abcd")
    lines = quarantine_notes(found)
    assert len(lines) == 4 and lines[-1] == "and 1 more, see quarantine.jsonl"
    assert lines[0].startswith("prompt a is drawn no more: 1 responses to it could not be scored")
    assert len(quarantine_notes(found[:3])) == 3 and quarantine_notes([]) == []


@given(
    st.lists(
        st.tuples(st.integers(0, 3), st.sampled_from([ERROR, TIMEOUT, 1.0]), st.sampled_from("xy")),
        max_size=20,
    ),
    st.randoms(use_true_random=False),
)
def test_what_is_quarantined_does_not_depend_on_the_order_of_rows(rows, order) -> None:
    told = []
    for _ in range(2):
        told.append(Quarantine(2, None).note(0, _table(*rows), PROMPTS))
        order.shuffle(rows)
    assert told[0] == told[1]
