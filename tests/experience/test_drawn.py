"""How samples came about, as it is written and read: cursors over all rows, and by source.

That damaged lines are refused is in `test_damage.py`.
"""

from __future__ import annotations

import json

import pytest

from megarl.data.cursor import PromptCursor
from megarl.data.join import JoinCounts
from megarl.experience.drawn import DrawnFacts
from megarl.rollout.account import Drawn
from tests.data.test_cursor import iteration, prompt_set, weighted


@pytest.mark.parametrize("rows", [prompt_set(7), weighted({"a": 3, "b": 4}, 1, 2)])
def test_a_cursor_goes_on_from_what_was_written(rows) -> None:
    cursor, again = PromptCursor(rows, 5, 2), PromptCursor(rows, 5, 2)
    for _ in range(3):
        iteration(cursor, 2, 2)
    facts = DrawnFacts.of(Drawn(("s",), 2, {"aborted": 1}), JoinCounts(), cursor.state)
    read = DrawnFacts.of_line(json.loads(json.dumps(facts.line)))
    assert read == facts and read.cursor == cursor.state
    again.restore(dict(read.cursor))
    assert iteration(again, 2, 2) == iteration(cursor, 2, 2)
