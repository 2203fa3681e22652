"""Evaluation by itself: weights into the actor's layout, proven, handed over, generated with.

    ACTOR_COMMITTED → EXPORTING → ROLLOUT_LOADING → ROLLOUT_READY      once for each of the targets

The path is training's own: megatron shards, resharded into SGLang, whose parameters are read back
and compared; only that no optimizer is there. Nothing is written but to the evaluation's folder. An
earlier evaluation stays there until this one has its results.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from megarl.assemble_data import facts_of, loaded_alike, sampling_of
from megarl.assemble_roles import role_arguments
from megarl.checkpoint.commit import CheckpointError
from megarl.checkpoint.folder_check import TensorsError
from megarl.checkpoint.hf_folder import load_shards
from megarl.checkpoint.position import Position
from megarl.checkpoint.restore import restore_policy
from megarl.contracts.states import Journal, State
from megarl.contracts.tokens import Tokens
from megarl.contracts.version import PolicyVersion, WeightManifest
from megarl.data.prompts import PromptSet
from megarl.data.reward_names import check_probes, check_rewards
from megarl.desk import announce, console_of
from megarl.evaluation.files import write_generations, write_numbers
from megarl.evaluation.folder import RESULTS_FILE, UNFINISHED, settle
from megarl.evaluation.held_out import Evaluated, HeldOut, evaluate, first_of_each_source
from megarl.evaluation.own_tokens import own_tokens
from megarl.evaluation.probes import Probes
from megarl.evaluation.tables import comparison_lines, evaluation_lines
from megarl.evaluation.targets import EvaluationError, Target
from megarl.experience.versions import VersionLog
from megarl.failure import Failure
from megarl.models.build import destroy_mesh
from megarl.models.roles import Reference
from megarl.modes.launch import Launch
from megarl.observe.console import Console
from megarl.observe.logs import real_stdout
from megarl.observe.timeline import Stopwatch
from megarl.recipe import Recipe
from megarl.reshard.families import FolderError, read_spec
from megarl.reshard.families.spec import ModelSpec
from megarl.reshard.layout import megatron_placement, sglang_placement
from megarl.reshard.transfer import Resharder
from megarl.rewards.score import ScoringPool
from megarl.rollout.generator import Generator
from megarl.rollout.hybrid import HybridEngine
from megarl.world import World


@dataclass(frozen=True)
class Bench:
    """What evaluations by themselves need, on this rank."""

    recipe: Recipe
    world: World
    console: Console
    spec: ModelSpec
    policy: Reference
    hybrid: HybridEngine
    held_out: HeldOut


@contextmanager
def assembled_to_evaluate(launch: Launch, world: World, failure: Failure) -> Iterator[Bench]:
    """Held-out prompts, scorers, the policy without an optimizer, and the generator."""
    recipe = launch.recipe
    with ExitStack() as stack, failure.told():
        console = stack.enter_context(console_of(recipe, world, failure))
        announce(world, console, "load_data")
        held_out = _held_out(stack, recipe, world)
        announce(world, console, "build_actor")
        spec = read_spec(Path(recipe.model.path))
        stack.callback(destroy_mesh)
        policy = Reference(*role_arguments(recipe, world, spec))
        announce(world, console, "start_generator")
        place, experts = (world.mesh, world.rank), recipe.actor.replay_routing
        folder = Path(recipe.model.path)
        generator = Generator(folder, *place, recipe.rollout, recipe.seed, world.device, experts)
        stack.callback(generator.close)
        resharder = Resharder(
            megatron_placement(spec, world.mesh),
            sglang_placement(spec, world.mesh),
            policy.named_parameters(),
            generator.named_parameters(),
            getattr(torch, recipe.rollout.dtype),
            recipe.rollout.bucket_bytes,
            world,
        )
        versions = VersionLog(recipe.run_folder / UNFINISHED if world.is_main else None)
        stack.callback(versions.close)
        stopwatch = stack.enter_context(Stopwatch(None))
        hybrid = HybridEngine(
            world, Journal(None), generator, resharder, stopwatch, versions=versions
        )
        yield Bench(recipe, world, console, spec, policy, hybrid, held_out)


def load_held_out(recipe: Recipe, world: World) -> tuple[Tokens, PromptSet]:
    """Tokenizer and held-out prompts, checked, the same on every rank. Collective.

    Raises `PromptError`, and `InputsDiffer` as `loaded_alike` does.
    """

    def load() -> tuple[Tokens, PromptSet]:
        tokens = Tokens.load(Path(recipe.model.path))
        rows = PromptSet.load(recipe.data.held_out, tokens, recipe.data)
        check_rewards(rows, recipe.reward, held_out=True)
        check_probes(rows, recipe.eval.probes)
        return tokens, rows

    return loaded_alike(world, load, lambda found: facts_of(found[0], {"eval": found[1]}))


def _held_out(stack: ExitStack, recipe: Recipe, world: World) -> HeldOut:
    tokens, rows = load_held_out(recipe, world)
    pool = ScoringPool(recipe.reward, tokens) if world.leads_replica else None
    if pool is not None:
        stack.callback(pool.close)
    probes = Probes.of(recipe, tokens, grades=world.leads_replica)
    stack.callback(probes.close)
    return HeldOut(
        prompts=first_of_each_source(rows.rows, recipe.eval.max_prompts),
        fingerprint=rows.fingerprint,
        tokens=tokens,
        sampling=sampling_of(recipe, tokens),
        section=recipe.eval,
        reward=recipe.reward,
        max_lost_share=recipe.rollout.max_lost_share,
        pool=pool,
        probes=probes,
    )


def evaluate_alone(bench: Bench, launch: Launch) -> None:
    """Every target in turn; `results.json` last. Collective.

    Raises `EvaluationError` and `FolderError` on every rank for weights that cannot be taken.
    """
    asked, world, folder = launch.evaluation, bench.world, bench.recipe.run_folder
    # Rank 0's, for a run that trains meanwhile may have another newest checkpoint by now.
    targets: tuple[Target, ...] = world.from_main(asked.targets)
    done = []
    for target in targets:
        bench.console.stage(f"evaluate {target.label}")
        for line in target.passed_over:
            bench.console.note(line)
        told, evaluated = _evaluate(bench, target, asked.recipe.run.name)
        done.append(told)
        if world.is_main:
            head = {"version": evaluated.version.id}
            file = folder / UNFINISHED / f"{target.label}.jsonl"
            write_generations(file, head, evaluated.lines)
            for line in _lines(told):
                bench.console.note(line)
    if not world.is_main:
        return
    if len(done) > 1:
        for line in ("", "All of them, the same prompts and seeds:", *comparison_lines(done)):
            bench.console.note(line)
    results = {"recipe": asked.recipe.hash, "evaluations": done}
    write_numbers(folder / UNFINISHED / RESULTS_FILE, results)
    settle(folder)
    bench.console.note(f"finished: {folder}")
    if asked.json:
        bench.console.close()
        print(json.dumps(results, ensure_ascii=False), file=real_stdout(), flush=True)


def _lines(told: Mapping[str, Any]) -> list[str]:
    weights = told["weight_manifest_hash"].partition(":")[2][:12]
    at = "" if told["iteration"] is None else f", after {told['iteration']} iterations"
    proven = ", proven by the checkpoint's digests" if told["is_checkpoint"] else ""
    head = f"{told['path']}{at}: weights {weights}{proven}"
    return ["", head, *evaluation_lines(told)]


def _evaluate(bench: Bench, target: Target, run_name: str) -> tuple[dict[str, Any], Evaluated]:
    """One target: (plain JSON, the evaluation). Collective."""
    world, hybrid = bench.world, bench.hybrid
    world.enter("build_actor")
    position = _load(bench, target)
    tokenizer = _own_tokenizer(bench, target, position)
    world.enter("commit")
    manifest = hybrid.manifest()
    version = _version(bench, position, manifest, run_name)
    hybrid.versions.committed(0, version, manifest)
    hybrid.journal = Journal(None)
    hybrid.journal.enter(
        State.ACTOR_COMMITTED, 0, version, weight_manifest_hash=version.weight_manifest_hash
    )
    with hybrid.generating(0, version, manifest) as generator:
        world.enter("evaluate")
        evaluated = evaluate(world, generator, version, bench.held_out)
    whose = {
        "label": target.label,
        "path": str(target.path),
        "is_checkpoint": target.is_checkpoint,
        "iteration": target.iteration,
        "tokenizer_hash": bench.held_out.tokens.hash,
        "own_tokenizer_hash": tokenizer,
    }
    told = whose | evaluated.told()
    if position is None:  # a folder says nothing of the steps behind it
        told |= {"run": None, "optimizer_step": None}
    return told, evaluated


def _load(bench: Bench, target: Target) -> Position | None:
    """The target's weights into the policy; a checkpoint's position. Collective."""
    world = bench.world
    if not target.is_checkpoint:
        _load_folder(bench, target.path)
        return None
    position, problem = None, ""
    if world.is_main:
        try:
            position = target.position()
        except CheckpointError as error:
            problem = str(error)
    position, problem = world.from_main((position, problem))
    if problem:
        raise EvaluationError(f"{problem}; did the run remove it meanwhile? start again")
    tokens = bench.held_out.tokens
    if position.contracts["tokenizer"] != tokens.hash:
        raise EvaluationError(
            f"{target.path}: its run had another tokenizer or chat template than model.path "
            f"{bench.recipe.model.path}; set model.path to the model that the run began from"
        )
    try:
        restore_policy(target.path, position, bench.policy, world)
    except (CheckpointError, TensorsError) as error:  # on every rank, in the same words
        raise EvaluationError(str(error)) from error
    return position


def _own_tokenizer(bench: Bench, target: Target, position: Position | None) -> str | None:
    """The hash of the target's own tokenizer, where it has one; says how it differs. Collective."""
    if position is not None:
        return position.contracts["tokenizer"]
    world, hash_, problem = bench.world, None, ""
    if world.is_main:
        try:
            own = own_tokens(target.path, bench.held_out.tokens, bench.recipe.data.template)
        except EvaluationError as error:
            problem = str(error)
        else:
            hash_ = own.hash
            if own.note is not None:
                bench.console.note(own.note)
    hash_, problem = world.from_main((hash_, problem))
    if problem:
        raise EvaluationError(problem)
    return hash_


def _load_folder(bench: Bench, folder: Path) -> None:
    world, policy = bench.world, bench.policy
    placement, problem = megatron_placement(bench.spec, world.mesh), ""
    try:
        weights = policy.named_parameters()
        load_shards(folder, placement, world.rank, weights, policy.model.dtype)
    except FolderError as error:
        problem = str(error)
    told = [line for line in world.gather(problem) if line]
    if told:
        raise FolderError(told[0])


def _version(
    bench: Bench, position: Position | None, manifest: WeightManifest, run_name: str
) -> PolicyVersion:
    """A checkpoint's own, where the rollout's dtype is its run's."""
    if position is not None:
        return replace(position.actor.version, weight_manifest_hash=manifest.hash)
    return PolicyVersion(
        run_id=run_name,
        optimizer_step=0,
        update_attempt=0,
        weight_manifest_hash=manifest.hash,
        tokenizer_hash=bench.held_out.tokens.hash,
        model_config_hash=bench.spec.config_hash,
    )
