"""Sizes of the actor's mesh and of a rollout replica, and who sits where. Pure arithmetic.

Ranks are laid out like Megatron's default order (tp-cp-ep-dp-pp), tensor parallel innermost:
`rank = tp_index + tp · (dp_index + dp · pp_index)`. Experts are cut another way over the ranks of a
pipeline stage: `rank in stage = etp_index + etp · (ep_index + ep · edp_index)`. Rollout replica r
is the block of ranks `r · rollout_tp … (r + 1) · rollout_tp − 1`; within it, experts are cut into
`rollout_ep` blocks of `rollout_tp / rollout_ep` ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Mesh:
    """Sizes of the actor's mesh and of a rollout replica.

    Raises `ValueError`, naming the recipe's keys, when the world does not divide.
    """

    world: int
    tp: int
    pp: int = 1
    rollout_tp: int = 1
    ep: int = 1
    expert_tp: int | None = None
    """Tensor-parallel size of experts; None: `tp`."""
    virtual: int = 1
    """Model chunks of a rank; more than one interleaves the pipeline's stages."""
    stages: tuple[int, ...] = ()
    """Layers of each of the pp · virtual chunks, in depth order; empty: the same number in all."""
    rollout_ep: int = 1

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
        if self.world % (self.etp * self.ep * self.pp):
            raise ValueError(
                f"{self.world} ranks do not divide by ep={self.ep} × expert_tp={self.etp} × "
                f"pp={self.pp}; change the number of ranks, actor.ep or actor.expert_tp"
            )
        if self.rollout_tp % self.rollout_ep:
            raise ValueError(
                f"rollout.tp={self.rollout_tp} does not divide by rollout.ep={self.rollout_ep}; "
                "change rollout.tp or rollout.ep"
            )
        if self.virtual > 1 and self.pp == 1:
            raise ValueError(
                f"actor.virtual_stages={self.virtual} needs a pipeline; raise actor.pp or leave "
                "it out"
            )
        if self.stages and (len(self.stages) != self.pp * self.virtual or min(self.stages) < 1):
            raise ValueError(
                f"actor.stage_layers {list(self.stages)}: needs the layers, 1 or more, of each of "
                f"{self.pp * self.virtual} stages (actor.pp × actor.virtual_stages)"
            )

    @property
    def dp(self) -> int:
        return self.world // (self.tp * self.pp)

    @property
    def etp(self) -> int:
        """Tensor-parallel size of experts."""
        return self.tp if self.expert_tp is None else self.expert_tp

    @property
    def edp(self) -> int:
        """Data-parallel copies of an expert."""
        return self.world // (self.etp * self.ep * self.pp)

    @property
    def described(self) -> dict[str, Any]:
        """Sizes by name, for records; what is left at its default is left out."""
        sizes: dict[str, Any] = {
            "tp": self.tp,
            "pp": self.pp,
            "dp": self.dp,
            "ranks": self.world,
            "rollout_tp": self.rollout_tp,
        }
        more = {
            "ep": (self.ep, 1),
            "expert_tp": (self.etp, self.tp),
            "virtual_stages": (self.virtual, 1),
            "stage_layers": (list(self.stages), []),
            "rollout_ep": (self.rollout_ep, 1),
        }
        return sizes | {name: size for name, (size, usual) in more.items() if size != usual}

    @property
    def replicas(self) -> int:
        return self.world // self.rollout_tp

    def tp_index(self, rank: int) -> int:
        return rank % self.tp

    def dp_index(self, rank: int) -> int:
        return rank // self.tp % self.dp

    def pp_index(self, rank: int) -> int:
        return rank // (self.tp * self.dp)

    def etp_index(self, rank: int) -> int:
        return rank % self.etp

    def ep_index(self, rank: int) -> int:
        return rank // self.etp % self.ep

    def edp_index(self, rank: int) -> int:
        return rank // (self.etp * self.ep) % self.edp

    def replica(self, rank: int) -> int:
        return rank // self.rollout_tp

    def owners(self, dp_index: int) -> list[int]:
        """The ranks that compute on data-parallel part `dp_index`, all stages and tp shards."""
        return [rank for rank in range(self.world) if self.dp_index(rank) == dp_index]

    def chunks(self, layers: int) -> tuple[range, ...]:
        """The layers of each model chunk, in depth order.

        Chunk c lies on stage `c % pp`, as that stage's virtual chunk `c // pp`. Raises `ValueError`
        when `stages` adds up to another number, or is empty and `layers` do not divide.
        """
        count = self.pp * self.virtual
        depths = self.stages or (layers // count,) * count
        if sum(depths) != layers:
            raise ValueError(
                f"{layers} layers do not divide by actor.pp={self.pp}"
                + (f" × actor.virtual_stages={self.virtual}" if self.virtual > 1 else "")
                + "; set actor.stage_layers"
                if not self.stages
                else f"actor.stage_layers {list(self.stages)} make {sum(depths)} layers, "
                f"the model has {layers}"
            )
        firsts = [sum(depths[:number]) for number in range(count)]
        return tuple(range(a, a + depth) for a, depth in zip(firsts, depths, strict=True))
