"""The loss that balances the experts' load, over all tokens of the global minibatch.

Switch Transformer's (arXiv:2101.03961, equations 4 to 6), summed over the layers with experts:

    c · Σ_layers E · Σ_e f_e · P_e

f_e is the share of expert e among all (token, slot) pairs that were routed, and P_e the mean over
tokens of its probability. Both run over the global minibatch (arXiv:2501.11873), prompts included,
padding left out. f and the number of tokens N are counted in the forward that scores the minibatch
before the first update and are constants from then on. So the loss is a plain sum over tokens,

    Σ_tokens Σ_layers Σ_e p_e · (c · E · f_e / N),

whatever the packs, and every rank that routes a token adds that token's part.

T tokens that this rank routes in one forward, E experts, L layers with experts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor, nn

from megarl.models.routers import ExpertRouter
from megarl.world import World


@dataclass(frozen=True)
class RouterTargets:
    """What the loss of one minibatch takes for constant, the same on every rank."""

    shares: Tensor
    """f, float64 [L, E]; every row sums to 1, or to 0 where there is no token."""
    tokens: int
    """N."""


class ExpertCounts:
    """How many tokens each expert got in forwards of this rank; a watch of its routers."""

    def __init__(self) -> None:
        self.counts: dict[int, list[Tensor]] = {}
        """Layer → of each forward, int64 [E]."""

    def scored(self, layer: int, scores_TE: Tensor, padding_T: Tensor) -> Tensor:
        return scores_TE

    def chosen(self, layer: int, chosen_TE: Tensor, padding_T: Tensor) -> None:
        real = chosen_TE & ~padding_T[:, None]
        self.counts.setdefault(layer, []).append(real.sum(dim=0))

    def targets(self, world: World, moe: Any, packs: Sequence[int]) -> list[RouterTargets]:
        """Of each minibatch, whose forwards were counted in order: `packs[minibatch]` of them on
        this rank. `moe` is the model's `MoESpec`. Forwards beyond these are dummies of a schedule.

        Collective over all ranks. Raises `RuntimeError`, the same on every rank, where layers of a
        minibatch saw unlike numbers of tokens.
        """
        total = torch.zeros(len(packs), len(moe.layers), moe.experts, dtype=torch.int64)
        for layer, forwards in self.counts.items():
            row = moe.layers.index(layer)
            start = 0
            for number, count in enumerate(packs):
                for counted in forwards[start : start + count]:
                    total[number, row] += counted.cpu()
                start += count
        total = total.to(world.device)
        dist.all_reduce(total)  # whole numbers: the same in any order
        total = total.cpu()
        slots = total.sum(dim=-1)
        if (slots != slots[:, :1]).any() or (slots % moe.per_token).any():
            raise RuntimeError(
                f"layers with experts routed unlike numbers of tokens of a minibatch: "
                f"{(slots / moe.per_token).tolist()} tokens by minibatch and layer"
            )
        shares = total.double() / slots.clamp(min=1)[..., None]
        tokens = (slots[:, 0] // moe.per_token).tolist()
        return [RouterTargets(*of) for of in zip(shares.unbind(0), tokens, strict=True)]


class BalanceLoss:
    """The loss in an update's forwards: its gradient goes in at the routers; a watch of them."""

    def __init__(
        self, targets: RouterTargets, coefficient: float, moe: Any, device: torch.device
    ) -> None:
        """`coefficient`: c. `moe`: the model's `MoESpec`."""
        scale = coefficient * moe.experts / max(targets.tokens, 1)
        slopes = (targets.shares * scale).to(device)
        self.slopes = {layer: slopes[row] for row, layer in enumerate(moe.layers)}
        """Layer → d loss / d p_e of each token, float64 [E]."""
        self.told: list[Tensor] = []
        """Of each layer and forward whose backward is done, its part of the loss."""
        self.device = device

    def scored(self, layer: int, scores_TE: Tensor, padding_T: Tensor) -> Tensor:
        """`scores_TE` bit for bit, with the loss behind them. p_e are the scores over their sum:
        of a softmax, the scores.

        Without grad this is a forward that recomputation repeats, or none of an update.
        """
        if not torch.is_grad_enabled():
            return scores_TE
        probabilities = scores_TE / (scores_TE.sum(dim=-1, keepdim=True) + 1e-20)
        sums_E = probabilities.masked_fill(padding_T[:, None], 0.0).sum(dim=0, dtype=torch.float64)
        return _WithLoss.apply(scores_TE, sums_E @ self.slopes[layer], self.told)

    def chosen(self, layer: int, chosen_TE: Tensor, padding_T: Tensor) -> None:
        """The shares are constants."""

    def added_to(self, parts: Sequence[tuple]) -> list[tuple]:
        """`parts`, the (loss, sums) of an update's micro-batches on the last stage and none on the
        others, with this loss of the data-parallel part as one more, `router_aux` in its sums.
        Collective over the part's tensor- and pipeline-parallel ranks."""
        own = torch.zeros((), dtype=torch.float64, device=self.device)
        own = torch.stack([own, *self.told]).sum()
        dist.all_reduce(own, group=parallel_state.get_model_parallel_group())
        return [*parts, (own.float(), {"router_aux": own})] if parts else []


class _WithLoss(torch.autograd.Function):
    """Scores unchanged; in the backward the loss gets a gradient of 1 and tells its value, once,
    also where activations are recomputed."""

    @staticmethod
    def forward(ctx: Any, scores_TE: Tensor, loss: Tensor, told: list[Tensor]) -> Tensor:
        ctx.loss, ctx.told = loss.detach(), told
        return scores_TE.view_as(scores_TE)

    @staticmethod
    def backward(ctx: Any, grad_TE: Tensor) -> tuple[Tensor, Tensor, None]:
        ctx.told.append(ctx.loss)
        return grad_TE, torch.ones_like(ctx.loss), None


@contextmanager
def watching(model: nn.Module, watch: ExpertCounts | BalanceLoss | None) -> Iterator[None]:
    """The scope in which `watch` sees what the routers of `model` do; None: nobody does."""
    routers = [module for module in model.modules() if isinstance(module, ExpertRouter)]
    for router in routers:
        router.watch = watch
    try:
        yield
    finally:
        for router in routers:
            router.watch = None
