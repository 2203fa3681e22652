"""The tensors of one forward: packed sequences, and what a loss needs of each response token.

A response token is *predicted* at the position before it: the first one at the last prompt token;
a packed neighbour's first token is never a target.

T packed tokens, A response tokens of a pack (the scored positions), n samples of a pack,
N samples and R response tokens of a `Samples`.

Example: prompts of 3 and 2, responses of 3 and 1 tokens, in one pack::

    token_ids_T  P0 P1 P2 R0 R1 R2 | Q0 Q1 S0      cu_seqlens  [0, 6, 9]
    positions_T   0  1  2  3  4  5 |  0  1  2
    predictor_A  [2, 3, 4, 7]  target_A [R0, R1, R2, S0]  sequence_A [0, 0, 0, 1]
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Self

import numpy as np
import torch
from torch import Tensor


class _OnDevice:
    """Moves every tensor field, also of nested records; a field that is no tensor is kept."""

    def to(self, device: torch.device | str) -> Self:
        moved = {}
        for item in fields(self):  # type: ignore[arg-type]
            value = getattr(self, item.name)
            moved[item.name] = value.to(device) if hasattr(value, "to") else value
        return replace(self, **moved)  # type: ignore[type-var]


@dataclass(frozen=True)
class Pack(_OnDevice):
    """Packed sequences of one forward.

    A pack without samples holds one dummy token (id 0, `cu_seqlens` [0, 1]) and A = 0: its rank
    runs the same forward as its peers and adds nothing. A padded pack (`pad_pack`) ends with dummy
    sequences, which have no row and no response token; `cu_seqlens` tells them too.
    """

    rows: Tensor  # int64 [n], rows of this rank's Samples, ascending
    token_ids_T: Tensor  # int64 [T]
    positions_T: Tensor  # int64 [T], restarting at 0 in every sequence
    cu_seqlens: Tensor  # int32 [n+1], sequence s is [cu_seqlens[s], cu_seqlens[s+1])
    predictor_A: Tensor  # int64 [A], index in T whose logits predict response token a
    target_A: Tensor  # int64 [A], the response token's id
    action_mask_A: Tensor  # bool [A]
    sequence_A: Tensor  # int64 [A], which of the n sequences
    response_A: Tensor  # int64 [A], index in the Samples' flat response arrays
    max_length: int
    """Tokens of the longest sequence."""
    experts_TX: Tensor | None = None
    """int16 [T, layers · k], the experts that the generator sent each token to, −1 of the last
    token of a sequence and of padding; None: it told none, or there is no sample."""

    @property
    def is_empty(self) -> bool:
        return len(self.rows) == 0

    def take(self, values_R: np.ndarray) -> Tensor:
        """This pack's part [A] of an array over the Samples' response tokens [R]."""
        return torch.from_numpy(np.ascontiguousarray(values_R[self.response_A.cpu().numpy()])).to(
            self.response_A.device
        )


class _Columns(_OnDevice):
    """A pack and float32 [A] columns beside it; a column may be None where that is allowed."""

    pack: Pack

    def __post_init__(self) -> None:
        shape = self.pack.target_A.shape
        for item in fields(self):  # type: ignore[arg-type]
            value = getattr(self, item.name)
            if item.name == "pack" or value is None:
                continue
            if value.dtype != torch.float32 or value.shape != shape:
                raise ValueError(
                    f"{item.name} is {value.dtype}{list(value.shape)}, "
                    f"the pack needs torch.float32{list(shape)}"
                )


@dataclass(frozen=True)
class MicroBatch(_Columns):
    """One forward and backward of the actor: a pack and what its loss needs of each response token.

    Raises `ValueError` when a column is not float32 [A].
    """

    pack: Pack
    old_log_probs_A: Tensor  # float32, the actor's before any update of the iteration
    ref_log_probs_A: Tensor | None  # float32, the reference's, when a KL term needs them
    rollout_log_probs_A: Tensor  # float32, the generator's
    advantages_A: Tensor  # float32
    weights_A: Tensor  # float32, Σ weights · loss over all packs of all ranks is the loss
    importance_A: Tensor | None = None  # float32, factor of the policy term; None: 1 everywhere


@dataclass(frozen=True)
class ValueBatch(_Columns):
    """One forward and backward of the critic: a pack and what its loss needs.

    Raises `ValueError` when a column is not float32 [A].
    """

    pack: Pack
    values_A: Tensor  # float32, V(s_t) of the critic before any update of the iteration
    returns_A: Tensor  # float32, its targets
    weights_A: Tensor  # float32, Σ weights · loss over all packs of all ranks is the loss
