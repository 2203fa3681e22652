"""The loop: GRPO and PPO on megatron-core, generating with in-process SGLang. It computes nothing
itself.

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

from megarl.algorithms.credit import Credit, credit
from megarl.algorithms.objectives import actor_loss
from megarl.algorithms.stopping import moved_too_far
from megarl.algorithms.values import critic_loss
from megarl.contracts.records import Derived
from megarl.contracts.states import State
from megarl.data.arrivals import Arrival
from megarl.data.everyone import everyone_of
from megarl.data.exchange import exchange, gather_arrivals
from megarl.data.guards import Guard
from megarl.data.minibatch import micro_batches, value_batches
from megarl.data.prepare import measure_parity, prepare
from megarl.data.seal import seal
from megarl.experience.drawn import DrawnFacts
from megarl.learnt import Learnt
from megarl.models.step import StepResult
from megarl.modes.reuse import reuse
from megarl.observe.row import iteration_row
from megarl.recipe import Recipe
from megarl.rollout.collect import Grading, make_requests, rollout
from megarl.rollout.groups import plan_iteration
from megarl.rollout.rounds import Rounds, Sampled
from megarl.run import Run
from megarl.run_versions import refresh_reference_if_due
from megarl.sealed import Sealed


def train(run: Run) -> None:
    """Sample, score, seal, credit, learn, commit; once per iteration (GRPO: arXiv:2402.03300, PPO:
    arXiv:1707.06347)."""
    run.begin()
    for iteration in run.iterations():
        # A resumed run may have it sealed already.
        sealed = reuse(run, iteration, run.recipe) or seal_experience(
            run, iteration, sample(run, iteration), run.recipe
        )
        run.close_ledger(iteration, sealed.experience.hash, sealed.plan, sealed.joined)
        # Advantages, and a critic's returns, from the sealed facts alone.
        credited = credit_sealed(run, sealed)
        derived = credited.derived
        with run.stopwatch("guard"):
            guard = Guard.of(run, iteration, sealed.prompts, run.recipe)
            guard.check_derived(sealed, derived)
        # UPDATING_FROM: an experience trains exactly once, also across restarts.
        begun = run.begin_update(iteration, sealed.experience, derived, sealed.plan)
        learnt = learn(run, iteration, sealed, derived)
        # The new weights become version v+1 once every copy of them was compared.
        run.commit(iteration)
        # Iterative GRPO: from time to time the KL term looks back at newer weights.
        refresh_reference_if_due(run, iteration)
        sums = run.close_update(begun, learnt)
        row = iteration_row(sealed.table, sealed.plan, sealed.parity, credited, learnt, sums)
        run.finish(iteration, row)


def sample(run: Run, iteration: int) -> Sampled:
    """EXPORTING … GENERATING: hand the committed weights to the generator, prove it, sample.

    Every prompt gets `group_size` candidates, each with a seed of its own. Grading streams beside
    generation. Rounds go on, all by this version, until enough groups would train (DAPO,
    arXiv:2503.14476); by default there is one.
    """
    rounds = Rounds(run.world, run.recipe, run.cursor, run.quarantine.prompt_ids, iteration)
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
                critic_even_length=None if run.critic is None else run.critic.spec.even_length,
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
            prepared = prepare(
                owned.samples,
                plan.update.local_packs(world.dp_index),
                run.actor,
                run.reference,
                world.device,
                run.critic,
                None if plan.critic is None else plan.critic.local_packs(world.dp_index),
            )
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


def credit_sealed(run: Run, sealed: Sealed) -> Credit:
    """Who did what, in numbers: pure functions of facts, statistics over all ranks' rows. The
    weight of the KL term follows for the next iteration."""
    credited = credit(
        sealed.experience,
        run.recipe.hash,
        sealed.table,
        sealed.plan,
        run.recipe.algorithm,
        everyone_of(run.world, sealed.table, sealed.experience.samples),
        run.controller.beta,
    )
    numbers = credited.numbers
    run.controller.update(
        numbers.get("reference/kl_sequence", 0.0), int(numbers.get("reference/sequences", 0))
    )
    return credited


def learn(run: Run, iteration: int, sealed: Sealed, derived: Derived) -> Learnt[StepResult]:
    """Optimizer steps, one per minibatch and pass, their denominators counted over all ranks.

    The critic's come first; the actor has none while the critic warms up, and no more once it moved
    too far. Old log-probs and values are constants throughout.
    """
    recipe, algorithm = run.recipe, run.recipe.algorithm
    learnt: Learnt[StepResult] = Learnt([])
    facts = (sealed.experience, derived)
    rules = (algorithm, recipe.rollout.max_response_tokens)
    with run.hybrid.training(), run.stage("update"):
        if run.critic is not None:
            with run.stopwatch("critic"):
                minibatches = zip(sealed.prepared.critic_packs, sealed.plan.totals, strict=True)
                batches = [value_batches(*facts, *each, *rules) for each in minibatches]
                loss = partial(critic_loss, settings=recipe.critic)
                for batch in batches * algorithm.epochs:
                    learnt.critic.append(run.critic.update(batch, loss))
        if run.critic is not None and iteration < recipe.critic.warmup_iterations:
            return learnt
        minibatches = zip(sealed.prepared.packs, sealed.plan.totals, strict=True)
        batches = [micro_batches(*facts, *each, *rules) for each in minibatches]
        loss = partial(actor_loss, settings=algorithm, beta=derived.kl_beta)
        veto = None if algorithm.target_kl is None else partial(moved_too_far, algorithm.target_kl)
        routers = sealed.prepared.routers or [None] * len(batches)
        for batch, router in list(zip(batches, routers, strict=True)) * algorithm.epochs:
            learnt.actor.append(run.actor.update(batch, loss, veto, router))
            if learnt.actor[-1].stopped:
                break
    return learnt
