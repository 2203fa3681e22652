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

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from megarl.algorithms.credit import credit
from megarl.algorithms.objectives import grpo_loss
from megarl.contracts.records import Derived, Experience, Prompt, RewardRecord
from megarl.contracts.samples import Samples
from megarl.contracts.states import State
from megarl.data.exchange import exchange, gather_table
from megarl.data.minibatch import micro_batches
from megarl.data.prepare import Parity, Prepared, measure_parity, prepare
from megarl.data.seal import seal
from megarl.data.table import SampleTable
from megarl.models.step import StepResult
from megarl.observe.row import iteration_row
from megarl.rollout.collect import Grading, make_requests, rollout
from megarl.rollout.groups import IterationPlan, plan_iteration
from megarl.run import Run


@dataclass(frozen=True)
class Sealed:
    """One iteration's facts, and what was decided over them once and globally."""

    table: SampleTable
    plan: IterationPlan
    prepared: Prepared
    parity: Parity
    experience: Experience


def train(run: Run) -> None:
    """Sample, score, seal, credit, learn, commit; once per iteration (arXiv:2402.03300)."""
    run.commit(iteration=0)
    for iteration in run.iterations():
        prompts = run.cursor.draw(iteration)
        generated, records = sample(run, iteration, prompts)
        sealed = seal_experience(run, iteration, prompts, generated, records)
        # Group-relative advantages, from the sealed facts alone.
        derived, advantages = credit(
            sealed.experience,
            run.recipe.hash,
            sealed.table,
            sealed.plan.trained,
            run.recipe.algorithm,
        )
        run.keep_derived(iteration, sealed.experience, derived, sealed.plan)
        results = learn(run, iteration, sealed, derived)
        # The new weights become version v+1 once every copy of them was compared.
        run.commit(iteration)
        sums = run.global_sums(results)
        row = iteration_row(sealed.table, sealed.plan, sealed.parity, advantages, results, sums)
        run.finish(iteration, row)


def sample(
    run: Run, iteration: int, prompts: Sequence[Prompt]
) -> tuple[Samples, list[RewardRecord]]:
    """EXPORTING … GENERATING: hand the committed weights to the generator, prove it, sample.

    Every prompt gets `group_size` candidates, each with a seed of its own. Grading streams beside
    generation. Returns this replica's samples, and their rewards on the rank that leads it.
    """
    requests = make_requests(prompts, run.sampling, iteration)
    grading = Grading(run.pool, prompts, run.tokens.known_ids)
    with run.hybrid.generating(iteration, run.version, run.manifest) as generator:
        run.evaluate_if_due(iteration, generator)
        run.enter(State.GENERATING, iteration, samples=len(requests))
        with run.stage("generate"):
            generated = rollout(run.world, generator, requests, run.sampling, run.version, grading)
            with run.stopwatch("wait"):  # the stage lasts until the slowest replica is done
                run.world.gather(None)
    run.enter(State.PREPARING, iteration, samples=len(requests))
    with run.stage("grade"):
        records = grading.collect()
        grading.check_failures(run.world, run.recipe.reward.max_error_share)
    return generated, records


def seal_experience(
    run: Run,
    iteration: int,
    prompts: Sequence[Prompt],
    generated: Samples,
    records: Sequence[RewardRecord],
) -> Sealed:
    """PREPARING → EXPERIENCE_SEALED: complete groups, decide once and globally what trains and in
    which packs, bring tokens to their owners, freeze the log-probs on those very packs, seal.
    """
    world, recipe = run.world, run.recipe
    with run.hybrid.scoring():
        with run.stage("exchange"):
            table = gather_table(world, generated, records)
            plan = plan_iteration(
                table, recipe, world.mesh.dp, prompts=len(prompts), invalid=table.invalid
            )
            run.store.rollout(iteration, generated, records, table.scores.scorer_version, prompts)
            samples, scores = exchange(world, generated, table, plan.update.owner)
        with run.stage("log_probs"):
            packs = plan.update.local_packs(world.dp_index)
            one_length = world.mesh.pp > 1
            prepared = prepare(
                samples, packs, run.actor, run.reference, world.device, one_length=one_length
            )
            parity = measure_parity(world, prepared)
            run.check_parity(parity)
    with run.stage("seal"):
        header = run.seal_header(iteration, table)
        experience = seal(world, run.store, header, scores, prepared)
        facts = {"experience_hash": experience.hash, "samples": len(table)}
        run.agree(State.EXPERIENCE_SEALED, iteration, **facts)
        run.close_ledger(iteration, plan)
    return Sealed(table, plan, prepared, parity, experience)


def learn(run: Run, iteration: int, sealed: Sealed, derived: Derived) -> list[StepResult]:
    """UPDATING_FROM: one optimizer step per minibatch, its denominators counted over all ranks."""
    algorithm = run.recipe.algorithm
    loss = partial(grpo_loss, settings=algorithm)
    results = []
    with run.hybrid.training(), run.stage("update"):
        run.enter(State.UPDATING_FROM, iteration, experience_hash=sealed.experience.hash)
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
