"""Derived numbers of a sealed iteration, computed again by the functions that trained on them.

N samples in canonical order, R response tokens of theirs. Nothing here is rewritten: selection,
minibatches, credit and the loss's terms are `rollout/groups.py`, `algorithms/credit.py` and
`algorithms/objectives.py` under a recipe, from facts alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch

from megarl.algorithms.credit import credit
from megarl.algorithms.kl import kl_estimate
from megarl.algorithms.objectives import policy_loss
from megarl.algorithms.reduction import token_weights
from megarl.contracts.records import Derived, Experience, Scores
from megarl.data.packing import ragged_index
from megarl.experience.load import SealedIteration
from megarl.modes.sealed_updates import table_of
from megarl.recipe import Recipe, RewardSection
from megarl.recipe.layout import mesh_of
from megarl.rewards.score import PENALTY
from megarl.rewards.scorer import component_name
from megarl.rollout.groups import IterationPlan, plan_iteration
from megarl.rollout.selection import VERDICTS


@dataclass(frozen=True)
class Recomputed:
    """What a recipe makes of one iteration's facts."""

    plan: IterationPlan
    derived: Derived
    """Over all rows: float32 [R] columns."""
    advantages: np.ndarray  # float64 [N], NaN where the sample does not train


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


@dataclass(frozen=True)
class Terms:
    """Loss terms of one minibatch at ratio 1, which its tokens have until the first update."""

    surrogate: float
    kl: float | None
    """β Σ w KL; None where log-probs of a token are not sealed."""
    scale: float
    """Σ w |advantage|: the surrogate's, were all advantages of one sign."""


def recompute(sealed: SealedIteration, recipe: Recipe, scores: Scores | None = None) -> Recomputed:
    """Selection, minibatches and credit of `sealed` under `recipe`, with `scores` in place of the
    sealed ones if given. Raises `ValueError` for facts that the recipe cannot be applied to."""
    table = table_of(sealed)
    if scores is not None:
        table = replace(table, scores=scores)
    dp = mesh_of(recipe).dp
    plan = plan_iteration(table, recipe, dp, prompts=len(sealed.prompts), invalid=table.invalid)
    experience = Experience(
        samples=sealed.samples,
        scores=table.scores,
        old_log_probs=sealed.old_log_probs,
        ref_log_probs=sealed.ref_log_probs,
        values=None,
        producers=sealed.manifest.header.producers,
        hash=sealed.manifest.experience_hash,
    )
    derived, advantages = credit(experience, recipe.hash, table, plan.trained, recipe.algorithm)
    return Recomputed(plan, derived, advantages)


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
    scoring, scorers of weight 0 do not count, whatever they said."""
    total, violated = np.zeros(len(scores)), np.zeros(len(scores), dtype=bool)
    for scorer in section.scorers:
        said = scores.components[component_name(scorer.name)]
        if scorer.weight:
            total = total + said * scorer.weight
        if scorer.at_least is not None:
            violated |= said < scorer.at_least
    if violated.any():
        total[violated] = section.violated
    penalised = np.array([told.startswith(PENALTY) for told in scores.details], dtype=bool)
    if penalised.any():
        total[penalised[scores.detail_code]] = section.penalty
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
    for name in ("advantages", "shaped_rewards", "returns"):
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


def token_kl(sealed: SealedIteration, estimator: str) -> np.ndarray | None:
    """float32 [R]: KL(old ‖ ref) per token, NaN where log-probs are not sealed; None without a
    reference."""
    if sealed.ref_log_probs is None:
        return None
    old, ref = torch.tensor(sealed.old_log_probs), torch.tensor(sealed.ref_log_probs)
    return kl_estimate(estimator, old, ref).numpy()


def terms(sealed: SealedIteration, again: Recomputed, recipe: Recipe) -> list[Terms | None]:
    """Per minibatch; None for an empty one. The entropy bonus is not among them: it needs whole
    distributions, of which only the sampled token's log-prob is sealed."""
    algorithm, kl = recipe.algorithm, token_kl(sealed, recipe.algorithm.kl.estimator)
    result: list[Terms | None] = []
    for index, totals in enumerate(again.plan.totals):
        if totals.tokens == 0:
            result.append(None)
            continue
        rows = np.flatnonzero(again.plan.minibatch == index)
        tokens = ragged_index(sealed.samples.response_offsets, rows)
        lengths = sealed.samples.response_lengths[rows]
        weights = token_weights(
            algorithm.reduction,
            torch.tensor(sealed.samples.action_mask[tokens]),
            torch.from_numpy(np.repeat(np.arange(len(rows)), lengths)),
            totals,
            recipe.rollout.max_response_tokens,
        ).double()
        advantages = torch.tensor(again.derived.advantages[tokens]).double()
        same = torch.zeros_like(advantages)
        bounds = (algorithm.clip_low, algorithm.clip_high, algorithm.dual_clip)
        surrogate, _ = policy_loss(same, same, advantages, weights, *bounds)
        term: float | None = 0.0
        if algorithm.kl.beta:
            active = weights.numpy() != 0
            known = kl is not None and not np.isnan(kl[tokens][active]).any()
            sums = float((weights.numpy()[active] * kl[tokens][active]).sum()) if known else None
            term = None if sums is None else algorithm.kl.beta * sums
        scale = float((weights * advantages.abs()).nansum())
        result.append(Terms(float(surrogate), term, scale))
    return result
