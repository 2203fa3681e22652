"""The mesh that a recipe asks for."""

from __future__ import annotations

from megarl.contracts.mesh import Mesh
from megarl.recipe.schema import Recipe


def mesh_of(recipe: Recipe) -> Mesh:
    """Sizes of the actor's mesh and of a rollout replica. Raises `ValueError` where they do not
    divide; a checked recipe's do."""
    actor, rollout = recipe.actor, recipe.rollout
    return Mesh(
        world=recipe.world.ranks,
        tp=actor.tp,
        pp=actor.pp,
        rollout_tp=rollout.tp,
        ep=actor.ep,
        expert_tp=actor.expert_tp,
        virtual=actor.virtual_stages,
        stages=actor.stage_layers,
        rollout_ep=rollout.ep,
    )
