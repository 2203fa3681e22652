"""The built-in scorers against hand-made verdicts, without processes."""

from __future__ import annotations

import pytest

from megarl.rewards import exact, format
from megarl.rewards.scorer import Response, RewardParts, load_scorer

SUM = r"(?:^|so )(\d+)$"


def response(text: str, answer: str = "46", finished: bool = True) -> Response:
    return Response(text, answer, "What is 8 + 38?", finished, "eos" if finished else "max_tokens")


@pytest.mark.parametrize(
    ("text", "total", "detail"),
    [
        (" 8 + 8 = 16, 0 + 3 + 1 = 4, so 46", 1.0, ""),
        ("46", 1.0, ""),
        (" 46\n", 1.0, ""),
        (" 8 + 8 = 16, so 45", 0.0, ""),
        ("so 046", 0.0, ""),
        (" about 50", 0.0, "no_answer"),
        ("so 46.", 0.0, "no_answer"),
        ("", 0.0, "no_answer"),
        ("   ", 0.0, "no_answer"),
    ],
)
def test_exact_match_reads_the_group_and_compares_text(text, total, detail):
    assert exact.make(pattern=SUM)(response(text)) == RewardParts(total, detail)


def test_exact_match_takes_the_last_match_unless_told():
    text = "<a>46</a> or <a>45</a>"
    assert exact.make(pattern="<a>(.*?)</a>")(response(text)).total == 0.0
    assert exact.make(pattern="<a>(.*?)</a>", take="first")(response(text)).total == 1.0


def test_exact_match_without_a_pattern_compares_the_whole_response():
    assert exact.make()(response(" 46 ")).total == 1.0
    assert exact.make()(response("so 46")).total == 0.0


def test_exact_match_wants_a_finished_response_unless_told():
    cut = response("46", finished=False)
    assert exact.make(pattern=SUM)(cut) == RewardParts(0.0, "not_finished")
    assert exact.make(pattern=SUM, finished=False)(cut) == RewardParts(1.0)


@pytest.mark.parametrize(
    ("text", "total"),
    [(" 8 + 8 = 16, so 46", 1.0), ("8 + 8, so 46", 0.0), ("a = b, so 46 or", 0.0), ("", 0.0)],
)
def test_format_must_match_from_end_to_end(text, total):
    assert format.make(pattern=r".*=.*, so \d+")(response(text)).total == total


def test_built_ins_and_own_functions_are_found_by_name():
    scorer, module = load_scorer("exact_match", {"pattern": SUM})
    assert scorer(response("46")).total == 1.0 and module == "megarl.rewards.exact"
    own, module = load_scorer("tests.rewards.graders:length", {"per": 4.0})
    assert own(response("x")) == 0.0 and module == "tests.rewards.graders"
