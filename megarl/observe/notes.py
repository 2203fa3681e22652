"""What the console says of an iteration that taught less than it was asked to. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from megarl.observe import metrics

if TYPE_CHECKING:  # as in row.py
    from megarl.models.step import StepResult
    from megarl.recipe import Recipe


def ended_early(iteration: int, steps: Sequence[StepResult]) -> str | None:
    """Why the actor's updates of an iteration ended before all its steps; None where they did not.

    `steps` are those that were begun, in order.
    """
    if not steps or not steps[-1].stopped:
        return None
    taken = sum(step.stepped for step in steps)
    after = f"{taken} step{'' if taken == 1 else 's'}"
    reason = steps[-1].skipped_reason
    return f"iteration {iteration}: the updates ended early, after {after}: {reason}"


def little_taught(row: Mapping[str, float], recipe: Recipe) -> Iterator[str]:
    """Of an iteration's row: that no step was taken, or that the policy term was 0 in all of them,
    and what acted then."""
    head = f"iteration {row[metrics.ITERATION]}"
    if not row["update/steps"]:
        if not row.get("critic/steps"):
            yield f"{head} taught nothing: {why_nothing(row)}"
    elif row.get("advantage/abs_max") == 0:
        acting = " and ".join(_still_acting(row, recipe))
        if acting:
            yield f"{head}: every advantage is 0; only {acting} acted on the actor"
        else:
            yield f"{head} taught the actor nothing: every advantage is 0"


def _still_acting(row: Mapping[str, float], recipe: Recipe) -> Iterator[str]:
    """The terms of the actor's loss besides the policy's."""
    algorithm = recipe.algorithm
    if algorithm.kl_in_loss and row.get("kl/beta"):
        yield "the KL term (algorithm.kl)"
    if algorithm.entropy_coefficient:
        yield "the entropy bonus (algorithm.entropy_coefficient)"
    if "policy/router_aux" in row:
        yield "the balancing loss (actor.router_aux_loss)"


def why_nothing(row: Mapping[str, float]) -> str:
    """Where the samples of an iteration without an optimizer step went."""
    where = {
        key.removeprefix("groups/samples_"): int(value)
        for key, value in row.items()
        if key.startswith("groups/samples_") and value
    }
    told = ", ".join(f"{count} {reason.replace('_', ' ')}" for reason, count in where.items())
    samples = int(row["groups/samples"])
    why = f"of {samples} samples {told}"
    if samples and where.get("no_steps") == samples:
        why += (
            "; no scorer gives step scores: return RewardParts.steps, or set algorithm.rewards to "
            "outcome"
        )
    return why
