"""Buckets of a transfer: what they carry, what memory they hold.

Not covered here: digests and what is refused (`test_transfer.py`), CUDA and NCCL.
"""

from __future__ import annotations

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from megarl.reshard.exchange import Window, _dealt, _joined
from megarl.reshard.plan import Copy
from tests.reshard.models import make_shards, same_bits
from tests.reshard.test_transfer import make_resharder


def _in_buckets(tp: int, pp: int, rollout_tp: int, sizes: tuple[int, ...]) -> list[tuple]:
    """(all written, buckets, bytes of the buffers, the longest) by size; the target is cleared."""
    resharder, whole = make_resharder(tp, rollout_tp, torch.bfloat16, pp=pp)
    right = make_shards(resharder.target, resharder.world.rank, whole, torch.bfloat16)
    told = []
    for size in sizes:
        resharder.bucket_bytes = size
        for param in resharder.target_params.values():
            param.fill_(float("nan"))
        (exchange,) = resharder._exchanges(resharder.plan, resharder.target_params)
        for _ in range(2):
            exchange.run()
        written = same_bits(resharder.target_params, right)
        buffers = (*exchange.send_buffers, *exchange.receive_buffers)
        assert exchange.held_bytes == sum(buffer.nbytes for buffer in buffers)
        longest = max(buffer.nbytes for buffer in buffers)
        told.append((written, len(exchange.sends), exchange.held_bytes, longest))
    return told


@pytest.mark.dist
@pytest.mark.parametrize("world, tp, pp, rollout_tp", [(2, 2, 1, 1), (4, 1, 2, 4), (4, 2, 2, 2)])
def test_any_bucket_size_writes_the_same_within_its_memory(ranks, world, tp, pp, rollout_tp):
    """Four buffers of half a bucket, two under way at once."""
    sizes = (300, 2047, 30_001, 1 << 22)
    by_rank = ranks.run(world, _in_buckets, tp, pp, rollout_tp, sizes)
    for turn, size in enumerate(sizes):
        told = [rank[turn] for rank in by_rank]
        assert all(written for written, *_ in told)
        assert len({buckets for _, buckets, *_ in told}) == 1
        assert all(held <= 2 * size and longest <= size // 2 for *_, held, longest in told)
    counts = [by_rank[0][turn][1] for turn in range(len(sizes))]
    assert counts == sorted(counts, reverse=True) and counts[-1] < counts[0]


def _allocated(bucket_bytes: int) -> tuple[int, int]:
    """Bytes that a run allocates beside its buffers, and those of the buffers."""
    resharder, _ = make_resharder(2, 1, bucket_bytes=bucket_bytes)
    resharder.transfer()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        resharder.exchanges[0].run()
    taken = sum(max(event.self_cpu_memory_usage, 0) for event in seen.key_averages())
    return taken, resharder.exchanges[0].held_bytes


@pytest.mark.dist
def test_a_run_allocates_nothing_beside_its_buffers(ranks) -> None:
    for taken, held in ranks.run(2, _allocated, 20_000):
        assert 0 < held <= 40_000
        assert taken <= 1000  # scalars of the profiler's own


def test_copies_that_lie_one_below_the_other_are_one() -> None:
    top, below = Window("a", 0, 4, 3, 8), Window("a", 3, 4, 2, 8)
    assert _joined([(top,), (below,)]) == [(Window("a", 0, 4, 5, 8),)]
    for other in (Window("a", 4, 4, 2, 8), Window("a", 3, 5, 2, 8), Window("b", 3, 4, 2, 8)):
        assert _joined([(top,), (other,)]) == [(top,), (other,)]
    # Only where both sides do.
    assert len(_joined([(top, top), (below, Window("a", 5, 4, 2, 8))])) == 2
    assert _joined([(top, top), (below, below)]) == [(Window("a", 0, 4, 5, 8),) * 2]


@pytest.mark.parametrize("parts", [1, 2, 7, 100])
def test_local_copies_are_dealt_evenly_and_each_once(parts: int) -> None:
    copies = [
        Copy("w", 0, 0, rows, 5, 0, f"s{number}", 1, 2, 0, f"t{number}", 3, 4)
        for number, rows in enumerate((7, 1, 12))
    ]
    away = copies[0]._replace(target=1)
    dealt = _dealt([*copies, away], 0, parts)
    assert len(dealt) == parts
    windows = [one for part in dealt for one in part.windows]
    assert _joined(windows) == [
        (Window(c.source_param, 1, 2, c.rows, 5), Window(c.target_param, 3, 4, c.rows, 5))
        for c in copies
    ]
    sizes = [sum(one.rows * one.cols for one, _ in part.windows) for part in dealt]
    assert max(sizes) <= 100 / parts + 5
