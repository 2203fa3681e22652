"""Summary and report of run folders written here by hand.

Not covered: a folder that a real run wrote (the launch tests do that), and the page's looks.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

from megarl.observe import report, summary
from megarl.observe.runfolder import read_run

ROWS = [
    {
        "iteration": index,
        "reward/mean": reward,
        "parity/logprob_gap_max": 1e-5 * (1 + index % 2),
        "time/iteration": 2.0,
        "time/generate": 1.0,
        "time/generate/flush": 0.5,
        "time/update": 0.5,
        "time/tokens_per_second": 12000.0,
    }
    for index, reward in enumerate([0.25, 0.5, 0.875])
]
ROWS[0] |= {"eval/accuracy": 0.125, "eval/accuracy_sampled": 0.25}
ROWS[2] |= {"eval/accuracy": 0.9375, "eval/accuracy_sampled": 0.75}


def write_run(folder: Path, rows: list[dict], finished: bool = True) -> Path:
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "recipe.yaml").write_text(
        "seed: 1\nrun: {iterations: 3}\nworld: {ranks: 2}\nactor: {tp: 2}\nrollout: {tp: 1}\n"
        "parity: {max: 1.0e-4}\n"
    )
    argv = ["megarl/train.py", "recipes/quickstart.yaml"]
    (folder / "environment.json").write_text(json.dumps({"argv": argv, "cpu": "<b>fast</b>"}))
    (folder / "hf").mkdir()
    (folder / "tensorboard").mkdir()
    if finished:
        (folder / "finished.json").write_text("{}")
    return folder


def told(folder: Path, capsys: pytest.CaptureFixture[str]) -> str:
    assert summary.main([str(folder)]) == 0
    return capsys.readouterr().out


def test_the_summary_tells_results_times_files_and_what_next(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = told(write_run(tmp_path / "runs" / "quickstart-s1", ROWS), capsys)
    words = [" ".join(line.split()) for line in text.splitlines()]
    assert words[0] == "quickstart-s1: 2 ranks, actor tp=2, rollout tp=1"
    for line in (
        "held-out accuracy, greedy 0.125 0.938",
        "held-out accuracy, sampled 0.250 0.750",
        "reward, first and last 0.250 0.875",
        "trainer and generator differ by at most 2.0e-05 in any token's log-prob (allowed 1e-04)",
        "3 iterations in 6.0 s, 2.00 s each:",
        "generate 50%, update 25%, other 25%",
        "hf the trained model: a Hugging Face folder that transformers loads",
    ):
        assert line in words
    assert "INCOMPLETE" not in text
    assert f"--logdir {tmp_path / 'runs'}" in text
    assert "bash launch/grpo.sh recipes/quickstart.yaml rollout.tp=2" in text
    assert "make demo SEED=2" in text
    assert "●" in text and all(len(line) <= 100 for line in text.splitlines() if "/" not in line)


def by_source(row: dict, **rewards: float | None) -> dict:
    """A row that tells sources apart; a reward of None: none could be scored."""
    told = dict(row)
    for place, (name, reward) in enumerate(rewards.items()):
        told |= {
            f"rollout/prompts/source/{name}": 4.0,
            f"groups/zero_variance/source/{name}": 0.25 * place,
            f"response/length/source/{name}": 30.5 + place,
        }
        told |= {} if reward is None else {f"reward/source/{name}": reward}
    return told


def test_sources_are_told_apart_where_there_are_several(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [
        ROWS[0],
        by_source(ROWS[1], math=0.5, **{"code<b>\x1b" + "x" * 40: None}),
        by_source(ROWS[2], math=0.75, **{"code<b>\x1b" + "x" * 40: None}),
    ]
    folder = write_run(tmp_path / "run", rows)
    text = told(folder, capsys)
    words = [" ".join(line.split()) for line in text.splitlines()]
    assert "by source first last equal tokens" in words
    assert "math 0.500 0.750 0.000 30.500" in words
    assert "code<b>?xxxxxxxxxxxxxxxxxxx… - - 0.250 31.500" in words
    page = report.write_report(folder).read_text()
    for title in ("Reward by source", "Share of groups with equal rewards", "Tokens of a response"):
        assert title in page
    assert "code&lt;b&gt;" in page and "code<b>" not in page
    assert "by source" not in told(write_run(tmp_path / "one", ROWS), capsys)
    assert "by source" not in report.write_report(tmp_path / "one").read_text()
    many = by_source(ROWS[0], **{f"s{number:02}": 0.5 for number in range(20)})
    assert "and 8 more, see metrics.jsonl" in told(write_run(tmp_path / "many", [many]), capsys)


def test_an_incomplete_run_says_so_and_how_far_it_came(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_run(tmp_path / "run", ROWS[:2], finished=False)
    with open(folder / "metrics.jsonl", "a") as out:
        out.write('{"iteration": 2, "rew')
    assert "INCOMPLETE: 2 of 3 iterations are there; still going" in told(folder, capsys)
    line = {"state": "FAILED", "reason": "rank 1 is missing at vote ROLLOUT_READY"}
    (folder / "journal.jsonl").write_text(json.dumps(line) + "\n")
    text = told(folder, capsys)
    assert "it failed: rank 1 is missing at vote ROLLOUT_READY" in text
    assert "held-out accuracy, greedy         0.125        -" in text


def test_a_run_of_one_iteration_has_before_and_after_in_one_row(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    row = ROWS[0] | {"eval/final/accuracy": 0.5}
    text = told(write_run(tmp_path / "run", [row]), capsys)
    assert "held-out accuracy, greedy         0.125    0.500" in text


def test_the_final_evaluation_is_a_point_behind_the_last_iteration(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [*ROWS[:2], ROWS[2] | {"eval/accuracy": 0.75, "eval/final/accuracy": 0.5}]
    folder = write_run(tmp_path / "run", rows)
    run = read_run(folder)
    assert run.points("eval/accuracy") == [(0, 0.125), (2, 0.75)]
    assert run.evaluations("eval/accuracy") == [(0, 0.125), (2, 0.75), (3, 0.5)]
    assert told(folder, capsys).count("●") == 4  # and its legend
    page = report.write_report(folder).read_text()
    assert "0.125 → 0.5<" in page


def test_the_final_evaluation_of_an_earlier_end_is_a_point_once_and_in_order(
    tmp_path: Path,
) -> None:
    """A run of two iterations that was extended: the next row evaluated the same weights again."""
    rows = [ROWS[0], ROWS[1] | {"eval/final/accuracy": 0.25}]
    rows += [ROWS[2] | {"eval/accuracy": 0.75, "eval/final/accuracy": 0.5}]
    run = read_run(write_run(tmp_path / "run", rows))
    assert run.evaluations("eval/accuracy") == [(0, 0.125), (2, 0.75), (3, 0.5)]
    rows[2] = {key: value for key, value in rows[2].items() if key != "eval/accuracy"}
    rows.append(rows[2] | {"iteration": 3, "eval/accuracy": 0.5, "eval/final/accuracy": 1.0})
    run = read_run(write_run(tmp_path / "longer", rows))
    assert run.evaluations("eval/accuracy") == [(0, 0.125), (2, 0.25), (3, 0.5), (4, 1.0)]


def test_penalties_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "penalty" not in told(write_run(tmp_path / "none", ROWS), capsys)
    rows = [row | {"reward/penalised": 5.0} for row in ROWS[:2]]
    text = told(write_run(tmp_path / "some", rows), capsys)
    assert "10 responses could not be scored and got the penalty" in text


@pytest.mark.parametrize("tool", [summary, report])
def test_a_folder_that_is_no_run_is_refused_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], tool
) -> None:
    broken = write_run(tmp_path / "broken", ROWS)
    (broken / "metrics.jsonl").write_text("{}\n{}\n")
    for folder in (tmp_path, tmp_path / "nowhere", broken):
        assert tool.main([str(folder)]) == 2
        out, err = capsys.readouterr()
        assert out == "" and err.startswith("megarl: error: ") and err.count("\n") == 1


@pytest.mark.parametrize(
    ("file", "body", "says"),
    [
        ("metrics.jsonl", b'{"iteration": 0}\nnull\n', r"metrics\.jsonl:2: not a row of metrics"),
        ("metrics.jsonl", b'{"iteration": "0"}\n', r"metrics\.jsonl:1: `iteration` is '0'"),
        ("metrics.jsonl", b'{"iteration": 0, "a": [1]}\n', r"metrics\.jsonl:1: .*'a' is a list"),
        ("metrics.jsonl", b'{"iteration": 0, "a": null}\n', r":1: metric 'a' is a NoneType"),
        ("metrics.jsonl", b'{"iteration": 0, "reward/mean": "x"}\n', r":1: .*'x', not a number"),
        ("metrics.jsonl", b'{"iteration": 0, "reward/mean": NaN}\n', r":1: metric .* is nan"),
        ("metrics.jsonl", b'{"iteration": 0, "reward/mean": 1e999}\n', r":1: metric .* is inf"),
        ("metrics.jsonl", b'{"iteration": 0, "a": 1' + b"0" * 400 + b"}\n", r":1: .*out of range"),
        ("metrics.jsonl", b"[" * 100_000 + b"\n", r"metrics\.jsonl:1: not a row of metrics"),
        ("recipe.yaml", b"seed: 1\nname: \xff\n", r"recipe\.yaml:2: cannot be read: not UTF-8"),
        ("recipe.yaml", b"seed: 1\nrun: [\n", r"recipe\.yaml:\d+: cannot be read: "),
        ("environment.json", b"\xfe\xff", r"environment\.json:1: cannot be read: not UTF-8"),
        ("environment.json", b'{\n"a": }', r"environment\.json:2: cannot be read: not JSON"),
    ],
)
def test_a_damaged_file_is_named_with_its_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], file: str, body: bytes, says: str
) -> None:
    folder = write_run(tmp_path / "run", ROWS)
    (folder / file).write_bytes(body)
    for tool in (summary, report):
        assert tool.main([str(folder)]) == 2
        out, err = capsys.readouterr()
        assert out == "" and err.count("\n") == 1 and re.search(says, err), err


@pytest.mark.parametrize(
    ("file", "body"),
    [
        ("environment.json", b'{"argv": 3}'),
        ("environment.json", b"[]"),
        ("recipe.yaml", b"run: 3\nworld: [1]\n"),
        ("journal.jsonl", b"\xff\n[]\n"),
        ("replay.json", b"[]"),
    ],
)
def test_files_of_another_shape_are_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], file: str, body: bytes
) -> None:
    folder = write_run(tmp_path / "run", ROWS, finished=False)
    (folder / file).write_bytes(body)
    assert "reward, first and last" in told(folder, capsys)


@pytest.mark.parametrize("within", [True, False])
def test_a_finished_replay_is_told_as_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], within: bool
) -> None:
    folder = write_run(tmp_path / "quickstart-s1.replay-2", [], finished=False)
    (folder / "replay.json").touch()  # while it goes on
    assert "INCOMPLETE: 0 of 3 iterations are there" in told(folder, capsys)
    asked = [] if within else ["actor.lr=0.1 (run: 0.01)"]
    facts = {"run": "runs/quickstart-s1", "iteration": 2, "what_if": asked, "within": within}
    (folder / "replay.json").write_text(json.dumps(facts | {"iterations": []}))
    text = told(folder, capsys)
    verdict = f"{'within' if within else 'beyond'} tolerance; step by step in {folder}/replay.json"
    assert f"replay of runs/quickstart-s1@2: {verdict}" in text
    assert "INCOMPLETE" not in text and "accuracy" not in text
    assert ("asked for another update: actor.lr=0.1 (run: 0.01)" in text) is not within
    assert "replay of runs/quickstart-s1@2" in report.write_report(folder).read_text()


def test_a_reader_that_goes_away_is_no_error(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", ROWS)
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "megarl.observe.summary", str(folder)]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, check=False)
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, b"")


class Page(HTMLParser):
    """Collects tags, attributes and whether every tag is closed."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[tuple[str, dict]] = []

    def handle_starttag(self, tag: str, attrs: list) -> None:
        self.seen.append((tag, dict(attrs)))
        if tag not in ("meta",):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list) -> None:
        self.seen.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_report_is_one_escaped_page_without_other_hosts(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "<i>run", [row | {"time/<script>": 0.1} for row in ROWS])
    text = report.write_report(folder).read_text()
    page = Page()
    page.feed(text)
    assert page.open == []
    tags = [tag for tag, _ in page.seen]
    assert tags.count("svg") == 4
    assert not {"script", "link", "img", "i", "b"} & set(tags)
    assert "://" not in text and "&lt;b&gt;fast" in text and "&lt;script&gt;" in text
    for tag, attributes in page.seen:
        if tag == "polyline":
            for x, y in re.findall(r"([-\d.]+),([-\d.]+)", attributes["points"]):
                assert 0 <= float(x) <= report.WIDTH and 0 <= float(y) <= report.HEIGHT


def test_the_approximate_kl_of_steps_taken_and_of_the_stopped_one_share_a_plot(
    tmp_path: Path,
) -> None:
    rows = [row | {"policy/approx_kl": 0.25} for row in ROWS]
    rows[1]["policy/approx_kl_stopped"] = 0.5
    text = report.write_report(write_run(tmp_path / "run", rows)).read_text()
    (plot,) = re.findall(r"Approximate KL from.*?(<svg.*?)<h2>", text, re.DOTALL)
    lines = re.findall(r'points="([^"]*)"', plot)
    assert [len(line.split()) for line in lines] == [3, 1]
    assert "step that target_kl stopped" in plot


def test_the_report_of_a_run_without_rows_says_incomplete(tmp_path: Path) -> None:
    text = report.write_report(write_run(tmp_path / "run", [], finished=False)).read_text()
    assert "<svg" not in text and "Incomplete: 0 of 3 iterations" in text
