"""Builds the parts of a run from its recipe, the same on every rank, and closes them in order."""

from __future__ import annotations

import gc
import json
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch

from megarl.contracts.mesh import Mesh
from megarl.contracts.samples import SamplingContract
from megarl.contracts.states import Journal
from megarl.contracts.tokens import Tokens
from megarl.data.prompts import PromptCursor, PromptSet
from megarl.models.build import destroy_mesh
from megarl.models.roles import Actor, Reference
from megarl.observe.console import Console
from megarl.observe.environment import write_environment
from megarl.observe.metrics import MetricsWriter
from megarl.observe.timeline import Stopwatch
from megarl.recipe import Recipe
from megarl.reshard.families import read_spec
from megarl.reshard.layout import megatron_placement, sglang_placement
from megarl.reshard.transfer import Resharder
from megarl.rewards.score import ScoringPool
from megarl.rollout.generator import Generator
from megarl.rollout.hybrid import HybridEngine
from megarl.run import Run
from megarl.world import World


def mesh_of(recipe: Recipe) -> Mesh:
    return Mesh(recipe.world.ranks, recipe.actor.tp, recipe.actor.pp, recipe.rollout.tp)


def sampling_of(recipe: Recipe, tokens: Tokens) -> SamplingContract:
    """What responses are drawn from; refused when the trainer cannot score it."""
    rollout = recipe.rollout
    contract = SamplingContract(
        n=rollout.group_size,
        temperature=rollout.temperature,
        max_response_tokens=rollout.max_response_tokens,
        stop_token_ids=tuple(sorted({*tokens.eos_ids, *tokens.ids_of(rollout.stop)})),
        seed=recipe.seed,
        dtype=rollout.dtype,
        attention_backend=rollout.attention_backend,
    )
    contract.check_trainable()
    return contract


@contextmanager
def assembled(recipe: Recipe, world: World) -> Iterator[Run]:
    """The run, ready for its first iteration.

    Closed in the order that both libraries need: SGLang, megatron's parallel state; the default
    process group is the caller's.
    """
    folder = recipe.run_folder
    with ExitStack() as stack:
        console = stack.enter_context(
            Console(
                recipe.observe.console if world.is_main else "off",
                recipe.run.iterations,
                title=recipe.run.name,
            )
        )
        console.stage("load data")
        spec = read_spec(Path(recipe.model.path))
        tokens = Tokens.load(Path(recipe.model.path))
        section = recipe.data
        train = PromptSet.load(Path(section.train), tokens, section)
        held_out = ()
        if section.eval is not None:
            held_out = PromptSet.load(Path(section.eval), tokens, section).rows
            held_out = held_out[: recipe.eval.max_prompts]
        stopwatch = Stopwatch(folder / "timeline.json" if world.is_main else None)
        stack.callback(stopwatch.close)
        pool = None
        if world.leads_replica:
            pool = ScoringPool(recipe.reward, tokens)
            stack.callback(pool.close)
        console.stage("build actor")
        stack.callback(destroy_mesh)
        actor, reference = _megatron_roles(recipe, world, spec)
        console.stage("start generator")
        generator = Generator(
            Path(recipe.model.path),
            world.mesh,
            world.rank,
            recipe.rollout,
            recipe.seed,
            world.device,
        )
        stack.callback(generator.close)
        resharder = Resharder(
            megatron_placement(spec, world.mesh),
            sglang_placement(spec, world.mesh, world.device.type),
            actor.named_parameters(),
            generator.named_parameters(),
            getattr(torch, recipe.rollout.dtype),
            recipe.rollout.bucket_bytes,
            world,
        )
        journal = Journal(folder / "journal.jsonl" if world.is_main else None)
        stack.callback(journal.close)
        metrics = None
        if world.is_main:
            metrics = MetricsWriter(folder, recipe.observe.tensorboard)
            stack.callback(metrics.close)
        _write_facts(recipe, world, folder, train)
        run = Run(
            recipe=recipe,
            folder=folder,
            world=world,
            spec=spec,
            tokens=tokens,
            cursor=PromptCursor(train, recipe.seed, recipe.rollout.prompts_per_iteration),
            held_out=held_out,
            actor=actor,
            reference=reference,
            hybrid=HybridEngine(world, journal, generator, resharder, stopwatch),
            pool=pool,
            sampling=sampling_of(recipe, tokens),
            journal=journal,
            metrics=metrics,
            console=console,
            stopwatch=stopwatch,
        )
        # What lives for the whole run is taken out of the collector's sight: a collection over
        # two libraries' objects costs a third of a second.
        gc.collect()
        gc.freeze()
        console.start(recipe.run.iterations)
        yield run


def _megatron_roles(recipe: Recipe, world: World, spec) -> tuple[Actor, Reference | None]:
    folder, algorithm = Path(recipe.model.path), recipe.algorithm
    steps = recipe.run.iterations * algorithm.minibatches
    actor = Actor(
        spec,
        folder,
        world,
        recipe.model,
        recipe.actor,
        recipe.rollout.temperature,
        steps,
        recipe.seed,
    )
    if algorithm.kl.beta == 0.0:
        return actor, None
    reference = Reference(
        spec, folder, world, recipe.model, recipe.actor, recipe.rollout.temperature
    )
    return actor, reference


def _write_facts(recipe: Recipe, world: World, folder: Path, train: PromptSet) -> None:
    hosts = world.gather(socket.gethostname())
    if not world.is_main:
        return
    write_environment(folder / "environment.json", hosts)
    facts = {
        "file": recipe.data.train,
        "fingerprint": train.fingerprint,
        "rows": len(train.rows),
        "refused": [f"{where}: {why}" for where, why in train.refusals],
    }
    (folder / "data.json").write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
