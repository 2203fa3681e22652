"""`resume.use: reuse_sealed`: an iteration goes on from what it had sealed before the run died.

    ACTOR_COMMITTED(v) → EXPERIENCE_SEALED(v) → UPDATING_FROM(v)      nothing is generated or scored

The facts were made by the very version that the run was resumed at. So in the same layout all that
follows has the bits of a run that was never interrupted. In another one the packs differ, and old
log-probs and values, which stay as they were sealed, from those that these packs would give, by
roundings.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

from megarl.contracts.errors import InputError
from megarl.contracts.hashes import canonical_json
from megarl.contracts.records import Prompt
from megarl.contracts.states import State
from megarl.data.guards import Guard
from megarl.data.prepare import measure_parity
from megarl.experience.columns import SealError
from megarl.experience.load import SealedIteration, load_iteration
from megarl.experience.manifest import MANIFEST_FILE, iteration_folder
from megarl.experience.parts import prompt_lines
from megarl.modes.launch import Source
from megarl.modes.sealed_updates import OtherModel, Reloaded, reload
from megarl.recipe import Recipe
from megarl.run import Run
from megarl.sealed import Sealed

WAY_OUT = "set resume.use=regenerate to sample the iteration again"

MOST_LETTERS = 60
"""Of a prompt's text or answer that are told."""


class CannotReuse(InputError):
    """Sealed experience that this run cannot go on from; one line with both values."""


def reuse(run: Run, iteration: int, recipe: Recipe) -> Sealed | None:
    """The sealed facts of `iteration`, ready for its update; None where there are none to go on
    from, or the run was not resumed to do so. Collective.

    Leaves run, prompt cursor and quarantine as generating and sealing would have left them. The
    evaluation that was due before is done again. Raises `CannotReuse` on every rank for facts of
    another version, tokenizer, sampling, scorer, run or data set, and for files that are not whole;
    `GuardError` and `ParityError` as for facts that were made just now.
    """
    if iteration != run.reusable or not _is_sealed(run, iteration):
        return None
    world = run.world
    with run.stage("exchange"):
        facts, prompts = proven_facts(run, iteration)
    evaluate_again(run, iteration)
    with run.hybrid.scoring(), run.stage("log_probs"):
        # What it was started with is not needed now; on a GPU, training needs its memory.
        run.hybrid.generator.sleep()
        again = _reload(run, facts, recipe)
        with run.stopwatch("guard"):
            guard = Guard.of(run, iteration, prompts, recipe)
            guard.check_facts(
                facts.manifest.header.producers,
                again.prepared,
                again.experience.scores,
                again.table,
                again.plan,
            )
        parity = measure_parity(world, again.prepared)
        run.check_parity(parity)
    run.judge_prompts(iteration, prompts, again.table, again.plan)
    run.cursor.restore(dict(facts.drawn.cursor))
    evidence = {"experience_hash": again.experience.hash, "samples": len(again.table)}
    run.agree(State.EXPERIENCE_SEALED, iteration, **evidence, reused=True)
    run.console.note(
        f"iteration {iteration} goes on from {facts.folder}, nothing is generated: its old "
        f"log-probs differ from those of the weights at hand by at most {again.gap_max:.1e} nats"
    )
    return Sealed(
        table=again.table,
        plan=again.plan,
        prepared=again.prepared,
        parity=parity,
        experience=again.experience,
        joined=facts.drawn.joined,
        prompts=prompts,
    )


def evaluate_again(run: Run, iteration: int) -> None:
    """The evaluation that is due before the iteration's rollout, by the generator; then back to
    ACTOR_COMMITTED of the same version. Collective."""
    if not run.evaluation_is_due(iteration):
        return
    with run.hybrid.generating(iteration, run.version, run.manifest) as generator:
        run.evaluate_if_due(iteration, generator)
    run.agree(State.ACTOR_COMMITTED, iteration, **run.committed)


def _is_sealed(run: Run, iteration: int) -> bool:
    """As rank 0 finds it: a shared folder may tell others later."""
    there = (iteration_folder(run.folder, iteration) / MANIFEST_FILE).exists()
    return run.world.gather(there)[0]


def proven_facts(run: Run, iteration: int) -> tuple[SealedIteration, tuple[Prompt, ...]]:
    """The facts, proven to be those that this run would have made, and the present rows of their
    prompts, by draw index. Collective; raises `CannotReuse` on every rank with the same words."""
    problem, facts, prompts = None, None, ()
    scorer = run.world.gather(None if run.pool is None else run.pool.version)[0]
    try:
        facts = load_iteration(run.folder, iteration)
        rows = {prompt.prompt_id: prompt for prompt in run.cursor.rows}
        problem = next(_refusals(run, facts, scorer, rows), None)
        if problem is None:
            prompts = tuple(rows[told["prompt_id"]] for told in facts.prompts)
    except SealError as error:
        problem = f"{error}; {WAY_OUT}"
    # Every rank reads the files itself, and one that cannot must not leave the others waiting.
    problem = next((told for told in run.world.gather(problem) if told is not None), None)
    if problem is not None:
        raise CannotReuse(problem)
    return facts, prompts


def _refusals(
    run: Run, facts: SealedIteration, scorer: str | None, rows: Mapping[str, Prompt]
) -> Iterator[str]:
    """One line for each way in which the facts are not those that this run would have made."""
    header, cursor = facts.manifest.header, run.cursor.state
    compared: list[tuple[str, Any, Any]] = [("run.name", header.run_id, run.recipe.run.name)]
    reference = run.reference_version if run.reference is not None else None
    made_by = {"rollout": run.version.id, "old": run.version.id}
    made_by |= {"ref": reference.id} if reference is not None else {}
    made_by |= {"critic": run.critic_version.id} if run.critic is not None else {}
    for role in sorted(made_by.keys() | header.producers.keys()):
        told = "values of critic version" if role == "critic" else f"{role} log-probs of version"
        compared.append((told, header.producers.get(role), made_by.get(role)))
    compared.append(("tokenizer", header.tokenizer_hash, run.tokens.hash))
    mine = asdict(run.sampling)
    compared += [(f"sampling.{k}", v, mine[k]) for k, v in asdict(header.sampling).items()]
    compared.append(("scorer version", header.scorer_version, scorer))
    compared += [
        (f"data {key}", facts.drawn.cursor[key], cursor[key]) for key in ("fingerprint", "seed")
    ]
    if run.start is not None and run.start.position is not None:
        drawn_by = run.start.position.contracts.get("curriculum")
        compared.append(("prompts of curriculum", drawn_by, run.contracts.get("curriculum")))
    for what, sealed, at_hand in compared:
        if sealed != at_hand:
            yield _refusal(facts, what, sealed, at_hand)
    for told in facts.prompts:
        row = rows.get(told["prompt_id"])
        if row is None:
            yield _refusal(facts, "prompt", told["prompt_id"], "no such row")
            continue
        at_hand = prompt_lines((row,))[0]
        for key in sorted(told):
            sealed, mine = canonical_json(told[key]), canonical_json(at_hand.get(key))
            if sealed != mine:
                what = f"prompt {told['prompt_id']} of {key}"
                yield _refusal(facts, what, _short(sealed), _short(mine))


def _short(text: str) -> str:
    return text if len(text) <= MOST_LETTERS else text[:MOST_LETTERS] + "…"


def _refusal(facts: SealedIteration, what: str, sealed: Any, at_hand: Any) -> str:
    return f"{facts.folder}: sealed with {what} {sealed}, this run has {at_hand}; {WAY_OUT}"


def _reload(run: Run, facts: SealedIteration, recipe: Recipe) -> Reloaded:
    """Collective; every rank holds the same facts, so that all raise here or none."""
    source = Source(run.folder, facts.manifest.header.iteration)
    try:
        again = reload(run.world, recipe, source, facts, run.actor, run.critic)
    except OtherModel as error:
        raise CannotReuse(f"{error}; {WAY_OUT}") from error
    if again.from_rollout:
        raise CannotReuse(
            f"{facts.folder}: {again.from_rollout} action tokens train under this recipe and were "
            f"sealed without old log-probs, since they did not then; {WAY_OUT}"
        )
    return again
