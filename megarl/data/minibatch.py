"""Micro-batches of one optimizer step, from sealed experience and what was derived of it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megarl.algorithms.reduction import Totals, token_weights
from megarl.contracts.records import Derived, Experience
from megarl.data.packing import MicroBatch, Pack


def micro_batches(
    experience: Experience,
    derived: Derived,
    packs: Sequence[Pack],
    totals: Totals,
    reduction: str,
    max_response_tokens: int,
) -> list[MicroBatch]:
    """One per pack, on the pack's device. `totals` are the minibatch's over all ranks; where they
    are 0 (a probe, an empty minibatch) every weight is 0 and nobody steps.

    Raises `ValueError` when `derived` is of another experience.
    """
    if derived.experience_hash != experience.hash:
        raise ValueError(
            f"advantages of experience {derived.experience_hash} for experience {experience.hash}"
        )
    ref = experience.ref_log_probs
    return [
        MicroBatch(
            pack=pack,
            old_log_probs_A=pack.take(experience.old_log_probs),
            ref_log_probs_A=None if ref is None else pack.take(ref),
            rollout_log_probs_A=pack.take(experience.samples.rollout_log_probs),
            advantages_A=pack.take(derived.advantages),
            weights_A=torch.zeros_like(pack.action_mask_A, dtype=torch.float32)
            if totals.tokens == 0
            else token_weights(
                reduction, pack.action_mask_A, pack.sequence_A, totals, max_response_tokens
            ),
        )
        for pack in packs
    ]
