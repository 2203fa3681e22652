"""Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1) on packed sequences.

T tokens of this rank, h this rank's heads. Megarl's own in place of megatron's `MLASelfAttention`
for three reasons: without Transformer Engine that one cuts the down projections over
tensor-parallel ranks, whatever divides; the key with positions, which all heads share, then gets
the gradient of one rank's heads only; and its rotary embedding goes sequence by sequence.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.multi_latent_attention import (
    MLASelfAttentionSubmodules,
    MultiLatentAttention,
)
from megatron.core.transformer.spec_utils import ModuleSpec
from torch import Tensor, nn
from torch.nn.functional import linear

from megarl.models.packed import PackedCore, PackedSequences, RMSNorm
from megarl.models.rotary import Rotate

NORM_EPS = 1e-6
"""Of the norms within attention, whatever the config's `rms_norm_eps`, as in transformers."""


class WholeLinear(nn.Module):
    """`x · weightᵀ`, the same on every tensor-parallel rank, on the tokens that a rank holds."""

    def __init__(self, config: Any, inputs: int, outputs: int) -> None:
        super().__init__()
        device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
        self.weight = nn.Parameter(
            torch.empty(outputs, inputs, dtype=config.params_dtype, device=device)
        )
        self.weight.sequence_parallel = config.sequence_parallel

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight)


class LatentAttention(MultiLatentAttention):
    """Queries and keys of `nope` dimensions without positions and `rope` with them."""

    def __init__(self, config: Any, *args: Any, interleaved: bool, **kwargs: Any) -> None:
        kwargs.setdefault("attention_type", "self")
        super().__init__(config, *args, **kwargs)
        self.interleaved = interleaved
        rank, hidden = config.q_lora_rank, config.hidden_size
        queries = config.num_attention_heads * self.q_head_dim
        if rank is None:
            self.linear_q_proj = self._cut(hidden, queries)
        else:
            self.linear_q_down_proj = WholeLinear(config, hidden, rank)
            self.q_layernorm = RMSNorm(config, rank, NORM_EPS)
            self.linear_q_up_proj = self._cut(rank, queries)
        down = config.kv_lora_rank + config.qk_pos_emb_head_dim
        self.linear_kv_down_proj = WholeLinear(config, hidden, down)
        self.kv_layernorm = RMSNorm(config, config.kv_lora_rank, NORM_EPS)
        up = config.num_attention_heads * (config.qk_head_dim + config.v_head_dim)
        self.linear_kv_up_proj = self._cut(config.kv_lora_rank, up)

    def _cut(self, inputs: int, outputs: int) -> ColumnParallelLinear:
        return ColumnParallelLinear(
            inputs,
            outputs,
            config=self.config,
            init_method=self.config.init_method,
            bias=False,
            gather_output=False,
            tp_group=self.pg_collection.tp,
        )

    def get_query_key_value_tensors(
        self,
        hidden_states: Tensor,
        key_value_states: Any = None,
        position_ids: Any = None,
        packed_seq_params: PackedSequences | None = None,
        **_: Any,
    ) -> tuple[Tensor, Tensor, Tensor, None, None]:
        """hidden_states [T, 1, H], under sequence parallelism a part of the tokens → query and key
        [T, h, nope + rope] and value [T, h, v] of all tokens; what comes after is for inference.
        """
        config, pack = self.config, packed_seq_params
        nope, rope = config.qk_head_dim, config.qk_pos_emb_head_dim
        hidden = hidden_states.squeeze(1)
        if config.q_lora_rank is None:
            query, _ = self.linear_q_proj(hidden)
        else:
            query, _ = self.linear_q_up_proj(self.q_layernorm(self.linear_q_down_proj(hidden)))
        latent, shared = self.linear_kv_down_proj(hidden).split([config.kv_lora_rank, rope], dim=-1)
        both, _ = self.linear_kv_up_proj(self.kv_layernorm(latent))
        heads = self.num_attention_heads_per_partition
        query = query.view(len(query), heads, nope + rope)
        key, value = both.view(len(both), heads, -1).split([nope, config.v_head_dim], dim=-1)
        # All heads of all ranks use the shared key: its gradient is the sum of theirs.
        if config.sequence_parallel:
            shared = gather_from_sequence_parallel_region(shared, group=self.pg_collection.tp)
        else:
            shared = copy_to_tensor_model_parallel_region(shared, group=self.pg_collection.tp)
        turned = self._turned(torch.cat([query[..., nope:], shared[:, None]], dim=1), pack)
        query = torch.cat([query[..., :nope], turned[:, :heads]], dim=-1)
        key = torch.cat([key, turned[:, heads:].expand(-1, heads, -1)], dim=-1)
        return query, key, value, None, None

    def _turned(self, x: Tensor, pack: PackedSequences) -> Tensor:
        """[T, n, rope] with its positions; neighbours that turn together are first put apart."""
        if self.interleaved:
            x = torch.cat([x[..., 0::2], x[..., 1::2]], dim=-1)
        return Rotate.apply(x, pack.cos_TD, pack.sin_TD)


def latent_attention(interleaved: bool) -> ModuleSpec:
    """The self-attention of a layer. `interleaved` as in `MLASpec`."""
    return ModuleSpec(
        module=LatentAttention,
        params={"attn_mask_type": AttnMaskType.causal, "interleaved": interleaved},
        submodules=MLASelfAttentionSubmodules(
            core_attention=PackedCore, linear_proj=RowParallelLinear
        ),
    )
