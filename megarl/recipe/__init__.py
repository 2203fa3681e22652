"""Recipes: YAML files → one frozen, checked `Recipe`, or one line that says what to change.

`python -m megarl.recipe RECIPE [key=value …]` checks a recipe and prints it resolved;
`--get KEY` prints one value, `--reference` the page docs/recipe.md. Needs no torch.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from megarl.recipe.algorithm import AlgorithmSection, DynamicSamplingSection, KlSection
from megarl.recipe.checks import refusals
from megarl.recipe.data import DataSection, EvalSection, SourceSection
from megarl.recipe.keys import key_table, nearest_key
from megarl.recipe.learning import (
    OnStatusSection,
    ParitySection,
    RewardSection,
    ScorerSection,
)
from megarl.recipe.reference import help_text, recipe_reference_markdown
from megarl.recipe.roles import CriticSection, ReferenceSection
from megarl.recipe.schema import Recipe
from megarl.recipe.sections import (
    ActorSection,
    CheckpointSection,
    ExperienceSection,
    ModelSection,
    ObserveSection,
    ResumeSection,
    RolloutSection,
    RunSection,
    WorldSection,
)
from megarl.recipe.source import RecipeError, Settings, apply_overrides, dotted, read_settings

__all__ = [
    "ActorSection",
    "AlgorithmSection",
    "CheckpointSection",
    "CriticSection",
    "DataSection",
    "DynamicSamplingSection",
    "EvalSection",
    "ExperienceSection",
    "KlSection",
    "ModelSection",
    "ObserveSection",
    "OnStatusSection",
    "ParitySection",
    "Recipe",
    "RecipeError",
    "ReferenceSection",
    "ResumeSection",
    "RewardSection",
    "RolloutSection",
    "RunSection",
    "ScorerSection",
    "SourceSection",
    "WorldSection",
    "help_text",
    "load_recipe",
    "recipe_of_tree",
    "recipe_reference_markdown",
]

# Keys in which `{seed}` stands for the seed.
MOST_TOLD = 5
"""Problems of a recipe that are told one by one."""
SEEDED_KEYS = (
    ("run", "name"),
    ("run", "folder"),
    ("model", "path"),
    ("data", "train"),
    ("data", "eval"),
    ("data", "template"),
    ("critic", "path"),
    ("reference", "path"),
    ("resume", "from"),
)


def load_recipe(path: Path | str, overrides: Sequence[str] = ()) -> Recipe:
    """Read a recipe with its `base` chain, apply `key=value` overrides, check all of it.

    Raises `RecipeError`: one line with `file:line` (or the override), the key and what to change.
    """
    path = Path(path)
    settings = read_settings(path)
    apply_overrides(settings, overrides)
    _refuse_unknown_keys(settings)
    _unset_sections(settings.data, Recipe)
    _name_run(settings, path)
    _fill_seed(settings)
    try:
        recipe = Recipe.model_validate_json(json.dumps(settings.data, default=str))
    except ValidationError as error:
        raise RecipeError(_problems(error, settings)) from error
    for keys, message in refusals(recipe):
        at = next((key for key in keys if settings.is_set(key.split("."))), keys[0])
        raise RecipeError(f"{settings.place(at.split('.'))}: {keys[0]}: {message}")
    return recipe


def recipe_of_tree(tree: Mapping[str, Any]) -> Recipe:
    """The recipe of a resolved tree, as `Recipe.model_dump(mode="json")` makes it.

    Keys that are younger than the tree get their defaults. Raises `RecipeError`, which does not say
    where the tree lies.
    """
    settings = Settings("recipe", dict(tree))
    _refuse_unknown_keys(settings)
    try:
        return Recipe.model_validate_json(json.dumps(settings.data))
    except ValidationError as error:
        raise RecipeError(_problems(error, settings)) from error


def _refuse_unknown_keys(settings: Settings) -> None:
    known = [row.key for row in key_table()]
    sections = {dotted(key.split(".")[:depth]) for key in known for depth in (1, 2, 3)}

    def walk(tree: dict[str, Any], path: tuple[str, ...]) -> None:
        for part, value in tree.items():
            here = dotted((*path, part))
            if here not in sections:
                near = nearest_key(here, sorted(sections))
                hint = f"; did you mean {near}?" if near else "; see --help for the keys"
                place = settings.place((*path, part))
                raise RecipeError(f"{place}: {here}: unknown key{hint}")
            if isinstance(value, dict) and any(key.startswith(here + ".") for key in known):
                walk(value, (*path, part))

    walk(settings.data, ())


def _unset_sections(tree: dict[str, Any], model: type[BaseModel]) -> None:
    """A section that is given as nothing has its defaults, whatever a base said."""
    for field, info in model.model_fields.items():
        name, kind = info.alias or field, info.annotation
        if not isinstance(kind, type) or not issubclass(kind, BaseModel):
            continue
        if isinstance(tree.get(name), dict):
            _unset_sections(tree[name], kind)
        elif name in tree and tree[name] is None and not info.is_required():
            del tree[name]


def _name_run(settings: Settings, path: Path) -> None:
    run = settings.data.setdefault("run", {})
    if isinstance(run, dict) and run.get("name") is None:
        run["name"] = f"{path.stem}-s{{seed}}"


def _fill_seed(settings: Settings) -> None:
    seed = settings.data.get("seed", Recipe.model_fields["seed"].default)
    for section, key in SEEDED_KEYS:
        table = settings.data.get(section)
        if not isinstance(table, dict):
            continue
        if isinstance(table.get(key), str):
            table[key] = table[key].replace("{seed}", str(seed))
        for source in table[key] if isinstance(table.get(key), list) else ():  # data's sources
            if isinstance(source, dict) and isinstance(source.get("path"), str):
                source["path"] = source["path"].replace("{seed}", str(seed))


def _problems(error: ValidationError, settings: Settings) -> str:
    """Pydantic's complaints as our one line."""
    problems = error.errors(include_url=False)
    first = tuple(problems[0]["loc"])
    # A list with a bad entry is also reported as too short: that is no second problem.
    others = [other for other in problems[1:] if other["loc"] != first[: len(other["loc"])]]
    told = [_problem(problem, settings) for problem in [problems[0], *others[: MOST_TOLD - 1]]]
    rest = len(others) + 1 - len(told)
    return "; ".join(told) + (f"; and {rest} more" if rest else "")


def _problem(problem: Mapping[str, Any], settings: Settings) -> str:
    path = tuple(part for part in problem["loc"] if part != "[key]")
    given = problem["input"]
    match problem["type"]:
        case "missing":
            text = "this key is required and not set"
        case "extra_forbidden":
            text = "unknown key"
        case "tuple_type" if path in (("data", "train"), ("data", "eval")):
            text = f"must be a path or a list of sources, got {_shown(given)}"
        case kind:
            text = _complaint(kind, problem["msg"], problem.get("ctx", {}))
            text += f", got {_shown(given)}"
    return f"{settings.place(path)}: {dotted(path)}: {text}"


def _complaint(kind: str, message: str, context: dict[str, Any]) -> str:
    plain = {
        "model_type": "a section of keys",
        "tuple_type": "a list",
        "string_type": "text",
        "bool_type": "true or false",
    }
    if kind in plain:
        return f"must be {plain[kind]}"
    if kind == "too_short":
        return f"must have at least {context['min_length']} entry"
    if kind == "literal_error":
        return f"must be {context['expected']}"
    if message.startswith("Input should be a valid "):
        wanted = message.removeprefix("Input should be a valid ")
        return f"must be {'an' if wanted[0] in 'aeiou' else 'a'} {wanted}"
    if message.startswith("Input should "):
        return "must " + message.removeprefix("Input should ")
    return message[0].lower() + message[1:]


def _shown(value: Any) -> str:
    text = "nothing" if value is None else json.dumps(value, default=str)
    return text if len(text) <= 60 else text[:57] + "…"


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m megarl.recipe", description=__doc__)
    parser.add_argument("recipe", nargs="?", help="recipe file")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings over it")
    parser.add_argument("--get", metavar="KEY", help="print one resolved value")
    parser.add_argument("--reference", action="store_true", help="print docs/recipe.md")
    options = parser.parse_args(arguments)
    if options.reference:
        print(recipe_reference_markdown(), end="")
        return 0
    if options.recipe is None:
        parser.error("name a recipe file, for example recipes/quickstart.yaml")
    try:
        recipe = load_recipe(options.recipe, options.overrides)
        print(_value(recipe, options.get) if options.get else recipe.resolved_yaml(), end="\n")
    except RecipeError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def _value(recipe: Recipe, key: str) -> Any:
    value: Any = recipe
    for part in key.split("."):
        fields = type(value).model_fields if isinstance(value, BaseModel) else {}
        named = {info.alias or name: name for name, info in fields.items()}
        if part not in named:
            raise RecipeError(f"--get {key}: unknown key; see --help for the keys")
        value = getattr(value, named[part])
    return value
