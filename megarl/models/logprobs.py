"""Log-probabilities and entropies of packed tokens over a vocabulary cut across TP ranks.

A scored tokens, H hidden size, C tokens of a chunk, V this rank's vocabulary rows without padding.

For each token: z = h·W / temperature over the model's own vocabulary (padding rows are left out of
the product, so their probability is 0 and their gradient is 0), log p(target) = z_t − log Σ exp z
and H = −Σ p log p, in float32. Logits of one chunk exist at a time, in backward too, where they
are computed again. Ranks exchange four numbers per token, once per call.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

LOWEST = torch.finfo(torch.float32).min


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


def _logits(hidden_CH: Tensor, weight_VH: Tensor, temperature: float) -> Tensor:
    """float32 [C, V]; the product is in the model's dtype, as in generation."""
    logits = (hidden_CH @ weight_VH.t()).float()
    return logits if temperature == 1.0 else logits.div_(temperature)


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
        weight_VH = weight[:valid]
        statistics = [
            _chunk_statistics(_logits(hidden_CH, weight_VH, temperature), target_C)
            for hidden_CH, target_C in zip(
                hidden_AH.split(chunk), target_A.split(chunk), strict=True
            )
        ]
        log_probs, entropy, log_sum = _combine(torch.cat(statistics), target_A, valid, group)
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
        for start in range(0, len(hidden_AH) if ctx.valid else 0, ctx.chunk):
            part = slice(start, start + ctx.chunk)
            hidden_CH = hidden_AH[part]
            logits = _logits(hidden_CH, weight_VH, ctx.temperature)
            grad_logits = _grad_logits(
                logits.sub_(log_sum[part, None]),
                target_A[part],
                entropy[part],
                grad_log_probs[part],
                None if grad_entropy is None else grad_entropy[part],
            )
            if ctx.temperature != 1.0:
                grad_logits.div_(ctx.temperature)
            grad_logits = grad_logits.to(weight.dtype)
            torch.mm(grad_logits, weight_VH, out=grad_hidden[part])
            if weight.dtype is torch.float32:
                grad_weight[: ctx.valid].addmm_(grad_logits.t(), hidden_CH)
            else:
                grad_weight[: ctx.valid] += grad_logits.t() @ hidden_CH
        if ctx.group.size() > 1 and len(hidden_AH):
            dist.all_reduce(grad_hidden, group=ctx.group)
        return grad_hidden, grad_weight.to(weight.dtype), None, None, None, None, None


def _grad_logits(
    log_p_CV: Tensor,
    target_C: Tensor,
    entropy_C: Tensor,
    grad_log_prob_C: Tensor,
    grad_entropy_C: Tensor | None,
) -> Tensor:
    """d/dz of g·log p_t + k·H: g·(1[v=t] − p_v) − k·p_v·(log p_v + H). Overwrites its input."""
    p = log_p_CV.exp()
    if grad_entropy_C is None:
        grad = p.mul_(-grad_log_prob_C[:, None])
    else:
        inner = log_p_CV.add_(entropy_C[:, None]).mul_(grad_entropy_C[:, None])
        grad = p.mul_(inner.add_(grad_log_prob_C[:, None])).neg_()
    owned = (target_C >= 0) & (target_C < p.shape[1])
    columns = target_C.clamp(0, p.shape[1] - 1)[:, None]
    return grad.scatter_add_(1, columns, torch.where(owned, grad_log_prob_C, 0.0)[:, None])
