"""From the numbers of an HF model to this rank's shard of a megatron-core GPT, weights loaded.

Parallel layout: megatron's default order, tensor parallel innermost (`contracts/mesh.py`).
Dense decoders only (RMSNorm, rotary embedding, SwiGLU, grouped queries). A pipeline has stages of
equal depth: the first one holds the embedding, the last one the final norm and the output layer,
which in a tied model is a second copy of the embedding. Both copies are loaded from the file, get
the sum of both gradients and take the same steps.
"""

from __future__ import annotations

import math
from pathlib import Path

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from megarl.checkpoint.hf_folder import load_shards
from megarl.contracts.mesh import Mesh
from megarl.models.packed import (
    PackedAttention,
    PackedSequences,
    RMSNorm,
    inverse_frequencies,
    pack_sequences,
)
from megarl.platforms import megatron_patches
from megarl.platforms.megatron_patches import cpu_mode
from megarl.reshard.families.spec import ModelSpec
from megarl.reshard.layout import megatron_placement


def initialize_mesh(mesh: Mesh, timeout: float = 1800.0) -> None:
    """Megatron's process groups for `mesh`; called again with the same mesh it does nothing.

    Collective. `timeout` in seconds bounds megatron's collectives. Raises `RuntimeError` when
    another mesh is initialised: all roles of a process share one layout, for megatron's parallel
    state is global.
    """
    megatron_patches.install()
    if parallel_state.model_parallel_is_initialized():
        tp = parallel_state.get_tensor_model_parallel_world_size()
        pp = parallel_state.get_pipeline_model_parallel_world_size()
        if (tp, pp, parallel_state.get_data_parallel_world_size()) != (mesh.tp, mesh.pp, mesh.dp):
            raise RuntimeError(f"megatron is initialised with tp={tp}, pp={pp}, not with {mesh}")
        return
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=mesh.tp,
        pipeline_model_parallel_size=mesh.pp,
        distributed_timeout_minutes=timeout / 60,
        create_gloo_process_groups=False,
    )


def destroy_mesh() -> None:
    """Drop megatron's groups; after the last role, before `destroy_process_group`."""
    parallel_state.destroy_model_parallel()


def transformer_config(
    spec: ModelSpec, mesh: Mesh, dtype: torch.dtype, device: torch.device, recompute: str
) -> TransformerConfig:
    """Megatron's config of `spec`. No dropout and no fusion: a forward is a pure function.

    `recompute`: the recipe's `actor.recompute`, none or full; in effect in training mode only.
    """
    recomputing = {
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
    }
    return TransformerConfig(
        num_layers=spec.layers,
        hidden_size=spec.hidden,
        num_attention_heads=spec.heads,
        num_query_groups=spec.kv_heads,
        kv_channels=spec.head_dim,
        ffn_hidden_size=spec.ffn,
        normalization="RMSNorm",
        layernorm_epsilon=spec.norm_eps,
        gated_linear_unit=True,
        activation_func=nn.functional.silu,
        add_bias_linear=False,
        add_qkv_bias=spec.qkv_bias,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=mesh.tp,
        pipeline_model_parallel_size=mesh.pp,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        batch_p2p_sync=device.type == "cuda",
        bf16=dtype is torch.bfloat16,
        use_cpu_initialization=device.type == "cpu",
        perform_initialization=False,
        # Losses carry global denominators, so gradients are summed over data-parallel ranks:
        # with this flag megatron's DDP scales by 1 and not by 1/dp.
        calculate_per_token_loss=True,
        bias_dropout_fusion=False,
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        apply_rope_fusion=False,
        persist_layer_norm=False,
        **(recomputing if recompute == "full" else {}),
    )


def _layers(layers: int) -> TransformerBlockSubmodules:
    """Megatron's own layer of torch modules, with this house's attention core and norms."""
    layer = get_gpt_layer_local_spec(normalization="RMSNorm")
    layer.submodules.self_attention.submodules.core_attention = PackedAttention
    layer.submodules.input_layernorm = RMSNorm
    layer.submodules.pre_mlp_layernorm = RMSNorm
    return TransformerBlockSubmodules(layer_specs=[layer] * layers, layer_norm=RMSNorm)


def _mark_shards(model: nn.Module) -> None:
    """Mark the weights that are cut over TP ranks, by the dimension they are cut along.

    Megatron marks them where it initialises them, which is switched off here; an unmarked one
    counts as a copy, and the gradient norm would leave out every rank's but the first's.
    """
    for module in model.modules():
        cut = {ColumnParallelLinear: 0, VocabParallelEmbedding: 0, RowParallelLinear: 1}
        if type(module) in cut and module.weight is not None:
            set_tensor_model_parallel_attributes(module.weight, True, cut[type(module)], 1)


class PackedGPT(GPTModel):
    """One stage of a GPT on packed sequences. `forward` stops at hidden states: only the positions
    that predict a response token go through the output layer (`logprobs.py`).
    """

    def __init__(
        self,
        spec: ModelSpec,
        mesh: Mesh,
        dtype: torch.dtype,
        device: torch.device,
        recompute: str = "none",
    ) -> None:
        config = transformer_config(spec, mesh, dtype, device, recompute)
        rows = 128 * mesh.tp
        super().__init__(
            config=config,
            transformer_layer_spec=_layers(spec.layers // mesh.pp),
            pre_process=parallel_state.is_pipeline_first_stage(),
            post_process=parallel_state.is_pipeline_last_stage(),
            vocab_size=math.ceil(spec.vocab / rows) * rows,
            max_sequence_length=spec.max_positions,
            position_embedding_type="none",  # rotary embedding is PackedAttention's
            share_embeddings_and_output_weights=spec.tied,
        )
        _mark_shards(self)
        self.spec = spec
        self.dtype = dtype
        self.inv_freq = inverse_frequencies(spec.head_dim, spec.rope_theta)

    def sequences(self, cu_seqlens: Tensor, positions_T: Tensor) -> PackedSequences:
        """What all layers need of a pack: `cu_seqlens` int32 [n+1], `positions_T` int64 [T]."""
        return pack_sequences(cu_seqlens, positions_T, self.inv_freq, self.dtype)

    def forward(self, token_ids_T: Tensor, sequences: PackedSequences) -> Tensor:
        """Hidden states [T, 1, H] in the model's dtype, on every TP rank: after the last stage's
        final norm, or for the next stage. A later stage starts from `set_input_tensor`'s.
        """
        embedded = None
        if self.pre_process:
            embedded = self.embedding(input_ids=token_ids_T[None], position_ids=None)
            # [T, 1, H] comes with the strides of a transpose; with plain ones every layer's
            # product is one matrix product and not a batch of T.
            embedded = embedded.squeeze(1).unsqueeze(1)
        return self.decoder(
            hidden_states=embedded, attention_mask=None, packed_seq_params=sequences
        )

    @property
    def output_weight(self) -> Tensor:
        """[V/tp, H]: this rank's rows of the output layer, or of the embedding if tied; on the
        last stage.
        """
        if self.share_embeddings_and_output_weights:
            return self.shared_embedding_or_output_weight()
        return self.output_layer.weight


def build_model(
    spec: ModelSpec,
    folder: Path,
    mesh: Mesh,
    rank: int,
    dtype: torch.dtype,
    device: torch.device,
    recompute: str = "none",
) -> PackedGPT:
    """This rank's shard with the weights of the HF checkpoint in `folder`, cast to `dtype`.

    Padding rows of the vocabulary are zero and stay so. `initialize_mesh` must have run. Collective
    over the embedding group of a tied pipeline. Raises what `megatron_placement` and `load_shards`
    raise, and `RuntimeError` naming the parameter when a loaded weight is not finite.
    """
    placement = megatron_placement(spec, mesh)
    with cpu_mode():
        model = PackedGPT(spec, mesh, dtype, device, recompute)
    params = dict(model.named_parameters())
    with torch.no_grad():
        for param in params.values():
            param.fill_(math.nan)  # an element that nothing writes is found below
    load_shards(folder, placement, rank, params, dtype)
    for name, param in params.items():
        if not torch.isfinite(param).all():
            raise RuntimeError(
                f"{name} (rank {rank}) holds values that are not finite after loading {folder}"
            )
    return model
