"""Word problems: GSM8K's form, whole numbers, right answers, and sides that share no problem.

Not covered: that a model learns from them (recipes/smollm2-135m-gsm8k-style.yaml says what did).
"""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path

import pytest

from megarl.rewards import gsm8k
from megarl.rewards.scorer import Response
from tools.make_word_problems import BY_STEPS, MOST, NAMES, THINGS, main, problems

MARK = re.compile(r"<<([\d+*/-]+)=(\d+)>>")


def rows_of(seed: int, held_out: bool, count: int = 600) -> list[dict]:
    made = problems(seed, [1, 2], held_out)
    return [next(made) for _ in range(count)]


def nameless(question: str) -> str:
    """The question without what may be exchanged."""
    for name, _ in NAMES:
        question = question.replace(name, "N")
    for thing in THINGS:
        question = question.replace(thing, "T")
    return re.sub(r"\b([Ss]he|[Hh]e)\b", "P", question)


@pytest.mark.parametrize("held_out", [False, True])
def test_every_answer_is_the_result_of_its_last_operation(held_out: bool) -> None:
    score = gsm8k.make()
    for row in rows_of(1, held_out):
        marks = MARK.findall(row["answer"])
        assert len(marks) == row["steps"]
        for operation, result in marks:
            assert eval(operation) == int(result) >= 0  # digits and operators alone, by MARK
        assert row["answer"].endswith(f"\n#### {marks[-1][1]}")
        said = Response(f"… #### {marks[-1][1]}", row["answer"], row["question"], True, "eos")
        assert score(said).total == 1.0
        used = {int(number) for number in re.findall(r"\d+", marks[0][0])}
        told = {int(number) for number in re.findall(r"\d+", row["question"])}
        assert used <= told | {a * b for a in told for b in told}


def test_no_held_out_problem_is_a_training_problem_with_another_name() -> None:
    train = {nameless(row["question"]) for row in rows_of(1, False, 3000)}
    held_out = {nameless(row["question"]) for row in rows_of(1, True)}
    assert not train & held_out
    # Names would have hidden it: many problems differ in them alone.
    assert len(train) < 3000


def test_templates_come_about_as_often() -> None:
    templates = sum(map(len, BY_STEPS.values()))
    counts = Counter(re.sub(r"\d+", "#", nameless(row["question"])) for row in rows_of(1, False))
    assert len(counts) == templates and min(counts.values()) > 600 / templates / 2


def test_the_folder_is_whole_and_made_once(tmp_path: Path, capsys) -> None:
    sizes = ["--train", "20", "--eval", "5"]
    for seed, name in (("1", "a"), ("1", "b"), ("2", "c")):
        assert main(["--seed", seed, "--out", str(tmp_path / name), *sizes]) == 0
    one, same, other = ((tmp_path / name / "train.jsonl").read_text() for name in "abc")
    assert one == same != other
    rows = [json.loads(line) for line in one.splitlines()]
    assert len(rows) == 20 and all(row["steps"] == 1 for row in rows)
    capsys.readouterr()
    assert main(["--out", str(tmp_path / "a"), *sizes]) == 0
    assert capsys.readouterr().out.endswith("is there\n")
    assert main(["--out", str(tmp_path / "a"), *sizes, "--steps", "1", "2"]) == 0
    assert (tmp_path / "a" / "train.jsonl").read_text() != one
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b", "c"]


def test_sizes_that_are_none_are_refused(capsys) -> None:
    for asked in ("0", "2001"):
        with pytest.raises(SystemExit, match="2"):
            main(["--eval", asked])
        assert f"--eval {asked}: from 1 to 2000" in capsys.readouterr().err


@pytest.mark.parametrize("steps", [[1], [2]])
def test_the_most_rows_are_there(steps: list[int]) -> None:
    made = problems(5, steps, True)
    assert len({next(made)["question"] for _ in range(MOST["eval"])}) == MOST["eval"]
