"""What the ranks of the pool do in `test_replay.py`; results are plain."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch

from tests.models.support import full_gradients


def gradients(run: Path, iteration: int, *overrides: str) -> dict[str, Any]:
    """One sealed iteration's update from the model folder's weights, in the layout of `overrides`:
    whole gradients before clipping (HF names, float64) and the norm, of each minibatch. Collective.
    """
    from megarl.algorithms.credit import credit
    from megarl.algorithms.objectives import actor_loss
    from megarl.assemble_roles import actor_of
    from megarl.contracts.tokens import Tokens
    from megarl.data.everyone import everyone_of
    from megarl.data.minibatch import micro_batches
    from megarl.models.build import destroy_mesh
    from megarl.modes.launch import Source
    from megarl.modes.sealed_updates import load_source, reload
    from megarl.recipe import load_recipe
    from megarl.recipe.layout import mesh_of
    from megarl.reshard.families import read_spec
    from megarl.world import World

    # Every data-parallel rank then holds the whole reduced gradients.
    recipe = load_recipe(run / "recipe.yaml", [*overrides, "actor.distributed_optimizer=false"])
    world = World(mesh_of(recipe), torch.device("cpu"), 60.0)
    spec = read_spec(Path(recipe.model.path))
    actor = actor_of(recipe, world, spec)
    source = Source(run, iteration)
    sealed = load_source(source, recipe, Tokens.load(Path(recipe.model.path)), spec)
    again = reload(world, recipe, source, sealed, actor)
    algorithm = recipe.algorithm
    everyone = everyone_of(world, again.table, again.experience.samples)
    facts = (again.experience, recipe.hash, again.table, again.plan)
    derived = credit(*facts, algorithm, everyone, algorithm.kl.beta).derived
    told: dict[str, Any] = {"gradients": [], "norms": [], "same_choice": again.same_choice}
    step = actor.trainer.step

    def step_after_a_look(lr: float, norm: float) -> None:
        told["gradients"].append(full_gradients(actor))
        step(lr, norm)

    actor.trainer.step = step_after_a_look
    for packs, totals in zip(again.prepared.packs, again.plan.totals, strict=True):
        batches = micro_batches(
            again.experience,
            derived,
            packs,
            totals,
            algorithm,
            recipe.rollout.max_response_tokens,
        )
        loss = partial(actor_loss, settings=algorithm, beta=derived.kl_beta)
        result = actor.update(batches, loss)
        told["norms"].append(result.grad_norm)
    destroy_mesh()
    return told
