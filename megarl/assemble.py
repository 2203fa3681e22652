"""Builds the parts of a run from its recipe, the same on every rank, and closes them in order."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch

from megarl.assemble_data import Inputs, contracts_of, load_inputs, sampling_of
from megarl.assemble_roles import (
    controller_of,
    critic_of,
    frozen_of,
    offload_of,
    policies_of,
)
from megarl.checkpoint.resume import Resume
from megarl.checkpoint.saver import Checkpointer
from megarl.checkpoint.start import Start, take_up
from megarl.contracts.states import COLLECTING, RESUMED, TRANSITIONS
from megarl.desk import Desk, announce, console_of, desk_of
from megarl.evaluation.probes import Probes
from megarl.exports import Exports
from megarl.failure import Failure
from megarl.models.build import destroy_mesh
from megarl.models.roles import Actor, Critic, Reference
from megarl.observe.console import Console
from megarl.platforms.offload import Offloads
from megarl.recipe import Recipe
from megarl.recipe.checks_learning import learning_notes
from megarl.reshard.families import read_spec
from megarl.reshard.families.spec import ModelSpec
from megarl.reshard.layout import megatron_placement, sglang_placement
from megarl.reshard.transfer import Resharder
from megarl.rewards.quarantine import Quarantine
from megarl.rewards.score import ScoringPool
from megarl.rollout.generator import Generator
from megarl.rollout.hybrid import HybridEngine
from megarl.run import Run
from megarl.world import World


@contextmanager
def assembled(
    recipe: Recipe,
    world: World,
    failure: Failure,
    resume: Resume | None = None,
    *,
    learns: bool = True,
) -> Iterator[Run]:
    """The run, ready for its first iteration. One that only collects (`learns` False) has no
    optimizer, and evaluates nothing, since its weights stay.

    `resume` is where rank 0 goes on; other ranks take its word. What does not fit is refused before
    anything of the run's folder is changed.
    Closed in the order that both libraries need: SGLang, megatron's parallel state; the default
    process group is the caller's. An error is told before anything is closed.
    """
    with ExitStack() as stack, failure.told():
        run = _assemble(stack, recipe, world, failure, resume, learns)
        # What lives for the whole run is taken out of the collector's sight: a collection over
        # two libraries' objects costs a third of a second.
        gc.collect()
        gc.freeze()
        run.console.start(recipe.run.iterations)
        yield run


def _assemble(
    stack: ExitStack,
    recipe: Recipe,
    world: World,
    failure: Failure,
    resume: Resume | None,
    learns: bool,
) -> Run:
    """`stack` closes what is built."""
    console = stack.enter_context(console_of(recipe, world, failure))
    announce(world, console, "load_data")
    spec = read_spec(Path(recipe.model.path))
    inputs = load_inputs(recipe, console, world)
    pool, probes = _scoring(stack, recipe, world, inputs, learns)
    contracts = contracts_of(recipe, spec, inputs, pool)
    start = take_up(recipe, world, resume, contracts, console, inputs.facts)
    transitions = (TRANSITIONS if start is None else RESUMED) if learns else COLLECTING
    desk = stack.enter_context(desk_of(recipe, world, failure, console, transitions))
    inputs.write_facts(world, desk.folder)
    for line in (*inputs.notes(), *(learning_notes(recipe) if learns else ())):
        desk.console.note(line)
    desk.announce("build_actor")
    stack.callback(destroy_mesh)
    actor, reference = policies_of(recipe, world, spec, learns)
    critic, controller = critic_of(recipe, world), controller_of(recipe)
    checkpointer = exports = None
    if learns:
        checkpointer = _checkpointer(recipe, world, actor, reference, critic, console)
        stack.callback(checkpointer.close)
        exports = _restored(start, checkpointer, recipe, spec, world, console)
    offload = offload_of(recipe, world, actor, critic)
    frozen = frozen_of(recipe, world, actor, reference)
    if learns:
        checkpointer.offload = Offloads([offload, frozen])
    desk.announce("start_generator")
    generator = _generator(recipe, world)
    stack.callback(generator.close)
    quarantine = _quarantine(start, recipe, world, inputs, console)
    if start is not None:
        start.restore_controller(controller)
    return Run(
        **vars(desk),
        spec=spec,
        tokens=inputs.tokens,
        cursor=inputs.cursor,
        quarantine=quarantine,
        held_out=inputs.evaluated(recipe.eval.max_prompts) if learns else (),
        actor=actor,
        reference=reference,
        critic=critic,
        controller=controller,
        hybrid=_hybrid(desk, spec, actor, generator, offload, frozen),
        pool=pool,
        probes=probes,
        sampling=sampling_of(recipe, inputs.tokens),
        checkpointer=checkpointer,
        exports=exports,
        contracts=contracts,
        start=start,
        stop=failure.stop,
    )


def _quarantine(
    start: Start | None, recipe: Recipe, world: World, inputs: Inputs, console: Console
) -> Quarantine:
    """Prompts that are drawn no more; with it, what was drawn, as the start goes on with them."""
    kept = recipe.run_folder if world.is_main else None
    quarantine = Quarantine(recipe.reward.quarantine_after, kept)
    if start is not None:
        start.restore_data(inputs.cursor, quarantine, console.note)
    return quarantine


def _scoring(
    stack: ExitStack, recipe: Recipe, world: World, inputs: Inputs, learns: bool
) -> tuple[ScoringPool | None, Probes]:
    """Scorers on the ranks that lead a replica, and those that evaluations alone ask."""
    pool = ScoringPool(recipe.reward, inputs.tokens) if world.leads_replica else None
    if pool is not None:
        stack.callback(pool.close)
    probes = Probes()
    if inputs.held_out is not None and learns:
        probes = Probes.of(recipe, inputs.tokens, grades=world.leads_replica)
        stack.callback(probes.close)
    return pool, probes


def _checkpointer(
    recipe: Recipe,
    world: World,
    actor: Actor,
    reference: Reference | None,
    critic: Critic | None,
    console: Console,
) -> Checkpointer:
    """Collective; raises `CheckpointError` on every rank where the disk has no room."""
    folder, name = recipe.run_folder, recipe.run.name
    checkpointer = Checkpointer(world, folder, name, recipe.checkpoint, actor, reference, critic)
    checkpointer.note = console.note
    checkpointer.check_disk()
    return checkpointer


def _restored(
    start: Start | None,
    checkpointer: Checkpointer,
    recipe: Recipe,
    spec: ModelSpec,
    world: World,
    console: Console,
) -> Exports:
    """Roles as the start goes on with them, and the exports beside. Collective."""
    exports = Exports(recipe.run_folder, recipe, spec, world)
    if start is not None:
        start.restore_roles(checkpointer, recipe)
        start.restore_exports(exports, console.note)
    return exports


def _hybrid(
    desk: Desk,
    spec: ModelSpec,
    actor: Actor | Reference,
    generator: Generator,
    offload: Offloads,
    frozen: Offloads,
) -> HybridEngine:
    return HybridEngine(
        desk.world,
        desk.journal,
        generator,
        _resharder(desk.recipe, desk.world, spec, actor, generator),
        desk.stopwatch,
        offload,
        desk.records.versions,
        desk.recipe.rollout.verify_every,
        frozen,
    )


def _generator(recipe: Recipe, world: World) -> Generator:
    folder = Path(recipe.model.path)
    place, experts = (world.mesh, world.rank), recipe.actor.replay_routing
    return Generator(folder, *place, recipe.rollout, recipe.seed, world.device, experts)


def _resharder(
    recipe: Recipe, world: World, spec: ModelSpec, actor: Actor, generator: Generator
) -> Resharder:
    return Resharder(
        megatron_placement(spec, world.mesh),
        sglang_placement(spec, world.mesh),
        actor.named_parameters(),
        generator.named_parameters(),
        getattr(torch, recipe.rollout.dtype),
        recipe.rollout.bucket_bytes,
        world,
    )
