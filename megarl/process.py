"""The process boundary of a rank: arguments in, exit code out, one clear line when it fails.

Exit codes: 0 done, 1 failed, 2 wrong arguments or recipe, 130 interrupted.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from megarl.observe.logs import captured, fail
from megarl.recipe import Recipe, RecipeError, load_recipe
from megarl.recipe_reference import help_text

USAGE = """usage: python -m megarl.train RECIPE [key=value …]

Trains as RECIPE (a YAML file) says; key=value overrides any of its keys. This is one rank; for
the recipe's number of ranks on this machine: bash launch/grpo.sh RECIPE [key=value …]

  python -m megarl.train recipes/quickstart.yaml world.ranks=1 actor.tp=1
  bash launch/grpo.sh recipes/quickstart.yaml seed=2 rollout.group_size=16
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Train on this rank of torchrun's world, or as a world of one."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or {"-h", "--help"} & set(arguments):
        print(USAGE + "\n" + help_text())
        return 0 if arguments else 2
    try:
        recipe = load_recipe(arguments[0], arguments[1:])
        _check_world(recipe)
        _prepare_folder(recipe)
    except RecipeError as error:
        fail(str(error))
        return 2
    rank = int(os.environ.get("RANK", "0"))
    with captured(recipe.run_folder / "logs" / f"rank_{rank}.log", rank):
        _run(recipe)
    return 0


def _check_world(recipe: Recipe) -> None:
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if ranks != recipe.world.ranks:
        raise RecipeError(
            f"world.ranks is {recipe.world.ranks}, but {ranks} rank(s) were started; use "
            f"`bash launch/grpo.sh`, or torchrun --nproc_per_node {recipe.world.ranks}, "
            f"or set world.ranks={ranks}"
        )


def _prepare_folder(recipe: Recipe) -> None:
    """On rank 0, before the slow imports: refuse to write over a run that lies there."""
    if os.environ.get("RANK", "0") != "0":
        return
    from megarl.run_folder import open_folder

    open_folder(recipe)


def _run(recipe: Recipe) -> None:
    import torch

    from megarl.assemble import assembled, mesh_of
    from megarl.train import train
    from megarl.world import World, process_group

    if recipe.world.device == "cuda" and not torch.cuda.is_available():
        raise RecipeError(
            "world.device is cuda, but torch sees no GPU here; set world.device=cpu, "
            "or install a CUDA build of torch and check nvidia-smi"
        )
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    local = int(os.environ.get("LOCAL_RANK", "0"))
    device = torch.device("cuda", local) if recipe.world.device == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    with process_group(device.type, recipe.world.timeout_seconds):
        world = World(mesh_of(recipe), device, recipe.world.timeout_seconds)
        with assembled(recipe, world) as run:
            try:
                train(run)
            except BaseException as error:
                run.record_failure(error)
                raise
            run.mark_finished()
