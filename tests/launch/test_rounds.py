"""Whole runs that sample in rounds, lose a response, and put prompts into quarantine.

Not covered: a generator of several ranks that loses a response (its ranks lose it together).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from megarl.experience.load import load_iteration
from megarl.faults import PERMISSION, VARIABLE
from tests.launch.runs import Finished, make_model, read_lines, run_warm, settings

pytestmark = pytest.mark.launch

GROUP, TARGET = 4, 8
SCORER = "[{name: 'tests.launch.scorers:choosy'}]"
LOSES = {VARIABLE: "lose@generate:rank=1:visit=1", PERMISSION: "1"}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("data"))


def _run(name: str, data: Path, runs: Path, **more: object) -> Finished:
    values = {
        "reward.scorers": SCORER,
        "reward.max_error_share": 0.9,
        "data.eval": "null",
        "world.timeout_seconds": 120,
    }
    return run_warm(name, settings(data, runs, **(values | more)), runs)


@pytest.fixture(scope="module")
def run(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """Two replicas; the second one loses a response of the first round of the first iteration."""
    runs = tmp_path_factory.mktemp("runs")
    with pytest.MonkeyPatch.context() as patch:
        _plan(patch, LOSES)
        done = _run(
            "rounds",
            data,
            runs,
            **{
                "rollout.max_lost_share": 0.05,
                "algorithm.dynamic_sampling.max_rounds": 2,
                "reward.quarantine_after": GROUP,
            },
        )
    assert done.code == 0, done.output + done.logs()
    return done


def _plan(patch: pytest.MonkeyPatch, fault: Mapping[str, str]) -> None:
    for key, value in fault.items():
        patch.setenv(key, value)


def _prompts(run: Finished, iteration: int) -> list[dict]:
    return read_lines(run.folder / f"experience/iter_{iteration:06d}/prompts.jsonl")


def test_rounds_add_up_to_one_experience_and_one_account(run: Finished) -> None:
    ledger = read_lines(run.folder / "ledger.jsonl")
    assert len(ledger) == len(run.rows) == 3
    for iteration, (line, row) in enumerate(zip(ledger, run.rows, strict=True)):
        out = sum(line["dropped"].values()) + sum(line["refused"].values())
        assert line["sampled"] == line["trained"] + out
        assert line["sampled"] + line["lost"] == GROUP * line["prompts"]
        assert line["rounds"] == 2 and TARGET < line["prompts"] <= 2 * TARGET
        assert row["rollout/rounds"] == 2 and row["rollout/prompts"] == line["prompts"]
        informative = row["groups/groups_informative"]
        assert row["groups/groups_trained"] == min(TARGET, informative)
        assert row["rollout/informative_share"] == informative / line["prompts"]
        assert line["dropped"].get("surplus", 0) == GROUP * max(0, informative - TARGET)
        prompts = _prompts(run, iteration)
        assert len({prompt["prompt_id"] for prompt in prompts}) == line["prompts"]
        assert len(load_iteration(run.folder, iteration).samples) == line["sampled"]
    told = run.output.count("dynamic sampling found")
    assert told == sum(row["groups/groups_informative"] < TARGET for row in run.rows)


def test_a_lost_response_is_counted_with_its_reason_and_its_group_dropped(run: Finished) -> None:
    first, *others = read_lines(run.folder / "ledger.jsonl")
    assert first["lost"] == 1 and first["lost_reasons"] == {"not_returned": 1}
    assert first["dropped"]["incomplete_group"] == GROUP - 1
    assert all(line["lost"] == 0 and line["lost_reasons"] == {} for line in others)
    assert run.rows[0]["lost/not_returned"] == run.rows[0]["groups/samples_lost"] == 1
    log = (run.folder / "logs/rank_1.log").read_text()
    assert "megarl: fault lose@generate" in log


def test_prompts_that_cannot_be_scored_are_drawn_no_more(run: Finished) -> None:
    lines = read_lines(run.folder / "quarantine.jsonl")
    barred = {line["prompt_id"]: line["iteration"] for line in lines}
    unscorable = []
    for iteration, row in enumerate(run.rows):
        prompts = _prompts(run, iteration)
        assert not [p for p in prompts if barred.get(p["prompt_id"], 99) < iteration]
        unscorable += [p["prompt_id"] for p in prompts if p["answer"].endswith("7")]
        known = sum(since <= iteration for since in barred.values())
        assert row["rollout/quarantined"] == known
    # Of the group that lost a response fewer than the limit could not be scored.
    assert set(barred) <= set(unscorable) and len(barred) >= len(unscorable) - 1 > 0
    told = [line for line in lines if f"prompt {line['prompt_id']} is drawn no more" in run.output]
    assert told and told[0] == lines[0]
    for line in lines:
        assert line["counts"] == {"error": GROUP} and "ends in 7" in line["detail"]


def test_a_loss_beyond_the_share_stops_every_rank_with_one_line(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _plan(monkeypatch, LOSES)
    done = _run("stopped", data, tmp_path)
    assert done.code != 0
    (line,) = [line for line in done.output.splitlines() if line.startswith("megarl: ")]
    assert "1 of 32 responses are lost after their retries" in line
    assert "rollout.max_lost_share is 0: draw " in line and "SGLang returned nothing" in line
    assert not list((tmp_path / "stopped").glob("experience/iter_*"))
