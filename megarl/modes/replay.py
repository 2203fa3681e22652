"""An old iteration's update once more, from sealed facts, compared with what was recorded.

    bash launch/grpo.sh RECIPE --replay RUN@N [key=value …]

No checkpoint is needed: the weights before iteration N come from replaying 0 … N−1 from the model
folder, and every step on the way is compared too, a critic's as well. Log-probs and values are the
sealed constants; neither a generator nor a scorer is started.

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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from megarl.contracts.records import Derived
from megarl.contracts.states import State
from megarl.contracts.version import WeightManifest
from megarl.data.guards import check_sealed
from megarl.experience.source import write_source
from megarl.experience.updates import Update, UpdateStep, finite, read_updates
from megarl.experience.versions import Versions
from megarl.models.step import StepResult
from megarl.modes.launch import Launch
from megarl.modes.sealed_updates import NOT_MEASURED, Reloaded, load_source, reload
from megarl.observe.logs import fail
from megarl.observe.runfolder import REPLAY_FILE
from megarl.run import Run
from megarl.sealed import Sealed
from megarl.train import credit_sealed, learn

TOLERANCES = {"float32": (1e-5, 1e-3), "bfloat16": (5e-2, 2e-1)}
"""By `model.dtype`: of the first iteration, and of later ones."""


class NotRecorded(ValueError):
    """A run that did not record what a replay is compared with; one line."""


@dataclass(frozen=True, slots=True)
class StepGap:
    """One optimizer step, recorded and replayed. A skipped step's numbers may be None."""

    iteration: int
    role: str
    """`actor` or `critic`."""
    epoch: int
    minibatch: int
    loss: tuple[float | None, float | None]
    """(recorded, replayed)."""
    grad_norm: tuple[float | None, float | None]
    stepped: tuple[bool, bool]
    scale: float
    """Mean |advantage| of the minibatch's tokens: what a loss that cancels is measured by; 0 for a
    critic's, whose terms have one sign."""

    @property
    def loss_gap(self) -> float:
        return _gap(*self.loss, self.scale)

    @property
    def grad_norm_gap(self) -> float:
        return _gap(*self.grad_norm, 0.0)

    @property
    def name(self) -> str:
        whose = "" if self.role == "actor" else f"{self.role} "
        return f"{whose}step {self.minibatch}" + (f" of pass {self.epoch}" if self.epoch else "")

    def broken(self, tolerance: float) -> str | None:
        """What differs beyond `tolerance`, None where nothing does."""
        where = f"iteration {self.iteration} {self.name}"
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
    """Every tensor's digest after the iteration is the recorded one, the critic's too."""
    old_gap_max: float
    """Largest |recomputed − sealed| old log-prob, nats."""
    old_gap_mean: float
    value_gap_max: float
    """Largest |recomputed − sealed| value; 0 without a critic."""

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
    _check_begin(folder, versions.resolve(recorded[0].from_version).manifest, run.manifest, "")
    if run.critic is not None and (first := _critics(versions, None)) is not None:
        _check_begin(folder, first, run.critic_manifest, "the critic's ")
    gaps = []
    for source in launch.sources:
        iteration = load_source(source, run.recipe, run.tokens, run.spec)
        then = recorded[source.iteration]
        if then.experience_hash != iteration.manifest.experience_hash:
            raise NotRecorded(f"{folder}: iteration {source.iteration} trained on other facts")
        run.stopwatch.begin(source.iteration, run.version.id)
        with run.hybrid.scoring(), run.stage("log_probs"):
            again = reload(run.world, run.recipe, source, iteration, run.actor, run.critic)
        steps = tuple(_update(run, again, then))
        after = versions.resolve(then.to_version).version.weight_manifest_hash
        critic = None if run.critic is None else _critics(versions, source.iteration)
        same_critic = critic is None or critic.hash == run.critic_manifest.hash
        gaps.append(
            IterationGap(
                iteration=source.iteration,
                steps=steps,
                same_choice=again.same_choice,
                same_weights=after == run.manifest.hash and same_critic,
                old_gap_max=again.gap_max,
                old_gap_mean=again.gap_mean,
                value_gap_max=again.value_gap_max,
            )
        )
    return _tell(run, launch, gaps)


def _check_begin(folder: Path, then: WeightManifest, now: WeightManifest, whose: str) -> None:
    if then.hash != now.hash:
        raise NotRecorded(
            f"model.path and critic.path hold other weights than {folder} began with: "
            f"{whose}{then.differences(now)[0]}"
        )


def _critics(versions: Versions, iteration: int | None) -> WeightManifest | None:
    """The critic's weights as they were told last in an iteration, or before the first (None)."""
    told = [
        (line, number, committed.manifest)
        for committed in versions.committed.values()
        if committed.version.role == "critic"
        for line, number in zip(committed.lines, committed.iterations, strict=True)
    ]
    if iteration is None:
        return min(told, default=(0, 0, None), key=lambda each: each[0])[2]
    of_it = [each for each in told if each[1] == iteration]
    return max(of_it, default=(0, 0, None), key=lambda each: each[0])[2]


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
    sealed = Sealed(again.table, again.plan, again.prepared, NOT_MEASURED, again.experience)
    credited = credit_sealed(run, sealed)
    derived = credited.derived
    facts = {"experience_hash": again.experience.hash, "samples": len(again.table)}
    if run.world.is_main:
        write_source(run.folder, number, again.iteration)
    run.agree(State.EXPERIENCE_SEALED, number, **facts)
    names = again.iteration.identities
    check_sealed(run.world, names, run.recipe, run.recipe.hash, again, derived)
    begun = run.begin_update(number, again.experience, derived, again.plan)
    learnt = learn(run, number, sealed, derived)
    run.commit(number)
    losses = run.close_update(begun, learnt)
    scales = _scales(run, again, derived)
    yield from _gaps(number, "critic", recorded.critic, learnt.critic, losses.critic, ())
    yield from _gaps(number, "actor", recorded.steps, learnt.actor, losses.actor, scales)


def _gaps(
    iteration: int,
    role: str,
    recorded: Sequence[UpdateStep],
    results: Sequence[StepResult],
    losses: Sequence[Mapping[str, float]],
    scales: Sequence[float],
) -> Iterator[StepGap]:
    """`scales` by minibatch; none for 0 everywhere."""
    if len(recorded) != len(results):
        raise NotRecorded(
            f"iteration {iteration}: {len(recorded)} {role} steps recorded, {len(results)} replayed"
        )
    for then, now, sums in zip(recorded, results, losses, strict=True):
        yield StepGap(
            iteration=iteration,
            role=role,
            epoch=then.epoch,
            minibatch=then.minibatch,
            loss=(then.loss, finite(sums["loss"])),
            grad_norm=(then.grad_norm, finite(now.grad_norm)),
            stepped=(then.stepped, now.stepped),
            scale=scales[then.minibatch] if scales else 0.0,
        )


def _scales(run: Run, again: Reloaded, derived: Derived) -> list[float]:
    """By minibatch, the mean |advantage| of its tokens over all ranks. Collective."""
    samples, world = again.prepared.samples, run.world
    own = np.flatnonzero(again.plan.update.owner == world.dp_index)
    minibatch = np.repeat(again.plan.minibatch[own], samples.response_lengths)
    sizes = np.abs(derived.advantages.astype(np.float64))
    sums = world.totals(
        {
            str(number): float(sizes[(minibatch == number) & samples.action_mask].sum())
            for number in range(len(again.plan.totals))
        },
        counted=world.leads_owners,
    )
    return [
        sums[str(number)] / totals.tokens if totals.tokens else 0.0
        for number, totals in enumerate(again.plan.totals)
    ]


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
    named = {step: _place(step) for gap in gaps for step in gap.steps}
    wide = max([4, *map(len, named.values())])
    yield (
        f"{'iteration':>9} {'step':>{wide}} {'loss: recorded':>14} {'replayed':>12} {'gap':>7} "
        f"{'grad norm: recorded':>20} {'replayed':>12} {'gap':>7}"
    )
    for step in (step for gap in gaps for step in gap.steps):
        yield (
            f"{step.iteration:>9} {named[step]:>{wide}} {_number(step.loss[0]):>14} "
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
    if any(step.role == "critic" for gap in gaps for step in gap.steps):
        yield f"values recomputed: max gap {max(gap.value_gap_max for gap in gaps):.1e}"
    unsealed = [gap.iteration for gap in gaps if gap.same_choice is None]
    if unsealed:
        yield f"no choice of rows was sealed in iterations {unsealed}: not compared"


def _place(step: StepGap) -> str:
    """`critic 1.0` is the critic's step on minibatch 0 in its second pass."""
    whose = "" if step.role == "actor" else f"{step.role} "
    return f"{whose}{step.epoch}.{step.minibatch}" if step.epoch else f"{whose}{step.minibatch}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.6g}"
