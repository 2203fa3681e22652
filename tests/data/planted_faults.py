"""Faults that guards must find: how each is planted, and the finding it leads to.

Records are spoilt past their own checks, as a fault in memory would leave them. In the expected
findings, regular expressions, FIRST is the first sample of the rank with the fault.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from megarl.contracts.records import STATUSES, RewardStatus
from megarl.contracts.samples import EndReason
from tests.data.make_iteration import LIMIT, UNKNOWN, VERSION, VOCABULARY, Iteration, put, spoilt

OTHER = replace(VERSION, optimizer_step=3)


def _samples(it: Iteration, **columns: np.ndarray) -> None:
    it.prepared = spoilt(it.prepared, samples=spoilt(it.prepared.samples, **columns))


def _column(name: str, at: int, value: object) -> Callable[[Iteration], None]:
    """A value of one sample column; `at` counts from the rank's first row or token."""

    def spoil(it: Iteration) -> None:
        _samples(it, **{name: put(getattr(it.prepared.samples, name), at, value)})

    return spoil


def scored(name: str, value: float) -> Callable[[Iteration], None]:
    def spoil(it: Iteration) -> None:
        it.prepared = spoilt(it.prepared, **{name: put(getattr(it.prepared, name), 1, value)})

    return spoil


def _pack(name: str, change: Callable) -> Callable[[Iteration], None]:
    def spoil(it: Iteration) -> None:
        pack = it.prepared.packs[0][0]
        column = change(getattr(pack, name).clone())
        packs = [[spoilt(pack, **{name: column}), *it.prepared.packs[0][1:]]]
        it.prepared = spoilt(it.prepared, packs=packs + it.prepared.packs[1:])

    return spoil


def _bump(at: int = 0) -> Callable:
    def change(tensor):
        tensor[at] += 1
        return tensor

    return change


def _flip(tensor):
    tensor[0] = ~tensor[0]
    return tensor


def producer(role: str, version_id: str | None) -> Callable[[Iteration], None]:
    def spoil(it: Iteration) -> None:
        it.producers = {**it.producers, role: version_id}

    return spoil


def _twice(it: Iteration) -> None:
    packs = it.prepared.packs
    it.prepared = spoilt(it.prepared, packs=[packs[0], [*packs[0][:1], *packs[1][1:]]])


def _lost_pack(it: Iteration) -> None:
    it.prepared = spoilt(it.prepared, packs=it.prepared.packs[:1])


def _lost_row(it: Iteration) -> None:
    kept = np.arange(1, len(it.prepared.samples))
    samples = it.prepared.samples.select(kept)
    tokens = len(it.prepared.samples.response_ids) - len(samples.response_ids)
    it.prepared = spoilt(
        it.prepared,
        samples=samples,
        old_log_probs=it.prepared.old_log_probs[tokens:],
        ref_log_probs=it.prepared.ref_log_probs[tokens:],
    )
    it.scores = it.scores.select(kept)


def _shuffled_rewards(it: Iteration) -> None:
    it.scores = it.scores.select(np.arange(len(it.scores.total))[::-1])


def _table(**columns) -> Callable[[Iteration], None]:
    def spoil(it: Iteration) -> None:
        it.table = spoilt(
            it.table, **{n: put(getattr(it.table, n), *change) for n, change in columns.items()}
        )

    return spoil


def _totals(it: Iteration) -> None:
    wrong = replace(it.plan.totals[0], tokens=it.plan.totals[0].tokens + 1)
    it.plan = spoilt(it.plan, totals=(wrong, *it.plan.totals[1:]))


def _half_a_group(it: Iteration) -> None:
    it.plan = spoilt(it.plan, trained=put(it.plan.trained, 0, False))


def _unscored(it: Iteration) -> None:
    scores = it.table.scores
    codes = put(scores.status_code, 0, STATUSES.index(RewardStatus.ERROR))
    it.table = spoilt(it.table, scores=spoilt(scores, status_code=codes))


def _equal(it: Iteration) -> None:
    scores = it.table.scores
    it.table = spoilt(it.table, scores=spoilt(scores, total=np.ones(len(scores.total))))


def _in_two_minibatches(it: Iteration) -> None:
    packs = it.plan.update.packs
    it.plan = spoilt(it.plan, update=spoilt(it.plan.update, packs=(packs[0], packs[0])))


def _other_owner(it: Iteration) -> None:
    it.plan = spoilt(it.plan, update=spoilt(it.plan.update, owner=1 - it.plan.update.owner))


def _step(it: Iteration) -> None:
    it.actor_step += 1


def shorter(name: str) -> Callable[[Iteration], None]:
    def spoil(it: Iteration) -> None:
        it.prepared = spoilt(it.prepared, **{name: getattr(it.prepared, name)[:-1]})

    return spoil


def _shorter_mask(it: Iteration) -> None:
    _samples(it, action_mask=it.prepared.samples.action_mask[:-1])


def _version(it: Iteration) -> None:
    it.prepared = spoilt(it.prepared, samples=spoilt(it.prepared.samples, version_id=OTHER.id))


FACTS: dict[str, tuple[Callable[[Iteration], None], str]] = {
    "old of another version": (
        producer("old", OTHER.id),
        rf"old_log_probs of run/3/p0/0, .* and 3 more: made by version {OTHER.id}, the update from "
        rf"actor@4\.0 \({VERSION.id}\) expects those of actor@4\.0",
    ),
    "rollout of another version": (
        producer("rollout", OTHER.id),
        rf"rollout_log_probs of run/3/p0/0.*{OTHER.id}, .*expects those of actor@4\.0",
    ),
    "reference of another version": (
        producer("ref", VERSION.id),
        rf"ref_log_probs of run/3/p0/0.*{VERSION.id}, .*expects those of reference@0\.0",
    ),
    "reference of nobody": (producer("ref", None), "ref_log_probs of .*: made by nobody"),
    "samples of another version": (_version, rf"version_id of .*: sampled by {OTHER.id}"),
    "old after a step": (
        _step,
        "old_log_probs of .*: taken after optimizer step 5, not by actor@4",
    ),
    "nan in rollout": (
        _column("rollout_log_probs", 1, np.nan),
        "rollout_log_probs of FIRST response token 1: a log-prob must be a finite number",
    ),
    "nan in old": (scored("old_log_probs", np.nan), "old_log_probs of FIRST response token 1"),
    "positive in ref": (scored("ref_log_probs", 0.5), "ref_log_probs of FIRST response token 1"),
    "infinite in ref": (scored("ref_log_probs", -np.inf), "ref_log_probs of FIRST response tok"),
    "short old": (shorter("old_log_probs"), r"old_log_probs of FIRST.*: float32\[\d+\], float32"),
    "short mask": (_shorter_mask, r"action_mask of FIRST.*: \d+ values for \d+ tokens"),
    "first token no action": (
        _column("action_mask", 0, False),
        "action_mask of FIRST: the first sampled token is no action",
    ),
    "a hole in the mask": (
        _column("action_mask", 1, False),
        "action_mask of FIRST response token 1: a token that the engine sampled is no action",
    ),
    "outside the vocabulary": (
        _column("response_ids", 0, VOCABULARY),
        f"response_ids of FIRST: an id outside the vocabulary of {VOCABULARY}",
    ),
    "negative id": (_column("prompt_ids", 0, -1), "prompt_ids of FIRST: an id outside the vocab"),
    "unknown id": (
        _column("response_ids", 0, UNKNOWN),
        "response_ids of FIRST: an id that the tokenizer does not know",
    ),
    "another prompt": (
        _column("prompt_ids", 0, 40),
        "prompt_ids of FIRST: not the ids that were to run",
    ),
    "a stop token in the middle": (
        _column("response_ids", 0, 2),
        "response_ids of FIRST response token 0: ids go on behind a stop token",
    ),
    "the end is not one": (
        _column("end_reason", 0, EndReason.MAX_TOKENS),
        rf"end_reason of FIRST: it was cut off, but (its last id is a stop|not at {LIMIT})",
    ),
    "a row is missing": (_lost_row, "owner of FIRST: data-parallel part 1 trains it and does not"),
    "rewards in another order": (_shuffled_rewards, "reward.total of .*in another order"),
    "a row is in two packs": (_twice, "packs of run/3/p./.*: it must be in exactly one pack"),
    "a minibatch is missing": (_lost_pack, "packs of this rank: not as many packs as the plan"),
    "target": (_pack("target_A", _bump()), "target_A of run/3/p./. response token 0: not the samp"),
    "predictor": (
        _pack("predictor_A", _bump()),
        "predictor_A of run/3/p./. response token 0: not the position before the token",
    ),
    "token in the pack": (_pack("token_ids_T", _bump()), "token_ids_T of run/3/p./.: its prompt"),
    "last token in the pack": (_pack("token_ids_T", _bump(-1)), "token_ids_T of run/3.*sampled id"),
    "position": (_pack("positions_T", _bump()), "positions_T of run/3/p./.: positions are not"),
    "mask in the pack": (_pack("action_mask_A", _flip), "action_mask_A of run/3/p./. response tok"),
    "boundaries": (_pack("cu_seqlens", _bump(1)), "packs of run/3/p./.*: its sequences are not"),
    "table counts other actions": (
        _table(actions=(slice(None), 9)),
        r"totals.tokens of minibatch 0: \d+, its rows add up to \d+; .*actions of FIRST",
    ),
    "totals": (_totals, r"totals.tokens of minibatch 0: (\d+), its rows add up to \d+"),
    "half a group": (
        _half_a_group,
        "group of run/3/p0/1: 1 of 2 sound samples of its group train; algorithm.partial_groups is "
        "drop, 2 are needed",
    ),
    "without a score": (_unscored, "reward.total of run/3/p0/0: it trains without a score"),
    "equal rewards": (_equal, "reward.total of run/3/p0/0, .*all equal and algorithm.zero_var"),
    "in two minibatches": (_in_two_minibatches, "minibatch of .*: in several minibatches"),
    "trained by nobody": (_in_two_minibatches, "minibatch of .*: it trains, but no minibatch has"),
    "another owner": (_other_owner, "owner of run/3/p0/0, .*: packed by another part than its own"),
}


def _derived(name: str, value: object) -> Callable[[Iteration], None]:
    def spoil(it: Iteration) -> None:
        it.derived = spoilt(it.derived, **{name: value})

    return spoil


def _advantage(at: int, value: float) -> Callable[[Iteration], None]:
    def spoil(it: Iteration) -> None:
        it.derived = spoilt(it.derived, advantages=put(it.derived.advantages, at, value))

    return spoil


def _masked(it: Iteration) -> None:
    samples = it.experience.samples
    masked = spoilt(samples, action_mask=put(samples.action_mask, 1, False))
    it.experience = spoilt(it.experience, samples=masked)
    it.prepared = spoilt(it.prepared, samples=masked)


def _idle(it: Iteration) -> None:
    it.plan = spoilt(it.plan, trained=np.zeros_like(it.plan.trained))


def _late_producer(it: Iteration) -> None:
    it.experience = spoilt(it.experience, producers={**it.producers, "old": OTHER.id})


DERIVED: dict[str, tuple[Callable[[Iteration], None], str]] = {
    "of another experience": (
        _derived("experience_hash", "g"),
        "experience_hash of the advantages: g, this update needs h",
    ),
    "under another recipe": (
        _derived("recipe_hash", "other"),
        "recipe_hash of the advantages: other, this update needs recipe",
    ),
    "nan": (_advantage(1, np.nan), "advantages of FIRST response token 1: not a finite number"),
    "on no action": (_masked, "advantages of FIRST response token 1: not 0 on a token that is no"),
    "on an idle row": (_idle, "advantages of FIRST.*: not 0 on a sample that does not train"),
    "of another length": (
        _derived("advantages", np.zeros(1, np.float32)),
        r"advantages of FIRST.*: float32\[1\], float32\[\d+\] is needed",
    ),
    "in another precision": (
        _derived("returns", np.zeros(1)),
        r"returns of FIRST.*: float64\[1\], float32\[\d+\] is needed",
    ),
    "no number weighs KL": (
        _derived("kl_beta", np.nan),
        "kl_beta of the advantages: nan is no num",
    ),
    "of other samples": (_lost_row, "samples of the sealed experience: not those of the packs"),
    "old of another version": (_late_producer, "old_log_probs of run/3/p0/0"),
    "after a step": (_step, "old_log_probs of .*: taken after optimizer step 5"),
}
