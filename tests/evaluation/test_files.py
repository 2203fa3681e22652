"""Generations on their way to rank 0. Not covered: what is in them (`tests/launch`)."""

from __future__ import annotations

from typing import Any

import pytest


def _gathered() -> tuple[list[int], int]:
    """(whose lines are here, the most that any rank's gather to all ranks told, in lines)."""
    import torch
    import torch.distributed as dist

    from megarl.contracts.mesh import Mesh
    from megarl.evaluation.files import LINES_AT_ONCE, gather_lines
    from megarl.world import World

    class Watched(World):
        most = 0

        def gather(self, value: Any) -> list[Any]:
            self.most = max(self.most, len(value) if isinstance(value, list) else 0)
            return super().gather(value)

    world = Watched(Mesh(dist.get_world_size(), tp=1), torch.device("cpu"), 30.0)
    count = 2 * LINES_AT_ONCE + 1 if world.rank else 3
    lines = gather_lines(world, [{"rank": world.rank, "number": n} for n in range(count)])
    numbers = [line["number"] for line in lines if line["rank"] == 1]
    assert numbers == (list(range(2 * LINES_AT_ONCE + 1)) if world.is_main else [])
    return [line["rank"] for line in lines], world.most


@pytest.mark.dist
def test_generations_go_to_rank_0_alone(ranks) -> None:
    (whose, most), others = ranks.run(2, _gathered)
    assert whose.count(0) == 3 and whose.count(1) == 513 and most == 0
    assert others == ([], 0)
