"""Identities, reward records, their columns, and sealed experience."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from megarl.contracts.records import (
    Experience,
    Identities,
    RewardRecord,
    RewardStatus,
    Scores,
)
from tests.data.make_samples import make_record, make_samples

OK, TIMEOUT, ERROR = RewardStatus.OK, RewardStatus.TIMEOUT, RewardStatus.ERROR


def test_ids_are_strings_of_run_iteration_prompt_and_candidate() -> None:
    names = Identities("run", 7, ("row-3", "row-9"))
    assert names.group_id(1) == "run/7/row-9" and names.sample_id(0, 2) == "run/7/row-3/2"


def test_a_prompt_is_drawn_once_an_iteration() -> None:
    with pytest.raises(ValueError, match="iteration 7 draws a prompt twice"):
        Identities("run", 7, ("a", "b", "a"))


def test_zero_wrong_and_unscorable_are_three_things() -> None:
    scores = Scores.from_records(
        [make_record(0, 1, None, ERROR), make_record(0, 0, 0.0), make_record(0, 2, -1.0)]
    )
    assert scores.ok.tolist() == [True, False, True]
    np.testing.assert_equal(scores.total, [0.0, np.nan, -1.0])


@pytest.mark.parametrize(
    "total, status", [(None, OK), (0.0, ERROR), (1.0, TIMEOUT), (float("nan"), OK)]
)
def test_a_total_that_contradicts_its_status_is_refused(total, status) -> None:
    with pytest.raises(ValueError):
        RewardRecord(0, 0, total, {}, "s", status)


def test_values_that_are_not_finite_are_refused() -> None:
    with pytest.raises(ValueError, match="not finite"):
        RewardRecord(0, 0, 1.0, {"style": float("inf")}, "s", OK)
    with pytest.raises(ValueError, match="not finite"):
        RewardRecord(0, 0, 1.0, {}, "s", OK, step_rewards=((3, float("nan")),))


def test_columns_are_canonical_and_components_may_be_missing() -> None:
    records = [
        RewardRecord(1, 0, 2.0, {"b": 2.0}, "s", OK, seconds=0.5),
        RewardRecord(0, 1, None, {}, "s", TIMEOUT, detail="deadline"),
        RewardRecord(0, 0, 1.0, {"a": 0.25, "b": 0.75}, "s", OK),
    ]
    scores = Scores.from_records(records)
    assert scores.draw_index.tolist() == [0, 0, 1] and scores.candidate.tolist() == [0, 1, 0]
    np.testing.assert_equal(scores.components["a"], [0.25, np.nan, np.nan])
    np.testing.assert_equal(scores.components["b"], [0.75, np.nan, 2.0])
    assert scores.status == (OK, TIMEOUT, OK) and scores.detail == ("", "deadline", "")
    assert scores.total.dtype == np.float64 and scores.seconds.tolist() == [0.0, 0.0, 0.5]


def test_selecting_and_joining_parts_gives_the_whole() -> None:
    records = [
        RewardRecord(0, 0, 1.0, {"a": 1.0}, "s", OK),
        RewardRecord(0, 1, 2.0, {"b": 2.0}, "s", OK),
        RewardRecord(1, 0, None, {}, "s", ERROR, detail="crash"),
    ]
    whole = Scores.from_records(records)
    parts = [Scores.from_records(records[2:]), Scores.from_records([])]
    joined = Scores.concat([*parts, Scores.from_records(records[:2])]).select([1, 2, 0])
    assert joined.status == whole.status and joined.detail == whole.detail
    assert joined.scorer_version == "s" and joined.candidate.dtype == np.int32
    for name in ("draw_index", "candidate", "total", "seconds"):
        np.testing.assert_equal(getattr(joined, name), getattr(whole, name))
    np.testing.assert_equal(joined.components, whole.components)


def test_no_records() -> None:
    none = Scores.from_records([])
    assert len(none.ok) == 0 and none.scorer_version == ""
    assert Scores.concat([none, none]).status == ()


def test_one_sample_has_one_record_and_one_step_one_scorer() -> None:
    with pytest.raises(ValueError, match="two reward records"):
        Scores.from_records([make_record(0, 0, 1.0), make_record(0, 0, 0.0)])
    mixed = [make_record(0, 0, 1.0), make_record(0, 1, 1.0, scorer_version="s2")]
    with pytest.raises(ValueError, match=r"\['s1', 's2'\]"):
        Scores.from_records(mixed)
    with pytest.raises(ValueError, match=r"\['s1', 's2'\]"):
        Scores.concat([Scores.from_records([record]) for record in mixed])


def _experience(**change) -> Experience:
    samples = make_samples([(0, 0, 2, 3), (0, 1, 2, 2)])
    facts = {
        "samples": samples,
        "scores": Scores.from_records([make_record(0, 0, 1.0), make_record(0, 1, 0.0)]),
        "old_log_probs": np.zeros(5, np.float32),
        "ref_log_probs": None,
        "values": None,
        "producers": {"rollout": "v0", "old": "v0"},
        "hash": "h",
    }
    return Experience(**(facts | change))


def test_sealed_columns_are_read_only() -> None:
    experience = _experience()
    with pytest.raises(ValueError, match="read-only"):
        experience.old_log_probs[0] = 1


@pytest.mark.parametrize(
    "change, message",
    [
        ({"old_log_probs": np.zeros(4, np.float32)}, r"old_log_probs is float32\(4,\), not"),
        ({"old_log_probs": np.zeros(5)}, "old_log_probs is float64"),
        ({"values": np.zeros(6, np.float32)}, "values is"),
        ({"producers": {"rollout": "v0", "old": "v1"}}, "two versions"),
        ({"producers": {"rollout": "v1", "old": "v1"}}, "samples of version v0"),
        ({"ref_log_probs": np.zeros(5, np.float32)}, "unnamed version"),
        ({"values": np.zeros(5, np.float32)}, "values of an unnamed critic version"),
        ({"last_values": np.zeros(2, np.float32)}, "but none of the tokens"),
        ({"last_values": np.zeros(5, np.float32)}, r"last_values is float32\(5,\), not float32\(2"),
        ({"scores": Scores.from_records([make_record(0, 0, 1.0)])}, "join by id"),
    ],
)
def test_experience_that_contradicts_itself_is_refused(change, message) -> None:
    with pytest.raises(ValueError, match=message):
        _experience(**change)


def test_scores_in_another_order_are_refused() -> None:
    scores = _experience().scores
    with pytest.raises(ValueError, match="candidate of samples and scores differ"):
        replace(_experience(), scores=scores.select([1, 0]))
