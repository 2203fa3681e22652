"""Runs with two weighted sources and a curriculum: what they draw, tell, and go on with.

Two ranks of one tiny model, stopped by a kill behind the third update and resumed. Not covered: a
source of whose rows none is left (`tests/data/test_cursor.py`).
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megarl.experience.load import load_iteration
from tests.launch.resumes import Runs, copied, differences, resumes, rows
from tests.launch.runs import make_model, read_lines, run_warm, settings

pytestmark = pytest.mark.launch

LONG = pytest.mark.long
CURRICULUM = "tests.launch.curricula:middling"
ITERATIONS = 4
SIZES = {"easy": 20, "hard": 6}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_model(tmp_path_factory.mktemp("data"))
    lines = (folder / "train.jsonl").read_text().splitlines(keepends=True)
    for name, size in SIZES.items():
        (folder / f"{name}.jsonl").write_text("".join(lines[:size]))
        lines = lines[size:]
    return folder


def sources(data: Path, easy: int = 3, hard: int = 1) -> str:
    listed = [
        {"path": str(data / f"{name}.jsonl"), "weight": weight}
        for name, weight in (("easy", easy), ("hard", hard))
    ]
    return json.dumps(listed)


def values(data: Path) -> dict[str, object]:
    return {
        "data.train": sources(data),
        "data.eval": "null",
        "data.curriculum": CURRICULUM,
        "reward.scorers": "[{name: 'tests.launch.scorers:choosy'}]",
        "reward.max_error_share": 0.9,
        "run.iterations": ITERATIONS,
        "checkpoint.background": "false",  # the position before the kill is whole
    }


@pytest.fixture(scope="module")
def runs(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(data, tmp_path_factory.mktemp("runs"), values(data), warm=True)


@pytest.fixture(scope="module")
def whole(runs: Runs) -> Path:
    return runs.finish("whole")


@pytest.fixture(scope="module")
def killed(runs: Runs) -> Path:
    return runs.kill("run", "kill@update:visit=3")


def drawn(run: Path, iteration: int) -> list[dict]:
    return read_lines(run / f"experience/iter_{iteration:06d}/prompts.jsonl")


def test_sources_are_drawn_by_weight_and_a_curriculum_is_heard(whole: Path) -> None:
    metrics, last = rows(whole), {}
    for iteration in range(ITERATIONS):
        names = [prompt["source"] for prompt in drawn(whole, iteration)]
        # In the first iteration hard ones are refused: easy ones fill their turns.
        hard = 2 if iteration else 0
        assert (names.count("easy"), names.count("hard")) == (8 - hard, hard)
        totals: dict[str, list[float]] = {}
        for record in load_iteration(whole, iteration).records:
            prompt = drawn(whole, iteration)[record.draw_index]["prompt_id"]
            totals.setdefault(prompt, []).append(record.total)
        for prompt, scores in totals.items():
            assert last.get(prompt, 0.0) < 0.5, "no prompt comes again that went well"
            if None not in scores:  # what cannot be scored says nothing of the prompt
                last[prompt] = sum(scores) / len(scores)
        row = metrics[iteration]
        if hard:
            assert row["rollout/prompts/source/hard"] == 2
            assert row["response/length_mean"] == pytest.approx(
                (row["response/length/source/easy"] * 6 + row["response/length/source/hard"] * 2)
                / 8
            )
        else:
            assert "reward/source/easy" not in row
    assert any(value >= 0.5 for value in last.values()), "the curriculum had something to say"
    passed = {each["source"]: each for each in cursor_of(whole)["streams"]}
    assert [passed[name]["taken"] for name in SIZES] == [24, 8]
    assert [passed[name]["stood_in"] for name in SIZES] == [2, 0]
    for name, size in SIZES.items():
        stood = passed[name]["position"] - len(passed[name]["back"])
        assert metrics[-1][f"rollout/epoch/{name}"] == stood / size


def cursor_of(run: Path) -> dict:
    """As the last iteration left it."""
    file = run / f"experience/iter_{ITERATIONS - 1:06d}/drawn.json"
    return json.loads(file.read_text())["cursor"]


@pytest.mark.parametrize("use", ["reuse_sealed", pytest.param("regenerate", marks=LONG)])
def test_a_run_that_goes_on_draws_what_an_uninterrupted_one_does(
    use: str, data: Path, whole: Path, killed: Path, tmp_path: Path
) -> None:
    """From the position before the third iteration, which was sealed: with its own facts, or drawn
    again. What the curriculum saw of it counts once in either."""
    copied(killed, tmp_path)
    run = Runs(data, tmp_path, values(data), warm=True).finish("run", **{"resume.use": use})
    (resumed,) = resumes(run)
    assert resumed["iteration"] == 2 and (resumed["reused"] == 2) == (use == "reuse_sealed")
    assert differences(run, whole, range(ITERATIONS)) == []
    assert cursor_of(run) == cursor_of(whole)
    position = "checkpoints/iter_000004/position.json"
    told = [json.loads((each / position).read_text())["curriculum"] for each in (run, whole)]
    assert told[0] == told[1] and sum(told[0]["draws"]) == 8 * ITERATIONS


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        pytest.param({"data.train": (1, 1)}, "data was ", marks=LONG),
        ({"data.curriculum": "tests.launch.curricula:other"}, "data.curriculum was tests"),
    ],
)
def test_another_curriculum_or_other_weights_are_refused(
    changes: dict, says: str, data: Path, killed: Path, tmp_path: Path
) -> None:
    copied(killed, tmp_path)
    if "data.train" in changes:
        changes = {"data.train": sources(data, *changes["data.train"])}
    ended = Runs(data, tmp_path, values(data), warm=True).launch("run", **changes)
    assert ended.code == 2 and f"does not fit: {says}" in ended.output


@pytest.mark.long
def test_collecting_alone_draws_the_same_way(data: Path, whole: Path, tmp_path: Path) -> None:
    """With the weights as they are rewards differ from the second iteration on; those of the first,
    and so the prompts of the second, do not."""
    given = [*settings(data, tmp_path, **values(data)), "--only", "rollout"]
    done = run_warm("collected", given, tmp_path)
    assert done.code == 0, done.output + done.logs()
    for iteration in (0, 1):
        mine, theirs = (drawn(each, iteration) for each in (done.folder, whole))
        assert [each["prompt_id"] for each in mine] == [each["prompt_id"] for each in theirs]
    assert "rollout/epoch/hard" in done.rows[-1]
