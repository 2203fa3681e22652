"""tools/show_rollouts.py on a real run: filters, order, groups, statistics, JSON lines, safety.

Oracles are the sealed files (`raw.py`). Not covered: colours, and how wide a terminal draws a
character.
"""

from __future__ import annotations

import json
import shutil
import statistics
from collections.abc import Callable
from pathlib import Path

import pytest

from megarl.audit.rollouts import main
from tests.audit.forge import Forger
from tests.audit.raw import RawSample, read_prompts, read_samples

pytestmark = pytest.mark.launch


def lines(capsys: pytest.CaptureFixture, run: Path, *words: str) -> list[dict]:
    assert main([str(run), *words, "--json"]) == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        ([], lambda sample: True),
        (["--reward", ">0"], lambda sample: (sample.reward or 0) > 0),
        (["--reward", "0"], lambda sample: sample.reward == 0),
        (["--reward", "none"], lambda sample: sample.reward is None),
        (["--status", "error"], lambda sample: sample.status == "error"),
        (["--length", "<12"], lambda sample: len(sample.ids) < 12),
        (["--length", "12..", "--reward", "2"], lambda s: len(s.ids) >= 12 and s.reward == 2),
        (["--trained"], lambda sample: sample.minibatch >= 0),
        (["--no-trained"], lambda sample: sample.minibatch < 0),
        (["--verdict", "trained", "--reward", "0"], lambda s: s.minibatch >= 0 and s.reward == 0),
        (["--verdict", "reward_error"], lambda sample: sample.status == "error"),
        (["--end", "truncated"], lambda sample: len(sample.ids) == 12 and sample.ids[-1] != 2),
        (["--source", "tr*"], lambda sample: True),
        (["--source", "eval"], lambda sample: False),
    ],
)
def test_filters_choose_what_the_files_say(
    capsys: pytest.CaptureFixture,
    audited: Path,
    words: list[str],
    wanted: Callable[[RawSample], bool],
) -> None:
    expected = [
        (number, *key)
        for number in range(3)
        for key, sample in sorted(read_samples(audited, number).items())
        if wanted(sample)
    ]
    told = lines(capsys, audited, "--iteration", "0-2", "--limit", "0", *words)
    assert [(row["iteration"], row["draw_index"], row["candidate"]) for row in told] == expected


def test_without_options_it_is_the_last_iteration(
    capsys: pytest.CaptureFixture, audited: Path
) -> None:
    assert {row["iteration"] for row in lines(capsys, audited)} == {2}
    told = lines(capsys, audited, "--last", "2", "--limit", "0")
    assert {row["iteration"] for row in told} == {1, 2}
    prompt = read_prompts(audited, 2)[3]["prompt_id"]
    told = lines(capsys, audited, "--prompt", prompt)
    assert [row["sample_id"] for row in told] == [f"audited/2/{prompt}/{n}" for n in range(4)]


def test_contains_looks_into_the_response(capsys: pytest.CaptureFixture, audited: Path) -> None:
    whole = lines(capsys, audited, "--limit", "0")
    some = whole[5]["response"][2:6]
    told = lines(capsys, audited, "--limit", "0", "--contains", some.upper())
    found = [r["sample_id"] for r in whole if some.casefold() in r["response"].casefold()]
    assert [row["sample_id"] for row in told] == found != []


def test_order_is_canonical_or_by_a_value(capsys: pytest.CaptureFixture, audited: Path) -> None:
    told = lines(capsys, audited, "--sort", "advantage", "--reverse", "--limit", "0")
    values = [row["advantage"] for row in told]
    known = [value for value in values if value is not None]
    assert known == sorted(known, reverse=True)
    assert values[len(known) :] == [None] * (32 - len(known))
    first = lines(capsys, audited, "--sort", "advantage", "--reverse", "--limit", "3")
    assert first == told[:3]


def test_groups_are_whole_and_the_wanted_are_marked(
    capsys: pytest.CaptureFixture, audited: Path
) -> None:
    failed = {d for (d, _), s in read_samples(audited, 2).items() if s.status == "error"}
    told = lines(capsys, audited, "--groups", "--status", "error", "--limit", "0")
    assert {group["samples"][0]["draw_index"] for group in told} == failed
    assert all(len(group["samples"]) == 4 for group in told)
    assert main([str(audited), "--groups", "--status", "error", "--limit", "0"]) == 0
    page = capsys.readouterr().out
    assert page.count("> ") == sum(s.status == "error" for s in read_samples(audited, 2).values())
    assert page.rstrip().endswith(f"{len(failed)} groups")


def test_statistics_are_those_of_the_files(capsys: pytest.CaptureFixture, audited: Path) -> None:
    told = lines(capsys, audited, "--iteration", "0-", "--stats")
    assert [line["iteration"] for line in told] == [0, 1, 2]
    for line in told:
        samples = read_samples(audited, line["iteration"])
        rewards = [s.reward for s in samples.values() if s.reward is not None]
        assert line["reward_mean"] == pytest.approx(statistics.mean(rewards), rel=1e-12)
        assert line["unscored"] == 32 - len(rewards)
        assert line["length_mean"] == statistics.mean(len(s.ids) for s in samples.values())
        assert line["trained"] == sum(s.minibatch >= 0 for s in samples.values())
        gaps = [
            abs(float(old) - float(rollout))
            for s in samples.values()
            if "old_log_probs" in s.columns
            for old, rollout in zip(
                s.columns["old_log_probs"], s.columns["rollout_log_probs"], strict=True
            )
        ]
        assert line["gap_max"] == max(gaps)
    assert main([str(audited), "--stats"]) == 0
    assert capsys.readouterr().out.splitlines()[0].split()[:3] == [
        "iteration",
        "samples",
        "trained",
    ]


def test_a_page_fits_its_width_and_is_plain_where_there_is_no_terminal(
    capsys: pytest.CaptureFixture, audited: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    for columns in ("60", "120"):
        monkeypatch.setenv("COLUMNS", columns)
        for words in ([], ["--groups"], ["--stats", "--iteration", "0-"]):
            assert main([str(audited), *words]) == 0
            page = capsys.readouterr().out
            assert "\x1b" not in page
            assert max(map(len, page.splitlines())) <= int(columns)


def test_what_a_prompt_or_scorer_says_cannot_steer_the_terminal(
    capsys: pytest.CaptureFixture, audited: Path, tmp_path: Path
) -> None:
    copy = Path(shutil.copytree(audited, tmp_path / "copy"))
    forger = Forger(copy)
    forger.prompts(2, lambda told: told[0].update(text="clear\x1b[2J", answer="\x07[red]8[/red]"))
    forger.reseal(2)
    for words in ([], ["--groups"]):
        assert main([str(copy), *words]) == 0
        page = capsys.readouterr().out
        assert "clear\\x1b[2J  [answer \\x07[red]8[/red]]" in page
        assert all(line.isprintable() for line in page.splitlines())


def test_wrong_arguments_are_refused(
    capsys: pytest.CaptureFixture, audited: Path, tmp_path: Path
) -> None:
    for words, reason in (
        ([str(audited), "--reward", "high"], "write >=0.5, <10"),
        ([str(audited), "--iteration", "9"], "sealed are 0-2"),
        ([str(tmp_path)], "not a run"),
        ([str(tmp_path / "nowhere")], "no such folder"),
    ):
        assert main(words) == 2
        told = capsys.readouterr()
        assert reason in told.err
        assert told.out == ""
    for words in (["--status", "good"], ["--limit", "-1"], ["--last", "0"], ["--chars", "x"]):
        with pytest.raises(SystemExit, match="2"):
            main([str(audited), *words])
    assert main([str(audited), "--reward", "77"]) == 0
    assert "no samples are like this" in capsys.readouterr().out


def test_a_damaged_iteration_is_told_in_one_line(
    capsys: pytest.CaptureFixture, audited: Path, tmp_path: Path
) -> None:
    copy = Path(shutil.copytree(audited, tmp_path / "copy"))
    Forger(copy).flip(2, "rollout_0", "response_ids")
    assert main([str(copy)]) == 1
    told = capsys.readouterr().err
    assert "rollout_0.safetensors" in told
    assert told.count("\n") == 1
    assert main([str(copy), "--iteration", "1"]) == 0
