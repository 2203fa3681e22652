"""What a start takes from a position besides tensors, and which contents a resume explains."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from megarl.algorithms.controller import KlController
from megarl.checkpoint.resume import is_explained
from megarl.checkpoint.start import Start


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
