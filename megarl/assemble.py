"""Builds the parts of a run from its recipe, the same on every rank, and closes them in order."""

from __future__ import annotations

import gc
import json
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch

from megarl.algorithms.registry import code_hashes
from megarl.assemble_roles import (
    controller_of,
    critic_folder,
    critic_of,
    frozen_of,
    offload_of,
    policies_of,
)
from megarl.checkpoint.resume import Resume
from megarl.checkpoint.saver import Checkpointer
from megarl.checkpoint.start import Start, take_up
from megarl.contracts.hashes import contract_hash
from megarl.contracts.samples import SamplingContract
from megarl.contracts.states import COLLECTING, RESUMED, TRANSITIONS
from megarl.contracts.tokens import Tokens
from megarl.data.cursor import PromptCursor
from megarl.data.prompts import PromptSet
from megarl.desk import Desk, announce, console_of, desk_of
from megarl.experience.tokenizer import keep_tokenizer
from megarl.exports import Exports
from megarl.failure import Failure
from megarl.models.build import destroy_mesh
from megarl.models.critic_spec import critic_spec
from megarl.models.roles import Actor, Critic, Reference
from megarl.observe.console import Console
from megarl.observe.environment import write_environment
from megarl.observe.runfolder import DATA_FILE
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
    tokens, train, held_out = _load_data(recipe)
    cursor = PromptCursor(train, recipe.seed, recipe.rollout.prompts_per_iteration)
    pool = ScoringPool(recipe.reward, tokens) if world.leads_replica else None
    if pool is not None:
        stack.callback(pool.close)
    contracts = contracts_of(recipe, spec, tokens, train, held_out, pool)
    start = take_up(recipe, world, resume, contracts, console)
    transitions = (TRANSITIONS if start is None else RESUMED) if learns else COLLECTING
    desk = stack.enter_context(desk_of(recipe, world, failure, console, transitions))
    _write_facts(recipe, world, desk.folder, train, tokens)
    _note_refusals(train, desk.console)
    for line in learning_notes(recipe) if learns else ():
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
    if checkpointer is not None:
        checkpointer.offload = Offloads([offload, frozen])
    desk.announce("start_generator")
    generator = _generator(recipe, world)
    stack.callback(generator.close)
    quarantine = Quarantine(
        recipe.reward.quarantine_after, recipe.run_folder if world.is_main else None
    )
    if start is not None:
        start.restore_data(cursor, quarantine, console.note)
        start.restore_controller(controller)
    return Run(
        **vars(desk),
        spec=spec,
        tokens=tokens,
        cursor=cursor,
        quarantine=quarantine,
        held_out=held_out.rows[: recipe.eval.max_prompts] if held_out and learns else (),
        actor=actor,
        reference=reference,
        critic=critic,
        controller=controller,
        hybrid=_hybrid(desk, spec, actor, generator, offload, frozen),
        pool=pool,
        sampling=sampling_of(recipe, tokens),
        checkpointer=checkpointer,
        exports=exports,
        contracts=contracts,
        start=start,
        stop=failure.stop,
    )


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


def _note_refusals(prompts: PromptSet, console: Console) -> None:
    if prompts.refusals:
        first = prompts.refusals[0]
        told = f"{len(prompts.refusals)} rows refused, see data.json"
        console.note(f"{told}; first {first.where}: {first.why}")


def _load_data(recipe: Recipe) -> tuple[Tokens, PromptSet, PromptSet | None]:
    """Tokenizer, training prompts, held-out prompts (None where the recipe names no file)."""
    section = recipe.data
    tokens = Tokens.load(Path(recipe.model.path))
    train = PromptSet.load(section.training, tokens, section)
    if section.eval is None:
        return tokens, train, None
    return tokens, train, PromptSet.load(section.held_out, tokens, section)


def contracts_of(
    recipe: Recipe,
    spec: ModelSpec,
    tokens: Tokens,
    train: PromptSet,
    held_out: PromptSet | None,
    pool: ScoringPool | None,
) -> dict[str, str]:
    """What a position is only good with, as hashes; the scorer's on ranks that score."""
    found = {
        "tokenizer": tokens.hash,
        "model": spec.config_hash,
        "data": train.fingerprint,
        "sampling": sampling_of(recipe, tokens).hash,
    }
    if held_out is not None:
        found["eval_data"] = held_out.fingerprint
    if pool is not None:
        found["scorer"] = pool.version
    if recipe.algorithm.needs_values:
        found["critic"] = critic_spec(critic_folder(recipe), spec)[0].config_hash
    if own := code_hashes(recipe.algorithm):
        found["algorithm"] = contract_hash(own)
    return found


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


def _write_facts(
    recipe: Recipe, world: World, folder: Path, train: PromptSet, tokens: Tokens
) -> None:
    """environment.json, data.json and tokenizer/: what this run ran on and with."""
    hosts = world.gather(socket.gethostname())
    if not world.is_main:
        return
    keep_tokenizer(tokens, folder)
    write_environment(folder / "environment.json", hosts)
    facts = {
        "files": [source.path for source in recipe.data.train],
        "fingerprint": train.fingerprint,
        "rows": len(train.rows),
        "refused": [f"{where}: {why}" for where, why in train.refusals],
    }
    (folder / DATA_FILE).write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
