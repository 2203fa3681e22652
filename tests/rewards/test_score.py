"""The scoring pool: statuses, rules, streaming, versions.

Not covered here: deadlines with hung scorers (`tests/known_faults/test_rewards.py`), processes that
end (`test_processes.py`), scorers that harm their process (`test_rude.py`).
"""

from __future__ import annotations

import time

import pytest

from megarl.contracts.records import RewardStatus
from megarl.contracts.samples import EndReason
from megarl.rewards.score import Failures, RewardError, ScoringPool, is_penalised
from megarl.rewards.scorer import ScorerError
from tests.rewards.make_pool import (
    GRADERS,
    Characters,
    child_processes,
    left_of,
    prompt,
    sample,
    score,
    scoring,
    section,
)

EXACT = {"name": "exact_match", "pattern": r"so (\d+)$", "weight": 2.0}
OBEY = f"{GRADERS}:obey"


@pytest.fixture(scope="module")
def obeying():
    with scoring(OBEY, workers=2) as pool:
        yield pool


def test_the_total_is_the_weighted_sum_and_weight_0_is_only_reported():
    scorers = (
        EXACT,
        {"name": "format", "pattern": r"\d.*", "weight": 0.5},
        {"name": f"{GRADERS}:length", "per": 2.0, "weight": 0.0},
    )
    with scoring(*scorers) as pool:
        both, neither, wrong = score(pool, ["8 so 46", "x", "9 so 45"])
    assert both.components == {"exact_match": 1.0, "format": 1.0, "length": 3.5}
    assert both.total == 2.5 and both.status is RewardStatus.OK and both.detail == ""
    assert neither.components == {"exact_match": 0.0, "format": 0.0, "length": 0.5}
    assert neither.total == 0.0 and neither.detail == "no_answer"
    assert wrong.total == 0.5 and wrong.detail == ""


def test_records_join_by_id_in_the_order_asked_for(obeying):
    order = [(d, c) for d in range(20) for c in range(3)]
    for draw, candidate in order:
        obeying.submit(sample(f"score {draw}.{candidate}", draw, candidate), prompt())
    asked = order[::-1]
    records = obeying.collect(asked)
    assert [(r.draw_index, r.candidate) for r in records] == asked
    assert [r.total for r in records] == [float(f"{d}.{c}") for d, c in asked]


def test_scoring_streams_while_more_is_submitted(obeying):
    obeying.submit(sample("sleep 1", 0), prompt())
    time.sleep(1.5)  # the caller generates meanwhile
    began = time.monotonic()
    obeying.submit(sample("score 1", 1), prompt())
    assert [r.total for r in obeying.collect([(0, 0), (1, 0)])] == [1.0, 1.0]
    assert time.monotonic() - began < 0.8


def test_the_same_response_twice_changes_nothing_and_another_is_refused(obeying):
    obeying.submit(sample("score 1", 5), prompt())
    obeying.submit(sample("score 1", 5), prompt())
    with pytest.raises(ValueError, match="two different responses"):
        obeying.submit(sample("score 2", 5), prompt())
    with pytest.raises(ValueError, match=r"differ from submitted samples, at \[\(6, 0\)\]"):
        obeying.collect([(5, 0), (6, 0)])
    assert [r.total for r in obeying.collect([(5, 0)])] == [1.0]
    obeying.submit(sample("score 2", 5), prompt())  # the next iteration has the same ids
    assert [r.total for r in obeying.collect([(5, 0)])] == [2.0]
    assert obeying.collect([]) == []


@pytest.mark.parametrize(
    ("text", "detail"),
    [
        ("raise broken", "obey: RuntimeError: broken (graders.py:"),
        ("none", "obey: TypeError: returned None, not a number"),
        ("text 1", "obey: TypeError: returned '1', not a number"),
        ("score nan", "obey: ValueError: returned nan, not a finite number"),
        ("score -inf", "obey: ValueError: returned -inf, not a finite number"),
        ("exit 3", "the scorer ended its process with exit code 3"),
        ("leave 3", "obey: SystemExit: 3 (graders.py:"),
        ("input", "obey: EOFError: EOF when reading a line"),
    ],
)
def test_a_failure_is_an_error_without_total(obeying, text, detail):
    failed, fine = score(obeying, [text, "score 1"])
    assert failed.status is RewardStatus.ERROR and failed.total is None
    assert detail in failed.detail and "\n" not in failed.detail and failed.components == {}
    assert fine.total == 1.0
    assert obeying.failures.records == 2 and obeying.failures.details.total() == 1


def test_numbers_of_other_libraries_and_details_come_through(obeying):
    numpy, parts = score(obeying, ["numpy 0.25", "parts half right"])
    assert numpy.total == 0.25 and type(numpy.total) is float
    assert (parts.total, parts.detail) == (0.5, "half right")


def test_what_a_scorer_prints_is_no_answer(obeying, capfd):
    assert [r.total for r in score(obeying, ["print", "score 2"])] == [1.0, 2.0]
    assert capfd.readouterr().out == ""


def test_a_scorer_sees_the_whole_sample():
    with scoring(f"{GRADERS}:everything") as pool:
        pool.submit(sample("so 4", reason=EndReason.MAX_TOKENS), prompt())
        (record,) = pool.collect([(0, 0)])
    assert record.detail == (
        "so 4|46|What is 8 + 38?|p|sums|{'level': 2}|False|max_tokens|(115, 111, 32, 52)"
    )


def test_retry_scores_once_more_and_then_drops(tmp_path):
    rules = {"on_status": {"error": "retry", "timeout": "drop"}}
    with scoring({"name": f"{GRADERS}:flaky", "marks": str(tmp_path)}, **rules) as pool:
        assert [r.total for r in score(pool, ["a", "b"])] == [1.0, 1.0]
        assert not pool.failures.details
    with scoring(OBEY, **rules) as pool:
        (record,) = score(pool, ["raise always"])
    assert record.status is RewardStatus.ERROR and "always" in record.detail


def test_penalty_gives_the_declared_total_and_says_so():
    with scoring(OBEY, on_status={"error": "penalty"}, penalty=-0.5) as pool:
        failed, fine = score(pool, ["raise it", "score 1"])
        assert pool.failures.details.total() == 1
    assert failed.status is RewardStatus.OK and failed.total == -0.5 and failed.components == {}
    assert failed.detail.startswith("[penalty] error: obey: RuntimeError: it")
    assert fine.total == 1.0


def test_a_scorers_own_detail_is_never_taken_for_a_penalty():
    with scoring(OBEY, penalty=-1.0) as pool:
        harmless, forged, longer = score(
            pool, ["parts penalty for length", "parts [penalty] error: x", f"parts {'x' * 5000}"]
        )
    assert (harmless.total, harmless.detail) == (0.5, "penalty for length")
    assert not is_penalised(harmless.status, harmless.detail)
    assert forged.status is RewardStatus.ERROR
    assert "returned a detail that begins with '[penalty] '" in forged.detail
    assert not is_penalised(forged.status, forged.detail)
    assert (longer.total, longer.detail) == (0.5, "x" * 300)


def test_a_constraint_decides_the_total_and_leaves_the_components():
    constrained = ({"name": f"{GRADERS}:length", "at_least": 4.0}, EXACT)
    with scoring(*constrained, violated=-3.0) as pool:
        short, met, wrong = score(pool, ["46", "so 46", "so 45"])
    assert short.total == -3.0 and short.status is RewardStatus.OK
    assert short.components == {"length": 2.0, "exact_match": 0.0}
    assert short.detail == "no_answer; below at_least: length"
    assert (met.total, met.detail) == (5.0 + 2.0, "")
    assert (wrong.total, wrong.detail) == (5.0, "")
    # A weight of 0 is no exemption: the constraint is on the score.
    only = {"name": f"{GRADERS}:length", "at_least": 4.0, "weight": 0.0}
    with scoring(only, EXACT, violated=-3.0) as pool:
        assert [record.total for record in score(pool, ["46", "so 46"])] == [-3.0, 2.0]
    with pytest.raises(ScorerError, match="says at_least: set reward.violated"):
        ScoringPool(section(*constrained), Characters())


def test_a_sum_beyond_floats_is_an_error():
    huge = [{"name": f"{GRADERS}:obey"}, {"name": f"{GRADERS}:length", "weight": 1e308}]
    with scoring(*huge) as pool:
        (failed,) = score(pool, ["score 1e308"])
    assert failed.status is RewardStatus.ERROR and failed.total is None
    assert failed.detail == "the weighted scores are beyond floats" and not failed.components
    assert pool.failures.details == {"error: the weighted scores are beyond floats": 1}


def test_a_constraint_is_part_of_the_scorers_version():
    def version(at_least: float | None, violated: float | None) -> str:
        item = {"name": f"{GRADERS}:length", "at_least": at_least}
        with scoring(item, violated=violated) as pool:
            return pool.version

    assert version(1.0, 0.0) == version(1.0, 0.0)
    assert len({version(None, None), version(1.0, 0.0), version(2.0, 0.0), version(1.0, 0.5)}) == 4


def test_stop_names_the_prompt_and_what_happened():
    with (
        scoring(OBEY, on_status={"error": "stop"}) as pool,
        pytest.raises(RewardError, match="prompt p1 could not be scored.*error is stop: obey: Run"),
    ):
        score(pool, ["score 1", "raise it"])


def test_too_large_a_share_of_failures_names_the_commonest(obeying):
    limited = Failures(10)
    limited.details.update({"error: rare": 1, "error: common": 2})
    limited.check(0.3)
    with pytest.raises(RewardError, match=r"3 of 10 .* is 0.29; most often \(2×\) error: common"):
        limited.check(0.29)
    total = limited + Failures(10)
    assert total.records == 20
    total.check(0.15)
    with scoring(OBEY, max_error_share=0.4) as pool:
        with pytest.raises(RewardError, match="1 of 2 responses"):
            score(pool, ["score 1", "raise it"])
        records = score(pool, ["score 1", "raise it"], check_share=False)
        assert [r.status for r in records] == [RewardStatus.OK, RewardStatus.ERROR]


@pytest.mark.parametrize(
    ("scorer", "why"),
    [
        ("exact", "'exact' is no scorer; did you mean exact_match.*or your function as import"),
        ("my_grader", "'my_grader' is no scorer; give one of exact_match, format,.*math, gsm8k"),
        ({"name": "exact_match", "batch": 2}, "takes one response; batch is for own functions"),
        ("no.such:thing", "cannot import no.such:thing: ModuleNotFoundError"),
        (f"{GRADERS}:nothing", "has no attribute 'nothing'"),
        (f"{GRADERS}:NOT_A_FUNCTION", "is a int, not a function"),
        ({"name": f"{GRADERS}:length", "pre": 2.0}, "'pre'; its options are per"),
        ({"name": f"{GRADERS}:flaky"}, "missing a required.*argument: 'marks'"),
        ({"name": "exact_match", "patern": "x"}, "options are pattern, take, finished"),
        ({"name": "exact_match", "pattern": "("}, "is no regular expression"),
        ({"name": "exact_match", "pattern": "x"}, "has 0 groups; exactly one"),
        ({"name": "exact_match", "take": "middle"}, "take must be first or last"),
        ({"name": "format", "pattern": "["}, "is no regular expression"),
    ],
)
def test_a_scorer_that_cannot_be_used_is_refused_at_start(scorer, why):
    before = child_processes()
    with pytest.raises(ScorerError, match=why) as caught:
        ScoringPool(section(scorer), Characters())
    assert "\n" not in str(caught.value)
    assert left_of(before) == [] and child_processes() <= before


def test_workers_load_what_scorers_need_and_nothing_heavy(tmp_path, monkeypatch):
    (tmp_path / "looking.py").write_text(
        "import sys\n"
        "from megarl.rewards.scorer import RewardParts\n"
        "HEAVY = {'torch', 'numpy', 'transformers', 'sglang', 'megatron'}\n"
        "def score(response): return RewardParts(1.0, ','.join(HEAVY & set(sys.modules)))\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    with scoring("looking:score") as pool:
        assert score(pool, ["x"])[0].detail == ""


def test_contradicting_sections_are_refused():
    with pytest.raises(ScorerError, match="set reward.penalty"):
        ScoringPool(section("exact_match", on_status={"error": "penalty"}), Characters())
    with pytest.raises(ScorerError, match="same component name"):
        ScoringPool(section("exact_match", "exact_match"), Characters())
