"""What a start takes from a position besides tensors, and which contents a resume explains."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from megarl.algorithms.controller import KlController
from megarl.checkpoint.resume import is_explained
from megarl.checkpoint.start import Start
from megarl.data.curriculum import Curriculum
from megarl.data.cursor import PromptCursor
from megarl.data.prompts import PromptSet
from megarl.rewards.quarantine import Quarantine
from tests.data.test_cursor import iteration, prompt_set


def _start(kl: dict[str, float] | None, **changes: Any) -> Start:
    keys = {key.replace("__", "."): pair for key, pair in changes.items()}
    position = None if kl is None else SimpleNamespace(kl=kl)
    return Start(SimpleNamespace(changes=keys), position)


@pytest.mark.parametrize(
    "start, beta",
    [
        (_start({"beta": 0.0625}), 0.0625),
        (_start({"beta": 0.0625}, algorithm__kl__horizon=(10, 20)), 0.0625),
        (_start({"beta": 0.0625}, algorithm__kl__target=(6.0, 3.0)), 0.0625),
        (_start({"beta": 0.0625}, algorithm__kl__target=(6.0, None)), 0.5),
        (_start({"beta": 0.0625}, algorithm__kl__beta=(0.1, 0.5)), 0.5),
        (_start({}), 0.5),  # a position of a run whose β was never told
        (_start(None), 0.5),
    ],
)
def test_beta_goes_on_from_where_it_was(start: Start, beta: float) -> None:
    controller = KlController(0.5, 6.0, 100)
    start.restore_controller(controller)
    assert controller.beta == beta


@pytest.mark.parametrize(
    "name, allowed, explained",
    [
        ("critic", "algorithm.name", True),
        ("critic", "critic.lr", False),
        ("algorithm", "algorithm.advantage", True),
        ("algorithm", "algorithm.objective", True),
        ("algorithm", "algorithm.advantage_eps", False),  # begins alike
        ("scorer", "reward.on_status.lost", True),
        ("scorer", "reward.workers", False),
        ("sampling", "seed", True),
    ],
)
def test_contents_that_follow_from_a_key(name: str, allowed: str, explained: bool) -> None:
    assert is_explained(name, [allowed]) is explained


CURRICULUM = "tests.data.test_curriculum:even_only"


def _taken_up(rows: PromptSet, history: dict[str, Any]) -> tuple[PromptCursor, list[str]]:
    """A cursor with a curriculum that goes on after two iterations of one over ten rows."""
    before = PromptCursor(prompt_set(10), 1, 2)
    for _ in range(2):
        iteration(before, 2)
    position = SimpleNamespace(
        cursor=before.state,
        quarantine={"failures": {}, "prompt_ids": ["3"]},
        curriculum=history,
    )
    cursor, notes = PromptCursor(rows, 1, 2, Curriculum(CURRICULUM)), []
    quarantine = Quarantine(1, None)
    start = Start(SimpleNamespace(iteration=2), position)
    start.restore_data(cursor, quarantine, notes.append)
    kept = cursor.state["fingerprint"] == before.state["fingerprint"]
    assert quarantine.prompt_ids == ({"3"} if kept else set())
    return cursor, notes


def test_what_a_curriculum_knew_goes_on_with_the_data_it_is_of() -> None:
    history = {"prompt_ids": ["4"], "draws": [2], "scored": [3], "total": [1.5], "last": [1.0]}
    cursor, notes = _taken_up(prompt_set(10), history)
    assert notes == [] and cursor.state["position"] == 4 and cursor.history == history
    cursor, (line,) = _taken_up(prompt_set(10), {})
    assert line.startswith(f"data.curriculum: {CURRICULUM} knows nothing of the 2 iterations")
    other = replace(prompt_set(10), fingerprint="blake3:other")
    cursor, (first, second) = _taken_up(other, history)
    assert first.startswith("another data, as allowed") and "knows nothing" in second
    assert cursor.state["position"] == 0 and cursor.history["prompt_ids"] == []
