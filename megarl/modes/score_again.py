"""`--only score --from RUN[@A-B]`: an old run's sealed samples, with rewards by another recipe.

The new run's experience has the same samples under the same iteration numbers, the trainer's facts
as they were sealed, and new reward records. No model is built.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from megarl.contracts.records import Prompt, RewardRecord, Scores
from megarl.contracts.tokens import Tokens
from megarl.data.exchange import gather_table
from megarl.data.packing import ragged_index
from megarl.data.prepare import Prepared
from megarl.desk import Desk
from megarl.experience.load import SealedIteration, load_iteration
from megarl.experience.source import write_source
from megarl.experience.store import SealHeader
from megarl.experience.tokenizer import check_same_contract
from megarl.experience.versions import VERSIONS_FILE
from megarl.modes.launch import Launch, Source
from megarl.observe.row import reward_row
from megarl.observe.runfolder import FINISHED_FILE
from megarl.rewards.score import ScoringPool
from megarl.rollout.collect import Grading, check_failures
from megarl.world import World


def score_again(desk: Desk, tokens: Tokens, pool: ScoringPool | None, launch: Launch) -> None:
    """Seal the same samples under the same iteration numbers, with rewards by this recipe.

    Each rank takes the groups of its replica by draw index; what the trainer computed then is
    copied. Raises `SealError`, `TokensError`, `RewardError` on every rank.
    """
    began = time.time()
    pairs = []
    if desk.world.is_main:
        _copy_versions(launch.sources[0].run, desk.folder)
    for source in launch.sources:
        desk.stopwatch.begin(source.iteration, "")
        iteration = load_iteration(source.run, source.iteration)
        check_same_contract(iteration.manifest.header, tokens, source.run)
        records = _grade(desk, tokens, pool, iteration)
        scores = _seal_scored(desk, source, iteration, records)
        row = reward_row(scores) | {
            f"before/{key}": value for key, value in reward_row(iteration.scores).items()
        }
        if desk.metrics is not None:
            desk.metrics.write({"iteration": source.iteration} | row | desk.stopwatch.take())
        pairs.append((iteration.scores, scores))
        desk.console.note(
            f"{source}: {len(scores.status)} samples, reward {_mean(iteration.scores.total)} → "
            f"{_mean(scores.total)}"
        )
    for text in before_after(pairs):
        desk.console.note(text)
    if desk.world.is_main:
        facts = {"iterations": len(launch.sources), "seconds": round(time.time() - began, 1)}
        body = json.dumps(facts, indent=1) + "\n"
        (desk.folder / FINISHED_FILE).write_text(body, encoding="utf-8")


def _mine(world: World, iteration: SealedIteration) -> np.ndarray:
    """Rows that this rank's replica takes."""
    return np.flatnonzero(iteration.samples.draw_index % world.mesh.replicas == world.replica)


def _grade(
    desk: Desk, tokens: Tokens, pool: ScoringPool | None, iteration: SealedIteration
) -> list[RewardRecord]:
    """This replica's new records, on the rank that leads it."""
    prompts = [Prompt(**row, token_ids=()) for row in iteration.prompts]
    samples = iteration.samples.select(_mine(desk.world, iteration))
    desk.world.enter("grade")
    with desk.stopwatch("grade"):
        grading = Grading(pool, prompts, tokens.known_ids)
        for sample_ in samples:
            grading.submit(sample_)
        records = grading.collect()
    check_failures(desk.world, grading.failures, desk.recipe.reward.max_error_share)
    return records


def _seal_scored(
    desk: Desk, source: Source, iteration: SealedIteration, records: list[RewardRecord]
) -> Scores:
    world, before = desk.world, iteration.manifest.header
    desk.world.enter("seal")
    with desk.stopwatch("seal"):
        samples = iteration.samples.select(_mine(world, iteration))
        table = gather_table(world, samples, records)
        version = table.scores.scorer_version
        prompts = [Prompt(**row, token_ids=()) for row in iteration.prompts]
        desk.store.rollout(source.iteration, samples, records, version, prompts)
        header = SealHeader(
            run_id=desk.recipe.run.name,
            iteration=source.iteration,
            producers=dict(before.producers),
            tokenizer_hash=before.tokenizer_hash,
            recipe_hash=desk.recipe.hash,
            sampling=before.sampling,
            scorer_version=version,
            samples=len(table),
        )
        desk.store.seal(header, _scored_then(world, iteration), iteration.drawn)
        if world.is_main:
            write_source(desk.folder, source.iteration, iteration)
    return table.scores


def _scored_then(world: World, iteration: SealedIteration) -> Prepared:
    """This data-parallel part's share of what the trainer sealed then."""
    share = iteration.samples.draw_index % world.mesh.dp == world.dp_index
    own = np.flatnonzero(share & (iteration.owner >= 0))
    samples = iteration.samples
    tokens = ragged_index(samples.response_offsets, own)
    ref, values, last = iteration.ref_log_probs, iteration.values, iteration.last_values
    return Prepared(
        samples=samples.select(own),
        packs=[],
        old_log_probs=iteration.old_log_probs[tokens],
        ref_log_probs=None if ref is None else ref[tokens],
        values=None if values is None else values[tokens],
        last_values=None if last is None else last[own],
        critic_packs=None,
    )


def _copy_versions(run: Path, folder: Path) -> None:
    """The versions that the copied samples name are told by the run that made them."""
    (folder / VERSIONS_FILE).write_bytes((run / VERSIONS_FILE).read_bytes())


def before_after(pairs: Sequence[tuple[Scores, Scores]]) -> list[str]:
    """For people, over all iterations: the mean of the total and of each component over the samples
    that were scored, then and now, and how many samples' values changed."""
    names = sorted({name for pair in pairs for scores in pair for name in scores.components})

    def column(side: int, name: str) -> np.ndarray:
        """One value a sample, NaN where there is none."""
        parts = []
        for pair in pairs:
            scores = pair[side]
            none = np.full(len(scores.status), np.nan)
            parts.append(scores.total if not name else scores.components.get(name, none))
        return np.concatenate(parts)

    told = [f"{'component':24} {'before':>10}   {'after':10} samples changed"]
    for name in ("", *names):
        then, now = column(0, name), column(1, name)
        changed = int((~((then == now) | (np.isnan(then) & np.isnan(now)))).sum())
        told.append(f"{name or 'total':24} {_mean(then):>10} → {_mean(now):10} {changed}")
    unscored = [sum(int((~pair[side].ok).sum()) for pair in pairs) for side in (0, 1)]
    if any(unscored):
        told.append(f"{'unscored samples':24} {unscored[0]:>10} → {unscored[1]}")
    return told


def _mean(values: np.ndarray) -> str:
    known = values[~np.isnan(values)]
    return f"{known.mean():.4f}" if len(known) else "-"
