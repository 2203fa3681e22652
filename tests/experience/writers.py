"""Real writers that can be killed: two ranks that seal iteration after iteration until the end."""

from __future__ import annotations

import os
import time
from datetime import timedelta
from pathlib import Path

from megarl.experience.manifest import sealed_iterations
from tests.experience.make_facts import derive_facts, make_facts, seal_facts, world_of
from tests.warm import forking

RANKS = 2


def write_on(rank: int, store: str, folder: Path) -> None:
    """Continue behind the last iteration that was sealed; iteration n is made of seed n."""
    import torch.distributed as dist

    from megarl.experience.store import ExperienceStore

    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(RANKS)}
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(store, RANKS),
        rank=rank,
        world_size=RANKS,
        timeout=timedelta(seconds=30),
    )
    world = world_of(RANKS)
    first = max(sealed_iterations(folder), default=-1) + 1
    writer = ExperienceStore(folder, world, None, 0)
    for iteration in range(first, first + 10_000):
        facts = make_facts(iteration, RANKS, RANKS)
        hash_ = seal_facts(writer, world, facts, iteration)
        derive_facts(writer, world, facts, iteration, hash_)


class Writers:
    """Starts such ranks from a server that has imported everything already."""

    def __init__(self) -> None:
        self._context = forking()
        self._starts = 0

    def kill_after(self, folder: Path, seconds: float) -> None:
        """Kill both ranks, so long after they have sealed one more iteration; SIGKILL."""
        self._starts += 1
        before = len(list(sealed_iterations(folder)))
        store = str(folder / f"store{self._starts}")
        ranks = [
            self._context.Process(target=write_on, args=(rank, store, folder), daemon=True)
            for rank in range(RANKS)
        ]
        for rank in ranks:
            rank.start()
        limit = time.monotonic() + 60
        while len(list(sealed_iterations(folder))) == before:
            if time.monotonic() > limit or not all(rank.is_alive() for rank in ranks):
                raise AssertionError("the writers sealed nothing")
            time.sleep(0.001)
        time.sleep(seconds)
        for rank in ranks:
            rank.kill()
        for rank in ranks:
            rank.join()
