"""From sealed facts to an update, in the layout at hand: nothing is generated or scored.

The plan (which rows train, in which minibatch and pack) is made anew from the sealed table: it
depends on the recipe, and its packs on the layout. Old and reference log-probs are the sealed ones,
and so are the critic's values.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from megarl.contracts.records import Experience
from megarl.contracts.tokens import Tokens
from megarl.data.packing import ragged_index
from megarl.data.prepare import Parity, Prepared, prepare
from megarl.data.table import SampleTable
from megarl.experience.load import SealedIteration, load_iteration
from megarl.experience.tokenizer import check_same_contract
from megarl.experience.versions import Versions
from megarl.modes.launch import Source
from megarl.recipe import Recipe
from megarl.reshard.families.spec import ModelSpec
from megarl.rollout.groups import IterationPlan, plan_iteration
from megarl.world import World

if TYPE_CHECKING:  # what is sealed can be read without megatron, whose import takes seconds
    from megarl.models.roles import Actor, Critic

NOT_MEASURED = Parity(0.0, 0.0, 0, "nothing was generated")
"""Parity is between a trainer and a generator: here there is none."""


class OtherModel(ValueError):
    """Sealed experience of another model or sampling than the recipe's; one line."""


@dataclass(frozen=True)
class Reloaded:
    """One sealed iteration, made ready for an update on this rank."""

    source: Source
    iteration: SealedIteration
    table: SampleTable
    plan: IterationPlan
    prepared: Prepared
    """This rank's rows; log-probs and values are the constants that the update gets."""
    experience: Experience
    gap_max: float
    """Largest |log-prob of the weights at hand − sealed old log-prob| of an action token, nats."""
    gap_mean: float
    value_gap_max: float
    """Largest |value of the critic at hand − sealed value| of an action token; 0 without one."""
    from_rollout: int
    """Action tokens whose constant is the generator's log-prob, since their row was sealed without
    an old one: it did not train then, and does under this recipe."""

    @property
    def same_choice(self) -> bool | None:
        """Whether the plan trains the rows that trained then, in the same minibatches; None where
        no choice was sealed."""
        derived = self.iteration.derived
        if derived is None:
            return None
        return np.array_equal(derived.minibatch, self.plan.minibatch)


def table_of(iteration: SealedIteration) -> SampleTable:
    """The sealed samples and scores as the table that plans are made from."""
    samples = iteration.samples
    prefix = np.concatenate([[0], np.cumsum(samples.action_mask)])
    return SampleTable(
        draw_index=samples.draw_index,
        candidate=samples.candidate,
        prompt_length=samples.prompt_lengths,
        response_length=samples.response_lengths,
        actions=np.diff(prefix[samples.response_offsets]),
        end_reason=samples.end_reason,
        replica=iteration.replica,
        started=samples.started,
        finished=samples.finished,
        scores=iteration.scores,
        version_id=samples.version_id,
    )


def load_source(source: Source, recipe: Recipe, tokens: Tokens, spec: ModelSpec) -> SealedIteration:
    """The sealed facts, every hash checked, of this recipe's model.

    Raises `SealError`, `VersionsError`, `TokensError` for another tokenizer, and `OtherModel` where
    model config, temperature or group size are not those of the recipe.
    """
    iteration = load_iteration(source.run, source.iteration)
    header = iteration.manifest.header
    producer = Versions.read(source.run).resolve(header.producers["old"]).version
    check_same_contract(header, tokens, source.run)
    sampling, rollout = header.sampling, recipe.rollout
    for what, mine, sealed, change in (
        ("model config", spec.config_hash, producer.model_config_hash, "set model.path to it"),
        (
            "rollout.temperature",
            rollout.temperature,
            sampling.temperature,
            f"set rollout.temperature={sampling.temperature}",
        ),
        (
            "rollout.group_size",
            rollout.group_size,
            sampling.n,
            f"set rollout.group_size={sampling.n}",
        ),
    ):
        if mine != sealed:
            raise OtherModel(
                f"{iteration.folder}: sealed with {what} {sealed}, the recipe has {mine}; {change}"
            )
    return iteration


def reload(
    world: World,
    recipe: Recipe,
    source: Source,
    iteration: SealedIteration,
    actor: Actor,
    critic: Critic | None = None,
) -> Reloaded:
    """Collective; `iteration` is the same on every rank. `critic` is there where one will learn.

    Raises `OtherModel` on every rank where a KL term needs reference log-probs, the critic values,
    or replayed routing experts, that were not sealed.
    """
    table = table_of(iteration)
    plan = _planned(world, recipe, iteration, table, actor, critic)
    needs_ref, needs_values = recipe.algorithm.needs_reference, recipe.algorithm.needs_values
    samples = iteration.samples
    own = np.flatnonzero(plan.update.owner == world.dp_index)
    tokens = ragged_index(samples.response_offsets, own)
    sealed_old = iteration.old_log_probs[tokens]
    rollout = samples.rollout_log_probs[tokens]
    ref = iteration.ref_log_probs[tokens] if needs_ref else None
    values = iteration.values[tokens] if needs_values else None
    last_values = iteration.last_values[own] if needs_values else None
    now = prepare(
        samples.select(own),
        plan.update.local_packs(world.dp_index),
        actor,
        None,
        world.device,
        critic=critic,
        critic_rows=None if plan.critic is None else plan.critic.local_packs(world.dp_index),
    )
    unsealed = np.isnan(sealed_old)
    old = np.where(unsealed, rollout, sealed_old)
    prepared = replace(
        now, old_log_probs=old, ref_log_probs=ref, values=values, last_values=last_values
    )
    gap_max, gap_mean, from_rollout = _gaps(world, now, old, unsealed)
    return Reloaded(
        source=source,
        iteration=iteration,
        table=table,
        plan=plan,
        prepared=prepared,
        experience=Experience(
            samples=prepared.samples,
            scores=iteration.scores.select(own),
            old_log_probs=old,
            ref_log_probs=ref,
            values=values,
            last_values=last_values,
            producers=dict(iteration.manifest.header.producers),
            hash=iteration.manifest.experience_hash,
        ),
        gap_max=gap_max,
        gap_mean=gap_mean,
        value_gap_max=_value_gap(world, now, values),
        from_rollout=from_rollout,
    )


def _planned(
    world: World,
    recipe: Recipe,
    iteration: SealedIteration,
    table: SampleTable,
    actor: Actor,
    critic: Critic | None,
) -> IterationPlan:
    """The plan of what is sealed; raises as `reload` where it needs what is not."""
    plan = plan_iteration(
        table,
        recipe,
        world.mesh.dp,
        invalid=table.invalid,
        drawn=iteration.drawn.drawn([prompt["source"] for prompt in iteration.prompts]),
        even_length=actor.spec.even_length,
        critic_even_length=None if critic is None else critic.spec.even_length,
    )
    if recipe.algorithm.needs_reference:
        _check_sealed(iteration, plan, iteration.ref_log_probs, *_REFERENCE)
    if recipe.algorithm.needs_values:
        _check_sealed(iteration, plan, iteration.values, *_CRITIC)
    samples = iteration.samples
    if recipe.actor.replay_routing and len(samples) and not len(samples.experts):
        raise OtherModel(
            f"{iteration.folder}: sealed without the experts that its tokens went to, and "
            "actor.replay_routing is true; set it to false"
        )
    return plan


def _gaps(
    world: World, now: Prepared, old: np.ndarray, unsealed: np.ndarray
) -> tuple[float, float, int]:
    """`gap_max`, `gap_mean` and `from_rollout` over all ranks' tokens; `old` float [R] and
    `unsealed` bool [R] are this rank's. Collective."""
    action = now.samples.action_mask
    gap = np.where(action, np.abs(now.old_log_probs.astype(np.float64) - old), 0.0)
    sums = world.totals(
        {
            "gap": float(gap.sum()),
            "tokens": float(action.sum()),
            "unsealed": float((unsealed & action).sum()),
        },
        counted=world.leads_owners,
    )
    most = world.maximum(float(gap.max()) if len(gap) else 0.0)
    mean = sums["gap"] / sums["tokens"] if sums["tokens"] else 0.0
    return most, mean, int(sums["unsealed"])


def _value_gap(world: World, now: Prepared, sealed: np.ndarray | None) -> float:
    """`value_gap_max` over all ranks' tokens. Collective."""
    gap = 0.0
    if now.values is not None and sealed is not None:
        apart = np.abs(now.values.astype(np.float64) - sealed)[now.samples.action_mask]
        gap = float(apart.max()) if len(apart) else 0.0
    return world.maximum(gap)


_REFERENCE = (
    "algorithm.kl.beta is above 0",
    "reference log-probs",
    "set algorithm.kl.beta=0, or collect with `--only rollout` and algorithm.kl.beta above 0",
)
_CRITIC = (
    "algorithm.name is ppo",
    "values of a critic",
    "set algorithm.name=grpo, or collect with `--only rollout` and algorithm.name=ppo",
)
"""Who needs a column, its name, and what to do without it."""


def _check_sealed(
    iteration: SealedIteration,
    plan: IterationPlan,
    column: np.ndarray | None,
    needed_by: str,
    name: str,
    way_out: str,
) -> None:
    """Every row that the plan packs has the column, float32 [R]. On the global plan, so that every
    rank raises or none does."""
    if column is None:
        what = f"no {name} are sealed"
    else:
        lengths = iteration.samples.response_lengths
        row_of = np.repeat(np.arange(len(lengths)), lengths)
        lacking = plan.update.packed & (
            np.bincount(row_of, np.isnan(column), minlength=len(lengths)) > 0
        )
        if not lacking.any():
            return
        first = iteration.sample_id(int(np.flatnonzero(lacking)[0]))
        what = f"{first} was sealed without {name}"
    raise OtherModel(f"{iteration.folder}: {needed_by}, but {what}; {way_out}")


def same_run(sources: Sequence[Source]) -> Path:
    """The one run of all sources."""
    (run,) = {source.run for source in sources}
    return run
