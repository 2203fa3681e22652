"""The benchmarks' harness and the shape of what they tell; no speed is measured here."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from tools.bench import checkpoint, experience, harness, loop, peer_trl, runs
from tools.bench.harness import Bench, BenchError, Spread, interleaved, report
from tools.bench.peer import trl_env
from tools.bench.peer.lengths import facts, long_tailed


def script() -> ModuleType:
    """`tools/bench.py`, whose name the package beside it has as well."""
    spec = importlib.util.spec_from_file_location("bench_script", harness.ROOT / "tools/bench.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_help_lists_every_bench_with_a_line_and_loads_no_library() -> None:
    asked = [sys.executable, "-X", "importtime", "tools/bench.py", "--help"]
    told = subprocess.run(asked, cwd=harness.ROOT, capture_output=True, text=True, check=True)
    lines = [line.split(None, 1) for line in told.stdout.splitlines()]
    for bench in (loop.BENCH, peer_trl.BENCH, experience.BENCH, checkpoint.BENCH):
        assert [bench.name, bench.line] in lines
    loaded = {line.rpartition("|")[2].strip() for line in told.stderr.splitlines()}
    assert "argparse" in loaded and not {"torch", "sglang", "transformers"} & loaded


def test_sides_run_in_turn_and_every_second_turn_backwards() -> None:
    order: list[str] = []
    sides = {name: (lambda name=name: order.append(name) or name) for name in ("a", "b")}
    turns = interleaved(sides, 3)
    assert order == ["a", "b", "b", "a", "a", "b"]
    assert turns == [{"a": "a", "b": "b"}] * 3


def test_spread_tells_median_extent_and_relative_width() -> None:
    keys = Spread.of([1.0, 4.0, 2.0]).keys("x")
    assert keys == {"x": 2.0, "x_min": 1.0, "x_max": 4.0, "x_spread": 1.5}
    with pytest.raises(ValueError, match="no measurement"):
        Spread.of([])


def test_the_last_line_is_one_json_object(capsys) -> None:
    bench = Bench("b", "line", "text", lambda parser: None, lambda options: {})
    report(bench, Spread.of([1.0, 2.0]).keys("speed") | {"nested": {"a": 1}}, as_json=True)
    told = capsys.readouterr().out.splitlines()
    assert json.loads(told[-1]) == {
        "bench": "b",
        "speed": 1.5,
        "speed_min": 1.0,
        "speed_max": 2.0,
        "speed_spread": 0.6667,
        "nested": {"a": 1},
    }
    assert told[0].split() == ["speed", "1.5", "1", "…", "2"]


def test_environment_says_what_the_numbers_were_measured_on() -> None:
    found = harness.environment()
    assert found["cores"] >= 1 and found["processor"] and found["packages"]["torch"]
    json.dumps(found)


ROW = {
    "time/iteration": 1.0,
    "time/generate": 0.4,
    "time/log_probs": 0.1,
    "time/update": 0.2,
    "time/update/inner": 0.1,
    "time/grade": 0.05,
    "time/evaluate": 0.2,
    "time/tokens_per_second": 9.0,
    "response/tokens": 100.0,
}


def test_overhead_is_what_is_neither_work_nor_aside() -> None:
    seconds = loop.stage_seconds([ROW, ROW])
    assert seconds["iteration"] == pytest.approx(0.8)
    assert seconds["other"] == pytest.approx(0.05)
    assert "evaluate" not in seconds and "tokens_per_second" not in seconds
    assert loop.overhead_share(seconds) == pytest.approx(0.125)


def _options(bench: Bench, *arguments: str) -> Any:
    return script().parser().parse_args([bench.name, *arguments])


def test_the_loop_bench_tells_shares_and_seconds_of_every_layout(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(loop, "quickstart_model", lambda given: tmp_path)
    asked: list[dict[str, Any]] = []
    monkeypatch.setattr(loop, "run_megarl", lambda name, folder, keys: asked.append(keys) or [ROW])
    result = loop.run(_options(loop.BENCH, "--repeats", "2", "--set", "seed=3"))
    assert result["overhead_share"] == pytest.approx(0.125)
    assert {"seconds_per_iteration", "seconds_per_iteration_spread", "stages"} <= set(result)
    assert result["dp2_seconds_per_iteration"] == pytest.approx(0.8)
    assert [keys["actor.tp"] for keys in asked] == [2, 1, 1, 2]
    assert all(keys["seed"] == "3" for keys in asked)
    json.dumps(result)


def test_the_peer_bench_tells_a_ratio_of_every_setting(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(harness, "CACHE", tmp_path)
    monkeypatch.setattr(peer_trl, "CACHE", tmp_path)
    monkeypatch.setattr(peer_trl, "quickstart_model", lambda given: tmp_path)
    monkeypatch.setattr(peer_trl, "trl_python", lambda folder, index: tmp_path / "python")
    keys: list[dict[str, Any]] = []
    monkeypatch.setattr(
        peer_trl, "run_megarl", lambda name, folder, asked, **_: keys.append(asked) or [ROW]
    )
    jobs: list[dict[str, Any]] = []

    def run_command(command: list[str], environment: dict[str, str], log: Any) -> None:
        jobs.append(json.loads((tmp_path / command[-1]).read_text()))
        row = {"iteration": 1.6, "generate": 0.5, "grade": 0.1, "prepare": 0.9, "tokens": 100.0}
        (tmp_path / jobs[-1]["result"]).write_text(json.dumps([row] * 4))

    monkeypatch.setattr(peer_trl, "run_command", run_command)
    result = peer_trl.run(_options(peer_trl.BENCH, "--repeats", "2", "--prompts", "4"))
    for setting in ("fixed", "quickstart", "longtail"):
        for end in ("", "_min", "_max"):
            assert result[f"ratio_{setting}{end}"] == pytest.approx(2.0)
    assert result["settings"]["fixed"]["trl"]["seconds"]["update"] == pytest.approx(0.7)
    assert result["trl_layout"] in peer_trl.TRL_LAYOUTS
    # The probe of both layouts, then two turns of each setting.
    assert [job["fixed"] for job in jobs] == [False] * 2 + [True] * 2 + [False] * 4
    assert jobs[-1]["lengths"] == long_tailed(32, 24)
    assert keys[-1]["rollout.max_response_tokens"] == 192 == jobs[-1]["max_tokens"]
    json.dumps(result)


SEALED_ROWS = [{"time/iteration": 1.2, "time/seal": 0.01, "time/evaluate": 0.2}] * 3


def _experience(folder: str) -> dict[str, Any]:
    """In a process without a default group: the bench makes its own."""
    torch.distributed.destroy_process_group()
    sizes = ["--samples", "64", "--tokens", "16", "--join-samples", "64", "512"]
    with pytest.MonkeyPatch.context() as patch:
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
            patch.delenv(name)
        patch.setattr(experience, "CACHE", Path(folder))
        patch.setattr(experience, "quickstart_model", lambda given: Path(folder))
        patch.setattr(experience, "run_megarl", lambda name, model, settings: SEALED_ROWS)
        return dict(experience.run(_options(experience.BENCH, "--repeats", "2", *sizes)))


@pytest.mark.dist
def test_the_experience_bench_seals_joins_and_tells_a_share(ranks, tmp_path) -> None:
    result = ranks.run(1, _experience, str(tmp_path))[0]
    keys = ("seal_over_raw", "bytes_per_token", "iteration_share", "join_s_per_100k")
    assert all(result[key] > 0 for key in keys)
    assert result["iteration_share"] == pytest.approx(0.01)
    assert set(result["join_s_per_100k_by_size"]) == {"64", "512"}
    assert "join_exponent" in result and "join_cpu_exponent" in result
    assert not list(tmp_path.glob("runs/*"))
    json.dumps(result)


@pytest.mark.launch
@pytest.mark.long
def test_the_checkpoint_bench_saves_loads_and_tells_ratios(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(checkpoint, "CACHE", tmp_path)
    sizes = ["--layers", "1", "--hidden", "64", "--vocab", "256", "--repeats", "2"]
    result = checkpoint.run(_options(checkpoint.BENCH, *sizes))
    for key in ("save_over_raw", "load_over_raw", "load_over_raw_warm"):
        assert 0 < result[f"{key}_min"] <= result[key] <= result[f"{key}_max"]
    assert 0 < result["blocking_share"] < 1
    assert result["first_save_mb_per_s"] > 0 and result["save_mb_per_s"] > 0
    # Weights and two moments in fp32, and what a torch.save of each adds.
    numbers = 2 * 256 * 64 + 64 + (64 * 64 * 2 + 2 * 64 * 32 + 64 + 2 * 32 + 3 * 192 * 64 + 2 * 64)
    assert 12 * numbers < result["bytes"] < 2 * 12 * numbers
    assert len(result["bytes_per_rank"]) == 2 and not (tmp_path / "runs/checkpoint").exists()
    json.dumps(result)


def test_a_checkpoint_ratio_is_taken_within_a_turn() -> None:
    """A second turn at half the speed of everything changes no ratio."""
    seconds = {"save": [2.0, 4.0], "raw_write": [1.5, 3.0], "load": [1.0, 2.0]}
    seconds |= {"raw_read": [0.8, 1.6], "load_warm": [1.0, 1.0], "raw_read_warm": [0.5, 0.5]}
    seconds["load_proven"] = [1.25, 2.5]
    told = {"bytes": 3e8, "bytes_per_rank": [3e8], "seconds": seconds, "first_save": 3.0}
    result = checkpoint.summary(told | {"behind": [(2.0, 0.5), (4.0, 1.0)]})
    assert result["save_over_raw_min"] == result["save_over_raw_max"] == 0.75
    assert result["load_over_raw"] == 0.8 and result["load_over_raw_warm"] == 0.5
    assert result["load_proven_over_raw"] == pytest.approx(0.64)
    assert result["blocking_share"] == 0.25 and result["first_save_mb_per_s"] == 100
    assert result["save_mb_per_s_max"] == 150 and result["raw_read_mb_per_s_min"] == 187.5


def test_numbers_that_measure_nothing_are_refused_in_one_line(capsys) -> None:
    with pytest.raises(SystemExit, match="2"):
        script().main(["checkpoint", "--repeats", "0"])
    assert "--repeats 0: at least 1" in capsys.readouterr().err
    assert script().main(["checkpoint", "--tp", "3"]) == 1
    assert (
        capsys.readouterr().err == "bench checkpoint: --tp 3 must divide --ranks 2 and 4 (heads)\n"
    )


def test_an_exponent_of_one_is_linear() -> None:
    assert experience._exponent([10, 100, 1000], [2.0, 20.0, 200.0]) == pytest.approx(1)
    assert experience._exponent([10, 1000], [1.0, 10_000.0]) == pytest.approx(2)


def test_long_tailed_lengths_have_their_mean_and_their_longest() -> None:
    told = facts(long_tailed(256, 24))
    assert 20 < told["mean"] < 28 and told["max"] == 192 and told["median"] < told["mean"]
    assert long_tailed(256, 24) == long_tailed(256, 24)


def test_a_run_that_fails_is_one_line_after_its_last_output(tmp_path, capsys) -> None:
    command = [sys.executable, "-c", "print('before'); raise SystemExit(3)"]
    with pytest.raises(BenchError, match=f"exit code 3, .*{tmp_path}/log"):
        runs.run_command(command, None, tmp_path / "log")
    assert "before" in capsys.readouterr().err


def test_a_folder_without_a_model_is_refused(tmp_path) -> None:
    with pytest.raises(BenchError, match="no model/config.json"):
        runs.quickstart_model(tmp_path)


def test_trl_gets_the_torch_of_this_environment(monkeypatch) -> None:
    monkeypatch.setattr(trl_env.metadata, "version", lambda name: "9.9.9+cpu")
    pins = trl_env.pins()
    assert "torch==9.9.9" in pins and any(pin.startswith("trl==") for pin in pins)
    assert all("==" in pin or ">=" in pin for pin in pins)


def _forced() -> list[tuple[int, set[int]]]:
    from megarl.contracts.samples import SamplingContract
    from megarl.data import guards
    from megarl.rollout import scheduler
    from megarl.rollout.requests import Request
    from tools.bench.peer import forced

    sampling = SamplingContract(
        n=2,
        temperature=1.0,
        max_response_tokens=9,
        stop_token_ids=(2,),
        seed=1,
        dtype="float32",
        attention_backend="auto",
    )
    stock, guard = scheduler.engine_request, guards.check_ends
    try:
        forced.force([3, 1, 4, 2])
        made = [
            scheduler.engine_request("0", Request(draw, candidate, (5, 6), 7), sampling)
            for draw in range(2)
            for candidate in range(2)
        ]
    finally:
        scheduler.engine_request, guards.check_ends = stock, guard
    parameters = [request.sampling_params for request in made]
    return [(one.max_new_tokens, set(one.stop_token_ids or ())) for one in parameters]


@pytest.mark.dist
def test_forced_lengths_are_the_only_end_of_a_response(ranks) -> None:
    assert ranks.run(1, _forced)[0] == [(3, set()), (1, set()), (4, set()), (2, set())]
