"""The ranks of a run: torchrun's environment → one default group, meshes, totals and votes.

The default group carries tensors; one gloo *control* group carries votes and small objects, from
the main thread only. Megatron and SGLang make their own groups beside these.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from megarl.contracts.mesh import Mesh
from megarl.stages import VOTE, StageBoard

GATHER_BYTES = 2048
"""Pickled size up to which `World.gather` takes one collective; votes and verdicts are shorter."""


class Disagreement(RuntimeError):
    """Ranks that should be in one state are not, or some said no."""


class RanksMissing(RuntimeError):
    """Some ranks did not reach a barrier in time."""


class World:
    """This rank's place and the few collectives the loop uses.

    `stage` is the last stage, barrier or vote this rank entered; time-outs name it.
    """

    def __init__(
        self,
        mesh: Mesh,
        device: torch.device,
        timeout: float,
        board: StageBoard | None = None,
    ) -> None:
        """The default process group must exist and have `mesh.world` ranks.

        `timeout` in seconds bounds every barrier and vote. `board` is where this rank's stage is
        kept for others to see.
        """
        if dist.get_world_size() != mesh.world:
            raise ValueError(
                f"{dist.get_world_size()} ranks were started, the recipe wants {mesh.world}; "
                f"start it with --nproc_per_node {mesh.world} or set world.ranks"
            )
        self.mesh = mesh
        self.rank = dist.get_rank()
        self.size = mesh.world
        self.device = device
        self.timeout = timedelta(seconds=timeout)
        self.board = StageBoard() if board is None else board
        self.control = dist.new_group(backend="gloo", timeout=self.timeout)

    @property
    def stage(self) -> str:
        return self.board.now.stage

    def enter(self, stage: str) -> None:
        """Say that this rank is in `stage` from here on; every rank does, in the same order."""
        self.board.enter(stage)

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    @property
    def dp_index(self) -> int:
        return self.mesh.dp_index(self.rank)

    @property
    def tp_index(self) -> int:
        return self.mesh.tp_index(self.rank)

    @property
    def replica(self) -> int:
        return self.mesh.replica(self.rank)

    @property
    def leads_replica(self) -> bool:
        """True on the rank that speaks for its rollout replica."""
        return self.rank % self.mesh.rollout_tp == 0

    @property
    def leads_owners(self) -> bool:
        """True on the one rank of each data-parallel part that speaks for it."""
        return self.tp_index == 0 and self.mesh.pp_index(self.rank) == self.mesh.pp - 1

    def barrier(self, stage: str) -> None:
        """Wait for every rank; `RanksMissing` names those that did not come and the stage."""
        self.enter(stage)
        try:
            dist.monitored_barrier(self.control, timeout=self.timeout, wait_all_ranks=True)
        except RuntimeError as error:
            raise RanksMissing(
                f"rank {self.rank} at {stage} waited {self.timeout.total_seconds():.0f} s: {error}"
            ) from error

    def gather(self, value: Any) -> list[Any]:
        """Every rank's `value`, by rank, on every rank. For small plain objects.

        One collective for what fits `GATHER_BYTES` on all ranks, a second for the rest of it. Large
        ones are told by `from_main` and `to_main`, which leave no copy for each rank on each rank.
        """
        mine = pickle.dumps(value)
        sent = len(mine).to_bytes(8, "little") + mine[:GATHER_BYTES].ljust(GATHER_BYTES, b"\0")
        heads = self._gather_bytes(sent)
        sizes = [int.from_bytes(head[:8], "little") for head in heads]
        parts = [head[8 : 8 + size] for head, size in zip(heads, sizes, strict=True)]
        more = max(sizes) - GATHER_BYTES
        if more > 0:
            rests = self._gather_bytes(mine[GATHER_BYTES:].ljust(more, b"\0"))
            parts = [
                part + rest[: size - len(part)]
                for part, rest, size in zip(parts, rests, sizes, strict=True)
            ]
        return [pickle.loads(part) for part in parts]

    def from_main(self, value: Any) -> Any:
        """Rank 0's `value` on every rank, of any size; what the others pass is not looked at."""
        told = [value if self.is_main else None]
        dist.broadcast_object_list(told, src=0, group=self.control)
        return told[0]

    def to_main(self, value: Any) -> list[Any]:
        """Every rank's `value`, by rank, on rank 0; nothing on the others. For large objects."""
        told: list[Any] | None = [None] * self.size if self.is_main else None
        dist.gather_object(value, told, dst=0, group=self.control)
        return told or []

    def _gather_bytes(self, mine: bytes) -> list[bytes]:
        """Every rank's bytes, as many on each."""
        sent = torch.frombuffer(bytearray(mine), dtype=torch.uint8)
        received = [torch.empty_like(sent) for _ in range(self.size)]
        dist.all_gather(received, sent, group=self.control)
        return [part.numpy().tobytes() for part in received]

    def totals(self, values: Mapping[str, float], *, counted: bool = True) -> dict[str, float]:
        """Sums of `values` over the data, float64, the same on every rank.

        `counted` says whether this rank's values count: exactly one rank must count each datum
        (pass `world.leads_owners` when tensor-parallel peers hold the same data).
        """
        names = sorted(values)
        local = torch.tensor([float(values[name]) for name in names], dtype=torch.float64)
        if not counted:
            local.zero_()
        # A gather summed in rank order, not a ring: the same bits on every rank and every run.
        parts = [torch.zeros_like(local) for _ in range(self.size)]
        dist.all_gather(parts, local, group=self.control)
        total = torch.stack(parts).sum(dim=0)
        return dict(zip(names, total.tolist(), strict=True))

    def maximum(self, value: float) -> float:
        """The largest `value` of any rank; not-a-number anywhere gives not-a-number."""
        values = self.gather(float(value))
        return float(torch.tensor(values, dtype=torch.float64).max())

    def vote(self, stage: str, statement: Mapping[str, Any], error: str | None = None) -> None:
        """All ranks state where they are and what they hold; all must state the same.

        Raises `Disagreement` naming the ranks that differ or reported an `error`, on every rank,
        and `RanksMissing` when some did not come in time.
        """
        self.barrier(VOTE + stage)
        votes = self.gather({"stage": stage, "statement": dict(statement), "error": error})
        failed = [
            f"rank {rank}: {vote['error']}" for rank, vote in enumerate(votes) if vote["error"]
        ]
        if failed:
            raise Disagreement(f"{stage} refused: " + "; ".join(failed))
        groups: dict[str, list[int]] = {}
        for rank, vote in enumerate(votes):
            groups.setdefault(repr((vote["stage"], vote["statement"])), []).append(rank)
        if len(groups) > 1:
            told = "; ".join(f"ranks {ranks} say {text}" for text, ranks in groups.items())
            raise Disagreement(f"{stage}: ranks disagree: {told}")


@contextmanager
def process_group(backend: str, timeout: float) -> Iterator[None]:
    """The default process group for torchrun's environment, or a world of one without it."""
    if "RANK" not in os.environ:
        os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
        store = dist.HashStore()
        arguments: dict[str, Any] = {"store": store, "rank": 0, "world_size": 1}
    else:
        arguments = {}
    dist.init_process_group(backend, timeout=timedelta(seconds=timeout), **arguments)
    try:
        yield
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
