"""Whole runs on the other layouts: experts over ranks, virtual stages, a thinned read-back.

The oracles: log-probs of the other library at every iteration (parity), `audit verify`, and the
converter against the run's own export. Not covered: that these runs learn what one rank learns
(`tests/models/test_layouts.py`, `test_experts.py` hold gradients against HF), more than two ranks.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from megarl.audit.verify import verify
from megarl.audit.view import open_run
from tests.audit.raw import read_prompts
from tests.convert.models import convert, same_bytes, tensors_in
from tests.launch.runs import Finished, make_model, read_lines, run_warm, settings
from tools.audit import main

pytestmark = pytest.mark.launch

SCORERS = "[{name: 'tests.launch.scorers:digit_share'}, {name: exact_match, weight: 0.0}]"
EP2 = {"actor.tp": 1, "actor.ep": 2, "rollout.tp": 2, "rollout.ep": 2}
TP2 = {"actor.tp": 2, "actor.ep": 2, "actor.expert_tp": 1, "actor.sequence_parallel": True}
ROUTED = {"actor.replay_routing": True, "actor.router_aux_loss": 1e-3}
VIRTUAL = {"actor.tp": 1, "actor.pp": 2, "actor.virtual_stages": 2, "rollout.tp": 2}


def _agrees(run: Finished) -> None:
    assert run.code == 0, run.output + run.logs()
    for row in run.rows:
        assert 0 < row["parity/logprob_gap_max"] <= 1e-4
        assert row["policy/first_log_ratio_abs_max"] == 0.0
    assert verify(open_run(run.folder)).findings == []


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Finished]:
    """(data, runs folder, a run of two iterations with every expert on one rank of two)."""
    data = make_model(tmp_path_factory.mktemp("data"), experts=True)
    runs = tmp_path_factory.mktemp("runs")
    keys = EP2 | ROUTED | {"run.iterations": 2, "checkpoint.every": 1, "reward.scorers": SCORERS}
    return data, runs, run_warm("experts", settings(data, runs, **keys), runs)


def test_experts_are_trained_over_ranks_and_generate_over_ranks(experts) -> None:
    _, _, run = experts
    _agrees(run)
    assert run.rows[-1]["update/steps"] == 2


def test_tokens_are_trained_where_the_generator_sent_them_and_experts_are_balanced(experts) -> None:
    """Two layers of four experts, two of them a token: balanced, the loss is 1e-3 · 2."""
    _, _, run = experts
    for number, row in enumerate(run.rows):
        assert 2e-3 * 0.99 < row["policy/router_aux"] < 2e-3 * 2
        samples = open_run(run.folder).iteration(number).sealed.samples
        assert len(samples.experts) == 2 * 2 * (
            len(samples.prompt_ids) + len(samples.response_ids) - len(samples)
        )
        assert set(np.unique(samples.experts)) <= set(range(4))


def test_a_checkpoint_of_experts_is_converted_to_what_the_run_exported(experts, tmp_path) -> None:
    _, _, run = experts
    last = run.folder / "checkpoints" / "iter_000002"
    assert convert("megatron-to-hf", last, tmp_path / "hf") == 0
    assert same_bytes(tensors_in(tmp_path / "hf"), tensors_in(run.folder / "hf"))


def test_a_run_of_experts_goes_on_in_another_layout(experts) -> None:
    data, runs, _ = experts
    keys = TP2 | ROUTED | {"run.iterations": 3, "checkpoint.every": 1, "reward.scorers": SCORERS}
    run = run_warm("experts", settings(data, runs, **keys), runs)
    _agrees(run)
    assert [row["iteration"] for row in run.rows] == [0, 1, 2]


def test_virtual_stages_and_a_thinned_read_back(tmp_path: Path, capsys) -> None:
    data = make_model(tmp_path / "data", layers=4, tied=True)
    keys = VIRTUAL | {"rollout.verify_every": 2, "eval.every": 10, "reward.scorers": SCORERS}
    run = run_warm("virtual", settings(data, tmp_path, **keys), tmp_path)
    _agrees(run)
    ready = [
        (line["optimizer_step"], line["verified"])
        for line in read_lines(run.folder / "journal.jsonl")
        if line["state"] == "ROLLOUT_READY"
    ]
    assert dict(ready) == {0: True, 2: False, 4: True, 6: False}
    for iteration, words in ((0, "the generator held the same"), (1, "unverified: not read back")):
        prompt = read_prompts(run.folder, iteration)[0]["prompt_id"]
        assert main(["explain", str(run.folder), f"{iteration}/{prompt}/0"]) == 0
        assert words in " ".join(capsys.readouterr().out.split())
