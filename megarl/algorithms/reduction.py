"""From per-token losses to one number: weights whose denominators are the global minibatch's.

The loss is Σ_a weight_a · loss_a over *all* packs of all ranks, and so is its gradient: both are
plain sums, independent of micro-batching, packing, padding and the parallel layout. No later
division by ranks, micro-batches or accumulation steps may follow.

A response tokens of one pack.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Totals:
    """Counts over the whole minibatch, on all ranks, each token and sequence once."""

    tokens: int
    """Action tokens."""
    sequences: int
    """Sequences with at least one action token."""


def count(action_mask_A: Tensor, sequence_A: Tensor) -> Totals:
    """One pack's part of the totals."""
    return Totals(
        tokens=int(action_mask_A.sum()), sequences=len(torch.unique(sequence_A[action_mask_A]))
    )


def token_weights(
    kind: str,
    action_mask_A: Tensor,
    sequence_A: Tensor,
    totals: Totals,
    max_response_tokens: int,
) -> Tensor:
    """float32 [A]: what each response token's loss counts; 0 where the token is no action.

        token_mean             1 / N_tokens                        DAPO, arXiv:2503.14476
        sequence_mean          1 / (N_sequences · tokens of its sequence)   DeepSeekMath's
        sequence_sum_constant  1 / (N_sequences · max_response_tokens)      Dr. GRPO

    Tokens are action tokens; a sequence without any is no sequence here. A sequence lies whole in
    one pack. `max_response_tokens` is the recipe's, never the longest response at hand. An empty
    minibatch (totals 0) has no weights to give: a pack with actions is then refused.

    Raises `ValueError` for an unknown kind or totals smaller than this pack's own.
    """
    own = count(action_mask_A, sequence_A)
    if own.tokens > totals.tokens or own.sequences > totals.sequences:
        raise ValueError(f"a pack has {own}, more than the whole minibatch's {totals}")
    mask = action_mask_A.double()
    if own.tokens == 0:
        return mask.float()
    if kind == "token_mean":
        weights = mask / totals.tokens
    elif kind == "sequence_mean":
        per_sequence = torch.zeros(
            int(sequence_A.max()) + 1, dtype=torch.float64, device=mask.device
        )
        per_sequence.index_add_(0, sequence_A, mask)
        weights = mask / (totals.sequences * per_sequence[sequence_A].clamp(min=1))
    elif kind == "sequence_sum_constant":
        weights = mask / (totals.sequences * max_response_tokens)
    else:
        raise ValueError(
            f"algorithm.reduction is {kind!r}; "
            "use token_mean, sequence_mean or sequence_sum_constant"
        )
    return weights.float()
