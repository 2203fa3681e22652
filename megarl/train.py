"""The loop: GRPO on megatron-core, generating with in-process SGLang. It computes nothing itself.

    python -m megarl.train RECIPE [key=value …]                    one rank
    bash launch/grpo.sh RECIPE [key=value …]                       the recipe's ranks, this machine
    torchrun --nproc_per_node N launch/grpo.sh RECIPE [key=value …]

Every rank runs this same file; collectives are the stage barriers.
"""

from __future__ import annotations

import sys

if __name__ == "__main__":
    import signal

    # Until the boundary takes signals over, Ctrl-C ends this process at once and silently.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    # The process boundary comes first: it checks the recipe, takes the libraries' noise to the
    # log, and only then imports this file again, now with torch, megatron and SGLang.
    from megarl.process import main

    sys.exit(main())

from functools import partial

from megarl.algorithms.credit import credit
from megarl.algorithms.objectives import grpo_loss
from megarl.contracts.records import Derived
from megarl.contracts.states import State
from megarl.data.arrivals import Arrival
from megarl.data.exchange import exchange, gather_arrivals
from megarl.data.guards import Guard
from megarl.data.minibatch import micro_batches
from megarl.data.prepare import measure_parity, prepare
from megarl.data.seal import seal
from megarl.experience.drawn import DrawnFacts
from megarl.models.step import StepResult
from megarl.modes.reuse import reuse
from megarl.observe.row import iteration_row
from megarl.recipe import Recipe
from megarl.rollout.collect import Grading, make_requests, rollout
from megarl.rollout.groups import plan_iteration
from megarl.rollout.rounds import Rounds, Sampled
from megarl.run import Run
from megarl.sealed import Sealed


def train(run: Run) -> None:
    """Sample, score, seal, credit, learn, commit; once per iteration (arXiv:2402.03300)."""
    run.begin()
    for iteration in run.iterations():
        # A resumed run may have it sealed already.
        sealed = reuse(run, iteration, run.recipe) or seal_experience(
            run, iteration, sample(run, iteration), run.recipe
        )
        run.close_ledger(iteration, sealed.experience.hash, sealed.plan, sealed.joined)
        # Group-relative advantages, from the sealed facts alone.
        derived, advantages = credit(
            sealed.experience,
            run.recipe.hash,
            sealed.table,
            sealed.plan.trained,
            run.recipe.algorithm,
        )
        with run.stopwatch("guard"):
            guard = Guard.of(run, iteration, sealed.prompts, run.recipe)
            guard.check_derived(sealed, derived)
        # UPDATING_FROM: an experience trains exactly once, also across restarts.
        begun = run.begin_update(iteration, sealed.experience, derived, sealed.plan)
        results = learn(run, sealed, derived)
        # The new weights become version v+1 once every copy of them was compared.
        run.commit(iteration)
        sums = run.close_update(begun, results)
        row = iteration_row(sealed.table, sealed.plan, sealed.parity, advantages, results, sums)
        run.finish(iteration, row)


def sample(run: Run, iteration: int) -> Sampled:
    """EXPORTING … GENERATING: hand the committed weights to the generator, prove it, sample.

    Every prompt gets `group_size` candidates, each with a seed of its own. Grading streams beside
    generation. Rounds go on, all by this version, until enough groups would train (DAPO,
    arXiv:2503.14476); by default there is one.
    """
    rounds = Rounds(run.world, run.recipe, run.cursor, run.quarantine.prompt_ids)
    prompts = rounds.draw()
    with run.hybrid.generating(iteration, run.version, run.manifest) as generator:
        run.evaluate_if_due(iteration, generator)
        run.enter(State.GENERATING, iteration, samples=len(prompts) * run.sampling.n)
        while prompts:
            requests = make_requests(prompts, run.sampling, iteration, rounds.first_draw)
            grading = Grading(run.pool, prompts, run.tokens.known_ids, rounds.first_draw)
            with run.stage("generate"):
                samples, losses = rollout(
                    run.world, generator, requests, run.sampling, run.version, grading
                )
                with run.stopwatch("wait"):  # the stage lasts until the slowest replica is done
                    run.world.gather(None)
            rounds.add(prompts, samples, losses, grading)
            if rounds.may_go_on:  # how many more prompts are needed follows from these rewards
                with run.stage("grade"):
                    rounds.grade()
            prompts = rounds.draw()
    run.enter(State.PREPARING, iteration, samples=rounds.asked)
    with run.stage("grade"):
        return rounds.finish()


def seal_experience(run: Run, iteration: int, sampled: Sampled, recipe: Recipe) -> Sealed:
    """PREPARING → EXPERIENCE_SEALED: complete groups, decide once and globally, by `recipe`, what
    trains and in which packs, bring tokens to their owners, freeze the log-probs on those very
    packs, seal.
    """
    world = run.world
    with run.hybrid.scoring():
        with run.stage("exchange"):
            scope = run.scope(iteration)
            arrival = Arrival(scope, sampled.samples, sampled.records)
            gathered = gather_arrivals(world, scope, [arrival])
            table = gathered.table
            plan = plan_iteration(
                table,
                recipe,
                world.mesh.dp,
                invalid=table.invalid,
                drawn=sampled.drawn,
                even_length=run.spec.even_length,
            )
            run.store.rollout(
                iteration,
                gathered.samples,
                gathered.records,
                table.scores.scorer_version,
                sampled.prompts,
            )
            run.judge_prompts(iteration, sampled.prompts, table, plan)
            owned = exchange(world, gathered.samples, table, plan.update.owner)
        with run.stage("log_probs"):
            packs = plan.update.local_packs(world.dp_index)
            prepared = prepare(owned.samples, packs, run.actor, run.reference, world.device)
            header = run.seal_header(iteration, table)
            with run.stopwatch("guard"):
                guard = Guard.of(run, iteration, sampled.prompts, recipe)
                guard.check_facts(header.producers, prepared, owned.scores, table, plan)
            parity = measure_parity(world, prepared)
            run.check_parity(parity)
    with run.stage("seal"):
        drawn = DrawnFacts.of(sampled.drawn, owned.joined, run.cursor.state)
        experience = seal(world, run.store, header, owned.scores, prepared, drawn)
        facts = {"experience_hash": experience.hash, "samples": len(table)}
        run.agree(State.EXPERIENCE_SEALED, iteration, **facts)
    return Sealed(table, plan, prepared, parity, experience, owned.joined, sampled.prompts)


def learn(run: Run, sealed: Sealed, derived: Derived) -> list[StepResult]:
    """One optimizer step per minibatch, its denominators counted over all ranks."""
    algorithm = run.recipe.algorithm
    loss = partial(grpo_loss, settings=algorithm)
    results = []
    with run.hybrid.training(), run.stage("update"):
        for packs, totals in zip(sealed.prepared.packs, sealed.plan.totals, strict=True):
            batches = micro_batches(
                sealed.experience,
                derived,
                packs,
                totals,
                algorithm.reduction,
                run.recipe.rollout.max_response_tokens,
            )
            results.append(run.actor.update(batches, loss))
    return results
