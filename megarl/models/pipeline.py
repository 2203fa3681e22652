"""Micro-batches through the stages of a pipeline, forward alone or with their backward.

One stage: a plain loop. More: megatron's 1F1B schedule (Narayanan et al., arXiv:2104.04473), in
which stage s of S runs S − s − 1 forwards ahead and then alternates; with virtual stages its
interleaved one, section 2.2 there. Stages exchange hidden states [T, 1, H] of one shape, so all
packs of a call have the same T (`data/pack_shape.py`), and every data-parallel part has the same
number of them. The interleaved schedule takes micro-batches in rounds of S: dummies fill the last.

Losses arrive weighted, so that their sum is *the* loss: nothing is divided here. The schedule
divides a loss by the number of micro-batches unless told its number of tokens under
`calculate_per_token_loss`; it is told 0, which nobody reads since gradients are not finalized here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel.schedules import (
    forward_backward_pipelining_with_interleaving,
    forward_backward_pipelining_without_interleaving,
)
from torch import Tensor, nn

from megarl.data.packing import Pack, empty_pack, pad_pack
from megarl.models.build import ModelChunks, PackedGPT
from megarl.platforms.megatron_patches import cpu_mode, plain_mode

Told = TypeVar("Told")
Finish = Callable[[Tensor, int], tuple[Tensor, Told]]
"""(the last stage's hidden states [T, H], number of the pack) → (loss, what to tell of it)."""


def run_packs(
    model: PackedGPT | ModelChunks, packs: Sequence[Pack], finish: Finish[Told], *, learn: bool
) -> list[Told]:
    """What `finish` tells of each pack, in order, on the last stage; nothing on the others.
    The model must be in training mode to learn and in eval mode to score (`check_mode`).

    With `learn` the loss of each pack is followed by its backward; else nobody reads it. Collective
    over the tensor- and pipeline-parallel groups, whose ranks hold the same packs, and over the
    ranks that share experts, which have as many packs of the same lengths. Raises `ValueError` on
    every rank of these groups, before anything is sent, for packs of lengths that do not do.
    """
    check_mode(model, learn=learn)
    _check_lengths(model, packs)
    if model.config.pipeline_model_parallel_size > 1:
        return _through_stages(model, packs, finish, learn)
    told = []
    for number, pack in enumerate(packs):
        loss, facts = finish(_stage(model, pack).squeeze(1), number)
        if learn:
            loss.backward()
        told.append(facts)
    return told


def check_mode(model: nn.Module, *, learn: bool) -> None:
    """Raises `RuntimeError` naming the first module that is not in training mode, or without
    `learn` not in eval mode, or that drops anything: a forward is a pure function, and bits of an
    update's are a score's."""
    for name, module in model.named_modules():
        told = f"{name or 'the model'} ({type(module).__name__})"
        if module.training != learn:
            mode, wanted = ("eval", "training") if learn else ("training", "eval")
            raise RuntimeError(f"{told} is in {mode} mode in a forward that needs {wanted} mode")
        if isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0:
            raise RuntimeError(f"{told} has dropout {module.p}; the forward must have none")
    config = model.config
    for key in ("hidden_dropout", "attention_dropout"):
        if getattr(config, key) > 0:
            raise RuntimeError(f"the model's config has {key} {getattr(config, key)}; it must be 0")


def _stage(model: PackedGPT, pack: Pack) -> Tensor:
    sequences = model.sequences(pack.cu_seqlens, pack.positions_T, len(pack.rows))
    sequences.experts_TX = pack.experts_TX
    return model(pack.token_ids_T, sequences)


def _check_lengths(model: PackedGPT | ModelChunks, packs: Sequence[Pack]) -> None:
    config = model.config
    lengths = [len(pack.token_ids_T) for pack in packs]
    if config.num_moe_experts is not None:
        group = parallel_state.get_expert_tensor_and_model_parallel_group()
        if group.size() > 1:
            theirs: list[list[int]] = [[]] * group.size()
            dist.all_gather_object(theirs, lengths, group=group)
            if any(other != theirs[0] for other in theirs):
                raise ValueError(
                    f"ranks that share experts have packs of {theirs} tokens; pad them alike"
                )
    if config.pipeline_model_parallel_size > 1 and len(set(lengths)) > 1:
        raise ValueError(
            f"packs of {sorted(set(lengths))} tokens in one pipeline; pad them to one length"
        )
    parts = config.tensor_model_parallel_size if config.sequence_parallel else 1
    if any(length % parts for length in lengths):
        raise ValueError(
            f"packs of {lengths} tokens do not divide by actor.tp={parts} under sequence "
            "parallelism; pad them"
        )


def _through_stages(
    model: PackedGPT | ModelChunks, packs: Sequence[Pack], finish: Finish[Told], learn: bool
) -> list[Told]:
    if not packs:
        return []
    stages = model.config.pipeline_model_parallel_size
    chunks = model.chunks
    length = len(packs[0].token_ids_T)
    batches = list(packs)
    if len(chunks) > 1 and len(packs) % stages:
        dummy = pad_pack(empty_pack(), length).to(packs[0].token_ids_T.device)
        batches += [dummy] * (stages - len(packs) % stages)

    def finished(number: int, hidden: Tensor) -> tuple[Tensor, Tensor, Any]:
        with plain_mode():
            if number < len(packs):
                loss, facts = finish(hidden.squeeze(1), number)
            else:
                loss, facts = (hidden * 0.0).sum(), None
        return loss, torch.zeros((), dtype=torch.int), facts

    def forward(numbers: Iterator[int], chunk: PackedGPT) -> tuple[Tensor, Callable]:
        number = next(numbers)
        with plain_mode():
            return _stage(chunk, batches[number]), partial(finished, number)

    numbers = [iter(range(len(batches))) for _ in chunks]
    common = {
        "forward_step_func": forward,
        "num_microbatches": len(batches),
        "seq_length": length,
        "micro_batch_size": 1,
        "forward_only": not learn,
    }
    with cpu_mode():
        if len(chunks) == 1:
            told = forward_backward_pipelining_without_interleaving(
                data_iterator=numbers[0], model=chunks[0], **common
            )
        else:
            told = forward_backward_pipelining_with_interleaving(
                data_iterator=numbers, model=list(chunks), **common
            )
    return told[: len(packs)]


def from_last_stage(columns: Sequence[Tensor], count: int, device: torch.device) -> Tensor:
    """float32 [columns, count] of the last stage on every stage of its pipeline. Collective over
    the pipeline-parallel group; `columns` are read on the last stage only.
    """
    values = torch.empty(len(columns), count, device=device)
    if parallel_state.is_pipeline_last_stage(ignore_virtual=True):
        torch.stack(list(columns), out=values)
    if count:
        dist.broadcast(
            values,
            src=parallel_state.get_pipeline_model_parallel_last_rank(),
            group=parallel_state.get_pipeline_model_parallel_group(),
        )
    return values
