"""The experts of SGLang 0.5.21 on CPU, where a rank may hold only some of them.

Importing this module imports SGLang; call `megarl.platforms.prepare_sglang()` first.
Shapes: T tokens, K experts per token, H hidden size, E experts of this rank, F rows of an expert's
gate (or up) projection on this rank.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.moe import fused_moe_native
from sglang.srt.mem_cache.pool_host import common
from torch.nn.functional import linear, silu


def local_experts(layer: Any, x: torch.Tensor, topk_output: Any, config: Any) -> torch.Tensor:
    """Replaces `fused_moe_native.moe_forward_native`, which wants every expert on the rank.

    `x` [T, H]; `topk_output` holds weights and ids [T, K]. SGLang's dispatcher numbers the experts
    of this rank from 0 and calls the others -1: those add nothing here, and the layer's all-reduce
    adds them. Returns this rank's part of Σ_k weight_k · down_k(silu(gate_k(x)) · up_k(x)), [T, H],
    summed in the weights' dtype (float32). `layer.w13_weight` [E, 2F, H], `layer.w2_weight`
    [E, H, F]. Raises `NotImplementedError` for another activation, biases, or weights on the input.
    """
    if (
        config.activation != "silu"
        or config.apply_router_weight_on_input
        or getattr(layer, "w13_weight_bias", None) is not None
        or config.gemm1_alpha is not None
    ):
        raise NotImplementedError("experts other than plain SwiGLU are not computed here")
    weights_TK, ids_TK, _ = topk_output
    out_TH = torch.zeros(x.shape, dtype=weights_TK.dtype)
    for expert in ids_TK.unique().tolist():
        if expert < 0:
            continue
        rows, choices = (ids_TK == expert).nonzero(as_tuple=True)
        gate, up = linear(x[rows], layer.w13_weight[expert]).chunk(2, dim=-1)
        down = linear(silu(gate) * up, layer.w2_weight[expert])
        out_TH.index_add_(0, rows, down.to(out_TH.dtype) * weights_TK[rows, choices, None])
    return out_TH.to(x.dtype)


local_experts.__wrapped__ = fused_moe_native.moe_forward_native


def host_memory(dims: tuple[int, ...], dtype: torch.dtype, **_: Any) -> torch.Tensor:
    """Replaces `alloc_with_host_register` on a CPU, where there is no CUDA to register memory with.

    SGLang keeps there to which experts it sent each token of its cache (`RoutedExpertsCapturer`).
    """
    return torch.empty(dims, dtype=dtype)


host_memory.__wrapped__ = common.alloc_with_host_register
