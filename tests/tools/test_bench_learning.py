"""What the benches of log-probs, packing and invariance count and tell; no speed is measured here.

Not covered: the invariance bench as a whole on several ranks (`python tools/bench.py invariance`).
"""

from __future__ import annotations

import itertools
import json

import pytest
import torch

from tests.tools.test_bench import _options
from tools.bench import invariance, logprobs, packing
from tools.bench.harness import BenchError
from tools.bench.invariance_cuts import LAYOUTS, OBJECTIVES, REDUCTIONS, layouts_of, loss_cases


def test_a_logprob_ratio_is_within_a_turn_and_the_worst_case_is_told() -> None:
    def side(seconds: float) -> list[dict[str, float]]:
        """A second turn at half the speed changes no ratio."""
        return [
            {"seconds": seconds * k, "cpu_seconds": seconds * k, "extra_bytes": 1e6 * seconds}
            for k in (1, 2)
        ]

    def case(mine: float) -> dict:
        sides = {"megarl": side(mine), "naive": side(4.0)}
        return {"product": sides, "given": sides, "errors": [mine, mine / 2]}

    result = logprobs.summary({"a": case(1.0), "b": case(3.0)})
    assert (result["time_over_naive_min"], result["time_over_naive_max"]) == (0.75, 0.75)
    assert result["memory_over_given"] == 0.75 and result["cases"]["a"]["time_over_naive"] == 0.25
    assert (result["max_error"], result["max_gradient_error"]) == (3.0, 1.5)
    assert result["cases"]["a"]["naive_extra_mb"] == 4.0


def test_shapes_that_are_none_are_refused() -> None:
    for shape in ("4096", "0x5", "4x33"):
        with pytest.raises(BenchError, match=f"--shapes {shape}"):
            logprobs.sizes_of(shape, [1, 2])
    assert logprobs.sizes_of("4x32", [1, 2]) == (4, 32)


def _sides() -> tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]]:
    from tools.bench.logprobs_ranks import Problem

    problem = Problem(tokens=37, vocab=200, hidden=24, chunk=8)
    return problem.megarl(), problem.naive(), problem.exact(rows=10)


@pytest.mark.dist
@pytest.mark.parametrize("tp", [1, 2])
def test_both_sides_compute_what_float64_does(ranks, tp: int) -> None:
    """With two ranks the plain side has its own half for the whole, and only megarl is right."""
    for mine, plain, exact in ranks.run(tp, _sides):
        for found, wanted in zip(mine, exact, strict=True):
            torch.testing.assert_close(found.double(), wanted, atol=1e-5, rtol=1e-4)
        if tp == 1:
            for found, wanted in zip(plain, exact, strict=True):
                torch.testing.assert_close(found.double(), wanted, atol=1e-5, rtol=1e-4)
        else:
            assert not torch.allclose(plain[0].double(), exact[0], atol=1e-2)


def _cost() -> tuple[int, int]:
    """Of a call that holds 64 MB for a while and returns 16."""
    from tools.bench.memory import cost_of

    def call() -> list[torch.Tensor]:
        held = torch.ones(2**24)
        return [held[: 2**22].clone()]

    cost = cost_of(call, 2**20)
    return cost.extra_bytes, cost.cpu_seconds > 0


@pytest.mark.dist
def test_peak_memory_is_above_what_is_returned(ranks) -> None:
    for extra, worked in ranks.run(1, _cost):
        assert 2**26 - 2**20 <= extra < 2**26 + 2**23 and worked  # counted in pages


def _best(loads: list[int], parts: int) -> int:
    """Load of the fullest part at its least, by trying everything."""
    chosen = itertools.product(range(parts), repeat=len(loads))
    return min(
        max(sum(load for load, at in zip(loads, way, strict=True) if at == p) for p in range(parts))
        for way in chosen
    )


def test_karmarkar_karp_and_the_bound_on_the_classic_example() -> None:
    """8 7 6 5 4 in two: the method gives 16 and 14, the best is 15 and 15."""
    loads = [4, 5, 6, 7, 8]
    parts = packing.karmarkar_karp(loads, 2, equal=False)
    assert sorted(sum(loads[row] for row in rows) for rows in parts) == [14, 16]
    assert packing.least_work(loads, 2) == 15 == _best(loads, 2)
    equal = packing.karmarkar_karp([9, 1, 1, 1, 1, 1], 3, equal=True)
    assert {len(rows) for rows in equal} == {2} and sorted(sum(equal, [])) == list(range(6))
    with pytest.raises(ValueError, match="do not divide"):
        packing.karmarkar_karp(loads, 2, equal=True)


def test_no_plan_is_below_the_bound() -> None:
    for loads, parts in (([5, 5, 5], 2), ([9, 1, 1], 2), ([4, 4, 3, 3, 3], 3), ([7, 6, 5, 4], 3)):
        assert packing.least_work(loads, parts) <= _best(loads, parts)
    assert packing.least_work([5, 5, 5], 2) == 10 and packing.least_work([9, 1, 1], 2) == 9
    # 17 tokens in packs of 9 are two packs on the one part, both as long as the longest sample.
    assert packing.least_tokens([9, 4, 4], 1, 9) == 18


def test_padding_of_one_length_is_computed_too() -> None:
    lengths = [5, 3, 2, 4]
    plan = [[[0], [1]], [[2, 3], []]]
    plain = packing.cost_of(plan, lengths, lengths, "plain")
    assert plain.computed == [8, 7] and plain.work == [8, 6]  # an empty pack holds a dummy
    assert packing.cost_of(plan, lengths, lengths, "one_length").computed == [10, 12]


def test_the_packing_bench_tells_every_ratio() -> None:
    result = packing.run(_options(packing.BENCH, "--quick", "--repeats", "1", "--dp", "4", "8"))
    assert 1 <= result["over_bound"] <= 1.02 and 1 <= result["over_bound_one_length"] <= 1.03
    assert result["padding_over_useful"] > 2 and result["kk_over_bound"] >= 1
    assert len(result["cases"]) == 2
    json.dumps(result)
    with pytest.raises(BenchError, match="equal counts"):
        packing.run(_options(packing.BENCH, "--quick", "--dp", "3"))


def test_every_kind_of_loss_and_layout_is_among_the_quick_ones() -> None:
    for quick, number in ((True, 10), (False, 4 * 3 * 3 + 6)):
        cases = loss_cases(quick)
        assert len({case.name for case in cases}) == len(cases) == number
        policy = [case for case in cases if not case.critic]
        assert {case.name.split(",")[0] for case in policy} == set(OBJECTIVES)
        assert {case.settings.reduction for case in policy} == set(REDUCTIONS)
        assert {case.settings.importance.level for case in policy} == {"none", "token", "sequence"}
        assert {case.beta > 0 for case in policy} == {True, False}
    for experts, wanted in ((True, "ep2"), (False, "tp2")):
        few = layouts_of(2, experts=experts, quick=True)
        assert {"dp2", "pp2", "tp2, sequence parallel", wanted} == {one.name for one in few}
    assert len({layout.name for layout in LAYOUTS}) == len(LAYOUTS)


@pytest.mark.long
@pytest.mark.launch
def test_the_invariance_bench_tells_differences_that_are_rounding(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(invariance, "CACHE", tmp_path)
    options = ["--quick", "--models", "qwen3", "--worlds", "1"]
    result = invariance.run(_options(invariance.BENCH, *options))
    assert result["cuts"] == 3 and result["losses"] == 10
    assert 0 < result["max_rel_loss"] <= 1e-6 and 0 < result["max_rel_grad"] <= 1e-5
    assert not (tmp_path / "runs/invariance").exists()
    json.dumps(result)


def _differences(folder: str, fault: bool) -> tuple[float, float]:
    """The largest of the cuts of one rank; with `fault` each counts a token twice."""
    from tools.bench import invariance_ranks as ranks

    batch_of = ranks.batch_of

    def twice(pack, case, facts, totals):
        batch = batch_of(pack, case, facts, totals)
        if len(pack.rows) < ranks.ROWS:
            batch.weights_A[int((batch.weights_A != 0).nonzero()[0])] *= 2
        return batch

    ranks.batch_of = twice if fault else batch_of
    try:
        model = ranks.Model({"folder": folder, "quick": True}, "qwen3", 1, lambda text: None)
        rows = model.differences()
    finally:
        ranks.batch_of = batch_of
    model.kept.unlink()
    return max(row["rel_loss"] for row in rows), max(row["rel_grad"] for row in rows)


@pytest.mark.dist
def test_packs_give_one_gradient_and_a_token_that_counts_twice_is_found(ranks, tmp_path) -> None:
    from tools.layouts.models import make_models

    make_models(str(tmp_path), ["qwen3"])
    ((loss, gradient),) = ranks.run(1, _differences, str(tmp_path), False)
    assert 0 < loss <= 1e-6 and 0 < gradient <= 1e-5
    ((loss, gradient),) = ranks.run(1, _differences, str(tmp_path), True)
    assert loss > 1e-3 and gradient > 1e-3
