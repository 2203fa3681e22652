"""Numbers of an evaluation from its responses, and tables, against cases counted by hand.

Not covered: generation and scoring (`tests/launch/test_evaluate.py`).
"""

from __future__ import annotations

import json

import numpy as np
import pytest

from megarl.contracts.records import Prompt
from megarl.evaluation.held_out import first_of_each_source
from megarl.evaluation.numbers import (
    GREEDY,
    SAMPLED,
    Responses,
    by_source,
    metrics_of,
    numbers_of,
)
from megarl.evaluation.tables import comparison_lines, evaluation_lines
from megarl.recipe import EvalSection

NAN = float("nan")
PROMPTS = tuple(
    Prompt(prompt_id=f"{source}:{n}", source=source, text="", token_ids=(1,), answer="a")
    for n, source in enumerate(("sums", "sums", "words", "words"))
)
SECTION = EvalSection(samples=3, pass_at=(1, 2, 3))


def responses(scores: dict[int, list[float | None]], asked: int, **more: list) -> Responses:
    """Scores by prompt; a candidate that is None is lost."""
    rows = [
        (draw, candidate, score)
        for draw, values in scores.items()
        for candidate, score in enumerate(values)
        if score is not None
    ]
    count = len(rows)
    return Responses(
        asked=asked,
        draw_index=np.array([row[0] for row in rows], np.int32),
        candidate=np.array([row[1] for row in rows], np.int32),
        score=np.array([row[2] for row in rows], np.float64),
        total=np.array([2 * row[2] for row in rows], np.float64),
        length=np.arange(count, dtype=np.int32),
        truncated=np.array([True] + [False] * (count - 1)),
        probes={name: np.array(values, np.float64) for name, values in more.items()},
        probed={name: np.ones(count, bool) for name in more},
    )


@pytest.fixture
def modes() -> dict[str, Responses]:
    greedy = responses({0: [1.0], 1: [0.0], 2: [NAN], 3: [1.0]}, 1, short=[1, NAN, 1, 0])
    # Prompt 0: 1 of 3; 1: 2 of 2 scored, one unscored; 2: 0 of 1, two lost; 3: nothing scored.
    sampled = responses(
        {0: [1.0, 0.0, 0.0], 1: [1.0, NAN, 1.0], 2: [0.0, None, None], 3: [NAN, NAN, NAN]}, 3
    )
    return {GREEDY: greedy, SAMPLED: sampled}


def test_what_has_no_score_is_in_no_mean_and_counted(modes: dict[str, Responses]) -> None:
    row = metrics_of(numbers_of(4, modes, SECTION), {})
    assert row["eval/prompts"] == 4
    assert row["eval/accuracy"] == pytest.approx(2 / 3) and row["eval/unscored"] == 1
    # Every prompt weighs alike: (1/3 + 1 + 0) / 3.
    assert row["eval/accuracy_sampled"] == pytest.approx(4 / 9)
    assert row["eval/total_sampled"] == pytest.approx(8 / 9)
    assert row["eval/unscored_sampled"] == 4 and row["eval/lost_sampled"] == 2
    assert "eval/lost" not in row
    assert row["eval/response_length"] == 1.5 and row["eval/truncated"] == 0.25
    assert row["eval/probe/short"] == pytest.approx(2 / 3)
    assert row["eval/probe/short/unscored"] == 1
    for name in ("accuracy", "accuracy_sampled", "pass@1"):
        assert row[f"eval/{name}/low"] < row[f"eval/{name}"] < row[f"eval/{name}/high"]


def test_pass_at_k_leaves_out_prompts_with_fewer_scored_responses(
    modes: dict[str, Responses],
) -> None:
    row = metrics_of(numbers_of(4, modes, SECTION), {})
    assert row["eval/pass@1"] == pytest.approx((1 / 3 + 1 + 0) / 3)
    assert row["eval/pass@1/left_out"] == 1
    assert row["eval/pass@2"] == pytest.approx((1 - 1 / 3 + 1) / 2)  # 1 of 3: C(2,2)/C(3,2)
    assert row["eval/pass@2/left_out"] == 2
    assert row["eval/pass@3"] == 1.0 and row["eval/pass@3/left_out"] == 3


def test_a_response_is_right_from_solved_at_on() -> None:
    half = {
        GREEDY: responses({0: [0.5]}, 1),
        SAMPLED: responses({0: [0.5, 0.4]}, 2),
    }
    section = EvalSection(samples=2, pass_at=(2,), solved_at=0.5)
    assert metrics_of(numbers_of(1, half, section), {})["eval/pass@2"] == 1.0
    strict = section.model_copy(update={"solved_at": 0.6})
    assert metrics_of(numbers_of(1, half, strict), {})["eval/pass@2"] == 0.0


def test_sources_are_told_where_there_are_several(modes: dict[str, Responses]) -> None:
    whole, sources = numbers_of(4, modes, SECTION), by_source(PROMPTS, modes, SECTION)
    row = metrics_of(whole, sources)
    assert row["eval/prompts/source/sums"] == 2
    assert row["eval/accuracy/source/sums"] == 0.5
    assert row["eval/accuracy/source/words"] == 1.0
    assert row["eval/accuracy_sampled/source/words"] == 0.0
    assert row["eval/pass@2/source/sums"] == pytest.approx((2 / 3 + 1) / 2)
    assert "eval/pass@2/source/words" not in row  # nothing to tell it from
    assert row["eval/probe/short/source/sums"] == 1.0
    assert sources["words"].modes[SAMPLED].lost == 2
    only = {name: numbers for name, numbers in sources.items() if name == "sums"}
    assert not [key for key in metrics_of(whole, only) if "/source/" in key]


def test_an_evaluation_of_which_nothing_came_back_has_no_numbers_but_counts() -> None:
    nothing = {GREEDY: responses({0: [None]}, 1), SAMPLED: responses({0: [None] * 3}, 3)}
    row = metrics_of(numbers_of(1, nothing, SECTION), {})
    assert "eval/accuracy" not in row and "eval/pass@1" not in row
    assert row["eval/lost"] == 1 and row["eval/lost_sampled"] == 3
    assert row["eval/pass@1/left_out"] == 1


def test_the_first_of_each_source_are_taken() -> None:
    assert [one.prompt_id for one in first_of_each_source(PROMPTS, 1)] == ["sums:0", "words:2"]
    assert first_of_each_source(PROMPTS, None) == PROMPTS


def test_tables_say_what_the_numbers_say(modes: dict[str, Responses]) -> None:
    sources = by_source(PROMPTS, modes, SECTION)
    told = {
        "label": "iter_000002",
        "confidence": 0.95,
        "all": numbers_of(4, modes, SECTION).told(),
        "sources": {name: numbers.told() for name, numbers in sources.items()},
    }
    told = json.loads(json.dumps(told, allow_nan=False))
    lines = evaluation_lines(told)
    heads = ["prompts", "greedy", "sampled", "pass@1", "pass@2", "pass@3", "short (probe)"]
    assert lines[0].split("  ")[0] == "" and all(head in lines[0] for head in heads)
    assert [line.split()[0] for line in lines[1:4]] == ["sums", "words", "all"]
    assert lines[1].split()[1:5] == ["2", "0.500", "[0.095,", "0.905]"]
    # Two lost of the words' three asked; five without a score, of both modes.
    assert lines[3].split()[-4:] == ["1.5", "25%", "5", "2"]
    assert "(2 left out)" in lines[3] and "(1 unscored)" in lines[3]
    assert len({line.rindex(line.split()[-1]) for line in lines[1:4]}) == 1
    both = comparison_lines([told, told | {"label": "hf"}])
    assert [line.split()[0] for line in both[1:]] == ["iter_000002", "hf"]
    assert both[1].split()[1:] == both[2].split()[1:]
