"""What the bench of scoring counts and tells; no speed is measured here.

Not covered: the runs behind its overlap (`python tools/bench.py scoring --parts overlap`), and that
`code` works on its rows.
"""

from __future__ import annotations

import importlib
import json

import pytest

from megarl.rewards.scorer import BUILT_IN, Response
from tests.tools.test_bench import _options, script
from tools.bench import scoring, scoring_work


def test_the_bench_is_listed() -> None:
    assert script().BENCHES["scoring"] is scoring.BENCH


@pytest.mark.parametrize("name", ["exact_match", "math", "gsm8k", "multiple_choice"])
def test_three_quarters_of_a_scorers_rows_are_right_and_the_rest_wrong(name: str) -> None:
    options = {key: value for key, value in scoring.SCORERS[name].items() if key != "name"}
    score = importlib.import_module(BUILT_IN[name]).make(**options)
    rows = scoring_work.rows_of(name, 80, seed=3)
    said = [score(Response(text, answer, "", True, "eos")).total for text, answer, _ in rows]
    assert said == [1.0, 1.0, 1.0, 0.0] * 20
    assert rows != scoring_work.rows_of(name, 80, seed=4)


def test_shares_are_taken_within_a_turn() -> None:
    """A second turn at half the speed changes none."""
    turn = {"generate": 2.0, "waiting_grade": 4.0, "waiting_both": 4.5, "burning_grade": 3.0}
    turn["burning_both"] = 4.0
    told = scoring.overlap_summary([turn, {name: 2 * value for name, value in turn.items()}])
    assert told["overlap_share_min"] == told["overlap_share_max"] == 0.75
    assert told["cpu_grader_added_s_min"] == 2.0 and told["cpu_grader_alone_s_max"] == 6.0


def test_the_bound_of_a_storm_is_the_calm_with_slack_and_the_deadlines() -> None:
    assert scoring.storm_bound(10.0, stuck=100, workers=8, deadline=0.5) == 13.0 + 0.5 * 13
    calm = {"seconds": 10.0, "processes_left": 0, "records_without_status": 0}
    calm |= {"zeros_that_should_not_be": 0, "wrong_statuses": 0}
    turns = [{"plain": calm, "storm": calm | {"seconds": 39.0, "wrong_statuses": count}}
             for count in (0, 3)]  # fmt: skip
    told = scoring.storm_summary(turns, 100, 8, 0.5)
    assert told["storm_over_bound"] == 2.0 and told["wrong_statuses"] == 3
    assert told["processes_left"] == 0 and told["storm_bound_s"] == 19.5


@pytest.mark.long
def test_a_small_storm_is_accounted_for() -> None:
    sizes = ["--repeats", "1", "--storm", "100", "--storm-workers", "2", "--deadline", "2"]
    result = scoring.run(_options(scoring.BENCH, *sizes, "--parts", "storm"))
    assert result["storm_stuck"] == 1 and result["storm_s_storm"] > 2.0
    for name in ("processes_left", "records_without_status", "zeros_that_should_not_be"):
        assert result[name] == 0
    assert result["wrong_statuses"] == 0
    json.dumps(result)


def test_an_account_tells_zeros_gaps_and_statuses_apart() -> None:
    rows = scoring_work.storm_rows(10, 0.1, seed=1)
    with scoring_work.pool_of({"name": "format", "pattern": "x"}) as pool:
        records = scoring_work.measure(pool, rows).records
    told = scoring_work.account(rows, records[:-1])
    assert told["records_without_status"] == 1
    assert told["zeros_that_should_not_be"] == 9
    assert 1 <= told["wrong_statuses"] <= 2
