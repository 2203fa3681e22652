"""Builds what a launch from sealed experience needs: the actor alone, or scorers alone."""

from __future__ import annotations

import gc
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch

from megarl.assemble_data import sampling_of
from megarl.assemble_roles import actor_of, controller_of, critic_of, offload_of
from megarl.contracts.states import FROM_SEALED
from megarl.contracts.tokens import Tokens
from megarl.desk import Desk, console_of, desk_of
from megarl.experience.tokenizer import TOKENIZER_FOLDER, keep_tokenizer
from megarl.failure import Failure
from megarl.models.build import destroy_mesh
from megarl.modes.launch import Launch
from megarl.modes.sealed_updates import same_run
from megarl.observe.environment import write_environment
from megarl.recipe.checks_learning import learning_notes
from megarl.reshard.digest import Digester
from megarl.reshard.families import read_spec
from megarl.reshard.layout import megatron_placement
from megarl.reshard.transfer import weight_manifest
from megarl.rewards.score import ScoringPool
from megarl.rollout.hybrid import TrainingOnly
from megarl.run import Run
from megarl.world import World


@contextmanager
def assembled_to_train(launch: Launch, world: World, failure: Failure) -> Iterator[Run]:
    """A run that learns from sealed experience: no prompts, no scorers, no generator."""
    recipe = launch.recipe
    with ExitStack() as stack, failure.told():
        console = stack.enter_context(console_of(recipe, world, failure))
        desk = stack.enter_context(desk_of(recipe, world, failure, console, FROM_SEALED))
        desk.announce("load_data")
        tokens = Tokens.load(Path(recipe.model.path))
        _write_facts(desk, tokens)
        for line in learning_notes(recipe):
            desk.console.note(line)
        desk.announce("build_actor")
        spec = read_spec(Path(recipe.model.path))
        stack.callback(destroy_mesh)
        actor, critic = actor_of(recipe, world, spec), critic_of(recipe, world)
        placement = megatron_placement(spec, world.mesh)
        dtype = getattr(torch, recipe.rollout.dtype)
        digester = Digester(placement, world.rank, actor.named_parameters(), dtype)
        run = Run(
            **vars(desk),
            spec=spec,
            tokens=tokens,
            cursor=None,
            quarantine=None,
            held_out=(),
            actor=actor,
            reference=None,
            critic=critic,
            controller=controller_of(recipe),
            hybrid=TrainingOnly(
                lambda: weight_manifest(placement, digester, dtype, world),
                offload_of(recipe, world, actor, critic),
            ),
            pool=None,
            sampling=sampling_of(recipe, tokens),
        )
        gc.collect()
        gc.freeze()
        yield run


@contextmanager
def assembled_to_score(
    launch: Launch, world: World, failure: Failure
) -> Iterator[tuple[Desk, Tokens, ScoringPool | None]]:
    """Scorers on the ranks that lead a replica, and the tokenizer of the sealed run; no model."""
    recipe = launch.recipe
    with ExitStack() as stack, failure.told():
        console = stack.enter_context(console_of(recipe, world, failure))
        desk = stack.enter_context(desk_of(recipe, world, failure, console))
        desk.announce("load_data")
        kept = same_run(launch.sources) / TOKENIZER_FOLDER
        tokens = Tokens.load(kept if kept.is_dir() else Path(recipe.model.path))
        _write_facts(desk, tokens)
        pool = None
        if world.leads_replica:
            pool = ScoringPool(recipe.reward, tokens)
            stack.callback(pool.close)
        yield desk, tokens, pool


def _write_facts(desk: Desk, tokens: Tokens) -> None:
    """environment.json and tokenizer/. Collective."""
    hosts = desk.world.gather(socket.gethostname())
    if desk.world.is_main:
        keep_tokenizer(tokens, desk.folder)
        write_environment(desk.folder / "environment.json", hosts)
