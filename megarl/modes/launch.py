"""What a launch does: the whole loop, one part of it, or a sealed iteration once more.

Read from the command line before anything slow is imported; needs no torch.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megarl.checkpoint.segments import segment_of, segments_of
from megarl.experience.manifest import sealed_iterations
from megarl.recipe import Recipe, RecipeError, load_recipe
from megarl.recipe.differences import update_differences

if TYPE_CHECKING:
    from megarl.evaluation.arguments import Asked

RECIPE_FILE = "recipe.yaml"

MODES_HELP = """
Parts of the loop, and iterations once more. RUN is a run's folder, or its name in run.folder:

  --replay RUN@N          redo the update of RUN's iteration N from its sealed facts, in this
                          recipe's layout, and compare loss, gradient norm and weights with what
                          was recorded; exit code 0 within tolerance, 1 beyond it
  --only rollout          sample, score and seal run.iterations iterations; nothing is updated
  --only score --from RUN[@A-B]
                          score RUN's sealed samples again, by this recipe's reward, in a new run
  --only train --from RUN[@A-B] [--from RUN2 …]
                          train on sealed samples, each iteration once; nothing is generated

  bash launch/grpo.sh runs/NAME/recipe.yaml --replay NAME@3 actor.tp=1
  bash launch/grpo.sh RECIPE run.name=again --only score --from NAME

Held-out evaluation of a checkpoint or a model folder by itself: python -m megarl.evaluate --help
"""


class Work(StrEnum):
    """What one launch does."""

    LOOP = "loop"
    ROLLOUT = "rollout"
    SCORE = "score"
    TRAIN = "train"
    REPLAY = "replay"
    EVALUATE = "evaluate"

    @property
    def reads_sealed(self) -> bool:
        """Starts from the sealed experience of other runs, instead of generating its own."""
        return self in (Work.SCORE, Work.TRAIN, Work.REPLAY)


@dataclass(frozen=True, slots=True)
class Source:
    """One sealed iteration of an earlier run."""

    run: Path
    iteration: int

    def __str__(self) -> str:
        return f"{self.run}@{self.iteration}"


@dataclass(frozen=True)
class Launch:
    """A launch, checked: `sources` are sealed and in the order in which they are used."""

    recipe: Recipe
    work: Work = Work.LOOP
    sources: tuple[Source, ...] = ()
    what_if: tuple[str, ...] = ()
    """For a replay: keys that the command line set so that the update computes something else than
    the run's did, as `key=value (run: value)`."""
    evaluation: Asked | None = None
    """For an evaluation by itself: what it is of, and where it writes."""


OPTIONS = {
    "--replay": "RUN@N, a run and the iteration to redo",
    "--only": "rollout, score or train",
    "--from": "RUN or RUN@A-B, a run and which of its iterations",
}


def read_launch(arguments: Sequence[str]) -> Launch:
    """The launch that a command line asks for.

    Raises `RecipeError` in one line: for an unknown option, two modes at once, a recipe that cannot
    be used, something that is no run, an iteration that is not sealed or that retention dropped.
    """
    given, plain = _split(arguments)
    work = _work(given)
    if not plain:
        raise RecipeError("name a recipe file, for example recipes/quickstart.yaml")
    path, overrides = plain[0], plain[1:]
    recipe = load_recipe(path, overrides)
    overridden = frozenset(text.partition("=")[0].strip() for text in overrides)
    if not work.reads_sealed:
        return Launch(recipe, work)
    option = "--replay" if work is Work.REPLAY else "--from"
    sources = tuple(_sources(option, given[option], Path(recipe.run.folder)))
    if work is Work.REPLAY:
        if "run.name" not in overridden:
            last = sources[-1]
            name = f"{last.run.resolve().name}.replay-{last.iteration}"
            recipe = load_recipe(path, [*overrides, f"run.name={name}"])
        return Launch(recipe, work, sources, tuple(_what_if(recipe, sources, overridden)))
    if "run.iterations" in overridden and recipe.run.iterations != len(sources):
        raise RecipeError(
            f"override run.iterations={recipe.run.iterations}: --from names {len(sources)} sealed "
            "iterations, each is used once; leave run.iterations out"
        )
    recipe = load_recipe(path, [*overrides, f"run.iterations={len(sources)}"])
    if work is Work.TRAIN:
        _check_constants(recipe)
    return Launch(recipe, work, sources)


def _check_constants(recipe: Recipe) -> None:
    """Raises `RecipeError` for keys that would follow the policy that learns: what is sealed stays
    as the policy that sampled made it."""
    if recipe.algorithm.kl.target is not None:
        raise RecipeError(
            "algorithm.kl.target: --only train has sealed KL of another policy only, which cannot "
            "steer β; add algorithm.kl.target="
        )
    if recipe.reference.refresh_every:
        raise RecipeError(
            "reference.refresh_every: --only train takes sealed reference log-probs, which nothing "
            "refreshes; add reference.refresh_every=0"
        )


def _what_if(
    recipe: Recipe, sources: Sequence[Source], overridden: Collection[str]
) -> Iterator[str]:
    """Differences that were asked for; raises `RecipeError` for those that were not, and where the
    run was resumed with a recipe that computes another update: a replay has one."""
    run = sources[-1].run
    made = segments_of(run)
    firsts: dict[Path, int] = {}
    for source in sources:
        firsts.setdefault(segment_of(made, source.iteration).recipe, source.iteration)
    ran = [(path, load_recipe(path)) for path in firsts]
    for (before, old), (after, new) in pairwise(ran):
        changed = _but(update_differences(new, old), overridden)
        if changed:
            first = firsts[after]
            raise RecipeError(
                f"--replay {sources[-1]}: the run was resumed at iteration {first} with another "
                f"recipe, {_told(changed, 'before')}, and a replay has one; replay an iteration "
                f"before {first} with {before}, or ask for one value as key=value"
            )
    differences: dict[str, tuple[Any, Any]] = {}
    for _, then in ran:
        differences |= update_differences(recipe, then)
    silent = _but(differences, overridden)
    if silent:
        raise RecipeError(
            f"the recipe would compute another update than {run} did: {_told(silent, 'run')}; "
            f"replay with {ran[-1][0]}, or ask for a difference as key=value"
        )
    for key, (mine, theirs) in differences.items():
        yield f"{key}={mine} (run: {theirs})"


def _but(
    differences: Mapping[str, tuple[Any, Any]], keys: Collection[str]
) -> dict[str, tuple[Any, Any]]:
    return {key: pair for key, pair in differences.items() if key not in keys}


def _told(differences: Mapping[str, tuple[Any, Any]], whose: str) -> str:
    """The first ones, as `key value (whose: value)`."""
    pairs = list(differences.items())
    told = ", ".join(f"{key} {mine} ({whose}: {theirs})" for key, (mine, theirs) in pairs[:5])
    return told + (f" and {len(pairs) - 5} more" if len(pairs) > 5 else "")


def _check_begun(text: str, run: Path) -> None:
    """A replay starts from the model folder's weights."""
    start = segments_of(run)[0].start
    if start is not None and start.iteration > 0:
        raise RecipeError(
            f"--replay {text}: {run} began at iteration {start.iteration} with the weights of "
            f"{start.checkpoint}, and a replay begins with the model folder's; replay the run that "
            "saved them, or make this run's numbers again with tools/audit.py recompute"
        )


def sealed_numbers(run: Path) -> list[int]:
    """Iterations of a run whose manifest is there, rising."""
    return list(sealed_iterations(run))


def _split(arguments: Sequence[str]) -> tuple[dict[str, list[str]], list[str]]:
    """(values by option, the rest)."""
    given: dict[str, list[str]] = {name: [] for name in OPTIONS}
    plain: list[str] = []
    rest = iter(arguments)
    for argument in rest:
        name, equals, value = argument.partition("=")
        if name in OPTIONS:
            value = value if equals else next(rest, "")
            if not value or value.startswith("-"):
                raise RecipeError(f"{name} needs {OPTIONS[name]}")
            given[name].append(value)
        elif argument.startswith("-"):
            raise RecipeError(f"unknown option {argument}; options are {', '.join(OPTIONS)}")
        else:
            plain.append(argument)
    return given, plain


def _work(given: dict[str, list[str]]) -> Work:
    replays, parts, sources = given["--replay"], given["--only"], given["--from"]
    if len(replays) + len(parts) > 1:
        told = [f"--replay {text}" for text in replays] + [f"--only {text}" for text in parts]
        raise RecipeError(f"one mode at a time: {' and '.join(told)}; start two launches")
    if parts and parts[0] not in (Work.ROLLOUT, Work.SCORE, Work.TRAIN):
        raise RecipeError(f"--only {parts[0]}: there is no such part; use {OPTIONS['--only']}")
    work = Work.REPLAY if replays else Work(parts[0]) if parts else Work.LOOP
    if work in (Work.SCORE, Work.TRAIN) and not sources:
        raise RecipeError(f"--only {work} needs --from {OPTIONS['--from']}")
    if work is Work.SCORE and len(sources) > 1:
        raise RecipeError("--only score takes one --from: its iterations keep their numbers")
    if sources and work not in (Work.SCORE, Work.TRAIN):
        raise RecipeError(f"--from {sources[0]} goes with --only score or --only train")
    return work


def _sources(option: str, given: Iterable[str], runs: Path) -> list[Source]:
    found: list[Source] = []
    for text in given:
        name, at, numbers = text.partition("@")
        run = _find_run(option, text, name, runs)
        if option == "--replay":
            last = _number(option, text, numbers)
            _check_begun(text, run)
            wanted = list(range(last + 1))
            why = f"; the weights before iteration {last} come from replaying those before it"
        elif at:
            first, dash, last_text = numbers.partition("-")
            start = _number(option, text, first)
            stop = _number(option, text, last_text) if dash else start
            if stop < start:
                raise RecipeError(f"{option} {text}: {stop} lies before {start}")
            wanted, why = list(range(start, stop + 1)), ""
        else:
            wanted, why = sealed_numbers(run), ""
            if not wanted:
                raise RecipeError(f"{option} {text}: {run} has no sealed experience")
        _check_sealed(option, text, run, wanted, why)
        found += [Source(run, number) for number in wanted]
    seen: set[tuple[Path, int]] = set()
    for source in found:
        place = (source.run.resolve(), source.iteration)
        if place in seen:
            raise RecipeError(f"{option}: {source} is named twice; each experience is used once")
        seen.add(place)
    return found


def _find_run(option: str, text: str, name: str, runs: Path) -> Path:
    for folder in (Path(name), runs / name):
        if name and (folder / RECIPE_FILE).is_file():
            return folder
    raise RecipeError(
        f"{option} {text}: {name or 'nothing'} is no run: neither {name or 'it'} nor {runs / name} "
        f"holds {RECIPE_FILE}; give a run's folder, or its name in {runs}"
    )


def _number(option: str, text: str, number: str) -> int:
    if not (number.isascii() and number.isdigit()):
        form = "RUN@N" if option == "--replay" else "RUN, RUN@N or RUN@A-B"
        raise RecipeError(f"{option} {text}: write {form}, iterations are whole numbers from 0")
    return int(number)


def _check_sealed(option: str, text: str, run: Path, wanted: Sequence[int], why: str) -> None:
    sealed = set(sealed_numbers(run))
    missing = [number for number in wanted if number not in sealed]
    if not missing:
        return
    first = wanted[-1] if wanted[-1] not in sealed else missing[0]
    experience = load_recipe(run / RECIPE_FILE).experience
    dropped = experience.keep is not None and first < max(sealed, default=-1)
    reason = (
        f"was dropped by retention (experience.keep {experience.keep}, keep_every "
        f"{experience.keep_every})"
        if dropped
        else "is not sealed"
    )
    have = f"{spans(sealed)} are" if sealed else "none is"
    more = why if first < wanted[-1] else ""
    raise RecipeError(f"{option} {text}: iteration {first} of {run} {reason}, {have}{more}")


def spans(numbers: Iterable[int]) -> str:
    """`{0, 1, 2, 5}` → `0-2, 5`."""
    told: list[list[int]] = []
    for number in sorted(numbers):
        if told and number == told[-1][-1] + 1:
            told[-1] = [told[-1][0], number]
        else:
            told.append([number])
    return ", ".join("-".join(map(str, span)) for span in told)
