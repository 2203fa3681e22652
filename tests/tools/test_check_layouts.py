"""`tools/check_layouts.py`: its quick selection runs here, real ranks and both libraries, and what
it must not let pass.

Not covered: all pairs of layouts (the tool's default run), GPU.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megarl.reshard import families
from tools import check_layouts
from tools.layouts import crew
from tools.layouts.layouts import QUICK, Rollout, Train, mesh_of, rollouts, trains
from tools.layouts.models import FAMILIES, MODELS, make_model

BOUND = 3e-5


@pytest.fixture(autouse=True)
def one_fork_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one of all tests: it has the imports of both libraries done."""
    monkeypatch.setattr(crew, "PRELOADED", "tests.preloaded")


def run(tmp_path: Path, *arguments: str) -> tuple[int, dict[str, Any]]:
    """Exit code and the JSON."""
    file = tmp_path / "told.json"
    code = check_layouts.main([*arguments, "--json", str(file)])
    return code, json.loads(file.read_text())


def test_every_family_has_a_model() -> None:
    assert set(FAMILIES) == set(families.FAMILIES)


def test_the_quick_selection_has_every_kind_of_layout(tmp_path: Path) -> None:
    chosen = [(world, *row) for world, rows in QUICK.items() for row in rows]
    assert {MODELS[model][0] for _, model, *_ in chosen} == set(FAMILIES)
    told = {word for _, _, train, _ in chosen for word in train.split()}
    assert {"tp2", "sp", "pp2", "virtual2", "(1,3)", "ep2", "etp1", "etp2", "dp2"} <= told
    assert {word for *_, rollout in chosen for word in rollout.split()} >= {"tp1", "tp4", "ep2"}
    specs = {}
    for world, model, train, rollout in chosen:
        if model not in specs:
            make_model(tmp_path / model, model)
            specs[model] = families.read_spec(tmp_path / model / "float32")
        assert train in [one.name(world) for one in trains(specs[model], world)]
        assert rollout in [one.name(world) for one in rollouts(specs[model], world)]


def test_names_tell_layouts_apart(tmp_path: Path) -> None:
    """A row that fails is found by its names, and what is done is known by them."""
    for model in ("qwen2", "qwen3_moe"):
        make_model(tmp_path / model, model)
        spec = families.read_spec(tmp_path / model / "float32")
        for world in (1, 2, 3, 4):
            tried = trains(spec, world)
            assert len({one.name(world) for one in tried}) == len(set(tried)) == len(tried)
            assert {mesh_of(world, one, Rollout()).world for one in tried} == {world}
    experts = Train(tp=2, pp=2, stages=(1, 3), ep=2, expert_tp=1, sequence_parallel=True)
    assert experts.name(4) == "tp2 sp pp2 (1,3) ep2 etp1 dp1"
    assert Rollout(2, 2).name(4) == "tp2 ep2 ×2"


@pytest.mark.dist
def test_the_quick_selection_is_all_right(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    code, told = run(tmp_path, "--quick")
    shown = capsys.readouterr().out
    pairs = [row for row in told["rows"] if row["kind"] == "handover"]
    expected = {(world, *row) for world, rows in QUICK.items() for row in rows}
    assert {(r["ranks"], r["model"], r["train"], r["rollout"]) for r in pairs} == expected
    for row in pairs:
        assert row["ok"] and row["digests_equal"], row
        assert row["bytes_sent"] == row["bytes_bound"], row
        # Two libraries that agreed to the last bit would be one that was asked twice.
        assert 0 < row["trainer_gap"] <= BOUND and 0 < row["generator_gap"] <= BOUND, row
        assert row["tokens"] > 100 and row["tensors"] > 30
    assert any(row["bytes_sent"] for row in pairs)
    trips = [row for row in told["rows"] if row["kind"] == "round trip"]
    assert [row for row in trips if not row["ok"]] == []
    assert len(trips) == 2 * len(pairs)
    assert {row["dtype"] for row in trips} == {"float32", "bfloat16"}
    refused = {(row["model"], row["layout"]): row["why"] for row in told["refused"]}
    assert "kv heads 2" in refused["qwen3", "tp4 dp1"]
    assert code == 0 and "all right: 11 pairs" in shown and "kv heads 2" in shown


@pytest.mark.dist
def test_a_weight_that_changes_in_the_generator_is_found(tmp_path: Path, capsys) -> None:
    options = ("--quick", "--families", "mistral", "--ranks", "2", "--fault", "generator")
    code, told = run(tmp_path, *options)
    (row,) = told["rows"]
    assert code == 1 and not row["ok"] and not row["digests_equal"]
    assert "model.norm.weight on rank 1" in row["why"]
    shown = capsys.readouterr().out
    assert "mistral" in shown and "tp1 pp2 (1,3) dp1" in shown and "DIFFER" in shown
    assert "FAILED: 1 pairs of layouts (1 failed)" in shown


@pytest.mark.dist
def test_a_model_that_is_not_the_files_is_found_by_its_log_probs(tmp_path: Path, capsys) -> None:
    """Both sides hold the same weights, so digests say nothing."""
    make_model(tmp_path, "llama")
    folder = str(tmp_path / "float32")
    code, told = run(tmp_path, "--model", folder, "--ranks", "1", "--fault", "trainer")
    (row,) = told["rows"]
    assert code == 1 and not row["ok"] and row["digests_equal"]
    assert min(row["trainer_gap"], row["generator_gap"]) > BOUND
    assert "trainer's log-probs" in row["why"] and "generator's log-probs" in row["why"]
    assert row["model"] == "float32", "a folder goes by its name"


@pytest.mark.dist
def test_a_rank_that_dies_fails_its_row_and_no_other(tmp_path: Path) -> None:
    options = ("--quick", "--families", "mixtral", "--ranks", "2", "--fault", "crash")
    code, told = run(tmp_path, *options)
    assert code == 1
    expected = {tuple(names) for model, *names in QUICK[2] if model == "mixtral"}
    assert {(row["train"], row["rollout"]) for row in told["rows"]} == expected
    for row in told["rows"]:
        assert not row["ok"] and "rank 1 of 2" in row["why"] and "as asked" in row["why"]


@pytest.mark.parametrize(
    "arguments, told",
    [
        (["--families", "gpt2"], "--families gpt2"),
        (["--ranks", "0"], "--ranks"),
        (["--dtype", "bfloat16"], "--bound"),
        (["--model", "nowhere"], "nowhere: there is no such model folder"),
        (["--model", "nowhere", "--quick"], "--quick"),
    ],
)
def test_wrong_arguments_are_told_in_a_line(arguments, told, capsys) -> None:
    try:
        code = check_layouts.main(arguments)
    except SystemExit as end:
        code = end.code
    assert code == 2 and told in capsys.readouterr().err
