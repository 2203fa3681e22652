"""Cross-checks of the keys about learning: algorithm, optimizers, critic and reference.

As in `checks.py`, a check yields `(keys, message)` for what it refuses. A key that another choice
leaves unread is refused: nothing that a recipe says is passed over in silence.
"""

from __future__ import annotations

from collections.abc import Iterator

from megarl.recipe.algorithm import ESTIMATORS, OBJECTIVES, AlgorithmSection
from megarl.recipe.roles import LAYOUT_KEYS, CriticSection, ReferenceSection
from megarl.recipe.schema import Recipe
from megarl.recipe.sections import ActorSection

Refusal = tuple[tuple[str, ...], str]


def learning_refusals(recipe: Recipe) -> Iterator[Refusal]:
    """Everything that the keys about learning refuse about each other."""
    yield from _estimator(recipe)
    yield from _groups(recipe)
    yield from _unread(recipe)
    yield from _shaping(recipe)
    yield from _kl(recipe)
    yield from _process(recipe)
    yield from _routers(recipe)
    yield from _critic(recipe)
    if recipe.actor_steps:
        yield from _optimizer("actor", recipe.actor, recipe.actor_steps)
    yield from _reference(recipe)


def learning_notes(recipe: Recipe) -> Iterator[str]:
    """What a recipe may say and a person would want to be told of."""
    algorithm = recipe.algorithm
    if not recipe.actor_steps:
        yield (
            f"critic.warmup_iterations {recipe.critic.warmup_iterations} covers the whole run: the "
            "actor does not learn"
        )
    if algorithm.kl_in_loss and algorithm.kl.estimator == "k1":
        yield (
            "algorithm.kl.estimator k1 in the loss has an expected gradient of 0: it regularises "
            "nothing; k2 or k3 do"
        )


def _estimator(recipe: Recipe) -> Iterator[Refusal]:
    algorithm = recipe.algorithm
    for key, name, built_in in (
        ("algorithm.advantage", algorithm.advantage, ESTIMATORS),
        ("algorithm.objective", algorithm.objective, OBJECTIVES),
    ):
        if name not in built_in and ":" not in name and "." not in name:
            yield (
                (key,),
                f"there is no {name}; built in are {', '.join(built_in)}, an own function is named "
                "import.path:function",
            )
    if algorithm.advantage == "gae" and algorithm.name != "ppo":
        yield (
            ("algorithm.advantage", "algorithm.name"),
            "gae needs a critic's values; set algorithm.name to ppo, or choose another estimator",
        )
    if algorithm.name == "ppo" and algorithm.advantage in ESTIMATORS[:-1]:
        yield (
            ("algorithm.advantage", "algorithm.name"),
            f"{algorithm.advantage} reads no values, so the critic of ppo would be learnt for "
            "nothing; set algorithm.name to grpo, or algorithm.advantage to gae",
        )


def _groups(recipe: Recipe) -> Iterator[Refusal]:
    rollout, algorithm = recipe.rollout, recipe.algorithm
    minibatches = algorithm.minibatches
    if rollout.group_size < 2 and algorithm.group_relative:
        yield (
            ("rollout.group_size",),
            f"{algorithm.advantage} compares the responses of one prompt, a single one would "
            "always have advantage 0; set rollout.group_size to 2 or more",
        )
    elif rollout.group_size < 2 and algorithm.zero_variance == "drop":
        yield (
            ("algorithm.zero_variance", "rollout.group_size"),
            "a group of one always has equal rewards, so every sample would be dropped; set it to "
            "keep, or rollout.group_size to 2 or more",
        )
    if algorithm.minibatch_groups == "whole" and minibatches > rollout.prompts_per_iteration:
        yield (
            ("algorithm.minibatches", "rollout.prompts_per_iteration"),
            f"{minibatches} minibatches cannot be made of {rollout.prompts_per_iteration} whole "
            f"groups; set algorithm.minibatches to {rollout.prompts_per_iteration} or less, or "
            "raise rollout.prompts_per_iteration",
        )
    samples = rollout.prompts_per_iteration * rollout.group_size
    if minibatches > samples:
        yield (
            ("algorithm.minibatches", "rollout.group_size"),
            f"{minibatches} minibatches cannot be made of {samples} samples (prompts_per_iteration "
            "× group_size); lower it",
        )


def _unread(recipe: Recipe) -> Iterator[Refusal]:
    """Settings of one choice where another one is made."""
    algorithm = recipe.algorithm
    estimator, objective = algorithm.advantage, algorithm.objective
    readers = (
        ("group_std", estimator, ("grpo",), ESTIMATORS),
        ("advantage_eps", estimator, ("grpo",), ESTIMATORS),
        ("gae", estimator, ("gae",), ESTIMATORS),
        ("gamma", estimator, ("gae", "reinforce"), ESTIMATORS),
        ("dual_clip", objective, ("ppo_clip",), OBJECTIVES),
    )
    for name, chosen, reading, built_in in readers:
        plain = AlgorithmSection.model_fields[name].default
        # An own function may read whatever it likes.
        if chosen in built_in and chosen not in reading and getattr(algorithm, name) != plain:
            unset = f"algorithm.{name}=" if name in ("gae", "dual_clip") else f"set {plain}"
            yield (
                (f"algorithm.{name}",),
                f"{chosen} does not read it, only {' and '.join(reading)}; leave it out ({unset})",
            )
    if (
        algorithm.group_std == "none"
        and algorithm.advantage_eps != AlgorithmSection.model_fields["advantage_eps"].default
    ):
        yield (
            ("algorithm.advantage_eps", "algorithm.group_std"),
            "nothing is divided with group_std none; leave it out",
        )
    if algorithm.target_kl is not None and algorithm.steps_per_iteration == 1:
        yield (
            ("algorithm.target_kl", "algorithm.epochs"),
            "the first step of an iteration has a KL of exactly 0, and there is only this one; "
            "leave it out, or take more minibatches or epochs",
        )


def _shaping(recipe: Recipe) -> Iterator[Refusal]:
    """Of long responses, and of the gap between trainer and generator."""
    algorithm = recipe.algorithm
    overlong, longest = algorithm.overlong, recipe.rollout.max_response_tokens
    if overlong.penalty != 1.0 and not overlong.buffer_tokens:
        yield (
            ("algorithm.overlong.penalty", "algorithm.overlong.buffer_tokens"),
            "without a buffer there is no penalty; set algorithm.overlong.buffer_tokens, or leave "
            "it out",
        )
    if overlong.buffer_tokens > longest:
        yield (
            ("algorithm.overlong.buffer_tokens", "rollout.max_response_tokens"),
            f"{overlong.buffer_tokens} tokens below a limit of {longest}; set {longest} or less",
        )
    importance = algorithm.importance
    for key in ("mode", "low", "high") if importance.level == "none" else ():
        if getattr(importance, key) != type(importance).model_fields[key].default:
            yield (
                (f"algorithm.importance.{key}", "algorithm.importance.level"),
                "nothing is weighted at level none; set the level, or leave it out",
            )
    if importance.low and importance.mode == "truncate":
        yield (
            ("algorithm.importance.low", "algorithm.importance.mode"),
            "truncate has an upper bound only; leave low out, or set mode to mask",
        )
    if importance.low > importance.high:
        yield (
            ("algorithm.importance.low", "algorithm.importance.high"),
            f"the lower bound {importance.low} is above the upper one {importance.high}, so every "
            "token would count 0",
        )


def _kl(recipe: Recipe) -> Iterator[Refusal]:
    kl = recipe.algorithm.kl
    if kl.target is not None and not kl.beta:
        yield (
            ("algorithm.kl.target", "algorithm.kl.beta"),
            "β is steered in proportion and never leaves 0; set algorithm.kl.beta to a start",
        )
    if kl.horizon != type(kl).model_fields["horizon"].default and kl.target is None:
        yield (
            ("algorithm.kl.horizon", "algorithm.kl.target"),
            "β stays as it is without a target; set algorithm.kl.target, or leave it out",
        )
    algorithm = recipe.algorithm
    if algorithm.kl_in_reward and algorithm.group_relative and algorithm.overlong.mask_truncated:
        yield (
            ("algorithm.overlong.mask_truncated", "algorithm.kl.place"),
            "responses that are masked get no log-probs, so their KL cannot enter the reward that "
            "their group is compared by; set algorithm.kl.place to loss",
        )


def _process(recipe: Recipe) -> Iterator[Refusal]:
    """Step scores in place of totals."""
    algorithm, reward = recipe.algorithm, recipe.reward
    if algorithm.rewards != "process":
        return
    if algorithm.advantage in ("rloo", "reinforce_baseline"):
        yield (
            ("algorithm.rewards", "algorithm.advantage"),
            f"{algorithm.advantage} compares totals of responses; use grpo, reinforce or gae with "
            "step scores",
        )
    if algorithm.advantage == "grpo" and algorithm.kl_in_reward:
        yield (
            ("algorithm.kl.place", "algorithm.rewards"),
            "grpo compares step scores, into which no KL of tokens goes; set it to loss",
        )
    totals_only = {
        "algorithm.overlong.buffer_tokens": algorithm.overlong.buffer_tokens,
        "reward.violated": reward.violated,
        "reward.penalty": reward.penalty,
    }
    for key, value in totals_only.items():
        if value:
            yield (
                (key, "algorithm.rewards"),
                "it changes the total of a response, and with algorithm.rewards process only the "
                "scores of its steps count; leave one of the two out",
            )


def _optimizer(role: str, section: ActorSection, steps: int) -> Iterator[Refusal]:
    """`steps`: that the role takes in the run."""
    iterations = "run.iterations"
    if role == "actor":
        iterations = "(run.iterations − critic.warmup_iterations)"
    if section.min_lr > section.lr:
        yield (
            (f"{role}.min_lr", f"{role}.lr"),
            f"min_lr {section.min_lr} is above lr {section.lr}; set it to {section.lr} or less",
        )
    if section.min_lr and section.lr_schedule == "constant":
        yield (
            (f"{role}.min_lr",),
            f"a constant schedule never reaches min_lr; set {role}.lr_schedule to linear or "
            "cosine, or leave min_lr out",
        )
    if section.lr_warmup_steps >= steps:
        yield (
            (f"{role}.lr_warmup_steps", "run.iterations"),
            f"a warm-up of {section.lr_warmup_steps} steps never ends: the run has {steps} "
            f"({iterations} × algorithm.epochs × algorithm.minibatches); set it "
            "below that",
        )


def _routers(recipe: Recipe) -> Iterator[Refusal]:
    if recipe.actor.router == "frozen" and recipe.actor.router_aux_loss:
        yield (
            ("actor.router_aux_loss", "actor.router"),
            "it teaches routers, and they are frozen; leave it out, or set actor.router to trained",
        )


def _critic(recipe: Recipe) -> Iterator[Refusal]:
    critic, actor = recipe.critic, recipe.actor
    if not recipe.algorithm.needs_values:
        for key in CriticSection.model_fields:
            if getattr(critic, key) != CriticSection.model_fields[key].default:
                yield (
                    (f"critic.{key}", "algorithm.name"),
                    "grpo has no critic; leave the section out (critic=), or set algorithm.name to "
                    "ppo",
                )
        return
    for key in LAYOUT_KEYS:
        mine, actors = getattr(critic, key), getattr(actor, key)
        if mine is not None and mine != actors:
            yield (
                (f"critic.{key}", f"actor.{key}"),
                f"{mine}, but the actor has {actors}: megatron has one layout in a process, and "
                "the critic lives in the actor's; leave it out",
            )
    longest = recipe.data.max_prompt_tokens + recipe.rollout.max_response_tokens
    if critic.tokens_per_micro_batch is not None and critic.tokens_per_micro_batch < longest:
        yield (
            ("critic.tokens_per_micro_batch", "rollout.max_response_tokens"),
            f"{critic.tokens_per_micro_batch} tokens cannot hold the longest sample, {longest} "
            "(data.max_prompt_tokens + rollout.max_response_tokens); raise it to that or more",
        )
    yield from _optimizer("critic", recipe.critic_section, recipe.critic_steps)


def _reference(recipe: Recipe) -> Iterator[Refusal]:
    if recipe.algorithm.needs_reference:
        return
    for key, info in ReferenceSection.model_fields.items():
        if getattr(recipe.reference, key) != info.default:
            yield (
                (f"reference.{key}", "algorithm.kl.beta"),
                "with algorithm.kl.beta 0 no reference is loaded; set it above 0, or leave the "
                "section out (reference=)",
            )
