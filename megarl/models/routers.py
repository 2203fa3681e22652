"""Which experts a token goes to, and with what weights.

T tokens of this rank, H hidden size, E experts, G groups of experts.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor
from torch.nn.functional import linear

from megarl.reshard.families.spec import MoESpec


class GroupedRouter(TopKRouter):
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

    def forward(self, input: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """input [T, 1, H] → (weights float32 [T, E], 0 for experts not chosen; chosen bool [T, E]).

        Padding is routed as any token is: nothing is learnt from it.
        """
        scores = linear(input.reshape(-1, input.shape[-1]).float(), self.weight.float()).sigmoid()
        index = self._choice(scores.detach())
        top = scores.gather(1, index)
        if self.moe.normalize:
            top = top / (top.sum(dim=-1, keepdim=True) + 1e-20)
        weights = torch.zeros_like(scores).scatter(1, index, top * self.moe.scale)
        chosen = torch.zeros_like(scores, dtype=torch.bool).scatter(1, index, True)
        return weights, chosen

    def _choice(self, scores_TE: Tensor) -> Tensor:
        """int64 [T, k]."""
        biased = scores_TE + self.expert_bias
        groups = biased.view(len(biased), self.moe.groups, -1)
        best = groups.topk(2, dim=-1).values.sum(dim=-1).topk(self.moe.top_groups, dim=-1).indices
        kept = torch.zeros(groups.shape[:2], dtype=torch.bool, device=biased.device)
        kept.scatter_(1, best, True)
        open_to = groups.masked_fill(~kept[..., None], float("-inf")).flatten(1)
        return open_to.topk(self.topk, dim=-1).indices
