"""Builds the megatron roles of a recipe: actor, critic and reference, all on one mesh."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megarl.algorithms.controller import KlController
from megarl.models.critic_spec import critic_spec
from megarl.models.roles import Actor, Critic, Reference
from megarl.platforms import platform_of
from megarl.platforms.offload import Offloads, OptimizerOffload, WeightOffload
from megarl.recipe import ActorSection, Recipe
from megarl.reshard.families import read_spec
from megarl.reshard.families.spec import ModelSpec
from megarl.world import World


def policies_of(
    recipe: Recipe, world: World, spec: ModelSpec, learns: bool
) -> tuple[Actor | Reference, Reference | None]:
    """The actor, and the reference when a KL term needs it; one model where nothing is learnt and
    both are the same. Collective."""
    reference = None
    # A reference routes by itself, so one that replays routing is another one.
    differs = learns or recipe.reference.path is not None or recipe.actor.replay_routing
    if recipe.algorithm.needs_reference and differs:
        reference = reference_of(recipe, world)
    if learns:
        return actor_of(recipe, world, spec), reference
    policy = Reference(*role_arguments(recipe, world, spec))
    if recipe.actor.replay_routing:
        policy.replay_routing()
    return policy, reference or (policy if recipe.algorithm.needs_reference else None)


def actor_of(recipe: Recipe, world: World, spec: ModelSpec) -> Actor:
    """The policy with its optimizer. Collective."""
    return Actor(*role_arguments(recipe, world, spec), recipe.actor_steps, recipe.seed)


def reference_of(recipe: Recipe, world: World) -> Reference:
    """What the KL term looks back at: always the declared folder's weights, whatever the actor has
    been restored to. Collective."""
    folder = Path(recipe.reference.path or recipe.model.path)
    return Reference(*role_arguments(recipe, world, read_spec(folder), folder))


def critic_of(recipe: Recipe, world: World) -> Critic | None:
    """The values with their own optimizer, where the algorithm needs them. Collective."""
    if not recipe.algorithm.needs_values:
        return None
    folder = critic_folder(recipe)
    spec, fresh_head = critic_spec(folder, read_spec(Path(recipe.model.path)))
    arguments = role_arguments(recipe, world, spec, folder, recipe.critic_section)
    return Critic(*arguments, recipe.critic_steps, recipe.seed, fresh_head)


def critic_folder(recipe: Recipe) -> Path:
    return Path(recipe.critic.path or recipe.model.path)


def role_arguments(
    recipe: Recipe,
    world: World,
    spec: ModelSpec,
    folder: Path | None = None,
    section: ActorSection | None = None,
) -> tuple[Any, ...]:
    """What every megatron role is built from; the actor's where nothing else is given."""
    return (
        spec,
        folder or Path(recipe.model.path),
        world,
        recipe.model,
        section or recipe.actor,
        recipe.rollout.temperature,
    )


def controller_of(recipe: Recipe) -> KlController:
    """The weight of the KL term at the run's start."""
    kl = recipe.algorithm.kl
    return KlController(kl.beta, kl.target, kl.horizon)


def offload_of(
    recipe: Recipe, world: World, actor: Actor | Reference, critic: Critic | None
) -> Offloads:
    """Optimizer states that the recipe keeps in host memory outside of updates; out already, so
    that the generator starts with that memory free."""
    platform = platform_of(world.device.type)
    parts = []
    if isinstance(actor, Actor) and recipe.actor.offload == "optimizer":
        parts.append(OptimizerOffload(actor.trainer, platform))
    if critic is not None and recipe.critic_section.offload == "optimizer":
        parts.append(OptimizerOffload(critic.trainer, platform))
    offloads = Offloads(parts)
    offloads.out()
    return offloads


def frozen_of(
    recipe: Recipe, world: World, actor: Actor | Reference, reference: Reference | None
) -> Offloads:
    """The reference's weights, where the recipe keeps them in host memory outside of scoring; out
    already. They stay where the reference is the policy that generates, too."""
    parts = []
    if reference is not None and reference is not actor and recipe.reference.offload == "weights":
        parts.append(WeightOffload(reference, platform_of(world.device.type)))
    offloads = Offloads(parts)
    offloads.out()
    return offloads
