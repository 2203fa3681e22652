"""The cuts of one minibatch that `bench.py invariance` compares, and the losses that it takes.

A cut is a layout of ranks and a packing; the first one, one rank with everything in one pack, is
what all others are compared with.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import product
from types import SimpleNamespace
from typing import Any

REDUCTIONS = ("token_mean", "sequence_mean", "sequence_sum_constant")
OBJECTIVES: dict[str, dict[str, Any]] = {
    "ppo_clip": {},
    "dual_clip": {"objective": "ppo_clip", "dual_clip": 1.2},
    "gspo": {"clip_low": 0.05, "clip_high": 0.05},
    "cispo": {"clip_low": 0.3, "clip_high": 0.1},
}
MORE: dict[str, dict[str, Any]] = {
    "": {},
    "kl k3, entropy, importance of tokens": {
        "beta": 0.3,
        "estimator": "k3",
        "entropy": 0.05,
        "level": "token",
        "mode": "mask",
    },
    "kl k2, importance of sequences": {
        "beta": 0.3,
        "estimator": "k2",
        "level": "sequence",
        "mode": "truncate",
    },
}
"""What an objective is taken with."""
VALUE_CLIPS = (None, 0.2)


@dataclass(frozen=True)
class LossCase:
    """One loss: an objective or the critic's, and a reduction."""

    name: str
    settings: SimpleNamespace
    """As the recipe's `algorithm`, or `critic`, section."""
    beta: float = 0.0
    critic: bool = False


def loss_cases(quick: bool) -> list[LossCase]:
    """Every objective × reduction × what it is taken with, and the critic's. `quick`: every
    objective, reduction and addition once or more."""
    made = []
    chosen = list(product(OBJECTIVES, REDUCTIONS, MORE))
    if quick:
        more = list(MORE)
        chosen = [
            (name, REDUCTIONS[(at + k) % 3], more[(2 * at + k) % 3])
            for at, name in enumerate(OBJECTIVES)
            for k in range(2)
        ]
    for name, reduction, more in chosen:
        made.append(_policy_case(name, reduction, more))
    for clip, reduction in product(VALUE_CLIPS, REDUCTIONS[: 1 if quick else 3]):
        settings = SimpleNamespace(value_clip=clip, reduction=reduction)
        made.append(LossCase(f"critic clip {clip}, {reduction}", settings, critic=True))
    return made


def _policy_case(name: str, reduction: str, more: str) -> LossCase:
    given = {"objective": name, "clip_low": 0.2, "clip_high": 0.28, "dual_clip": None}
    given |= OBJECTIVES[name]
    extra = MORE[more]
    importance = SimpleNamespace(
        level=extra.get("level", "none"), mode=extra.get("mode", "truncate"), low=0.7, high=1.4
    )
    beta = extra.get("beta", 0.0)
    settings = SimpleNamespace(
        **given,
        reduction=reduction,
        importance=importance,
        entropy_coefficient=extra.get("entropy", 0.0),
        kl=SimpleNamespace(estimator=extra.get("estimator", "k3"), beta=beta),
        kl_in_loss=beta > 0,
    )
    return LossCase(", ".join(part for part in (name, reduction, more) if part), settings, beta)


@dataclass(frozen=True)
class Layout:
    """Of the ranks of one world."""

    name: str
    world: int
    mesh: dict[str, Any] = field(default_factory=dict)
    section: dict[str, Any] = field(default_factory=dict)
    experts: bool | None = None
    """Only for models with (or without) experts; None: for both."""
    quick: bool = False


# With experts, tensor-parallel ranks are sequence parallel too: megarl takes them no other way.
LAYOUTS = (
    Layout("1 rank", 1, quick=True),
    Layout("1 rank, recomputed, small chunks", 1, {}, {"recompute": "full", "chunk": 5}),
    Layout("dp2", 2, quick=True),
    Layout("tp2", 2, {"tp": 2}, experts=False, quick=True),
    Layout("tp2, sequence parallel", 2, {"tp": 2}, {"sequence_parallel": True}, quick=True),
    Layout("pp2", 2, {"pp": 2}, quick=True),
    Layout("pp2, virtual stages", 2, {"pp": 2, "virtual": 2}),
    Layout("ep2", 2, {"ep": 2}, experts=True, quick=True),
    Layout("dp4", 4),
    Layout("tp2, dp2", 4, {"tp": 2}),
    Layout("pp2, dp2", 4, {"pp": 2}),
    Layout("tp2, pp2", 4, {"tp": 2, "pp": 2}),
    Layout("ep4", 4, {"ep": 4}, experts=True),
    Layout("tp2, ep2, whole experts", 4, {"tp": 2, "ep": 2, "expert_tp": 1}, experts=True),
)


@dataclass(frozen=True)
class Packing:
    """Which samples share a forward."""

    name: str
    budget: int | None = None
    """Tokens of a pack, by megarl's plan; None: rows are shuffled."""
    packs: int = 0
    """Of each part, where rows are shuffled."""
    padding: int | None = None
    """All packs end with dummy sequences, so that they are so much longer than the longest."""


WHOLE = Packing("all in one pack", budget=10_000)
PACKINGS = (
    WHOLE,
    Packing("budget of 48 tokens", budget=48),
    Packing("3 shuffled packs, padded", packs=3, padding=7),
)
ALONE = Packing("a pack for each sample", packs=-1)


def packings_of(layout: Layout, quick: bool) -> tuple[Packing, ...]:
    """What a layout is taken with, the whole first on one rank."""
    if quick:
        return PACKINGS if layout.world == 1 else PACKINGS[2:]
    if layout.name == LAYOUTS[0].name:
        return (*PACKINGS, ALONE, Packing("padded", budget=10_000, padding=13))
    return PACKINGS[1:] if layout.world == 1 else PACKINGS


def layouts_of(world: int, *, experts: bool, quick: bool) -> list[Layout]:
    return [
        layout
        for layout in LAYOUTS
        if layout.world == world
        and layout.experts in (None, experts)
        and (layout.quick or not quick)
    ]
