"""Micro-batches of one optimizer step, from sealed experience and what was derived of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from megarl.algorithms.importance import ImportanceSettings, importance_weights
from megarl.algorithms.reduction import Totals, token_weights
from megarl.contracts.records import Derived, Experience
from megarl.data.packing import MicroBatch, Pack, ValueBatch


class BatchSettings(Protocol):
    """The `algorithm` section of the recipe, as far as micro-batches read it."""

    reduction: str
    importance: ImportanceSettings


def micro_batches(
    experience: Experience,
    derived: Derived,
    packs: Sequence[Pack],
    totals: Totals,
    algorithm: BatchSettings,
    max_response_tokens: int,
) -> list[MicroBatch]:
    """The actor's, one per pack, on the pack's device.

    `totals` are the minibatch's over all ranks; where they are 0 (a probe, an empty minibatch)
    every weight is 0 and nobody steps. Importance weights are of the sealed old and rollout
    log-probs, so they are the same in every epoch.

    Raises `ValueError` when `derived` is of another experience.
    """
    _same_experience(experience, derived)
    ref = experience.ref_log_probs
    return [
        MicroBatch(
            pack=pack,
            old_log_probs_A=pack.take(experience.old_log_probs),
            ref_log_probs_A=None if ref is None else pack.take(ref),
            rollout_log_probs_A=pack.take(experience.samples.rollout_log_probs),
            advantages_A=pack.take(derived.advantages),
            weights_A=_weights(pack, totals, algorithm.reduction, max_response_tokens),
            importance_A=_importance(experience, pack, algorithm.importance),
        )
        for pack in packs
    ]


def value_batches(
    experience: Experience,
    derived: Derived,
    packs: Sequence[Pack],
    totals: Totals,
    algorithm: BatchSettings,
    max_response_tokens: int,
) -> list[ValueBatch]:
    """The critic's, one per pack, on the pack's device; `totals` and weights as in
    `micro_batches`, with no importance weight.

    Raises `ValueError` when `derived` is of another experience, or when there are no values or
    returns.
    """
    _same_experience(experience, derived)
    if experience.values is None or derived.returns is None:
        absent = "values" if experience.values is None else "returns"
        raise ValueError(f"experience {experience.hash} has no {absent} for a critic to learn from")
    return [
        ValueBatch(
            pack=pack,
            values_A=pack.take(experience.values),
            returns_A=pack.take(derived.returns),
            weights_A=_weights(pack, totals, algorithm.reduction, max_response_tokens),
        )
        for pack in packs
    ]


def _same_experience(experience: Experience, derived: Derived) -> None:
    if derived.experience_hash != experience.hash:
        raise ValueError(
            f"advantages of experience {derived.experience_hash} for experience {experience.hash}"
        )


def _weights(pack: Pack, totals: Totals, reduction: str, max_response_tokens: int) -> Tensor:
    if totals.tokens == 0:
        return torch.zeros_like(pack.action_mask_A, dtype=torch.float32)
    return token_weights(
        reduction, pack.action_mask_A, pack.sequence_A, totals, max_response_tokens
    )


def _importance(experience: Experience, pack: Pack, settings: ImportanceSettings) -> Tensor | None:
    # On the CPU whatever the pack's device: sums over a sequence then have one order.
    tokens = pack.response_A.cpu().numpy()
    weights_A = importance_weights(
        torch.from_numpy(experience.old_log_probs[tokens]),
        torch.from_numpy(experience.samples.rollout_log_probs[tokens]),
        pack.action_mask_A.cpu(),
        pack.sequence_A.cpu(),
        settings,
    )
    return None if weights_A is None else weights_A.to(pack.response_A.device)
