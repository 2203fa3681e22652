"""Log-probabilities and entropies of packed tokens over a vocabulary cut across TP ranks.

A scored tokens, H hidden size, C tokens of a chunk, V this rank's vocabulary rows without padding.

For each token: z = h·W / temperature over the model's own vocabulary (padding rows are left out of
the product, so their probability is 0 and their gradient is 0), log p(target) = z_t − log Σ exp z
and H = −Σ p log p, in float32. Logits of one chunk exist at a time, in backward too, where they
are computed again and turn into their gradient in place; a CPU takes a block of tokens after the
other that its cache holds. Ranks exchange four numbers per token, once per call.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

LOWEST = torch.finfo(torch.float32).min
BLOCK_BYTES = {"cpu": 2**20}
"""Logits that elementwise passes take together, by device; elsewhere a whole chunk's, for there a
pass costs a launch."""


@dataclass(frozen=True, slots=True)
class TokenScores:
    """Of the response tokens of one pack, at the sampling temperature."""

    log_probs_A: Tensor  # float32
    entropy_A: Tensor  # float32, nats, of the distribution that the token was drawn from


def token_scores(
    hidden_AH: Tensor,
    weight: Tensor,
    target_A: Tensor,
    *,
    temperature: float,
    vocab: int,
    chunk: int,
    group: dist.ProcessGroup,
) -> TokenScores:
    """Scores of `target_A` under `softmax(hidden · weightᵀ / temperature)`; both differentiable.

    hidden_AH: [A, H], the same on all ranks of `group`, the tensor-parallel group;
    weight: this rank's rows of the output layer, padding rows last; target_A: int64, global ids
    below `vocab`. The gradient of `hidden_AH` is summed over the group, as megatron's
    ColumnParallelLinear does it. A forward gives the same bits with and without grad.
    """
    rows = len(weight)
    first = group.rank() * rows
    valid = min(max(vocab - first, 0), rows)
    log_probs, entropy = _TokenScores.apply(
        hidden_AH, weight, target_A - first, valid, temperature, chunk, group
    )
    return TokenScores(log_probs, entropy)


class _Chunks:
    """Logits of one chunk at a time, in memory that all chunks of a call share."""

    def __init__(
        self, hidden_AH: Tensor, weight_VH: Tensor, temperature: float, chunk: int
    ) -> None:
        self.hidden_AH, self.weight_VH, self.temperature = hidden_AH, weight_VH, temperature
        self.chunk = max(1, min(chunk, len(hidden_AH)))
        shape = self.chunk, len(weight_VH)
        self.product = hidden_AH.new_empty(shape)
        self.is_wide = hidden_AH.dtype is torch.float32
        self.wide = (
            self.product if self.is_wide else hidden_AH.new_empty(shape, dtype=torch.float32)
        )

    def __iter__(self) -> Iterator[tuple[slice, Tensor]]:
        """(tokens, their logits: float32 [C, V], to be overwritten)."""
        for start in range(0, len(self.hidden_AH), self.chunk):
            part = slice(start, min(start + self.chunk, len(self.hidden_AH)))
            length = part.stop - start
            # In the model's dtype, as in generation.
            torch.mm(self.hidden_AH[part], self.weight_VH.t(), out=self.product[:length])
            if not self.is_wide:
                self.wide[:length].copy_(self.product[:length])
            yield part, self.wide[:length]

    def blocks(self, part: slice, logits_CV: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """(tokens, views of their logits, over the temperature)."""
        size = BLOCK_BYTES.get(logits_CV.device.type, logits_CV.nbytes)
        rows = max(1, size // (4 * max(1, logits_CV.shape[1])))
        for start in range(part.start, part.stop, rows):
            block = slice(start, min(start + rows, part.stop))
            logits = logits_CV[start - part.start : block.stop - part.start]
            yield block, logits if self.temperature == 1.0 else logits.div_(self.temperature)

    def narrowed(self, gradient_CV: Tensor) -> Tensor:
        """In the model's dtype what the logits have become."""
        return gradient_CV if self.is_wide else self.product[: len(gradient_CV)].copy_(gradient_CV)


def _chunk_statistics(logits_CV: Tensor, target_C: Tensor) -> Tensor:
    """[C, 4] of this rank's rows: maximum m, Σ e^(z−m), Σ e^(z−m)·(z−m), and the target's z − m
    (0 where another rank owns the target). Overwrites its input.
    """
    statistics = logits_CV.new_zeros(len(logits_CV), 4)
    if logits_CV.shape[1] == 0:  # a rank that holds nothing but padding
        statistics[:, 0] = LOWEST
        return statistics
    statistics[:, 0] = logits_CV.amax(dim=1)
    shifted = logits_CV.sub_(statistics[:, :1])
    owned = (target_C >= 0) & (target_C < shifted.shape[1])
    target = shifted.gather(1, target_C.clamp(0, shifted.shape[1] - 1)[:, None]).squeeze(1)
    statistics[:, 3] = torch.where(owned, target, 0.0)
    weights = shifted.exp()
    statistics[:, 1] = weights.sum(dim=1)
    statistics[:, 2] = weights.mul_(shifted).sum(dim=1)
    return statistics


def _combine(statistics: Tensor, target_A: Tensor, valid: int, group: Any) -> tuple[Tensor, ...]:
    """(log-prob, entropy, log Σ exp z), each float32 [A], the same on every rank of the group."""
    owned = ((target_A >= 0) & (target_A < valid)).to(statistics.dtype)
    own = torch.cat([statistics, owned[:, None]], dim=1)
    if group.size() == 1 or len(own) == 0:  # peers hold the same pack, so all of them skip
        parts = own[None]
    else:
        parts = own.new_empty(group.size(), *own.shape)
        dist.all_gather_into_tensor(parts.view(-1, own.shape[1]), own, group=group)
    maximum, sums, moments, target, owned = parts.unbind(dim=2)
    top = maximum.amax(dim=0)
    below = maximum - top
    scale = below.exp()
    total = (sums * scale).sum(dim=0)
    moment = ((moments + sums * below) * scale).sum(dim=0)
    log_total = total.log()
    # owned is one-hot over ranks; `where` because 0 · (lowest − top) must not leave its mark.
    shifted_target = torch.where(owned > 0, target + below, 0.0).sum(dim=0)
    return shifted_target - log_total, log_total - moment / total, log_total + top


class _TokenScores(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_AH: Tensor,
        weight: Tensor,
        target_A: Tensor,
        valid: int,
        temperature: float,
        chunk: int,
        group: Any,
    ) -> tuple[Tensor, Tensor]:
        statistics = hidden_AH.new_empty(len(hidden_AH), 4, dtype=torch.float32)
        chunks = _Chunks(hidden_AH, weight[:valid], temperature, chunk)
        for part, logits_CV in chunks:
            for block, logits in chunks.blocks(part, logits_CV):
                statistics[block] = _chunk_statistics(logits, target_A[block])
        del chunks
        log_probs, entropy, log_sum = _combine(statistics, target_A, valid, group)
        ctx.save_for_backward(hidden_AH, weight, target_A, entropy, log_sum)
        ctx.valid, ctx.temperature, ctx.chunk, ctx.group = valid, temperature, chunk, group
        ctx.set_materialize_grads(False)
        return log_probs, entropy

    @staticmethod
    def backward(ctx: Any, grad_log_probs: Tensor | None, grad_entropy: Tensor | None) -> tuple:
        hidden_AH, weight, target_A, entropy, log_sum = ctx.saved_tensors
        weight_VH = weight[: ctx.valid]
        grad_hidden = torch.zeros_like(hidden_AH)
        grad_weight = torch.zeros_like(weight, dtype=torch.float32)
        if grad_log_probs is None:
            grad_log_probs = torch.zeros_like(entropy)
        # d/dz = d/d(z / temperature) / temperature
        grad_log_probs = grad_log_probs / ctx.temperature
        if grad_entropy is not None:
            grad_entropy = grad_entropy / ctx.temperature
        chunks = _Chunks(hidden_AH, weight_VH, ctx.temperature, ctx.chunk)
        for part, logits_CV in chunks if ctx.valid else ():
            for block, logits in chunks.blocks(part, logits_CV):
                _into_gradient(
                    logits.sub_(log_sum[block, None]),
                    target_A[block],
                    entropy[block],
                    grad_log_probs[block],
                    None if grad_entropy is None else grad_entropy[block],
                )
            grad_logits = chunks.narrowed(logits_CV)
            torch.mm(grad_logits, weight_VH, out=grad_hidden[part])
            if chunks.is_wide:
                grad_weight[: ctx.valid].addmm_(grad_logits.t(), hidden_AH[part])
            else:
                grad_weight[: ctx.valid] += grad_logits.t() @ hidden_AH[part]
        if ctx.group.size() > 1 and len(hidden_AH):
            dist.all_reduce(grad_hidden, group=ctx.group)
        return grad_hidden, grad_weight.to(weight.dtype), None, None, None, None, None


def _into_gradient(
    log_p_CV: Tensor,
    target_C: Tensor,
    entropy_C: Tensor,
    grad_log_prob_C: Tensor,
    grad_entropy_C: Tensor | None,
) -> None:
    """d/dz of g·log p_t + k·H: g·(1[v=t] − p_v) − k·p_v·(log p_v + H), in place of its input."""
    if grad_entropy_C is None:
        log_p_CV.exp_().mul_(-grad_log_prob_C[:, None])
    else:
        p = log_p_CV.exp()
        inner = log_p_CV.mul_(-grad_entropy_C[:, None])
        inner.sub_((grad_entropy_C * entropy_C + grad_log_prob_C)[:, None]).mul_(p)
    owned = (target_C >= 0) & (target_C < log_p_CV.shape[1])
    columns = target_C.clamp(0, log_p_CV.shape[1] - 1)[:, None]
    log_p_CV.scatter_add_(1, columns, torch.where(owned, grad_log_prob_C, 0.0)[:, None])
