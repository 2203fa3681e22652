"""Which experts a token goes to, and with what weights.

The choice is the router's own, or the generator's (rollout routing replay, R3, arXiv:2510.11370),
so that trainer and generator score one mixture also where scores nearly tie. Weights, and so the
gradient, are of this router's scores either way. Nothing is random: the same input and weights give
the same choice, in training too.

T tokens of this rank, H hidden size, E experts, k of them per token, G groups of experts.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor, nn
from torch.nn.functional import linear

from megarl.reshard.families.spec import MoESpec


class Watch(Protocol):
    """Who is told what routers do; `layer` is the layer's global number, `padding_T` bool."""

    def scored(self, layer: int, scores_TE: Tensor, padding_T: Tensor) -> Tensor:
        """Positive scores, float32; answers them bit for bit, perhaps with more gradient."""

    def chosen(self, layer: int, chosen_TE: Tensor, padding_T: Tensor) -> None:
        """bool."""


class ExpertRouter(TopKRouter):
    """What this house's routers share. No noise, no token is dropped, and a loss that balances
    experts is the business of whoever watches (`router_loss.py`).
    """

    watch: Watch | None = None
    replayed: Tensor | None = None
    """int64 [T, k], the choice of the next forward and of no other; −1 where it is the router's."""

    def __init__(self, config: Any, pg_collection: Any) -> None:
        """Raises `ValueError` for a config that asks for noise or for one of megatron's losses,
        which would depend on the packs."""
        super().__init__(config, pg_collection)
        if config.moe_input_jitter_eps is not None:
            raise ValueError("routers here add no noise: moe_input_jitter_eps must be None")
        if config.moe_router_load_balancing_type != "none" or config.moe_z_loss_coeff is not None:
            raise ValueError("routers here have none of megatron's auxiliary losses")

    def forward(self, input: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """input [T, 1, H] → (weights float32 [T, E], 0 for experts not chosen; chosen bool [T, E]).

        `padding_mask` bool [T, 1] is True where a token is padding, which is routed as any token
        is: nothing is learnt from it. None: there is no padding.
        """
        scores = self.scores(input.reshape(-1, input.shape[-1]))
        if self.watch is not None:
            if padding_mask is None:
                padding_mask = torch.zeros(len(scores), dtype=torch.bool, device=scores.device)
            padding_T = padding_mask.reshape(-1)
            scores = self.watch.scored(self.layer_number - 1, scores, padding_T)
        replayed, self.replayed = self.replayed, None
        index = self.choice(scores.detach())
        if replayed is not None:
            index = torch.where(replayed >= 0, replayed, index)
        top = self.weighted(scores.gather(1, index))
        weights = torch.zeros_like(scores).scatter(1, index, top)
        chosen = torch.zeros_like(scores, dtype=torch.bool).scatter(1, index, True)
        if self.watch is not None:
            self.watch.chosen(self.layer_number - 1, chosen, padding_T)
        return weights, chosen

    def scores(self, input_TH: Tensor) -> Tensor:
        """float32 [T, E], positive."""
        raise NotImplementedError

    def choice(self, scores_TE: Tensor) -> Tensor:
        """int64 [T, k]."""
        raise NotImplementedError

    def weighted(self, top_Tk: Tensor) -> Tensor:
        """The chosen experts' weights, of their scores."""
        raise NotImplementedError


class Router(ExpertRouter):
    """Softmax over all experts in float32, then the k largest, divided by their sum or not.

    HF's order (Mixtral, Qwen3-MoE): scores in the model's dtype, everything after in float32. The
    weights stay float32, as in HF's Mixtral and in generation; HF's Qwen3-MoE rounds them to the
    model's dtype.
    """

    def __init__(self, config: Any, pg_collection: Any, *, normalize: bool) -> None:
        super().__init__(config, pg_collection)
        self.normalize = normalize

    def scores(self, input_TH: Tensor) -> Tensor:
        return linear(input_TH, self.weight).softmax(dim=-1, dtype=torch.float32)

    def choice(self, scores_TE: Tensor) -> Tensor:
        return scores_TE.topk(self.topk, dim=-1).indices

    def weighted(self, top_Tk: Tensor) -> Tensor:
        return top_Tk / top_Tk.sum(dim=-1, keepdim=True) if self.normalize else top_Tk


class GroupedRouter(ExpertRouter):
    """DeepSeek-V3's (arXiv:2412.19437, equations 12 to 16), all in float32 as in transformers.

    A sigmoid of each score, and `expert_bias` [E] on top where experts are chosen: of G groups the
    `top_groups` whose two best experts sum highest, and of their experts the k best. The weights
    are the chosen sigmoids without the bias, divided by their sum or not, times `scale`.

    The bias is a part of the checkpoint that no gradient and no step changes: a buffer.
    """

    def __init__(self, config: Any, pg_collection: Any, *, moe: MoESpec) -> None:
        super().__init__(config, pg_collection)
        self.moe = moe
        device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
        del self.expert_bias  # megatron's, which its own steps would move
        self.register_buffer(
            "expert_bias", torch.empty(moe.experts, dtype=torch.float32, device=device)
        )

    def scores(self, input_TH: Tensor) -> Tensor:
        return linear(input_TH.float(), self.weight.float()).sigmoid()

    def weighted(self, top_Tk: Tensor) -> Tensor:
        if self.moe.normalize:
            top_Tk = top_Tk / (top_Tk.sum(dim=-1, keepdim=True) + 1e-20)
        return top_Tk * self.moe.scale

    def choice(self, scores_TE: Tensor) -> Tensor:
        biased = scores_TE + self.expert_bias
        groups = biased.view(len(biased), self.moe.groups, -1)
        best = groups.topk(2, dim=-1).values.sum(dim=-1).topk(self.moe.top_groups, dim=-1).indices
        kept = torch.zeros(groups.shape[:2], dtype=torch.bool, device=biased.device)
        kept.scatter_(1, best, True)
        open_to = groups.masked_fill(~kept[..., None], float("-inf")).flatten(1)
        return open_to.topk(self.topk, dim=-1).indices


def freeze_routers(model: nn.Module) -> None:
    """No router of `model` learns: no gradient, no optimizer state, no decay. Every role of a run
    does it alike, for torch picks a matrix product by what wants a gradient."""
    for module in model.modules():
        if isinstance(module, ExpertRouter):
            module.weight.requires_grad_(False)
