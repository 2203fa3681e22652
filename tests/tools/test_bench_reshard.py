"""The shape of what the reshard benches tell, and their counts; no speed is measured here."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.tools.test_bench import _options
from tools.bench import reshard, reshard_growth
from tools.bench.harness import BenchError

SMALL = ["--hidden", "128", "--ffn", "256", "--vocab", "1024", "--repeats", "2"]


def test_a_ratio_is_taken_within_a_turn_and_pooled_over_layouts() -> None:
    """A second turn at half the speed of everything changes no ratio."""
    seconds = {"memcpy_local": [3.0, 6.0], "local": [4.0, 8.0]}
    one = {"seconds": seconds, "peak_extra_over_bucket": [1.5, 1.75], "bytes_sent": 0}
    one |= {"bytes_bound": 0, "bytes_gather": 0, "world": 1}
    more = {"memcpy_local": [1.0, 1.0], "local": [2.0, 1.0], "transfer": [1.0, 3.0]}
    two = one | {"seconds": more | {"gather": [2.0, 4.0]}}
    two |= {"bytes_sent": 6, "bytes_bound": 6, "bytes_gather": 8}
    result = reshard.summary([one, two])
    assert result["local_over_memcpy"] == 0.75
    assert (result["local_over_memcpy_min"], result["local_over_memcpy_max"]) == (0.5, 1.0)
    assert (result["time_over_gather_min"], result["time_over_gather_max"]) == (0.5, 0.75)
    assert (result["bytes_over_bound"], result["bytes_over_gather"]) == (1.0, 0.75)
    assert result["peak_extra_over_bucket_max"] == 1.75
    assert "cross_over_alltoall" not in result
    found = reshard.of_layout(one)
    assert found["local_over_memcpy_spread"] == 0 and found["local_seconds"] == 6.0


def test_the_exponent_is_the_power() -> None:
    sizes = [60.0, 120.0, 240.0, 480.0]
    assert reshard_growth.exponent(sizes, [5 * size for size in sizes]) == pytest.approx(1)
    assert reshard_growth.exponent(sizes, [size**2 for size in sizes]) == pytest.approx(2)


def test_layers_that_two_stages_cannot_share_are_refused() -> None:
    with pytest.raises(BenchError, match="--layers 3: an even number"):
        reshard.run(_options(reshard.BENCH, "--layers", "3"))
    options = _options(reshard.BENCH, "--hidden", "100", "--layouts", "tp1-tp1")
    with pytest.raises(BenchError, match="--hidden 100: a multiple of 128"):
        reshard.run(options)


def _gathered(tp: int, pp: int) -> tuple[bool, float]:
    """Whether gathering writes what the transfer does, and bytes sent over those gathered."""
    from tools.bench import reshard_ranks
    from tools.bench.reshard_gather import Gather

    options = _options(reshard.BENCH, *SMALL)
    job = {"tp": tp, "pp": pp, "rollout_tp": 2, "bucket_bytes": 1 << 16}
    model = reshard_ranks.Model(reshard.numbers(options, 2), job)
    params = model.source_params, model.target_params
    gather = Gather(model.source, model.target, model.mesh, model.rank, *params)
    reshard_ranks.check_equal(model, gather)
    gather.steps.pop()  # what is not gathered is found
    try:
        reshard_ranks.check_equal(model, gather)
    except BenchError:
        missed = torch.tensor(1)
    else:
        missed = torch.tensor(0)
    dist.all_reduce(missed)
    received = reshard_ranks.total(gather.received)
    return bool(missed), 4 * model.plan.elements_sent / received


@pytest.mark.dist
@pytest.mark.parametrize("tp, pp, share", [(4, 1, 1 / 2), (2, 2, 1 / 3)])
def test_gathering_writes_the_same_and_moves_so_many_bytes_more(ranks, tp, pp, share) -> None:
    """Of M bytes of matrices: tensor parallel 4 to 2 × 2 lacks 1/4 on two ranks and 1/2 on two,
    gathering brings 3/4 to all four; two stages lack M/4 on each, gathering brings 3 M/4."""
    for missed, found in ranks.run(4, _gathered, tp, pp):
        assert missed
        assert found == pytest.approx(share, rel=0.01)  # norms are held whole


@pytest.mark.launch
def test_the_reshard_bench_tells_every_ratio(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setattr(reshard, "CACHE", tmp_path)
    sizes = ["--layers", "2", "--layouts", "tp2-tp1x2", "--bucket-bytes", "1048576"]
    result = reshard.run(_options(reshard.BENCH, *SMALL, *sizes))
    for key in ("local_over_memcpy", "cross_over_alltoall", "digest_over_memcpy"):
        assert 0 < result[f"{key}_min"] <= result[key] <= result[f"{key}_max"]
    assert result["digest_bf16_over_memcpy"] > 0 and result["bytes_over_bound"] == 1
    assert result["peak_extra_over_bucket"] >= 0
    assert result["layouts"]["tp2-tp1x2"]["ranks"] == 2
    assert not (tmp_path / "runs/reshard").exists()
    json.dumps(result)


@pytest.mark.launch
def test_the_growth_bench_tells_exponent_and_seconds(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setattr(reshard, "CACHE", tmp_path)
    parts = ["--parts", "parameters", "--layers", "1", "4"]
    result = reshard_growth.run(_options(reshard_growth.BENCH, *SMALL, *parts))
    assert "parameters_exponent" in result
    assert sum(key.endswith("_mb") for key in result) == 2
    json.dumps(result)


def test_a_plan_of_512_ranks_is_made_from_numbers_alone() -> None:
    for name in reshard_growth.PLANS:
        wall, cpu = reshard_growth.plan_seconds(name, 1 << 26)
        assert wall > 0 and 0 < cpu < 60
