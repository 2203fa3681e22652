"""What `audit recompute` found, as lines for a person."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from megarl.audit import text

if TYPE_CHECKING:
    from megarl.audit.recompute import Job, Result

_AS_TRAINED = ["iteration", "groups", "samples", "tokens", "mean|A|", "max|A|", "first-loss"]
_AS_TRAINED += ["recorded", "result"]


def as_trained(job: Job, results: Sequence[Result]) -> Iterator[str]:
    """What was trained on, against what the facts give."""
    yield f"{job.source.folder}: recomputed from sealed facts under {job.recipe.hash}"
    yield from _note_recipe(job)
    yield from text.table([_AS_TRAINED, *(_cells_as_trained(result) for result in results)])
    for result in results:
        for problem in result.problems:
            yield f"iteration {result.iteration}: {problem}"
    trained = [result for result in results if result.compared]
    for reason in sorted({result.loss_not_compared for result in trained} - {None}):
        numbers = [r.iteration for r in trained if r.loss_not_compared == reason]
        yield f"first loss of iterations {text.ranges(numbers)} not compared: {reason}"
    equal = sum(result.compared and not result.problems for result in results)
    yield (
        f"{equal} of {len(results)} iterations: verdicts, minibatches and advantages are bit-equal "
        "to what was trained on, and no first loss contradicts its record"
    )


def _cells_as_trained(result: Result) -> list[str]:
    loss = result.first_loss or {}
    keys = ("groups_trained", "samples_trained", "tokens_trained")
    keys += ("advantage_abs_mean", "advantage_abs_max")
    verdict = "bit-equal" if not result.problems else "DIFFERENT"
    return [
        str(result.iteration),
        *(text.number(result.old[key]) for key in keys),
        *(text.number(loss.get(key), 5) for key in ("recomputed", "recorded")),
        verdict if result.compared else "never derived",
    ]


def _note_recipe(job: Job) -> Iterator[str]:
    first = job.iterations[0]
    sealed = job.source.iteration(first).manifest.header.recipe_hash
    if sealed != job.source.facts_recipe_of(first).hash:
        yield f"note: recipe.yaml is not the recipe of the seal, {sealed}: edited, or by other code"


_CELLS = (
    ("groups", "groups_trained", 6),
    ("samples", "samples_trained", 6),
    ("tokens", "tokens_trained", 7),
    ("mean|A|", "advantage_abs_mean", 4),
    ("max|A|", "advantage_abs_max", 4),
    ("KL/token", "kl_mean", 3),
    ("surrogate", "surrogate", 3),
    ("KL-term", "kl_term", 3),
    ("value-loss", "value_loss", 4),
)


def what_if(job: Job, results: Sequence[Result]) -> Iterator[str]:
    """What other settings make of the same samples, beside what was trained on."""
    yield f"{job.source.folder}: what other settings make of the same samples (old → new)"
    for change in job.changes:
        yield f"  {change}"
    yield from _note_recipe(job)
    cells = [
        cell
        for cell in _CELLS
        if any(side[cell[1]] for result in results for side in (result.old, result.new))
    ]
    rows = [["iteration", *(head for head, _, _ in cells), "changed"]]
    for result in results:
        values = [_arrow(result.old[key], result.new[key], digits) for _, key, digits in cells]
        rows.append([str(result.iteration), *values, str(result.changed)])
    yield from text.table(rows)
    unknown = sum(result.new["kl_tokens_unknown"] or 0 for result in results)
    if unknown:
        yield f"KL of {unknown} action tokens is not known: what did not train has no log-probs"
    for result in results:
        for problem in result.problems:
            yield f"iteration {result.iteration} is not what was trained on: {problem}"
    yield f"{sum(result.changed for result in results)} samples change; losses are at ratio 1"


def _arrow(old: Any, new: Any, digits: int) -> str:
    told_old, told_new = (text.number(value, digits) for value in (old, new))
    return told_old if told_old == told_new else f"{told_old} → {told_new}"
