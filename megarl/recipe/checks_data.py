"""Cross-checks of the keys about prompts, rewards and evaluation.

As in `checks.py`, a check yields `(keys, message)` for what it refuses. What files hold is checked
where they are read.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from megarl.recipe.data import Sources
from megarl.recipe.keys import nearest_key
from megarl.recipe.learning import ScorerSection
from megarl.recipe.schema import Recipe
from megarl.rewards.scorer import BUILT_IN

Refusal = tuple[tuple[str, ...], str]

TAKEN = frozenset({"mean", "std", "min", "max", "unscored", "penalised", "shaped_mean", "source"})
"""What follows `reward/` in other metrics than a component's."""


def data_refusals(recipe: Recipe) -> Iterator[Refusal]:
    """Everything that the keys about prompts, rewards and evaluation refuse about each other."""
    yield from _names("data.train", recipe.data.training)
    yield from _weights(recipe)
    if recipe.data.eval is not None:
        yield from _names("data.eval", recipe.data.held_out)
    yield from _curriculum(recipe)
    yield from _reward(recipe)
    yield from _scorers("reward.scorers", recipe.reward.scorers)
    yield from _scorers("eval.probes", recipe.eval.probes)
    yield from _eval(recipe)


def _names(key: str, sources: Sources) -> Iterator[Refusal]:
    names = [source.name for source in sources]
    for index, name in enumerate(names):
        if name in names[:index]:
            yield (
                (f"{key}.{index}.name", f"{key}.{index}"),
                f"two sources are called {name}, and their rows could not be told apart; give "
                "each a name of its own",
            )
        for part, text in (("name", name), ("reward", sources[index].reward)):
            if text is not None and not text.isprintable():
                yield (
                    (f"{key}.{index}.{part}",),
                    f"{text!r} has a character that does not print, and metrics are named after "
                    "it; leave it out",
                )


def _weights(recipe: Recipe) -> Iterator[Refusal]:
    given = [source.weight is not None for source in recipe.data.train]
    if any(given) and not all(given):
        yield (
            (f"data.train.{given.index(False)}.weight", f"data.train.{given.index(False)}"),
            "the other sources have weights and this one has none; give all of them one, or none",
        )
    for index, source in enumerate(recipe.data.eval or ()):
        if source.weight is not None:
            yield (
                (f"data.eval.{index}.weight",),
                "held-out prompts are not drawn, all of them are evaluated; leave weight out",
            )
    for key in ("train", "eval"):
        for index, source in enumerate(getattr(recipe.data, key) or ()):
            reward_key = source.reward_key or recipe.data.reward_key
            if source.reward is not None and reward_key is not None:
                yield (
                    (f"data.{key}.{index}.reward",),
                    f"the rows say their rewards themselves, in {reward_key} (reward_key); keep "
                    "one of the two",
                )


def _curriculum(recipe: Recipe) -> Iterator[Refusal]:
    name = recipe.data.curriculum
    if name is not None and ":" not in name and "." not in name:
        yield (
            ("data.curriculum",),
            f"there is no curriculum {name}; name your function as import.path:function",
        )


def _reward(recipe: Recipe) -> Iterator[Refusal]:
    reward = recipe.reward
    for status in ("timeout", "error"):
        if getattr(reward.on_status, status) == "penalty" and reward.penalty is None:
            yield (
                (f"reward.on_status.{status}",),
                "the rule penalty needs a number; set reward.penalty or choose drop, retry or stop",
            )
    for index, scorer in enumerate(reward.scorers):
        if scorer.at_least is not None and reward.violated is None:
            yield (
                (f"reward.scorers.{index}.at_least", "reward.violated"),
                "at_least needs the total of a response that falls below it; set reward.violated",
            )
    if reward.violated is not None and all(item.at_least is None for item in reward.scorers):
        yield (
            ("reward.violated",),
            "no scorer has at_least, so no response gets this total; give one at_least or leave "
            "reward.violated out",
        )
    if all(scorer.weight == 0 for scorer in reward.scorers):
        yield (
            ("reward.scorers",),
            "every scorer has weight 0, so every reward is 0; give one a weight",
        )


def _scorers(key: str, scorers: Sequence[ScorerSection]) -> Iterator[Refusal]:
    titles = [scorer.title for scorer in scorers]
    for index, scorer in enumerate(scorers):
        own = ":" in scorer.name
        if not own and scorer.name not in BUILT_IN:
            near = nearest_key(scorer.name, list(BUILT_IN))
            hint = f"did you mean {near}? " if near else ""
            yield (
                (f"{key}.{index}.name",),
                f"there is no scorer {scorer.name}; {hint}built in are {', '.join(BUILT_IN)}, an "
                "own function is named import.path:function",
            )
        if titles[index] in titles[:index]:
            yield (
                (f"{key}.{index}.name", f"{key}.{index}.component"),
                f"scorer {scorer.name} is listed twice as {titles[index]}, its records could not "
                "be told apart; keep one, or give it another `component`",
            )
        if titles[index] in TAKEN:
            yield (
                (f"{key}.{index}.component", f"{key}.{index}.name"),
                f"reward/{titles[index]} is the name of another metric; give the scorer another "
                "`component`",
            )
        if "/" in titles[index]:
            yield (
                (f"{key}.{index}.component",),
                f"{titles[index]!r} has a slash, which separates the parts of a metric's name; "
                "leave it out",
            )
        if scorer.batch > 1 and not own:
            yield (
                (f"{key}.{index}.batch",),
                f"{scorer.name} scores one response at a time; leave batch out",
            )
        if len(set(scorer.only)) < len(scorer.only):
            yield (f"{key}.{index}.only",), "a reward name is listed twice; keep one"


def _eval(recipe: Recipe) -> Iterator[Refusal]:
    section = recipe.eval
    most = max(section.pass_at, default=1)
    if most > section.samples:
        yield (
            ("eval.pass_at", "eval.samples"),
            f"pass@{most} needs at least {most} sampled responses to a prompt; set eval.samples "
            f"to {most} or more",
        )
    if len(set(section.pass_at)) < len(section.pass_at):
        yield ("eval.pass_at",), "a number is listed twice; keep one"
    if not section.sampled:
        # A base recipe may have set it: then its default must be given.
        for key, plain in (("samples", "1"), ("temperature", "null")):
            value = getattr(section, key)
            if value != type(section).model_fields[key].default:
                yield (
                    (f"eval.{key}",),
                    "with eval.sampled false nothing is sampled; set eval.sampled=true, or leave "
                    f"it out (eval.{key}={plain} where a base recipe has it)",
                )
    for index, probe in enumerate(section.probes):
        if probe.at_least is not None or probe.weight != 1.0:
            yield (
                (f"eval.probes.{index}.at_least", f"eval.probes.{index}.weight"),
                "a probe is told by itself and never part of a reward; leave weight and at_least "
                "out",
            )
    titles = {scorer.title for scorer in recipe.reward.scorers}
    sampled = {f"{probe.title}_sampled" for probe in section.probes if section.sampled}
    for index, probe in enumerate(section.probes):
        if probe.title in sampled:
            yield (
                (f"eval.probes.{index}.component", f"eval.probes.{index}.name"),
                f"eval/probe/{probe.title} is what probe {probe.title.removesuffix('_sampled')} "
                "says of sampled responses; give one of them another `component`",
            )
        if probe.title in titles:
            yield (
                (f"eval.probes.{index}.name",),
                f"{probe.title} is a component of the reward already; give the probe another "
                "`component`",
            )
