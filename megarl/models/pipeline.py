"""Micro-batches through the stages of a pipeline, forward alone or with their backward.

One stage: a plain loop. More: megatron's 1F1B schedule (Narayanan et al., arXiv:2104.04473), in
which stage s of S runs S − s − 1 forwards ahead and then alternates. Stages exchange hidden states
[T, 1, H] of one shape, so all packs of a call have the same T (`data/packing.pad_pack`), and every
data-parallel part has the same number of them.

Losses arrive weighted, so that their sum is *the* loss: nothing is divided here. The schedule
divides a loss by the number of micro-batches unless told its number of tokens under
`calculate_per_token_loss`; it is told 0, which nobody reads since gradients are not finalized here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel.schedules import (
    forward_backward_pipelining_without_interleaving,
)
from torch import Tensor

from megarl.data.packing import Pack
from megarl.models.build import PackedGPT
from megarl.platforms.megatron_patches import cpu_mode, plain_mode

Told = TypeVar("Told")
Finish = Callable[[Tensor, int], tuple[Tensor, Told]]
"""(the last stage's hidden states [T, H], number of the pack) → (loss, what to tell of it)."""


def run_packs(
    model: PackedGPT, packs: Sequence[Pack], finish: Finish[Told], *, learn: bool
) -> list[Told]:
    """What `finish` tells of each pack, in order, on the last stage; nothing on the others.

    With `learn` the loss of each pack is followed by its backward; else nobody reads it. Collective
    over the tensor- and pipeline-parallel groups, whose ranks hold the same packs. Raises
    `ValueError` before anything is sent when there are several stages and packs of several lengths.
    """
    if model.config.pipeline_model_parallel_size > 1:
        return _one_forward_one_backward(model, packs, finish, learn)
    told = []
    for number, pack in enumerate(packs):
        loss, facts = finish(_stage(model, pack).squeeze(1), number)
        if learn:
            loss.backward()
        told.append(facts)
    return told


def _stage(model: PackedGPT, pack: Pack) -> Tensor:
    return model(pack.token_ids_T, model.sequences(pack.cu_seqlens, pack.positions_T))


def _one_forward_one_backward(
    model: PackedGPT, packs: Sequence[Pack], finish: Finish[Told], learn: bool
) -> list[Told]:
    lengths = sorted({len(pack.token_ids_T) for pack in packs})
    if len(lengths) > 1:
        raise ValueError(f"packs of {lengths} tokens in one pipeline; pad them to one length")
    if not packs:
        return []

    def forward(numbers: Iterator[int], _: Any) -> tuple[Tensor, Callable]:
        number = next(numbers)

        def finished(hidden: Tensor) -> tuple[Tensor, Tensor, Told]:
            with plain_mode():
                loss, facts = finish(hidden.squeeze(1), number)
            return loss, torch.zeros((), dtype=torch.int), facts

        with plain_mode():
            return _stage(model, packs[number]), finished

    with cpu_mode():
        return forward_backward_pipelining_without_interleaving(
            forward_step_func=forward,
            data_iterator=iter(range(len(packs))),
            model=model,
            num_microbatches=len(packs),
            seq_length=lengths[0],
            micro_batch_size=1,
            forward_only=not learn,
        )


def from_last_stage(columns: Sequence[Tensor], count: int, device: torch.device) -> Tensor:
    """float32 [columns, count] of the last stage on every stage of its pipeline. Collective over
    the pipeline-parallel group; `columns` are read on the last stage only.
    """
    values = torch.empty(len(columns), count, device=device)
    if parallel_state.is_pipeline_last_stage():
        torch.stack(list(columns), out=values)
    if count:
        dist.broadcast(
            values,
            src=parallel_state.get_pipeline_model_parallel_last_rank(),
            group=parallel_state.get_pipeline_model_parallel_group(),
        )
    return values
