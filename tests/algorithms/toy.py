"""A differentiable toy policy over packs, and loss settings, for tests of the whole loss."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np
import torch
from torch import Tensor

from megarl.algorithms.importance import importance_weights
from megarl.algorithms.objectives import PolicyTokens, actor_loss, policy_term
from megarl.data.packing import MicroBatch, Pack

VOCABULARY = 7


@dataclass(frozen=True)
class Kl:
    beta: float = 0.0
    estimator: str = "k3"


@dataclass(frozen=True)
class Importance:
    level: str = "none"
    mode: str = "truncate"
    low: float = 0.0
    high: float = 2.0


NO_CORRECTION = Importance()


@dataclass(frozen=True)
class Settings:
    objective: str = "ppo_clip"
    clip_low: float = 0.2
    clip_high: float = 0.28
    dual_clip: float | None = None
    importance: Importance = field(default_factory=Importance)
    reduction: str = "token_mean"
    entropy_coefficient: float = 0.0
    kl: Kl = field(default_factory=Kl)

    @property
    def kl_in_loss(self) -> bool:
        return self.kl.beta > 0


def loss_of(
    scores: SimpleNamespace, batch: MicroBatch, settings: Settings
) -> tuple[Tensor, dict[str, Tensor]]:
    """`actor_loss` with the β of the settings."""
    return actor_loss(scores, batch, settings, settings.kl.beta)


def policy_loss(
    log_probs_A: Tensor, old_A: Tensor, advantages_A: Tensor, weights_A: Tensor, **settings: object
) -> tuple[Tensor, dict[str, Tensor]]:
    """The policy term of one sequence under `Settings(**settings)`."""
    sequence_A = torch.zeros(len(log_probs_A), dtype=torch.int64)
    tokens = PolicyTokens.of(log_probs_A, old_A, advantages_A, weights_A != 0, sequence_A)
    return policy_term(tokens, weights_A, None, Settings(**settings))


def parameters(seed: int = 0, scale: float = 0.7) -> Tensor:
    """float64 [7, 7]: logits of the next token given this one, the toy's whole model."""
    generator = torch.Generator().manual_seed(seed)
    table = scale * torch.randn(VOCABULARY, VOCABULARY, dtype=torch.float64, generator=generator)
    return table.requires_grad_()


def scores(table_VV: Tensor, pack: Pack) -> SimpleNamespace:
    """Log-probs and entropy of a pack's response tokens under the bigram table."""
    contexts_A = pack.token_ids_T[pack.predictor_A] % VOCABULARY
    log_probs_AV = table_VV[contexts_A].log_softmax(-1)
    targets_A = pack.target_A % VOCABULARY
    return SimpleNamespace(
        log_probs_A=log_probs_AV.gather(1, targets_A[:, None])[:, 0],
        entropy_A=-(log_probs_AV.exp() * log_probs_AV).sum(-1),
    )


def micro_batch(
    pack: Pack,
    old_R: np.ndarray,
    ref_R: np.ndarray | None,
    advantages_R: np.ndarray,
    weights_A: Tensor,
    rollout_R: np.ndarray | None = None,
    importance: Importance = NO_CORRECTION,
) -> MicroBatch:
    """With the old log-probs as the generator's, where none are given."""
    rollout_A = pack.take(old_R if rollout_R is None else rollout_R)
    return MicroBatch(
        pack=pack,
        old_log_probs_A=pack.take(old_R),
        ref_log_probs_A=None if ref_R is None else pack.take(ref_R),
        rollout_log_probs_A=rollout_A,
        advantages_A=pack.take(advantages_R),
        weights_A=weights_A,
        importance_A=importance_weights(
            pack.take(old_R), rollout_A, pack.action_mask_A, pack.sequence_A, importance
        ),
    )


def flat_batch(old, advantages, weights, ref=None) -> MicroBatch:
    """A micro-batch of one sequence whose columns are given as lists."""
    n = len(old)
    none = torch.zeros(0, dtype=torch.int64)
    index = torch.arange(n)
    pack = Pack(
        rows=none.new_zeros(1),
        token_ids_T=none.new_zeros(n + 1),
        positions_T=torch.arange(n + 1),
        cu_seqlens=torch.tensor([0, n + 1], dtype=torch.int32),
        predictor_A=index,
        target_A=none.new_zeros(n),
        action_mask_A=torch.tensor(weights) != 0,
        sequence_A=none.new_zeros(n),
        response_A=index,
        max_length=n + 1,
    )
    columns = [torch.tensor(column, dtype=torch.float32) for column in (old, advantages, weights)]
    return MicroBatch(
        pack=pack,
        old_log_probs_A=columns[0],
        ref_log_probs_A=None if ref is None else torch.tensor(ref, dtype=torch.float32),
        rollout_log_probs_A=columns[0],
        advantages_A=columns[1],
        weights_A=columns[2],
    )
