"""What the ranks of the pool do in the tests of `megarl/models`; results are plain tensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megarl.contracts.samples import Samples
from megarl.data.packing import Pack
from tests.models.support import (
    full_gradients,
    gather_logical,
    local_packs,
    make_actor,
    make_samples,
    make_world,
    micro_batch,
    policy_gradient,
)


def merged(actor: Any, packs: list[Pack], values: list[Tensor], samples: Samples) -> Tensor:
    """Per-pack values of all data-parallel ranks as one [R]. Collective."""
    parts = [
        (np.array(p.response_A), v.detach().numpy()) for p, v in zip(packs, values, strict=True)
    ]
    whole = np.full(len(samples.response_ids), np.nan, np.float32)
    for theirs in actor.world.gather(parts):
        for place, value in theirs:
            known = ~np.isnan(whole[place])
            assert np.array_equal(whole[place][known], value[known]), "owners of a part differ"
            whole[place] = value
    return torch.from_numpy(whole)


def train_once(
    folder: Path,
    tp: int,
    budget: int,
    *,
    pp: int = 1,
    mesh: dict[str, Any] | None = None,
    padding: int | None = None,
    samples: Samples | None = None,
    **section: Any,
) -> dict[str, Any]:
    """Scores, one update and scores after it, of one layout; the same dictionary on every rank."""
    from megarl.models.build import destroy_mesh

    world = make_world(tp, pp, **mesh or {})
    samples = make_samples(5, 12) if samples is None else samples
    actor = make_actor(folder, world, **section)
    (packs,) = actor.padded([local_packs(samples, world.mesh, world.rank, budget, padding)])
    with actor.counting_experts([len(packs)]) as router:
        before = actor.log_probs(packs)
    kept: list[Tensor] = []

    def loss(scores: Any, batch: Any) -> tuple[Tensor, dict]:
        kept.append(scores.log_probs_A.detach().clone())
        return policy_gradient(scores, batch)

    batches = [micro_batch(pack, samples) for pack in packs]
    told: dict[str, Any] = {}
    step = actor.trainer.step

    def step_after_a_look(lr: float, norm: float) -> None:
        if not actor.trainer.section.distributed_optimizer:
            told["gradients"] = full_gradients(actor)
        step(lr, norm)

    actor.trainer.step = step_after_a_look
    result = actor.update(batches, loss, router=router[0] if router else None)
    told |= {
        "log_probs": merged(actor, packs, [s.log_probs_A for s in before], samples),
        "entropy": merged(actor, packs, [s.entropy_A for s in before], samples),
        "in_update": merged(actor, packs if kept else [], kept, samples),
        "result": result,
        "loss": sum(world.gather(result.loss if world.leads_owners else 0.0)),
        "packs": len(packs),
        "sums": [sums for sums in world.gather(result.sums) if sums][:: world.mesh.tp],
        "weights": gather_logical(actor, actor.named_parameters()),
    }
    after = [policy_gradient(s, b)[0] for s, b in zip(actor.log_probs(packs), batches, strict=True)]
    own = float(torch.stack(after).sum())
    told["loss_after"] = sum(world.gather(own if world.leads_owners else 0.0))
    destroy_mesh()
    return told


def several(calls: list[tuple]) -> list[Any]:
    """`train_once` with each (folder, tp, budget, section): one job for the pool."""
    return [train_once(folder, tp, budget, **section) for folder, tp, budget, section in calls]
