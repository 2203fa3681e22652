"""The same iteration by the house: what the loop calls, on real megatron roles, on any layout.

Nothing is generated, sealed to disk or committed. Samples lie on the replicas that would have made
them and go through the exchange; the updates are the loop's own `learn`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from megarl.contracts.records import Experience, RewardRecord, RewardStatus
from megarl.contracts.samples import EndReason, Sample, Samples
from megarl.recipe import Recipe, load_recipe
from tests.models.support import full_gradients, gather_logical, make_world
from tests.reference.cases import Case
from tests.reference.rules import MOST_TOKENS, TEMPERATURE, Optimizer, Row, Step

ROOT = Path(__file__).resolve().parents[2]
BUDGET = 40
"""Tokens of a pack: several packs in every minibatch."""


@dataclass(frozen=True)
class Layout:
    ranks: int = 1
    tp: int = 1
    pp: int = 1
    sequence_parallel: bool = False
    distributed_optimizer: bool = False
    """Where it is on, no rank has the whole gradient, and it is not told."""


TWO = {"tp2": Layout(2, tp=2), "dp2": Layout(2), "pp2": Layout(2, pp=2)}


@dataclass
class HouseTold:
    """Columns by (group, candidate) of what was packed; steps as the reference tells them."""

    columns: dict[tuple[int, int], dict[str, Any]]
    minibatch: dict[tuple[int, int], int]
    """−1 where a row does not train."""
    actor: list[Step]
    critic: list[Step]
    numbers: dict[str, float]
    packs: int
    """Packs of the first minibatch on the first rank."""


def recipe_of(case: Case, layout: Layout, how: Optimizer) -> Recipe:
    """The quickstart with the case's algorithm and sizes of these tests."""
    settings = {
        "world.ranks": layout.ranks,
        "data.max_prompt_tokens": 8,
        "actor.tp": layout.tp,
        "actor.pp": layout.pp,
        "actor.sequence_parallel": str(layout.sequence_parallel).lower(),
        "actor.distributed_optimizer": str(layout.distributed_optimizer).lower(),
        "actor.tokens_per_micro_batch": BUDGET,
        "actor.lr": how.lr,
        "actor.betas": list(how.betas),
        "actor.eps": how.eps,
        "actor.clip_grad": how.clip_grad,
        "actor.weight_decay": 0.0,
        "rollout.group_size": case.group_size,
        "rollout.prompts_per_iteration": 6,
        "rollout.max_response_tokens": MOST_TOKENS,
        "rollout.temperature": TEMPERATURE,
        "algorithm.clip_high": 0.2,
    }
    overrides = [f"{key}={value}" for key, value in settings.items()]
    return load_recipe(ROOT / "recipes" / "quickstart.yaml", overrides + case.overrides)


@contextmanager
def stepping_by(kind: str) -> Iterator[None]:
    """Megatron's own SGD in place of its Adam, which is all that the house offers."""
    from megarl.models import step

    config = step.OptimizerConfig

    def sgd(**settings: Any) -> Any:
        return config(**settings | {"optimizer": "sgd", "sgd_momentum": 0.0})

    step.OptimizerConfig = sgd if kind == "sgd" else config
    try:
        yield
    finally:
        step.OptimizerConfig = config


def _sample(row: Row) -> Sample:
    reason = EndReason.MAX_TOKENS if row.truncated else EndReason.EOS
    return Sample(
        draw_index=row.group,
        candidate=row.candidate,
        prompt_ids=row.prompt,
        response_ids=row.response,
        action_mask=row.acts,
        rollout_log_probs=row.rollout,
        end=0,  # implied by the reason
        end_reason=reason,
        seed=0,
        started=0.0,
        finished=1.0,
    )


def _record(row: Row) -> RewardRecord:
    failed = row.reward is None
    return RewardRecord(
        draw_index=row.group,
        candidate=row.candidate,
        total=row.reward,
        components={},
        scorer_version="scorer",
        status=RewardStatus.ERROR if failed else RewardStatus.OK,
        step_rewards=row.steps,
    )


class _Watched:
    """A role whose steps are written down as they happen."""

    def __init__(self, role: Any) -> None:
        self.role = role
        self.steps: list[Step] = []
        self.gradient: dict[str, torch.Tensor] = {}
        step = role.trainer.step

        def step_after_a_look(lr: float, norm: float) -> None:
            if not role.trainer.section.distributed_optimizer:
                self.gradient = full_gradients(role)
            step(lr, norm)

        role.trainer.step = step_after_a_look

    def update(self, *arguments: Any) -> Any:
        result, world = self.role.update(*arguments), self.role.world
        if result.stepped:
            losses = world.gather(result.loss if world.leads_owners else 0.0)
            weights = gather_logical(self.role, self.role.named_parameters())
            self.steps.append(Step(sum(losses), self.gradient, weights))
        else:
            assert result.stopped or "empty" in result.skipped_reason, result.skipped_reason
        return result


def iterate(folder: Path, rows: list[Row], case: Case, layout: Layout, how: Optimizer) -> HouseTold:
    """One iteration of `case` on the models of `folder`. Collective; the same on every rank."""
    from megarl.models.build import destroy_mesh

    rows = case.rows(rows)
    recipe = recipe_of(case, layout, how)
    world = make_world(layout.tp, layout.pp)
    with stepping_by(how.kind):
        told = _iterate(folder, rows, case, recipe, world)
    destroy_mesh()
    return told


def _iterate(folder: Path, rows: list[Row], case: Case, recipe: Recipe, world: Any) -> HouseTold:
    from megarl.algorithms.credit import credit
    from megarl.data.everyone import everyone_of
    from megarl.data.exchange import exchange, gather_table
    from megarl.data.prepare import prepare
    from megarl.reshard.families import read_spec
    from megarl.rollout.groups import plan_iteration

    spec = read_spec(folder / "actor")
    actor, reference, critic = roles(folder, case, recipe, world)
    mine = rows[world.replica :: world.mesh.replicas]
    samples = Samples.from_rows([_sample(row) for row in mine], "version")
    records = [_record(row) for row in mine]
    table = gather_table(world, samples, records)
    plan = plan_iteration(table, recipe, world.mesh.dp, even_length=spec.even_length)
    owned = exchange(world, samples.canonical(), table, plan.update.owner)
    prepared = prepare(
        owned.samples,
        plan.update.local_packs(world.dp_index),
        actor,
        reference,
        world.device,
        critic,
        None if plan.critic is None else plan.critic.local_packs(world.dp_index),
    )
    experience = Experience(
        samples=prepared.samples,
        scores=owned.scores,
        old_log_probs=prepared.old_log_probs,
        ref_log_probs=prepared.ref_log_probs,
        values=prepared.values,
        producers={name: "version" for name in ("rollout", "old", "ref", "critic")},
        hash="experience",
        last_values=prepared.last_values,
    )
    everyone = everyone_of(world, table, owned.samples)
    beta = case.rules.beta  # the recipe's, or what a controller made of it
    credited = credit(experience, recipe.hash, table, plan, recipe.algorithm, everyone, beta)
    steps = _learn(actor, critic, recipe, plan, prepared, experience, credited.derived)
    columns = [dict(part) for part in world.gather(_columns(experience, credited.derived))]
    keys = zip(table.draw_index.tolist(), table.candidate.tolist(), strict=True)
    return HouseTold(
        columns={key: value for part in columns for key, value in part.items()},
        minibatch=dict(zip(keys, plan.minibatch.tolist(), strict=True)),
        actor=steps["actor"],
        critic=steps["critic"],
        numbers=credited.numbers,
        packs=len(prepared.packs[0]),
    )


def roles(folder: Path, case: Case, recipe: Recipe, world: Any) -> tuple[Any, Any, Any]:
    """(actor, reference or None, critic or None)."""
    from megarl.models.critic_spec import critic_spec
    from megarl.models.roles import Actor, Critic, Reference
    from megarl.reshard.families import read_spec

    spec = read_spec(folder / "actor")
    common = (recipe.model, recipe.actor, TEMPERATURE)
    actor = Actor(spec, folder / "actor", world, *common, total_steps=10)
    reference = critic = None
    if recipe.algorithm.needs_reference:
        reference = Reference(spec, folder / "reference", world, *common)
    if case.critic is not None:
        home = folder / ("actor" if case.critic == "fresh" else "critic")
        numbers, fresh = critic_spec(home, spec)
        critic = Critic(
            numbers,
            home,
            world,
            recipe.model,
            recipe.critic_section,
            TEMPERATURE,
            total_steps=10,
            fresh_head=fresh,
        )
    return actor, reference, critic


def _learn(
    actor: Any,
    critic: Any,
    recipe: Recipe,
    plan: Any,
    prepared: Any,
    experience: Experience,
    derived: Any,
) -> dict[str, list[Step]]:
    """The loop's own `learn`, of a run that has only what it trains."""
    from megarl.train import learn

    roles = {"actor": _Watched(actor), "critic": None if critic is None else _Watched(critic)}
    run = SimpleNamespace(
        recipe=recipe,
        hybrid=SimpleNamespace(training=nullcontext),
        stage=nullcontext,
        stopwatch=nullcontext,
        **roles,
    )
    sealed = SimpleNamespace(experience=experience, plan=plan, prepared=prepared)
    learn(run, 0, sealed, derived)
    return {name: role.steps if role else [] for name, role in roles.items()}


def _columns(experience: Experience, derived: Any) -> list[tuple[tuple[int, int], dict]]:
    """Per sample of this rank's part what was frozen and what was derived, float64."""
    arrays = {
        "old": experience.old_log_probs,
        "ref": experience.ref_log_probs,
        "values": experience.values,
        "advantages": derived.advantages,
        "returns": derived.returns,
        "shaped": derived.shaped_rewards,
    }
    told = []
    for at, sample in enumerate(experience.samples):
        offsets = experience.samples.response_offsets
        part = slice(offsets[at], offsets[at + 1])
        column = {n: None if a is None else a[part].astype(np.float64) for n, a in arrays.items()}
        last = experience.last_values
        column["last"] = None if last is None else float(last[at])
        told.append(((sample.draw_index, sample.candidate), column))
    return told
