"""The command line of an evaluation by itself. Imports no torch."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megarl.evaluation.targets import OPTION, EvaluationError, Target, find_targets
from megarl.modes.launch import Launch, Work
from megarl.recipe import Recipe, load_recipe

USAGE = """usage: python -m megarl.evaluate RECIPE [key=value …] [--checkpoint WHAT …]
       [--out FOLDER] [--overwrite] [--json]

Evaluates weights on the recipe's held-out prompts (data.eval) as training does on the way: greedy
and sampled accuracy, pass@k, probes, each with an interval. It starts the recipe's ranks on this
machine itself; any layout may read any checkpoint.

  --checkpoint WHAT  a run's folder, or its name in run.folder: its newest whole checkpoint;
                     runs/NAME/checkpoints/iter_N; a Hugging Face folder (runs/NAME/hf, exports/…)
                     of the recipe's architecture. Several: one after the other, and a comparison.
                     Without it: model.path, the model that training would begin from
  --out FOLDER       where files go; otherwise <run.folder>/<run.name>.eval-<what>
  --overwrite        sets an evaluation that lies there aside
  --json             the last line of standard output is one JSON object: results.json
  RECIPE             a YAML file; a run's own is runs/NAME/recipe.yaml

  python -m megarl.evaluate recipes/quickstart.yaml
  python -m megarl.evaluate recipes/quickstart.yaml --checkpoint quickstart-s1 eval.samples=8 \\
    'eval.pass_at=[1, 8]'
  python -m megarl.evaluate runs/mine/recipe.yaml --checkpoint mine --checkpoint runs/mine/hf
  python -m megarl.evaluate runs/mine/recipe.yaml --checkpoint mine world.ranks=1 actor.tp=1

  data.eval, eval.max_prompts    which prompts; data.train is not read
  eval.samples, eval.pass_at, eval.temperature, eval.confidence, eval.solved_at, eval.probes
                                 what is sampled, estimated and asked: docs/evaluation.md
  world, actor, rollout          the layout: docs/recipe.md

Also: torchrun --nproc_per_node N -m megarl.evaluate RECIPE …, or N processes with RANK,
WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT set. Exit codes: 0 done, 1 failed, 2 an input
that cannot be used, 128 + n ended by signal n.
"""


@dataclass(frozen=True)
class Asked:
    """What an evaluation by itself is to do."""

    recipe: Recipe
    """As it was given; the launch's own has its run folder where the evaluation writes."""
    targets: tuple[Target, ...]
    overwrite: bool
    json: bool

    def explicit(self, arguments: Sequence[str], folder: Path) -> list[str]:
        """The same command line, with every place as it was found: `folder` is where it writes."""
        plain, _, _, flags = split(arguments)
        # What is not named stays so: the recipe's own model needs no option.
        named = [f"{OPTION}={target.path}" for target in self.targets if target.named]
        return [*plain, *named, f"--out={folder}", *sorted(flags)]

    def out(self, given: str | None) -> Path:
        """Where it writes."""
        if given is not None:
            return Path(given)
        more = f"+{len(self.targets) - 1}" if len(self.targets) > 1 else ""
        name = f"{self.recipe.run.name}.eval-{self.targets[0].label}{more}"
        return Path(self.recipe.run.folder) / name


def read_evaluation(arguments: Sequence[str]) -> Launch:
    """The launch that a command line of `USAGE` asks for.

    Raises `InputError` in one line: an unknown option, a recipe that cannot be used or has no
    held-out prompts, and what `find_targets` raises.
    """
    plain, named, out, flags = split(arguments)
    if not plain:
        raise EvaluationError("name a recipe file, for example recipes/quickstart.yaml")
    recipe = load_recipe(plain[0], plain[1:])
    if recipe.data.eval is None:
        raise EvaluationError(
            f"{plain[0]}: data.eval is not set, there are no held-out prompts; set data.eval=FILE"
        )
    targets = find_targets(named, recipe)
    asked = Asked(recipe, targets, "--overwrite" in flags, "--json" in flags)
    folder = asked.out(out).absolute()
    place = [f"run.folder={json.dumps(str(folder.parent))}", f"run.name={json.dumps(folder.name)}"]
    return Launch(load_recipe(plain[0], [*plain[1:], *place]), Work.EVALUATE, evaluation=asked)


def split(arguments: Sequence[str]) -> tuple[list[str], list[str], str | None, set[str]]:
    """(recipe and overrides, what is evaluated, where files go, flags); raises `InputError`."""
    plain: list[str] = []
    given: dict[str, list[str]] = {OPTION: [], "--out": []}
    flags: set[str] = set()
    rest = iter(arguments)
    for argument in rest:
        name, equals, value = argument.partition("=")
        if name in given:
            value = value if equals else next(rest, "")
            if not value or value.startswith("-"):
                raise EvaluationError(f"{name} needs a value; see python -m megarl.evaluate --help")
            given[name].append(value)
        elif argument in ("--overwrite", "--json"):
            flags.add(argument)
        elif argument.startswith("-"):
            raise EvaluationError(
                f"unknown option {argument}; options are {OPTION}, --out, --overwrite, --json"
            )
        else:
            plain.append(argument)
    if len(given["--out"]) > 1:
        raise EvaluationError("--out is given twice; all checkpoints of one launch share a folder")
    return plain, given[OPTION], next(iter(given["--out"]), None), flags
