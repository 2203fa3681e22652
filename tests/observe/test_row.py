"""Numbers of a row by component, by reason and by source, against ones that were counted by hand.

Not covered: the numbers of updates (`tests/launch`), and that a page explains each
(`test_docs.py`).
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from megarl.contracts.records import RewardRecord, RewardStatus, Scores
from megarl.data.prepare import Parity
from megarl.observe.row import reward_row, rollout_row
from megarl.rewards.scorer import PENALTY
from megarl.rollout.account import Drawn
from megarl.rollout.groups import plan_iteration
from tests.algorithms.make_credit import Row, make_facts
from tests.data.make_rules import make_rules


def record(candidate: int, told: float | RewardStatus, **components: float) -> RewardRecord:
    ok = not isinstance(told, RewardStatus)
    status, total = (RewardStatus.OK, told) if ok else (told, None)
    return RewardRecord(0, candidate, total, components, "s", status)


def test_components_tell_their_spread_over_the_samples_that_have_them() -> None:
    row = reward_row(
        Scores.from_records(
            [
                record(0, 3.0, math=1.0, form=0.5),
                record(1, 1.0, math=0.0),
                record(2, RewardStatus.TIMEOUT),
                record(3, 0.5, form=0.5),
                record(4, RewardStatus.ERROR, math=0.5),
                record(5, RewardStatus.TIMEOUT),
            ]
        )
    )
    assert row["reward/unscored"] == 3
    assert (row["reward/unscored/timeout"], row["reward/unscored/error"]) == (2, 1)
    assert (row["reward/mean"], row["reward/min"], row["reward/max"]) == (1.5, 0.5, 3.0)
    assert row["reward/std"] == pytest.approx(np.sqrt((1.5**2 + 0.5**2 + 1) / 3))
    for name, scored, mean, least, most, deviation in (
        ("math", 3, 0.5, 0.0, 1.0, np.sqrt(0.5 / 3)),
        ("form", 2, 0.5, 0.5, 0.5, 0.0),
    ):
        told = [row[f"reward/{name}{part}"] for part in ("", "/scored", "/min", "/max", "/std")]
        assert told == pytest.approx([mean, scored, least, most, deviation])


def test_penalties_are_counted_apart_from_what_has_no_score() -> None:
    failed = replace(record(0, -1.0), detail=f"{PENALTY}error: ValueError")
    row = reward_row(
        Scores.from_records(
            [failed, replace(failed, candidate=1), record(2, 1.0), record(3, RewardStatus.ERROR)]
        )
    )
    assert (row["reward/penalised"], row["reward/unscored"]) == (2, 1)
    assert row["reward/mean"] == pytest.approx(-1 / 3)


def test_reasons_are_told_where_there_are_any_and_no_component_is_made_up() -> None:
    row = reward_row(Scores.from_records([record(0, 1.0), record(1, 0.0)]))
    assert row == {
        "reward/unscored": 0.0,
        "reward/mean": 0.5,
        "reward/std": 0.5,
        "reward/min": 0.0,
        "reward/max": 1.0,
    }


ROWS = [
    # Source a: equal rewards; half cut off.
    *(Row(0, 0, 1.0, mask=(1,) * 2), Row(0, 1, 1.0, mask=(1,) * 4, cut=True)),
    # Source b: different ones, and one that could not be scored.
    *(Row(1, 0, 0.0, mask=(1,) * 1), Row(1, 1, 0.5, mask=(1,) * 5)),
    *(Row(2, 0, 0.5, mask=(1,) * 3), Row(2, 1, None, mask=(1,) * 3)),
    # Source a again: equal once more. Source c lost every response.
    *(Row(3, 0, 0.0, mask=(1,) * 2), Row(3, 1, 0.0, mask=(1,) * 2)),
]


def by_source(sources: tuple[str, ...]) -> dict[str, float]:
    rules = make_rules(group_size=2, prompts=len(sources), longest=8)
    drawn = Drawn(sources, lost={"aborted": 2 * (len(sources) - 4)} if len(sources) > 4 else {})
    table = make_facts(ROWS).table
    plan = plan_iteration(table, rules, 1, drawn=drawn)
    row = rollout_row(table, plan, Parity(0.0, 0.0, 0, ""))
    assert sum(
        row.get(f"groups/zero_variance/source/{name}", 0) * sources.count(name)
        for name in set(sources)
    ) == (row["groups/groups_zero_variance"] if len(set(sources)) > 1 else 0)
    return {key: value for key, value in row.items() if "/source/" in key and "drop" not in key}


def test_each_source_has_its_own_numbers() -> None:
    assert by_source(("a", "b", "b", "a", "c")) == {
        "rollout/prompts/source/a": 2,
        "groups/zero_variance/source/a": 1.0,
        "response/length/source/a": 2.5,
        "response/truncated/source/a": 0.25,
        "reward/source/a": 0.5,
        "rollout/prompts/source/b": 2,
        "groups/zero_variance/source/b": 0.0,
        "response/length/source/b": 3.0,
        "response/truncated/source/b": 0.0,
        "reward/source/b": pytest.approx(1 / 3),
        "rollout/prompts/source/c": 1,
        "groups/zero_variance/source/c": 0.0,
    }


def test_of_one_source_the_whole_tells_it() -> None:
    assert by_source(("a",) * 4) == {}
