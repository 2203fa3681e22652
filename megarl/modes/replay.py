"""An old iteration's update once more, from sealed facts, compared with what was recorded.

    bash launch/grpo.sh RECIPE --replay RUN@N [key=value …]

No checkpoint is needed: the weights before iteration N come from replaying 0 … N−1 from the model
folder, and every step on the way is compared too. Old and reference log-probs are the sealed
constants; neither a generator nor a scorer is started.

What counts as equal:

- the run's own layout: every bit. The weights' digests are compared after each iteration.
- another layout or packing: sums are taken in another order, and since Adam divides by √v, which
  makes a rounding of a tiny gradient as large as any, the gap grows with the steps. Largest gaps of
  the quickstart's TP2 run on one rank, DP2 and PP2 (CPU): in the first iteration loss 3e-8 and
  gradient norm 8e-7, in the third 1e-7 and 5e-6; with bfloat16 forwards 3e-4 and 1e-2, 1e-3 and
  4e-2.

`TOLERANCES` bound the first iteration and those after it: gradient norm relative to the recorded
one, loss relative to max(|recorded loss|, mean |advantage|), since a policy loss cancels to about
0.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from megarl.algorithms.credit import credit
from megarl.contracts.states import State
from megarl.data.guards import check_sealed
from megarl.experience.source import write_source
from megarl.experience.updates import Update, finite, read_updates
from megarl.experience.versions import Versions
from megarl.modes.launch import Launch
from megarl.modes.sealed_updates import NOT_MEASURED, Reloaded, load_source, reload
from megarl.observe.logs import fail
from megarl.observe.runfolder import REPLAY_FILE
from megarl.run import Run
from megarl.sealed import Sealed
from megarl.train import learn

TOLERANCES = {"float32": (1e-5, 1e-3), "bfloat16": (5e-2, 2e-1)}
"""By `model.dtype`: of the first iteration, and of later ones."""


class NotRecorded(ValueError):
    """A run that did not record what a replay is compared with; one line."""


@dataclass(frozen=True, slots=True)
class StepGap:
    """One optimizer step, recorded and replayed. A skipped step's numbers may be None."""

    iteration: int
    minibatch: int
    loss: tuple[float | None, float | None]
    """(recorded, replayed)."""
    grad_norm: tuple[float | None, float | None]
    stepped: tuple[bool, bool]
    scale: float
    """Mean |advantage| of the minibatch's tokens: what a loss that cancels is measured by."""

    @property
    def loss_gap(self) -> float:
        return _gap(*self.loss, self.scale)

    @property
    def grad_norm_gap(self) -> float:
        return _gap(*self.grad_norm, 0.0)

    def broken(self, tolerance: float) -> str | None:
        """What differs beyond `tolerance`, None where nothing does."""
        where = f"iteration {self.iteration} step {self.minibatch}"
        if self.stepped[0] != self.stepped[1]:
            words = ["stepped" if stepped else "was skipped" for stepped in self.stepped]
            return f"{where} {words[0]} in the run and {words[1]} here"
        for name, gap in (("loss", self.loss_gap), ("gradient norm", self.grad_norm_gap)):
            if not gap <= tolerance:
                return f"{where}: {name} differs by {gap:.1e}, tolerance {tolerance:.0e}"
        return None


@dataclass(frozen=True, slots=True)
class IterationGap:
    """One iteration, recorded and replayed."""

    iteration: int
    steps: tuple[StepGap, ...]
    same_choice: bool | None
    """The plan trained the rows that trained then, in the same minibatches; None: not sealed."""
    same_weights: bool
    """Every tensor's digest after the iteration is the recorded one."""
    old_gap_max: float
    """Largest |recomputed − sealed| old log-prob, nats."""
    old_gap_mean: float

    def broken(self, tolerances: tuple[float, float]) -> str | None:
        """What differs beyond the tolerance of the first or of later iterations, or None."""
        if self.same_choice is False:
            return (
                f"iteration {self.iteration}: this recipe trains other samples, or in other "
                "minibatches, than the run did"
            )
        tolerance = tolerances[min(self.iteration, 1)]
        return next((told for step in self.steps if (told := step.broken(tolerance))), None)


def replay(run: Run, launch: Launch) -> int:
    """Redo the iterations of `launch`; returns the exit code. Collective.

    Raises `SealError`, `OtherModel`, `VersionsError`, `NotRecorded`, each in one line.
    """
    folder = launch.sources[-1].run
    recorded, versions = _read_recorded(folder, launch), Versions.read(folder)
    for difference in launch.what_if:
        run.console.note(f"asked for: {difference}; the run's numbers are of another update")
    run.commit(iteration=0)
    first = versions.resolve(recorded[0].from_version).manifest
    if first.hash != run.manifest.hash:
        raise NotRecorded(
            f"{run.recipe.model.path} holds other weights than {folder} began with: "
            f"{first.differences(run.manifest)[0]}"
        )
    gaps = []
    for source in launch.sources:
        iteration = load_source(source, run.recipe, run.tokens, run.spec)
        then = recorded[source.iteration]
        if then.experience_hash != iteration.manifest.experience_hash:
            raise NotRecorded(f"{folder}: iteration {source.iteration} trained on other facts")
        run.stopwatch.begin(source.iteration, run.version.id)
        with run.hybrid.scoring(), run.stage("log_probs"):
            again = reload(run.world, run.recipe, source, iteration, run.actor)
        steps = tuple(_update(run, again, then))
        after = versions.resolve(then.to_version).version.weight_manifest_hash
        gaps.append(
            IterationGap(
                iteration=source.iteration,
                steps=steps,
                same_choice=again.same_choice,
                same_weights=after == run.manifest.hash,
                old_gap_max=again.gap_max,
                old_gap_mean=again.gap_mean,
            )
        )
    return _tell(run, launch, gaps)


def _read_recorded(folder: Path, launch: Launch) -> dict[int, Update]:
    """`updates.jsonl` by iteration."""
    updates = {update.iteration: update for update in read_updates(folder)[0]}
    for source in launch.sources:
        if source.iteration not in updates:
            raise NotRecorded(
                f"{folder}: iteration {source.iteration} was sealed, but updates.jsonl has no "
                "update from it: the run ended before"
            )
    return updates


def _update(run: Run, again: Reloaded, recorded: Update) -> Iterator[StepGap]:
    """One iteration's optimizer steps and the commit, each step beside its record."""
    number = again.source.iteration
    derived, advantages = credit(
        again.experience,
        run.recipe.hash,
        again.table,
        again.plan.trained,
        run.recipe.algorithm,
    )
    facts = {"experience_hash": again.experience.hash, "samples": len(again.table)}
    if run.world.is_main:
        write_source(run.folder, number, again.iteration)
    run.agree(State.EXPERIENCE_SEALED, number, **facts)
    names = again.iteration.identities
    check_sealed(run.world, names, run.recipe, run.recipe.hash, again, derived)
    begun = run.begin_update(number, again.experience, derived, again.plan)
    sealed = Sealed(again.table, again.plan, again.prepared, NOT_MEASURED, again.experience)
    results = learn(run, sealed, derived)
    run.commit(number)
    losses = run.close_update(begun, results)
    if len(recorded.steps) != len(results):
        raise NotRecorded(
            f"iteration {number}: {len(recorded.steps)} steps recorded, {len(results)} replayed"
        )
    for minibatch, (then, now, sums) in enumerate(
        zip(recorded.steps, results, losses, strict=True)
    ):
        rows = again.plan.minibatch == minibatch
        yield StepGap(
            iteration=number,
            minibatch=minibatch,
            loss=(then.loss, finite(sums["loss"])),
            grad_norm=(then.grad_norm, finite(now.grad_norm)),
            stepped=(then.stepped, now.stepped),
            scale=_mean_size(advantages[rows], again.table.actions[rows]),
        )


def _mean_size(advantages: np.ndarray, actions: np.ndarray) -> float:
    tokens = actions.sum()
    return float((np.abs(advantages) * actions).sum() / tokens) if tokens else 0.0


def _gap(recorded: float | None, replayed: float | None, scale: float) -> float:
    """|difference| relative to the larger of |recorded| and `scale`; infinite for one missing."""
    if recorded is None or replayed is None:
        return 0.0 if recorded is replayed else float("inf")
    difference = abs(replayed - recorded)
    return difference / max(abs(recorded), scale, 1e-30) if difference else 0.0


def _tell(run: Run, launch: Launch, gaps: Sequence[IterationGap]) -> int:
    """Table on the console, file, verdict; the same exit code on every rank."""
    tolerances = TOLERANCES[run.recipe.model.dtype]
    broken = next((told for gap in gaps if (told := gap.broken(tolerances))), None)
    for text in table(gaps):
        run.console.note(text)
    last = launch.sources[-1]
    if run.world.is_main:
        told = {
            "run": str(last.run),
            "iteration": last.iteration,
            "what_if": list(launch.what_if),
            "within": broken is None,
            "iterations": [asdict(gap) for gap in gaps],
        }
        text = json.dumps(told, indent=1) + "\n"
        (run.folder / REPLAY_FILE).write_text(text, encoding="utf-8")
    if broken is None:
        run.console.note(f"replay of {last} is within tolerance; {run.folder / REPLAY_FILE}")
    elif run.world.is_main:  # whose table it is: the verdict comes after it
        fail(f"replay of {last} is beyond tolerance: {broken}")
    run.world.barrier("verdict")  # the first rank to leave with 1 has torchrun end the others
    return 0 if broken is None else 1


def table(gaps: Sequence[IterationGap]) -> Iterator[str]:
    """Lines for people: a row for each step, then what was compared besides."""
    yield (
        f"{'iteration':>9} {'step':>4} {'loss: recorded':>14} {'replayed':>12} {'gap':>7} "
        f"{'grad norm: recorded':>20} {'replayed':>12} {'gap':>7}"
    )
    for step in (step for gap in gaps for step in gap.steps):
        yield (
            f"{step.iteration:>9} {step.minibatch:>4} {_number(step.loss[0]):>14} "
            f"{_number(step.loss[1]):>12} {step.loss_gap:7.0e} "
            f"{_number(step.grad_norm[0]):>20} {_number(step.grad_norm[1]):>12} "
            f"{step.grad_norm_gap:7.0e}" + ("" if step.stepped[1] else "  skipped")
        )
    unequal = [gap.iteration for gap in gaps if not gap.same_weights]
    yield (
        "weights after every iteration: bit for bit those recorded"
        if not unequal
        else f"weights: bits differ from iteration {unequal[0]} on"
    )
    worst = max(gaps, key=lambda gap: gap.old_gap_max)
    yield (
        f"old log-probs recomputed: max gap {worst.old_gap_max:.1e} nats (iteration "
        f"{worst.iteration}), mean {max(gap.old_gap_mean for gap in gaps):.1e}"
    )
    unsealed = [gap.iteration for gap in gaps if gap.same_choice is None]
    if unsealed:
        yield f"no choice of rows was sealed in iterations {unsealed}: not compared"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.6g}"
