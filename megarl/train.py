"""The loop: GRPO on megatron-core, generating with in-process SGLang. It computes nothing itself.

    python -m megarl.train RECIPE [key=value …]                    one rank
    bash launch/grpo.sh RECIPE [key=value …]                       the recipe's ranks, this machine
    torchrun --nproc_per_node N launch/grpo.sh RECIPE [key=value …]

Every rank runs this same file; collectives are the stage barriers.
"""

from __future__ import annotations

import sys
from functools import partial
from typing import TYPE_CHECKING

from megarl.process import run_process

if TYPE_CHECKING:  # torch and both libraries load only once the recipe is known to be good
    from megarl.run import Run


def train(run: Run) -> None:
    """Sample, score, seal, credit, update, commit; once per iteration (arXiv:2402.03300)."""
    from megarl.algorithms.credit import credit
    from megarl.algorithms.objectives import grpo_loss
    from megarl.contracts.states import State
    from megarl.data.exchange import exchange, gather_table
    from megarl.data.minibatch import micro_batches
    from megarl.data.prepare import measure_parity, prepare
    from megarl.data.seal import seal
    from megarl.observe.row import iteration_row
    from megarl.rollout.collect import Grading, make_requests, rollout
    from megarl.rollout.groups import plan_iteration

    recipe, world, hybrid = run.recipe, run.world, run.hybrid
    loss = partial(grpo_loss, settings=recipe.algorithm)
    run.commit(iteration=0)

    for iteration in run.iterations():
        # Draw prompts and ask for `group_size` candidates of each, every one with its own seed.
        prompts = run.cursor.draw(iteration)
        requests = make_requests(prompts, run.sampling, iteration)
        grading = Grading(run.pool, prompts, run.tokens.known_ids)

        # Hand the committed weights to the generator, prove it, and sample; grading streams.
        with hybrid.generating(iteration, run.version, run.manifest) as generator:
            run.evaluate_if_due(iteration, generator)
            run.enter(State.GENERATING, iteration, samples=len(requests))
            with run.stage("generate"):
                generated = rollout(world, generator, requests, run.sampling, run.version, grading)

        # Complete groups, decide once and globally what trains, freeze log-probs on its packs.
        with hybrid.scoring():
            run.enter(State.PREPARING, iteration, samples=len(requests))
            with run.stage("grade"):
                records = grading.collect()
                grading.check_failures(world, recipe.reward.max_error_share)
            with run.stage("exchange"):
                table = gather_table(world, generated, records)
                plan = plan_iteration(table, recipe, world.mesh.dp, invalid=table.invalid)
                samples, scores = exchange(world, generated, table, plan.update.owner)
            with run.stage("log_probs"):
                packs = plan.update.local_packs(world.dp_index)
                prepared = prepare(samples, packs, run.actor, run.reference, world.device)
                parity = measure_parity(world, prepared)
                run.check_parity(parity)
        with run.stage("seal"):
            identities = run.identities(iteration, prompts)
            producers = run.producers(table)
            experience = seal(world, identities, run.sampling, scores, prepared, producers)
            run.agree(
                State.EXPERIENCE_SEALED,
                iteration,
                experience_hash=experience.hash,
                samples=len(table),
            )
            run.close_ledger(iteration, plan)

        # Group-relative advantages, from the sealed facts alone.
        derived, advantages = credit(experience, recipe.hash, table, plan.trained, recipe.algorithm)

        # One optimizer step per minibatch; its denominators are counted over all ranks first.
        results = []
        with hybrid.training(), run.stage("update"):
            run.enter(State.UPDATING_FROM, iteration, experience_hash=experience.hash)
            for minibatch, totals in zip(prepared.packs, plan.totals, strict=True):
                batches = micro_batches(
                    experience,
                    derived,
                    minibatch,
                    totals,
                    recipe.algorithm.reduction,
                    recipe.rollout.max_response_tokens,
                )
                results.append(run.actor.update(batches, loss))

        # The new weights become version v+1 once every copy of them was compared.
        run.commit(iteration)
        sums = run.global_sums(results)
        run.finish(iteration, iteration_row(table, plan, parity, advantages, results, sums))


if __name__ == "__main__":
    sys.exit(run_process(train))
