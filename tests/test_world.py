"""Layout arithmetic, totals and votes. Not covered here: real launch time-outs (tests/launch)."""

from __future__ import annotations

import math
import time

import pytest
import torch

from megarl.contracts.mesh import Mesh
from megarl.world import Disagreement, RanksMissing, World


def test_mesh_is_tensor_parallel_innermost() -> None:
    mesh = Mesh(world=8, tp=2, pp=2, rollout_tp=4)
    assert [mesh.tp_index(r) for r in range(8)] == [0, 1, 0, 1, 0, 1, 0, 1]
    assert [mesh.dp_index(r) for r in range(8)] == [0, 0, 1, 1, 0, 0, 1, 1]
    assert [mesh.pp_index(r) for r in range(8)] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert [mesh.replica(r) for r in range(8)] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert mesh.owners(1) == [2, 3, 6, 7]


@pytest.mark.parametrize("sizes", [{"world": 3, "tp": 2}, {"world": 2, "tp": 1, "rollout_tp": 4}])
def test_a_world_that_does_not_divide_is_refused(sizes: dict) -> None:
    with pytest.raises(ValueError, match="do not divide"):
        Mesh(**sizes)


def _world(tp: int, timeout: float = 30.0) -> World:
    import torch.distributed as dist

    return World(Mesh(dist.get_world_size(), tp=tp), torch.device("cpu"), timeout)


def _totals() -> tuple[dict, dict, float]:
    world = _world(tp=2)
    values = {"tokens": 10.0 ** (17 * (world.rank % 2)), "one": 1.0}
    everywhere = world.totals(values)
    counted = world.totals({"data": float(world.dp_index + 1)}, counted=world.leads_owners)
    return everywhere, counted, world.maximum(math.nan if world.rank == 1 else 3.0)


@pytest.mark.dist
def test_totals_count_each_datum_once(ranks) -> None:
    for everywhere, counted, largest in ranks.run(4, _totals):
        assert everywhere == {"one": 4.0, "tokens": 2e17 + 2}
        assert counted == {"data": 3.0}
        assert math.isnan(largest)


def _gathered() -> list[list[int]]:
    """Values whose pickles are around the size that one collective takes, another on each rank."""
    from megarl.world import GATHER_BYTES

    world = _world(tp=1)
    sizes = [[0, GATHER_BYTES * 3], [GATHER_BYTES * 3, 1], *([n, n] for n in _AROUND), [5, 0]]
    return [[len(part) for part in world.gather(b"x" * pair[world.rank])] for pair in sizes]


_AROUND = range(2048 - 40, 2048 + 3)


@pytest.mark.dist
def test_a_gather_brings_values_of_any_size(ranks) -> None:
    expected = [[0, 2048 * 3], [2048 * 3, 1], *([n, n] for n in _AROUND), [5, 0]]
    assert ranks.run(2, _gathered) == [expected, expected]


class _Kept:
    """May not leave this rank."""

    def __reduce__(self) -> str:
        raise AssertionError("it was sent")


def _large() -> tuple[int, list[int]]:
    world = _world(tp=1)
    told = world.from_main(b"x" * 100_000 if world.is_main else _Kept())
    parts = world.to_main(b"y" * 70_000 * world.rank)
    return len(told), [len(part) for part in parts]


@pytest.mark.dist
def test_large_objects_go_one_way(ranks) -> None:
    assert ranks.run(2, _large) == [(100_000, [0, 70_000]), (100_000, [])]


def _vote(case: str) -> str:
    world = _world(tp=1, timeout=3.0)
    try:
        if case == "missing" and world.rank == 1:
            time.sleep(4)
        elif case == "error":
            world.vote("READY", {"v": 1}, error="disk full" if world.rank == 1 else None)
        else:
            world.vote("READY", {"v": world.rank if case == "differ" else 1})
    except (Disagreement, RanksMissing) as error:
        return f"{type(error).__name__}: {error}"
    return "agreed"


@pytest.mark.dist
@pytest.mark.parametrize(
    "case, expected",
    [
        ("same", ["agreed"]),
        ("differ", ["Disagreement", "ranks [0]", "ranks [1]"]),
        ("error", ["Disagreement", "rank 1: disk full"]),
    ],
)
def test_votes_name_who_differs(ranks, case: str, expected: list[str]) -> None:
    for told in ranks.run(2, _vote, case):
        assert all(text in told for text in expected), told


@pytest.mark.dist
def test_a_missing_rank_is_named_in_time(ranks) -> None:
    told = ranks.run(2, _vote, "missing")[0]
    assert told.startswith("RanksMissing") and "1" in told and "vote READY" in told
