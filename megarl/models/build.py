"""From the numbers of an HF model to this rank's shard of a megatron-core GPT, weights loaded.

Parallel layout: megatron's default order, tensor parallel innermost (`contracts/mesh.py`). The
first stage of a pipeline holds the embedding, the last one the final norm and the output layer,
which in a tied model is a second copy of the embedding. Both copies are loaded from the file, get
the sum of both gradients and take the same steps. A rank with virtual stages holds several chunks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.moe.moe_layer import MoELayer
from torch import Tensor, nn

from megarl.checkpoint.hf_folder import load_shards
from megarl.contracts.mesh import Mesh
from megarl.models.config import refuse_layout, transformer_config
from megarl.models.layers import ValueHead, block_spec, mark_shards
from megarl.models.mesh import destroy_mesh, initialize_mesh
from megarl.models.packed import PackedSequences, pack_sequences
from megarl.models.rotary import inverse_frequencies
from megarl.platforms.megatron_patches import cpu_mode
from megarl.reshard.families.spec import ModelSpec
from megarl.reshard.layout import megatron_placement

__all__ = ["ModelChunks", "PackedGPT", "build_model", "destroy_mesh", "initialize_mesh"]


class PackedGPT(GPTModel):
    """One model chunk of a GPT on packed sequences. `forward` stops at hidden states: only the
    positions that predict a response token go through the output layer (`logprobs.py`).
    """

    replays = False
    """Tokens go to the experts that the generator sent them to, where the pack tells."""

    def __init__(
        self,
        spec: ModelSpec,
        mesh: Mesh,
        rank: int,
        dtype: torch.dtype,
        device: torch.device,
        recompute: str = "none",
        sequence_parallel: bool = False,
        virtual: int = 0,
    ) -> None:
        """`virtual`: which of this rank's chunks."""
        config = transformer_config(spec, mesh, dtype, device, recompute, sequence_parallel)
        chunks = mesh.chunks(spec.layers)
        number = virtual * mesh.pp + mesh.pp_index(rank)
        has_values = spec.head == "value"
        rows = 128 * mesh.tp
        super().__init__(
            config=config,
            transformer_layer_spec=block_spec(spec, chunks[number]),
            pre_process=number == 0,
            post_process=number == len(chunks) - 1,
            vocab_size=math.ceil(spec.vocab / rows) * rows,
            max_sequence_length=spec.max_positions,
            position_embedding_type="none",  # rotary embedding is PackedAttention's
            share_embeddings_and_output_weights=spec.tied and not has_values,
            vp_stage=virtual if mesh.virtual > 1 else None,
        )
        if has_values and self.post_process:
            del self.output_layer
            self.value_head = ValueHead(config, bias=spec.value_bias)
        mark_shards(self)
        for layer in self.decoder.layers:
            if isinstance(layer.mlp, MoELayer):
                layer.register_forward_pre_hook(self._hand_experts, with_kwargs=True)
        self.spec = spec
        self.dtype = dtype
        self.inv_freq = inverse_frequencies(spec.head_dim, spec.rope_theta, spec.rope_scaling)
        self.attention_factor = spec.rope_scaling.attention_factor if spec.rope_scaling else 1.0

    @property
    def chunks(self) -> tuple[PackedGPT, ...]:
        """This rank's chunks in depth order: this one."""
        return (self,)

    def sequences(
        self, cu_seqlens: Tensor, positions_T: Tensor, real: int | None = None
    ) -> PackedSequences:
        """What all layers need of a pack: `cu_seqlens` int32 [n+1], `positions_T` int64 [T], and
        how many of the n sequences are samples', the first ones (None: all)."""
        return pack_sequences(
            cu_seqlens, positions_T, self.inv_freq, self.dtype, self.attention_factor, real
        )

    def _padding(self, sequences: PackedSequences) -> Tensor | None:
        """bool [1, T], of the tokens that this rank's routers see; None without experts."""
        return None if self.spec.moe is None else self._routed_here(sequences.padding_T)[None]

    def _routed_here(self, of_T: Tensor) -> Tensor:
        """The part of `of_T` [T, …] that is of this rank's tokens between layers."""
        if not self.config.sequence_parallel:
            return of_T
        group = self.pg_collection.tp
        return of_T.chunk(group.size())[group.rank()]

    def _hand_experts(self, layer: nn.Module, _: tuple, given: dict[str, Any]) -> None:
        """Before a layer's forward, also where it is repeated for its backward: its router gets the
        generator's choice for the pack's tokens."""
        experts_TX = given["packed_seq_params"].experts_TX
        if self.replays and experts_TX is not None:
            router = layer.mlp.router
            first = (layer.layer_number - 1) * router.topk
            index = self._routed_here(experts_TX[:, first : first + router.topk])
            router.replayed = index.long()

    def forward(self, token_ids_T: Tensor, sequences: PackedSequences) -> Tensor:
        """Hidden states in the model's dtype: after the last chunk's final norm [T, 1, H] on every
        TP rank, or for the next chunk [T, 1, H], under sequence parallelism [T/tp, 1, H], this TP
        rank's tokens. A later chunk starts from `set_input_tensor`'s.
        """
        embedded = None
        if self.pre_process:
            # The embedding without its dropout, which would want a random state of megatron's.
            embedded = self.embedding.word_embeddings(token_ids_T[None])
            if not self.config.sequence_parallel:
                # [1, T, H] → [T, 1, H] with plain strides: with those of a transpose every
                # layer's product is a batch of T and not one matrix product.
                embedded = embedded.squeeze(0).unsqueeze(1)
        hidden = self.decoder(
            hidden_states=embedded,
            attention_mask=None,
            packed_seq_params=sequences,
            padding_mask=self._padding(sequences),
        )
        if self.post_process and self.config.sequence_parallel:
            # Every TP rank scores all tokens, and `token_scores` sums the gradient over them: each
            # takes back its own tokens' part of it.
            hidden = gather_from_sequence_parallel_region(
                hidden, tensor_parallel_output_grad=False, group=self.pg_collection.tp
            )
        return hidden

    @property
    def output_weight(self) -> Tensor:
        """[V/tp, H]: this rank's rows of the output layer, or of the embedding if tied; on the
        last stage.
        """
        if self.share_embeddings_and_output_weights:
            return self.shared_embedding_or_output_weight()
        return self.output_layer.weight


class ModelChunks(nn.Module):
    """The chunks of a rank with virtual stages, in depth order; parameters are `chunk{v}.…`."""

    def __init__(self, chunks: list[PackedGPT]) -> None:
        super().__init__()
        for number, chunk in enumerate(chunks):
            self.add_module(f"chunk{number}", chunk)
        self.config = chunks[0].config
        self.spec = chunks[0].spec
        self.dtype = chunks[0].dtype
        self.pg_collection = chunks[0].pg_collection

    @property
    def chunks(self) -> tuple[PackedGPT, ...]:
        """This rank's chunks in depth order."""
        return tuple(self.children())

    @property
    def output_weight(self) -> Tensor:
        """As `PackedGPT.output_weight`, of the last chunk."""
        return self.chunks[-1].output_weight

    @property
    def value_head(self) -> ValueHead:
        """The last chunk's, on the last stage of a model with values."""
        return self.chunks[-1].value_head


def build_model(
    spec: ModelSpec,
    folder: Path,
    mesh: Mesh,
    rank: int,
    dtype: torch.dtype,
    device: torch.device,
    recompute: str = "none",
    sequence_parallel: bool = False,
    body: ModelSpec | None = None,
) -> PackedGPT | ModelChunks:
    """This rank's shard with the weights of the HF checkpoint in `folder`, cast to `dtype`.

    `body`: what `folder` holds, where that is a model of another head: all but its output layer is
    taken, and the head of `spec` is zeros.

    Padding rows of the vocabulary are zero and stay so. `initialize_mesh` must have run. Collective
    over the embedding group of a tied pipeline. Raises what `refuse_layout`, `megatron_placement`
    and `load_shards` raise, and `RuntimeError` naming the parameter when a loaded weight is not
    finite. In eval mode.
    """
    refuse_layout(spec, mesh, sequence_parallel)
    placement = megatron_placement(spec, mesh)
    with cpu_mode():
        chunks = [
            PackedGPT(spec, mesh, rank, dtype, device, recompute, sequence_parallel, virtual)
            for virtual in range(mesh.virtual)
        ]
    model = chunks[0] if mesh.virtual == 1 else ModelChunks(chunks)
    params = weights_of(model)
    with torch.no_grad():
        for param in params.values():
            param.fill_(math.nan)  # an element that nothing writes is found below
    load_shards(folder, placement, rank, params, dtype, body)
    for name in _not_finite(params):
        raise RuntimeError(
            f"{name} (rank {rank}) holds values that are not finite after loading {folder}"
        )
    return model.eval()


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    """All that a checkpoint holds of `model`, by name: its parameters, and its buffers, which no
    step changes."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def _not_finite(params: dict[str, Tensor]) -> Iterator[str]:
    return (name for name, param in params.items() if not torch.isfinite(param).all())
