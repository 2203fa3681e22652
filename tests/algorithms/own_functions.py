"""Own functions as a recipe would name them: sound ones, and each way to get one wrong."""

from __future__ import annotations

import torch
from torch import Tensor

from megarl.algorithms.objectives import PolicyTokens


def reinforce(tokens: PolicyTokens, settings) -> Tensor:
    return -tokens.advantages_A * tokens.log_probs_A


def soft_gate(tokens: PolicyTokens, settings) -> tuple[Tensor, dict[str, Tensor]]:
    """A sigmoid gate in place of the clip, with a number to report."""
    gate_A = torch.sigmoid(4 * (tokens.log_ratio_A.exp() - 1)) * 2
    far_A = tokens.active_A & (tokens.log_ratio_A.abs() > 1)
    return -gate_A * tokens.advantages_A, {"far": far_A.sum()}


def sequence_ratio(tokens: PolicyTokens, settings) -> Tensor:
    """GSPO without a clip, its means made by a loop."""
    loss_A = torch.zeros_like(tokens.log_probs_A)
    for sequence in torch.unique(tokens.sequence_A):
        own_A = tokens.sequence_A == sequence
        count = (own_A & tokens.active_A).sum().clamp(min=1)
        mean = (tokens.log_ratio_A * own_A).sum() / count
        loss_A = torch.where(own_A, -mean.exp() * tokens.advantages_A, loss_A)
    return loss_A


def detached(tokens: PolicyTokens, settings) -> Tensor:
    return reinforce(tokens, settings).detach()


def no_gradient(tokens: PolicyTokens, settings) -> Tensor:
    return -tokens.advantages_A + 0 * tokens.log_probs_A


def less_its_mean(tokens: PolicyTokens, settings) -> Tensor:
    """Each loss has a gradient, their sum has none."""
    loss_A = reinforce(tokens, settings)
    return loss_A - loss_A.mean()


def less_a_fixed_mean(tokens: PolicyTokens, settings) -> Tensor:
    loss_A = reinforce(tokens, settings)
    return loss_A - loss_A.detach().mean()


def drops_at_random(tokens: PolicyTokens, settings) -> Tensor:
    return torch.nn.functional.dropout(reinforce(tokens, settings), 0.5)


calls: list[int] = []


def counts_calls(tokens: PolicyTokens, settings) -> Tensor:
    """Another loss each time, by what it remembers."""
    calls.append(1)
    return reinforce(tokens, settings) * len(calls)


def reduced(tokens: PolicyTokens, settings) -> Tensor:
    return reinforce(tokens, settings).mean()


def in_double(tokens: PolicyTokens, settings) -> Tensor:
    return reinforce(tokens, settings).double()


def a_number(tokens: PolicyTokens, settings) -> float:
    return 0.0


def infinite(tokens: PolicyTokens, settings) -> Tensor:
    return reinforce(tokens, settings) / 0


def steep(tokens: PolicyTokens, settings) -> Tensor:
    """Finite, but the root of 0 has no slope."""
    return (tokens.log_ratio_A - tokens.log_ratio_A.detach()).abs().sqrt()


def counts_holes(tokens: PolicyTokens, settings) -> Tensor:
    """Divides by all tokens of the sequence, holes included."""
    lengths_A = torch.bincount(tokens.sequence_A)[tokens.sequence_A]
    return reinforce(tokens, settings) / lengths_A


def sees_neighbours(tokens: PolicyTokens, settings) -> Tensor:
    """Divides by the tokens of the pack: another loss for every packing."""
    return reinforce(tokens, settings) / tokens.active_A.sum().clamp(min=1)


def divides_by_none(tokens: PolicyTokens, settings) -> Tensor:
    """Not a number where a sequence has no action: nothing of that is used, so it is sound."""
    active_A = tokens.active_A.to(tokens.log_probs_A.dtype)
    count_A = torch.zeros_like(active_A).index_add(0, tokens.sequence_A, active_A)
    return reinforce(tokens, settings) / count_A[tokens.sequence_A]


def needs_an_action(tokens: PolicyTokens, settings) -> Tensor:
    """Fails for a pack of which nothing trains."""
    return reinforce(tokens, settings) / tokens.active_A[tokens.active_A].max(0).values


def reports_tokens(tokens: PolicyTokens, settings) -> tuple[Tensor, dict[str, Tensor]]:
    return reinforce(tokens, settings), {"ratio": tokens.log_ratio_A.exp()}


def raises(tokens: PolicyTokens, settings) -> Tensor:
    raise KeyError("no such\nfield")


not_a_function = 7
