"""Sizes of the actor's mesh and of a rollout replica, and who sits where. Pure arithmetic.

Ranks are laid out like Megatron's default order, tensor parallel innermost:
`rank = tp_index + tp · (dp_index + dp · pp_index)`. Rollout replica r is the block of ranks
`r · rollout_tp … (r + 1) · rollout_tp − 1`.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Mesh:
    """Sizes of the actor's mesh and of a rollout replica.

    Raises `ValueError` when the world does not divide.
    """

    world: int
    tp: int
    pp: int = 1
    rollout_tp: int = 1

    def __post_init__(self) -> None:
        if self.world % (self.tp * self.pp):
            raise ValueError(
                f"{self.world} ranks do not divide by tp={self.tp} × pp={self.pp}; "
                "change the number of ranks, actor.tp or actor.pp"
            )
        if self.world % self.rollout_tp:
            raise ValueError(
                f"{self.world} ranks do not divide by rollout.tp={self.rollout_tp}; "
                "change the number of ranks or rollout.tp"
            )

    @property
    def dp(self) -> int:
        return self.world // (self.tp * self.pp)

    @property
    def replicas(self) -> int:
        return self.world // self.rollout_tp

    def tp_index(self, rank: int) -> int:
        return rank % self.tp

    def dp_index(self, rank: int) -> int:
        return rank // self.tp % self.dp

    def pp_index(self, rank: int) -> int:
        return rank // (self.tp * self.dp)

    def replica(self, rank: int) -> int:
        return rank // self.rollout_tp

    def owners(self, dp_index: int) -> list[int]:
        """The ranks that compute on data-parallel part `dp_index`, all stages and tp shards."""
        return [rank for rank in range(self.world) if self.dp_index(rank) == dp_index]
