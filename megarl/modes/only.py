"""One part of the loop alone: collect experience, or train on what is sealed.

    --only rollout                      ACTOR_COMMITTED … EXPERIENCE_SEALED → ACTOR_COMMITTED
    --only train --from RUN[@A-B] …     EXPERIENCE_SEALED → UPDATING_FROM → ACTOR_COMMITTED

Scoring alone is `score_again.py`.
"""

from __future__ import annotations

from dataclasses import replace

from megarl.contracts.states import State
from megarl.data.guards import check_sealed
from megarl.experience.source import write_source
from megarl.modes.launch import Launch
from megarl.modes.sealed_updates import NOT_MEASURED, load_source, reload
from megarl.observe.row import iteration_row, rollout_row
from megarl.recipe import Recipe
from megarl.rollout.groups import IterationPlan
from megarl.run import Run
from megarl.run_outputs import export_final
from megarl.sealed import Sealed
from megarl.train import credit_sealed, learn, sample, seal_experience

COLLECTED = "collected"
"""In the ledger of a run that only collects: samples that are sound, and were not trained on."""


def collect(run: Run) -> None:
    """Sample, score and seal `run.iterations` iterations with the weights as they are.

    All sound samples (of groups of two or more, where responses are compared) get old and reference
    log-probs and, of ppo, values: which of them will train is decided by the recipe that trains on
    them.
    """
    run.commit(iteration=0)
    for iteration in run.iterations():
        sampled = sample(run, iteration)
        rules = everything(run.recipe, len(sampled.prompts))
        sealed = seal_experience(run, iteration, sampled, rules)
        run.close_ledger(iteration, sealed.experience.hash, _untrained(sealed.plan), sealed.joined)
        run.agree(State.ACTOR_COMMITTED, iteration, **run.committed)
        run.report(iteration, rollout_row(sealed.table, sealed.plan, sealed.parity))


def everything(recipe: Recipe, prompts: int) -> Recipe:
    """`recipe` with rules of selection by which every sound row stays that can be compared."""
    overlong = recipe.algorithm.overlong.model_copy(update={"mask_truncated": False})
    algorithm = {"zero_variance": "keep", "partial_groups": "keep_scored", "overlong": overlong}
    rollout = {"prompts_per_iteration": prompts}
    return recipe.model_copy(
        update={
            "algorithm": recipe.algorithm.model_copy(update=algorithm),
            "rollout": recipe.rollout.model_copy(update=rollout),
        }
    )


def _untrained(plan: IterationPlan) -> IterationPlan:
    """The plan with an account by which nothing was trained on."""
    account = dict(plan.account)
    account["dropped"] = account["dropped"] | {COLLECTED: account["trained"]}
    for by in ("by_source", "by_length"):
        account[by] = {
            name: {COLLECTED if reason == "trained" else reason: n for reason, n in counts.items()}
            for name, counts in account[by].items()
        }
    return replace(plan, account=account | {"trained": 0})


def train_sealed(run: Run, launch: Launch) -> None:
    """Learn from every sealed iteration once, in order; later ones are off-policy by as much as
    the weights have moved, which the ratio of the loss corrects within its clip.

    Raises `SealError`, `OtherModel`, `AlreadyTrained` on every rank.
    """
    run.console.note(
        "trains on sealed experience: old log-probs and values are those sealed, parity with a "
        "generator is not checked, nothing is evaluated"
    )
    run.commit(iteration=0)
    run.console.start(run.recipe.run.iterations)
    for number, source in enumerate(launch.sources):
        run.stopwatch.begin(number, run.version.id)
        iteration = load_source(source, run.recipe, run.tokens, run.spec)
        # The prompts of an iteration were drawn then: none is surplus here.
        rules = _all_prompts(run.recipe, len(iteration.prompts))
        with run.hybrid.scoring(), run.stage("log_probs"):
            again = reload(run.world, rules, source, iteration, run.actor, run.critic)
        facts = {"experience_hash": again.experience.hash, "samples": len(again.table)}
        if run.world.is_main:
            write_source(run.folder, number, iteration)
        run.agree(State.EXPERIENCE_SEALED, number, **facts, source=str(source))
        run.close_ledger(number, again.experience.hash, again.plan)
        sealed = Sealed(again.table, again.plan, again.prepared, NOT_MEASURED, again.experience)
        credited = credit_sealed(run, sealed)
        derived = credited.derived
        check_sealed(run.world, iteration.identities, rules, run.recipe.hash, again, derived)
        begun = run.begin_update(number, again.experience, derived, again.plan)
        learnt = learn(run, number, sealed, derived)
        run.commit(number)
        sums = run.close_update(begun, learnt)
        row = iteration_row(again.table, again.plan, NOT_MEASURED, credited, learnt, sums)
        row |= {
            "sealed/source": str(source),
            "sealed/log_prob_gap_max": again.gap_max,
            "sealed/log_prob_gap_mean": again.gap_mean,
            "sealed/tokens_without_old": float(again.from_rollout),
        }
        if run.critic is not None:
            row["sealed/value_gap_max"] = again.value_gap_max
        run.report(number, row)
    export_final(run)


def _all_prompts(recipe: Recipe, prompts: int) -> Recipe:
    rollout = recipe.rollout.model_copy(update={"prompts_per_iteration": prompts})
    return recipe.model_copy(update={"rollout": rollout})
