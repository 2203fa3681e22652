"""Derived numbers of a sealed iteration, computed again by the functions that trained on them.

N samples in canonical order, R response tokens of theirs. Nothing here is rewritten: selection,
minibatches and credit are `rollout/groups.py` and `algorithms/credit.py` under a recipe, from facts
alone. Terms of the losses are `terms.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from megarl.algorithms.credit import Credit, credit
from megarl.contracts.records import Derived, Experience, Scores
from megarl.data.everyone import alone
from megarl.data.packing import ragged_index
from megarl.experience.load import SealedIteration
from megarl.experience.parts import DERIVED_COLUMNS
from megarl.modes.sealed_updates import table_of
from megarl.recipe import Recipe, RewardSection
from megarl.recipe.layout import mesh_of
from megarl.rewards.score import penalised
from megarl.rollout.groups import IterationPlan, plan_iteration
from megarl.rollout.selection import VERDICTS


@dataclass(frozen=True)
class Recomputed:
    """What a recipe makes of one iteration's facts."""

    plan: IterationPlan
    credit: Credit
    """Of the rows that are packed."""
    derived: Derived
    """Over all rows: float32 [R] columns, 0 on rows that are not packed."""

    @property
    def advantages(self) -> np.ndarray:
        """float64 [N], the mean of the sample's action tokens; NaN where it does not train."""
        return self.credit.advantages


@dataclass(frozen=True)
class Difference:
    """A derived column that is not what the run trained on; the first of `count` places."""

    field: str
    sample_id: str
    token: int | None
    sealed: str
    recomputed: str
    count: int

    def __str__(self) -> str:
        at = self.sample_id if self.token is None else f"{self.sample_id} token {self.token}"
        more = f" ({self.count} differ)" if self.count > 1 else ""
        return f"{self.field} of {at}: {self.sealed} sealed, {self.recomputed} recomputed{more}"


def sealed_beta(sealed: SealedIteration, recipe: Recipe) -> float:
    """β of the KL penalty in the iteration: as it was sealed; where it was not, the recipe's."""
    told = None if sealed.derived is None else sealed.derived.kl_beta
    return recipe.algorithm.kl.beta if told is None else told


def recompute(
    sealed: SealedIteration,
    recipe: Recipe,
    scores: Scores | None = None,
    beta: float | None = None,
) -> Recomputed:
    """Selection, minibatches and credit of `sealed` under `recipe`, with `scores` in place of the
    sealed ones if given, and `beta` in place of the sealed weight of the KL penalty.

    Raises `ValueError` for facts that the recipe cannot be applied to, `InputError` for an own
    function that cannot be imported.
    """
    table = table_of(sealed)
    if scores is not None:
        table = replace(table, scores=scores)
    dp = mesh_of(recipe).dp
    plan = plan_iteration(table, recipe, dp, prompts=len(sealed.prompts), invalid=table.invalid)
    # As in training, where nobody holds what is in no pack.
    own = np.flatnonzero(plan.update.packed)
    at = ragged_index(sealed.samples.response_offsets, own)
    values, last_values, ref = _constants(sealed, recipe, plan)
    experience = Experience(
        samples=sealed.samples.select(own),
        scores=table.scores.select(own),
        old_log_probs=sealed.old_log_probs[at],
        ref_log_probs=None if ref is None else ref[at],
        values=None if values is None else values[at],
        last_values=None if last_values is None else last_values[own],
        producers=sealed.manifest.header.producers,
        hash=sealed.manifest.experience_hash,
    )
    credited = credit(
        experience,
        recipe.hash,
        table,
        plan,
        recipe.algorithm,
        alone(table, experience.samples),
        sealed_beta(sealed, recipe) if beta is None else beta,
    )
    return Recomputed(plan, credited, _everywhere(credited.derived, at, sealed))


def _constants(
    sealed: SealedIteration, recipe: Recipe, plan: IterationPlan
) -> tuple[np.ndarray | None, np.ndarray | None, np.ndarray | None]:
    """Values, last values and reference log-probs, as far as the recipe reads them. Raises
    `ValueError` where a sample would train that was sealed without them."""
    algorithm = recipe.algorithm
    trains = np.repeat(plan.trained, sealed.samples.response_lengths)
    for needed, column, name in (
        (algorithm.needs_values, sealed.values, "values of a critic"),
        (algorithm.kl_in_reward, sealed.ref_log_probs, "reference log-probs"),
    ):
        if needed and (column is None or np.isnan(column[trains]).any()):
            number = sealed.manifest.header.iteration
            raise ValueError(f"iteration {number}: samples would train that have no {name} sealed")
    values = (sealed.values, sealed.last_values) if algorithm.needs_values else (None, None)
    return *values, sealed.ref_log_probs


def _everywhere(derived: Derived, at: np.ndarray, sealed: SealedIteration) -> Derived:
    """Columns of the rows with tokens `at`, over all of them; 0 on the others."""
    columns: dict[str, np.ndarray] = {}
    for name in DERIVED_COLUMNS:
        column = getattr(derived, name)
        if column is not None:
            columns[name] = np.zeros(len(sealed.samples.response_ids), dtype=np.float32)
            columns[name][at] = column
    return replace(derived, **columns)


def scored_under(scores: Scores, before: Recipe, after: Recipe) -> Scores:
    """Totals that the `reward` section of `after` makes of the sealed components.

    Raises `ValueError` where that of `before` does not lead to the sealed totals.
    """
    ok = scores.ok
    if not np.array_equal(_totals(scores, before.reward)[ok], scores.total[ok]):
        raise ValueError("sealed totals are not what the recipe's reward section makes of scores")
    return replace(scores, total=np.where(ok, _totals(scores, after.reward), scores.total))


def _totals(scores: Scores, section: RewardSection) -> np.ndarray:
    """float64 [N]: the weighted sum, the total of a violated constraint, or the penalty. As in
    scoring, scorers of weight 0 do not count, whatever they said, nor do those that said nothing
    of a row, because they do not score it."""
    total, violated = np.zeros(len(scores)), np.zeros(len(scores), dtype=bool)
    for scorer in section.scorers:
        said = scores.components.get(scorer.title)
        if said is None:
            continue
        if scorer.weight:
            total = total + np.where(np.isnan(said), 0.0, said * scorer.weight)
        if scorer.at_least is not None:
            violated |= said < scorer.at_least
    if violated.any():
        total[violated] = section.violated
    with_penalty = penalised(scores)
    if with_penalty.any():
        total[with_penalty] = section.penalty
    return total


def differences(sealed: SealedIteration, again: Recomputed) -> Iterator[Difference]:
    """Every derived column that is not, bit for bit, what was sealed as trained on.

    Raises `ValueError` where nothing was derived.
    """
    derived = sealed.derived
    if derived is None:
        raise ValueError("nothing was derived of this iteration")
    selection, plan = again.plan.selection, again.plan
    yield from _rows_that_differ(sealed, "verdict", derived.verdict, selection.verdict)
    yield from _rows_that_differ(sealed, "minibatch", derived.minibatch, plan.minibatch)
    owned = np.repeat(plan.update.packed, sealed.samples.response_lengths)
    for name in DERIVED_COLUMNS:
        mine, theirs = getattr(again.derived, name), derived.columns.get(name)
        if mine is None and theirs is None:
            continue
        # A row that no owner packs has no number, in what was sealed as in what is expected.
        nothing = np.full(len(owned), np.nan, dtype=np.float32)
        mine = nothing if mine is None else np.where(owned, mine, nothing)
        theirs = nothing if theirs is None else theirs
        yield from _tokens_that_differ(sealed, name, theirs, mine)


def _rows_that_differ(
    sealed: SealedIteration, field: str, theirs: np.ndarray, mine: np.ndarray
) -> Iterator[Difference]:
    rows = np.flatnonzero(theirs != mine)
    if len(rows):
        row = int(rows[0])
        told = [int(values[row]) for values in (theirs, mine)]
        words = [_verdict(value) if field == "verdict" else str(value) for value in told]
        yield Difference(field, sealed.sample_id(row), None, *words, len(rows))


def _verdict(index: int) -> str:
    return str(VERDICTS[index]) if 0 <= index < len(VERDICTS) else f"verdict {index}"


def _tokens_that_differ(
    sealed: SealedIteration, field: str, theirs: np.ndarray, mine: np.ndarray
) -> Iterator[Difference]:
    same = (theirs.view(np.int32) == mine.view(np.int32)) | (np.isnan(theirs) & np.isnan(mine))
    tokens = np.flatnonzero(~same)
    if len(tokens):
        offsets, token = sealed.samples.response_offsets, int(tokens[0])
        row = int(np.searchsorted(offsets, token, side="right") - 1)
        told = [
            "none" if np.isnan(values[token]) else f"{values[token]:.9g}"
            for values in (theirs, mine)
        ]
        at = token - int(offsets[row])
        yield Difference(field, sealed.sample_id(row), at, *told, len(tokens))
