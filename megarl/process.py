"""The process boundary of a rank: arguments in, exit code out, one clear line when it fails.

Exit codes: 0 done, 1 failed or a replay beyond tolerance, 2 an input that cannot be used
(arguments, recipe, model folder, data, scorers) found before the run had weights, 75 stopped as
asked and to be started again (`stop.py`), 128 + n ended by signal n (130: Ctrl-C).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from megarl import stop
from megarl.algorithms.own import is_own
from megarl.checkpoint.commit import CheckpointError
from megarl.contracts.errors import InputError
from megarl.faults import planned
from megarl.models.critic_spec import critic_spec, refuse_other_tokens
from megarl.modes.launch import MODES_HELP, Launch, Work, read_launch
from megarl.observe.logs import Terminal, captured, fail
from megarl.recipe import Recipe, RecipeError
from megarl.recipe.layout import mesh_of
from megarl.recipe.reference import help_text
from megarl.reshard.families import ModelSpec, read_spec
from megarl.reshard.layout import megatron_placement, sglang_placement
from megarl.torchrun import die_with_launcher

if TYPE_CHECKING:
    from filelock import FileLock

    from megarl.checkpoint.resume import Resume
    from megarl.failure import Failure
    from megarl.platforms.interface import Platform
    from megarl.world import World

USAGE = f"""usage: python -m megarl.train RECIPE [key=value …] [--replay RUN@N | --only PART]

Trains as RECIPE (a YAML file) says; key=value overrides any of its keys. This is one rank; for
the recipe's number of ranks on this machine: bash launch/grpo.sh RECIPE [key=value …]

  python -m megarl.train recipes/quickstart.yaml world.ranks=1 actor.tp=1
  bash launch/grpo.sh recipes/quickstart.yaml seed=2 rollout.group_size=16
{MODES_HELP}"""

POSITIONS_KEPT = 2
"""Positions of a model's context that SGLang leaves free behind a request."""


def main(argv: Sequence[str] | None = None) -> int:
    """Train on this rank of torchrun's world, or as a world of one."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or {"-h", "--help"} & set(arguments):
        print(USAGE + "\n" + help_text())
        return 0 if arguments else 2
    return run_rank(lambda: read_launch(arguments))


def run_rank(read: Callable[[], Launch]) -> int:
    """Do what the launch that `read` reads asks for, on this rank; returns its exit code.

    `read` may raise `InputError`.
    """
    die_with_launcher()
    stop.hold()
    try:
        launch = read()
        recipe = launch.recipe
        check_inputs(launch)
        planned(rank=0)
        lock, resume = _prepare_folder(launch)
    except InputError as error:
        fail(str(error))
        return 2
    except CheckpointError as error:
        fail(f"{error}; resume.from another checkpoint, or run.overwrite=true starts anew")
        return 2
    rank = int(os.environ.get("RANK", "0"))
    with (
        _settled(recipe, lock),
        captured(recipe.run_folder / "logs" / f"rank_{rank}.log", rank) as terminal,
    ):
        code = _run(launch, resume, terminal, lock)
    if lock is not None:
        lock.release()
    return code


@contextmanager
def _settled(recipe: Recipe, lock: FileLock | None) -> Iterator[None]:
    """A launch that ends in here before it had weights has replaced no earlier run. Does something
    on the rank that has claimed the folder, which `lock` is given of."""
    from megarl.run_folder import settle

    try:
        yield
    finally:
        if lock is not None:
            settle(recipe.run_folder)


def check_inputs(launch: Launch, *, started: bool = True) -> None:
    """What can be told before the slow imports. Raises `InputError`. `started`: this is one of the
    ranks."""
    recipe = launch.recipe
    if started:
        _check_world(launch)
    if launch.work is Work.SCORE:  # which needs no model, only a tokenizer
        return
    longest = _check_model(recipe)
    if launch.work is not Work.EVALUATE:  # which has a policy alone
        _check_roles(recipe, longest)
        _check_functions(recipe)


def _check_world(launch: Launch) -> None:
    recipe, ranks = launch.recipe, int(os.environ.get("WORLD_SIZE", "1"))
    if ranks != recipe.world.ranks:
        starts = "bash launch/grpo.sh"
        if launch.work is Work.EVALUATE:
            starts = "python -m megarl.evaluate"
        raise RecipeError(
            f"world.ranks is {recipe.world.ranks}, but {ranks} rank(s) were started; use "
            f"`{starts}`, or torchrun --nproc_per_node {recipe.world.ranks}, "
            f"or set world.ranks={ranks}"
        )


def _check_model(recipe: Recipe) -> int:
    """The model's numbers, and whether they can be cut as the recipe says; returns the tokens of
    the longest sample.

    Raises `FolderError`, `LayoutError`, and `RecipeError` for samples longer than the model.
    """
    spec, mesh = read_spec(Path(recipe.model.path)), mesh_of(recipe)
    longest = recipe.data.max_prompt_tokens + recipe.rollout.max_response_tokens
    if longest > spec.max_positions - POSITIONS_KEPT:
        raise RecipeError(
            f"data.max_prompt_tokens + rollout.max_response_tokens are {longest}, but "
            f"{recipe.model.path} has {spec.max_positions} positions, {POSITIONS_KEPT} of which "
            "SGLang keeps; lower one of them or use a model with more positions"
        )
    _check_routers(recipe, spec)
    megatron_placement(spec, mesh)
    sglang_placement(spec, mesh)
    return longest


def _check_routers(recipe: Recipe, spec: ModelSpec) -> None:
    actor = recipe.actor
    if spec.moe is not None and actor.tp > 1 and not actor.sequence_parallel:
        raise RecipeError(
            f"actor.tp is {actor.tp} and {recipe.model.path} has experts: every tensor-parallel "
            "rank would send all tokens to them; set actor.sequence_parallel=true"
        )
    for key, plain in (("router", "trained"), ("router_aux_loss", 0.0), ("replay_routing", False)):
        value = getattr(actor, key)
        if spec.moe is None and value != plain:
            raise RecipeError(
                f"actor.{key} is {value}, but {recipe.model.path} has no experts; leave it out"
            )


def _check_roles(recipe: Recipe, longest: int) -> None:
    """The models of the critic and the reference beside the actor's."""
    actor, mesh = read_spec(Path(recipe.model.path)), mesh_of(recipe)
    if recipe.algorithm.needs_values:
        folder = Path(recipe.critic.path or recipe.model.path)
        critic_spec(folder, actor, longest, mesh)
        _check_tokens(recipe, "critic.path", recipe.critic.path)
    if recipe.algorithm.needs_reference and recipe.reference.path is not None:
        spec = read_spec(Path(recipe.reference.path))
        if (spec.vocab, spec.head) != (actor.vocab, "lm"):
            raise RecipeError(
                f"reference.path: {recipe.reference.path} scores {spec.vocab} tokens with a "
                f"{spec.head} head, the actor {actor.vocab} with an lm head; take a policy of the "
                "actor's tokenizer"
            )
        if spec.max_positions < longest:
            raise RecipeError(
                f"reference.path: {recipe.reference.path} has {spec.max_positions} positions, "
                f"{longest} are needed for a prompt and its response; take another reference"
            )
        if recipe.reference.refresh_every and replace(spec, config_hash="") != replace(
            actor, config_hash=""
        ):
            raise RecipeError(
                f"reference.refresh_every: {recipe.reference.path} is another model than "
                f"{recipe.model.path} and cannot take its weights; leave one of the two keys out"
            )
        megatron_placement(spec, mesh)
        _check_tokens(recipe, "reference.path", recipe.reference.path)


def _check_tokens(recipe: Recipe, key: str, folder: str | None) -> None:
    """Raises `InputError` for a folder of `key` whose token ids are not the actor's; says so where
    it has no tokenizer to tell."""
    if folder is None or Path(folder).resolve() == Path(recipe.model.path).resolve():
        return
    told = refuse_other_tokens(key, Path(folder), Path(recipe.model.path))
    if not told and os.environ.get("RANK", "0") == "0":
        print(
            f"megarl: {key}: {folder} has no tokenizer; its token ids are taken for the actor's",
            file=sys.stderr,
            flush=True,
        )


def _check_functions(recipe: Recipe) -> None:
    """The recipe's own functions, tried on made-up samples. Raises `InputError`."""
    algorithm = recipe.algorithm
    if is_own(algorithm.advantage) or is_own(algorithm.objective):
        from megarl.algorithms.registry import check_functions

        check_functions(algorithm)


def _prepare_folder(launch: Launch) -> tuple[FileLock | None, Resume | None]:
    """Before the slow imports: a folder on every rank, and rank 0 claims it for this run and
    decides where it goes on."""
    from megarl.run_folder import claim_folder, make_folder

    if launch.evaluation is not None:
        return _claim_evaluation(launch), None
    if os.environ.get("RANK", "0") == "0":
        return claim_folder(
            launch.recipe,
            again=launch.work is Work.REPLAY,
            may_resume=launch.work is Work.LOOP,
        )
    make_folder(launch.recipe)
    return None, None


def _claim_evaluation(launch: Launch) -> FileLock | None:
    from megarl.evaluation.folder import claim, refuse_folder
    from megarl.run_folder import make_folder

    folder = launch.recipe.run_folder
    if os.environ.get("RANK", "0") == "0":
        return claim(folder, launch.evaluation)
    if not (folder / "logs").is_dir():  # rank 0 has not been there: nor may others, then
        refuse_folder(folder, launch.evaluation)
    make_folder(launch.recipe)
    return None


def _platform(recipe: Recipe) -> Platform:
    """Of the recipe's device, made ready before the libraries ask torch what there is."""
    from megarl.platforms import platform_of

    platform = platform_of(recipe.world.device)
    platform.prepare()
    return platform


def _run(launch: Launch, resume: Resume | None, terminal: Terminal, lock: FileLock | None) -> int:
    recipe = launch.recipe
    platform = _platform(recipe)
    refusal = platform.refusal()
    if refusal is not None:
        fail(refusal)
        return 2
    import torch
    from torch.distributed.distributed_c10d import _get_default_store

    from megarl.failure import Failure
    from megarl.stages import StageBoard
    from megarl.watchdog import Watchdog
    from megarl.world import World, process_group

    work = _work(launch, resume)
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    local = int(os.environ.get("LOCAL_RANK", "0"))
    device = platform.device(local)
    board = StageBoard(int(os.environ.get("RANK", "0")))
    failure = Failure(terminal, board)
    failure.watch_signals()
    limits = recipe.world.stage_timeouts
    patience = _patience(recipe)
    with process_group(platform.backend, patience):
        world = World(mesh_of(recipe), device, patience, board)
        with (
            Watchdog(
                board,
                _get_default_store(),
                world.rank,
                world.size,
                lambda stage: limits.get(stage, recipe.world.timeout_seconds),
                failure.stuck,
            ),
            _settled(recipe, lock),  # before other ranks are gone, and torchrun ends this one
        ):
            code = work(world, failure)
    failure.leave_signals()
    return code


def _work(launch: Launch, resume: Resume | None) -> Callable[[World, Failure], int]:
    """What the launch does, with what it needs built around it; it returns the exit code.

    Everything is imported here, while ranks need not wait for one another yet.
    """
    from megarl.assemble import assembled
    from megarl.modes.assemble import assembled_to_score, assembled_to_train
    from megarl.modes.evaluate_alone import assembled_to_evaluate, evaluate_alone
    from megarl.modes.only import collect, train_sealed
    from megarl.modes.replay import replay
    from megarl.modes.score_again import score_again
    from megarl.run_outputs import mark_finished
    from megarl.train import train

    def work(world: World, failure: Failure) -> int:
        match launch.work:
            case Work.REPLAY:
                with assembled_to_train(launch, world, failure) as run:
                    return replay(run, launch)
            case Work.EVALUATE:
                with assembled_to_evaluate(launch, world, failure) as bench:
                    evaluate_alone(bench, launch)
            case Work.SCORE:
                with assembled_to_score(launch, world, failure) as (desk, tokens, pool):
                    score_again(desk, tokens, pool, launch)
            case Work.TRAIN:
                with assembled_to_train(launch, world, failure) as run:
                    train_sealed(run, launch)
                    mark_finished(run)
            case Work.ROLLOUT:
                with assembled(launch.recipe, world, failure, learns=False) as run:
                    collect(run)
                    mark_finished(run)
            case Work.LOOP:
                with assembled(launch.recipe, world, failure, resume) as run:
                    train(run)
                    mark_finished(run)
        return 0

    return work


def _patience(recipe: Recipe) -> float:
    """Seconds that a collective waits. Longer than any honest wait, which spans the stages of a
    slower rank up to the next collective: the watchdog comes first and can say who is stuck."""
    longest = max(recipe.world.timeout_seconds, *recipe.world.stage_timeouts.values(), 0.0)
    return 2 * longest + 30
