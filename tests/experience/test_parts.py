"""What lies in each kind of part. The trip through files is in test_load.py."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from megarl.contracts.records import RewardKind
from megarl.experience.part_columns import check_columns
from megarl.experience.parts import records_of, rollout_part
from tests.experience.make_facts import SCORER, make_facts


def test_a_part_does_not_depend_on_the_order_of_what_it_is_made_of() -> None:
    facts = make_facts(3, 1, 1)
    rows = np.random.default_rng(1).permutation(len(facts.samples))
    columns, metadata = rollout_part(facts.samples, facts.records, SCORER)
    shuffled = [facts.records[row] for row in rows[::-1]]
    other, words = rollout_part(facts.samples.select(rows), shuffled, SCORER)
    assert words == metadata and other.keys() == columns.keys()
    for name, column in columns.items():
        assert np.array_equal(other[name], column, equal_nan=column.dtype == np.float64)
    check_columns("rollout", columns)
    assert tuple(records_of(columns, metadata)) == facts.records


def test_failures_have_no_number_and_absent_components_none_either() -> None:
    facts = make_facts(3, 1, 1, groups=20)
    columns, _ = rollout_part(facts.samples, facts.records, SCORER)
    failed = [record.total is None for record in facts.records]
    assert any(failed) and np.isnan(columns["reward.total"]).tolist() == failed
    lacking = ["a" not in record.components for record in facts.records]
    assert any(lacking) and np.isnan(columns["reward.component.a"]).tolist() == lacking


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda records: records[1:], "do not join by id, at 0/0$"),
        (lambda records: [*records, records[2]], "do not join by id, at 1/0$"),
        (lambda records: [*records[:-1], replace(records[-1], candidate=7)], "at 2/1, 2/7$"),
        (lambda records: [replace(records[0], kind=RewardKind.SHAPED), *records[1:]], "raw"),
        (
            lambda records: [replace(records[0], scorer_version="s9"), *records[1:]],
            "of scorer scorer1, not",
        ),
    ],
)
def test_rewards_that_are_not_those_of_the_samples_are_refused(change, message) -> None:
    facts = make_facts(5, 1, 1)
    assert len(facts.records) == 6
    with pytest.raises(ValueError, match=message):
        rollout_part(facts.samples, change(list(facts.records)), SCORER)


def test_no_samples_are_a_part_too() -> None:
    facts = make_facts(5, 1, 1)
    columns, metadata = rollout_part(facts.samples.select([]), [], SCORER)
    check_columns("rollout", columns)
    assert records_of(columns, metadata) == []
