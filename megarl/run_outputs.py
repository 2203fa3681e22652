"""What a run gives: held-out evaluations, Hugging Face folders, and its last write."""

from __future__ import annotations

import time
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING

import torch

from megarl.checkpoint.hf_folder import export_folder
from megarl.evaluation.files import write_generations, write_numbers
from megarl.evaluation.held_out import HeldOut, evaluate
from megarl.observe.report import write_report
from megarl.observe.runfolder import write_finished
from megarl.reshard.layout import megatron_placement
from megarl.rollout.generator import Generator

if TYPE_CHECKING:
    from megarl.run import Run

HF_FOLDER = "hf"


def evaluate_held_out(run: Run, generator: Generator) -> dict[str, float]:
    """The committed weights on the held-out prompts, as metrics; `eval/step_N.jsonl` and `.json`.
    Collective."""
    with run.stage("evaluate"):
        done = evaluate(run.world, generator, run.version, held_out_of(run))
        if run.world.is_main:
            stem = run.folder / "eval" / f"step_{run.version.optimizer_step}"
            head = {"version": run.version.id, "optimizer_step": run.version.optimizer_step}
            write_generations(stem.with_suffix(".jsonl"), head, done.lines)
            write_numbers(stem.with_suffix(".json"), done.told())
    return done.metrics | {"eval/optimizer_step": float(run.version.optimizer_step)}


def held_out_of(run: Run) -> HeldOut:
    """What the run's evaluations are made of."""
    recipe = run.recipe
    return HeldOut(
        prompts=run.held_out,
        fingerprint=run.contracts["eval_data"],
        tokens=run.tokens,
        sampling=run.sampling,
        section=recipe.eval,
        reward=recipe.reward,
        max_lost_share=recipe.rollout.max_lost_share,
        pool=run.pool,
        probes=run.probes,
    )


def export_on_the_way(run: Run, finished: int, accuracy: float | None = None) -> None:
    """`exports/iter_N/` of the weights after `finished` iterations, where it is due. Collective.

    `accuracy`: theirs, where they were evaluated.
    """
    if run.exports is not None and run.exports.due(finished, accuracy):
        with run.stage("export"):
            run.exports.write(finished, run.actor.named_parameters(), accuracy)


def export_final(run: Run) -> None:
    """The actor's weights as a Hugging Face folder, `hf/`. Collective."""
    with run.stage("export"):
        export_folder(
            run.folder / HF_FOLDER,
            Path(run.recipe.model.path),
            megatron_placement(run.spec, run.world.mesh),
            run.actor.named_parameters(),
            run.spec,
            run.world,
            getattr(torch, run.recipe.model.dtype),
        )


def elapsed_seconds(run: Run) -> float:
    """That the run has taken, over all its starts."""
    position = None if run.start is None else run.start.position
    return time.time() - run.started + (0.0 if position is None else position.seconds)


def mark_finished(run: Run) -> None:
    """The last write of a run."""
    if not run.world.is_main:
        return
    facts = {
        "iterations": run.recipe.run.iterations,
        "version": run.version.id,
        "weight_manifest_hash": run.manifest.hash,
        "seconds": round(elapsed_seconds(run), 1),
    }
    write_finished(run.folder, facts)
    write_report(run.folder)
    run.console.note(
        f"finished: {run.folder}; "
        f"python -m megarl.observe.summary {quote(str(run.folder))} sums it up"
    )
