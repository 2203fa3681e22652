"""The layouts of trainer and generator that are tried on some ranks. Pure: neither library."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from megarl.contracts.mesh import Mesh
from megarl.reshard.families.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class Train:
    """The trainer's, on a number of ranks that is told elsewhere."""

    tp: int = 1
    pp: int = 1
    stages: tuple[int, ...] = ()
    virtual: int = 1
    ep: int = 1
    expert_tp: int | None = None
    sequence_parallel: bool = False

    def name(self, world: int) -> str:
        """`tp2 sp pp2 (1,3) dp1`; sizes of 1 are left out but for tp and dp."""
        parts = [f"tp{self.tp}", "sp" if self.sequence_parallel else ""]
        parts += [f"pp{self.pp}" if self.pp > 1 else ""]
        parts += [f"virtual{self.virtual}" if self.virtual > 1 else ""]
        parts += [f"({','.join(map(str, self.stages))})" if self.stages else ""]
        if self.expert_tp is not None:
            parts += [f"ep{self.ep} etp{self.expert_tp}"]
        return " ".join([*filter(None, parts), f"dp{world // (self.tp * self.pp)}"])


@dataclass(frozen=True, slots=True)
class Rollout:
    """The generator's: replicas of `tp` ranks."""

    tp: int = 1
    ep: int = 1

    def name(self, world: int) -> str:
        """`tp2 ep2 ×2`: so many replicas."""
        return f"tp{self.tp}" + (f" ep{self.ep}" if self.ep > 1 else "") + f" ×{world // self.tp}"


def mesh_of(world: int, train: Train, rollout: Rollout) -> Mesh:
    """Raises `ValueError` when the ranks do not divide."""
    return Mesh(
        world,
        tp=train.tp,
        pp=train.pp,
        rollout_tp=rollout.tp,
        ep=train.ep,
        expert_tp=train.expert_tp,
        virtual=train.virtual,
        stages=train.stages,
        rollout_ep=rollout.ep,
    )


def divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]


def rollouts(spec: ModelSpec, world: int) -> list[Rollout]:
    """Every split of the ranks into replicas; of a model with experts, each with every ep."""
    return [
        Rollout(tp, ep) for tp in divisors(world) for ep in (divisors(tp) if spec.moe else (1,))
    ]


def trains(spec: ModelSpec, world: int) -> list[Train]:
    """Every split of the ranks over tp, pp and dp, of a model with experts also over ep and
    expert tp; even and uneven stages, virtual ones on two stages; with and without sequence
    parallelism where tp > 1. What does not fit the model is among them, to be refused by name.
    """
    return [
        Train(tp, pp, stages, virtual, ep, expert_tp, sequence)
        for tp in divisors(world)
        for pp in divisors(world // tp)
        for virtual, stages in _stages(spec.layers, pp)
        for ep, expert_tp, sequence in _inner(spec, world // pp, tp, pp)
    ]


def _stages(layers: int, pp: int) -> Iterator[tuple[int, tuple[int, ...]]]:
    for virtual in (1, 2) if pp == 2 else (1,):
        chunks = pp * virtual
        if layers % chunks == 0 or layers < chunks:
            yield virtual, ()
        if chunks > 1 and layers > chunks:
            yield virtual, (1, 1 + layers - chunks, *(1,) * (chunks - 2))


def _inner(spec: ModelSpec, stage: int, tp: int, pp: int) -> Iterator[tuple[int, int | None, bool]]:
    """(ep, expert tp, sequence parallel) on the `stage` ranks of a pipeline stage."""
    if spec.moe is None:
        yield 1, None, False
        if tp > 1 and pp == 1:
            yield 1, None, True
        return
    if tp > 1 and pp == 1:
        yield 1, tp, False
    for ep in divisors(stage):
        for expert_tp in divisors(stage // ep):
            yield ep, expert_tp, tp > 1


QUICK = {
    1: (("llama", "tp1 dp1", "tp1 ×1"),),
    2: (
        ("llama", "tp2 sp dp1", "tp1 ×2"),
        ("mistral", "tp1 pp2 (1,3) dp1", "tp2 ×1"),
        ("qwen2", "tp1 pp2 virtual2 (1,2,1,1) dp1", "tp1 ×2"),
        ("llama3 rope, tied", "tp2 dp1", "tp2 ×1"),
        ("mixtral", "tp1 ep2 etp1 dp2", "tp2 ep2 ×1"),
        ("mixtral", "tp1 pp2 ep1 etp1 dp1", "tp2 ep2 ×1"),
        ("qwen3_moe", "tp2 sp ep2 etp1 dp1", "tp1 ×2"),
        ("deepseek_v3", "tp2 sp ep1 etp2 dp1", "tp2 ep2 ×1"),
    ),
    4: (
        ("qwen3", "tp2 pp2 dp1", "tp4 ×1"),
        ("qwen3_moe", "tp2 sp ep1 etp2 dp2", "tp4 ep2 ×1"),
    ),
}
"""Ranks → (model, trainer's layout, generator's): every family, every kind of layout once."""
