"""Guards before the loss: what is about to train is held against what it must be.

`check_facts` comes before sealing, `check_derived` before the first optimizer step. Each looks at
all of this rank's rows and at the global plan, tells its findings to all ranks in one gather, and
then every rank raises the same `GuardError` or none does. A finding names the field and the
samples. They are arrays compared with arrays: milliseconds an iteration.

N rows of the global table, n rows of this rank, R response tokens of these.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from megarl.contracts.ids import pair_keys
from megarl.contracts.records import Derived, Experience, Identities, Prompt, Scores
from megarl.contracts.samples import Samples, SamplingContract
from megarl.contracts.version import PolicyVersion
from megarl.data.guard_packs import GroupRules, check_packs, check_plan
from megarl.data.guard_samples import (
    Findings,
    check_column,
    check_ends,
    check_ids,
    check_log_probs,
    check_masks,
    check_shapes,
    check_values,
    is_column,
)
from megarl.data.prepare import Prepared
from megarl.data.table import SampleTable
from megarl.world import World

if TYPE_CHECKING:
    from megarl.rollout.groups import IterationPlan
    from megarl.run import Run

MOST_LINES = 6
"""Findings that one rank tells."""


class GuardError(RuntimeError):
    """Something that was about to train is not what it must be. The same on every rank."""


class Stepped(Protocol):
    """The actor or the critic, as far as guards ask it."""

    @property
    def optimizer_step(self) -> int: ...


class ToLearn(Protocol):
    """What is about to train: sealed facts, their packs, and the plan over all ranks' rows."""

    @property
    def experience(self) -> Experience: ...
    @property
    def prepared(self) -> Prepared: ...
    @property
    def table(self) -> SampleTable: ...
    @property
    def plan(self) -> IterationPlan: ...


@dataclass(frozen=True)
class Guard:
    """What one iteration's training may use. Made by `Guard.of` before anything is learnt."""

    world: World
    actor: Stepped
    identities: Identities
    prompt_ids: tuple[tuple[int, ...], ...]
    """By draw index: the very ids that were to be executed."""
    version: PolicyVersion
    """The actor's: it generated, and old log-probs are its own."""
    reference: PolicyVersion | None
    """The KL term's; None where the recipe has none."""
    critic: Stepped | None
    critic_version: PolicyVersion | None
    """The critic's, whose values are sealed; both are None where the recipe has none."""
    sampling: SamplingContract
    known_ids: np.ndarray  # bool [vocabulary], ids that the tokenizer knows
    recipe_hash: str
    algorithm: GroupRules
    """Its rules of groups and rewards."""

    @staticmethod
    def of(run: Run, iteration: int, prompts: Sequence[Prompt], recipe: Any) -> Guard:
        """`prompts` by draw index; the rules of groups are those of `recipe`."""
        names = tuple(prompt.prompt_id for prompt in prompts)
        return Guard(
            world=run.world,
            actor=run.actor,
            identities=Identities(run.recipe.run.name, iteration, names),
            prompt_ids=tuple(prompt.token_ids for prompt in prompts),
            version=run.version,
            reference=run.reference_version if recipe.algorithm.needs_reference else None,
            critic=run.critic,
            critic_version=None if run.critic is None else run.critic_version,
            sampling=run.sampling,
            known_ids=run.tokens.known_ids,
            recipe_hash=run.recipe.hash,
            algorithm=recipe.algorithm,
        )

    def check_facts(
        self,
        producers: Mapping[str, str],
        prepared: Prepared,
        scores: Scores,
        table: SampleTable,
        plan: IterationPlan,
    ) -> None:
        """Before sealing. Collective; raises `GuardError` on every rank or on none.

        `producers` says which version made which log-probs and values, `prepared` and `scores` are
        this rank's, `table` and `plan` all ranks'.
        """
        found = Findings(self.identities)
        self._versions(found, producers, prepared.samples.version_id, table)
        limits = (self.sampling.n, self.sampling.max_response_tokens)
        check_plan(found, table, plan, *limits, self.algorithm)
        if check_shapes(found, prepared, scores):
            trained = _own_rows(found, self.world, prepared.samples, table, plan)
            check_ids(found, prepared.samples, trained, self.known_ids, self.prompt_ids)
            check_masks(found, prepared.samples)
            check_ends(found, prepared.samples, self.sampling)
            check_log_probs(found, prepared, trained)
            check_values(found, prepared, trained, self.critic is not None)
            check_packs(found, prepared, plan, self.world.dp_index)
        _raise(self.world, found, "facts")

    def check_derived(self, sealed: ToLearn, derived: Derived) -> None:
        """Before the first optimizer step. Collective; as `check_facts`."""
        experience = sealed.experience
        found = Findings(self.identities)
        made_by = experience.samples.version_id
        self._versions(found, experience.producers, made_by, sealed.table)
        _check_derived(found, self.recipe_hash, sealed, derived, self.algorithm)
        _raise(self.world, found, "advantages")

    def _versions(
        self,
        found: Findings,
        producers: Mapping[str, str],
        version_id: str,
        table: SampleTable,
    ) -> None:
        everyone = np.ones(len(table), dtype=bool)
        wanted = {
            "rollout_log_probs": ("rollout", self.version),
            "old_log_probs": ("old", self.version),
            "ref_log_probs": ("ref", self.reference),
            "values": ("critic", self.critic_version),
        }
        for column, (role, version) in wanted.items():
            made_by = producers.get(role)
            if made_by != (None if version is None else version.id):
                by = f"made by version {made_by}" if made_by else "made by nobody"
                expects = f"expects those of {version}" if version else "expects none"
                why = f"{by}, the update from {self.version} {expects}"
                found.rows(column, table, everyone, why)
        for made_by in sorted({version_id, table.version_id} - {self.version.id}):
            why = f"sampled by {made_by}, the generator had to hold {self.version}"
            found.rows("version_id", table, everyone, why)
        for column, model, version in (
            ("old_log_probs", self.actor, self.version),
            ("values", self.critic, self.critic_version),
        ):
            if model is not None and model.optimizer_step != version.optimizer_step:
                why = f"taken after optimizer step {model.optimizer_step}, not by {version}"
                found.rows(column, table, everyone, why)


def check_sealed(
    world: World,
    identities: Identities,
    recipe: Any,
    recipe_hash: str,
    sealed: ToLearn,
    derived: Derived,
) -> None:
    """Before an update from experience that was sealed earlier. Collective; as `Guard`'s checks.

    The versions, prompts and ends that were sealed stand; what is looked at is what was made of
    them here: rows, packs, groups by the rules of `recipe`, totals, log-probs, values, advantages.
    """
    found = Findings(identities)
    prepared, table, plan = sealed.prepared, sealed.table, sealed.plan
    limits = (recipe.rollout.group_size, recipe.rollout.max_response_tokens)
    check_plan(found, table, plan, *limits, recipe.algorithm)
    if check_shapes(found, prepared, sealed.experience.scores):
        trained = _own_rows(found, world, prepared.samples, table, plan)
        check_masks(found, prepared.samples)
        check_log_probs(found, prepared, trained)
        check_values(found, prepared, trained, recipe.algorithm.needs_values)
        check_packs(found, prepared, plan, world.dp_index)
    _check_derived(found, recipe_hash, sealed, derived, recipe.algorithm)
    _raise(world, found, "sealed experience")


def _check_derived(
    found: Findings, recipe_hash: str, sealed: ToLearn, derived: Derived, rules: GroupRules
) -> None:
    experience, samples = sealed.experience, sealed.experience.samples
    for name, mine, wanted in (
        ("experience_hash", derived.experience_hash, experience.hash),
        ("recipe_hash", derived.recipe_hash, recipe_hash),
    ):
        if mine != wanted:
            found.add(name, ["the advantages"], f"{mine}, this update needs {wanted}")
    if not (np.isfinite(derived.kl_beta) and derived.kl_beta >= 0):
        found.add("kl_beta", ["the advantages"], f"{derived.kl_beta} is no number of 0 or more")
    if rules.needs_values and derived.returns is None:
        found.add("returns", ["the advantages"], "none there, the critic learns them")
    if samples is not sealed.prepared.samples:
        found.add("samples", ["the sealed experience"], "not those of the packs")
        return
    keys = pair_keys(samples.draw_index, samples.candidate)
    trained = np.isin(keys, sealed.table.keys[sealed.plan.trained])
    for name in ("advantages", "shaped_rewards", "returns"):
        column = getattr(derived, name)
        if column is not None and is_column(found, name, column, samples):
            check_column(found, name, column, samples, trained)


def _own_rows(
    found: Findings,
    world: World,
    samples: Samples,
    table: SampleTable,
    plan: IterationPlan,
) -> np.ndarray:
    """bool [n]: which of this rank's rows train. They must be those that the plan gives it."""
    own = np.flatnonzero(plan.update.owner == world.dp_index)
    if not (
        np.array_equal(table.draw_index[own], samples.draw_index)
        and np.array_equal(table.candidate[own], samples.candidate)
    ):
        planned = pair_keys(table.draw_index[own], table.candidate[own])
        held = pair_keys(samples.draw_index, samples.candidate)
        part = f"data-parallel part {world.dp_index}"
        lost, odd = np.setdiff1d(planned, held), np.setdiff1d(held, planned)
        found.keys("owner", lost, f"{part} trains it and does not hold it")
        found.keys("owner", odd, f"{part} holds it and does not train it")
        if not len(lost) and not len(odd):
            found.keys("owner", held, f"{part} does not hold its rows once, in canonical order")
        return np.ones(len(samples), dtype=bool)
    actions = np.add.reduceat(
        np.append(samples.action_mask, False), samples.response_offsets[:-1], dtype=np.int64
    )
    for name, mine, told in (
        ("prompt_length", samples.prompt_lengths, table.prompt_length[own]),
        ("response_length", samples.response_lengths, table.response_length[own]),
        ("actions", actions, table.actions[own]),
    ):
        why = "the tokens that came are not as many as the table says"
        found.rows(name, samples, mine != told, why)
    return plan.trained[own]


def _raise(world: World, found: Findings, what: str) -> None:
    """One gather, in which every rank takes part whatever it found."""
    ranks_of: dict[str, list[str]] = {}
    for rank, lines in enumerate(world.gather(found.lines[:MOST_LINES])):
        for line in lines:
            ranks_of.setdefault(line, []).append(str(rank))
    if ranks_of:
        told = "; ".join(
            f"rank{'s' * (len(ranks) > 1)} {', '.join(ranks)}: {line}"
            for line, ranks in ranks_of.items()
        )
        raise GuardError(
            f"the {what} of iteration {found.identities.iteration} may not train: {told}"
        )
