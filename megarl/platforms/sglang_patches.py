"""Patches of SGLang 0.5.21, each behind its own registry where it has one.

Importing this module imports SGLang; call `megarl.platforms.prepare_sglang()` first.
Shapes: B requests of a step, V vocabulary (the config's `vocab_size`, without padding rows).
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from sglang.kernels.ops.sampling.murmur_hash import murmur_hash32
from sglang.srt.distributed import parallel_state
from sglang.srt.layers import sampler as sampling
from sglang.srt.layers.attention import attention_registry
from sglang.srt.layers.moe import fused_moe_native
from sglang.srt.managers import scheduler as scheduling
from sglang.srt.managers import tp_worker
from sglang.srt.mem_cache.pool_host import common
from sglang.srt.model_executor import model_runner
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
from torch.nn.functional import log_softmax

from megarl.platforms import sglang_latent
from megarl.platforms.sglang_attention import BatchedAttention
from megarl.platforms.sglang_experts import host_memory, local_experts

SAMPLING_BACKEND = "pytorch"
"""The registry entry `SeededSampler` takes over; SGLang forces this name on CPU."""
CPU_ATTENTION_BACKEND = "torch_native"
"""The registry entry `BatchedAttention` takes over."""


def install() -> None:
    """Register the sampler and the seeds of a batch, and what a CPU needs; idempotent."""
    sampling._CUSTOM_SAMPLER_FACTORIES.setdefault(SAMPLING_BACKEND, SeededSampler)
    if not torch.cuda.is_available():
        attention_registry.ATTENTION_BACKENDS[CPU_ATTENTION_BACKEND] = BatchedAttention
        model_runner.adjust_config_with_unaligned_cpu_tp = _sizes_as_written
        fused_moe_native.moe_forward_native = local_experts
        common.ALLOC_MEMORY_FUNCS["cpu"] = host_memory
        sglang_latent.install(CPU_ATTENTION_BACKEND)
    if SamplingBatchInfo.from_schedule_batch.__func__ is _STOCK_FROM_SCHEDULE_BATCH:
        SamplingBatchInfo.from_schedule_batch = classmethod(_with_request_seeds)


def _sizes_as_written(model_config: Any, load_config: Any, tp_size: int) -> Any:
    """Replaces `model_runner.adjust_config_with_unaligned_cpu_tp`: the config stays as it is.

    On a CPU, SGLang rounds heads up to a multiple of the tensor-parallel size and feed-forward
    widths to one of 32 per rank, for kernels of `sgl_kernel`, and takes the head size of a Qwen2
    model from its hidden size. No checkpoint fills what is added. Without it the layers are made
    and loaded as on a GPU, key/value heads replicated where there are fewer than ranks;
    `rollout.sizes` refuses what does not divide.
    """
    return model_config


# --- One replica of a larger world ----------------------------------------------------------


@contextmanager
def replica_of_world(tp: int) -> Iterator[None]:
    """Let a `Scheduler` be built as one block of `tp` ranks of the default process group.

    SGLang takes the whole default group for its own. Within this context, for construction only:

    - `GroupCoordinator` makes each of its groups once for every block, since `new_group` must be
      entered by all ranks of the world;
    - `torch.distributed.get_world_size()` of the default group answers `tp`;
    - `tp_worker.broadcast_pyobj` (the shared random seed) gets this process's rank in the world
      instead of its rank in the block;
    - the scheduler gets no watchdog. SGLang's sends SIGQUIT to the *parent* process when a step
      stands still, and its thread keeps a closed engine alive.
    """
    world = dist.get_world_size()
    coordinator, world_size = parallel_state.GroupCoordinator, dist.get_world_size
    broadcast, watchdog = tp_worker.broadcast_pyobj, scheduling.create_scheduler_watchdog

    def every_block(group_ranks: list[list[int]], *args: Any, **kwargs: Any) -> Any:
        blocks = [
            [rank + first for rank in ranks]
            for first in range(0, world, tp)
            for ranks in group_ranks
        ]
        return coordinator(blocks, *args, **kwargs)

    def block_size(group: Any = None) -> int:
        return tp if group is None else world_size(group)

    def broadcast_by_world_rank(
        data: list, rank: int, group: Any = None, src: int = 0, **kwargs: Any
    ) -> list:
        return broadcast(data, dist.get_rank(), group, src=src, **kwargs)

    scheduling.create_scheduler_watchdog = lambda *args, **kwargs: None
    if world > tp:
        parallel_state.GroupCoordinator = every_block
        dist.get_world_size = block_size
        tp_worker.broadcast_pyobj = broadcast_by_world_rank
    try:
        yield
    finally:
        parallel_state.GroupCoordinator, dist.get_world_size = coordinator, world_size
        tp_worker.broadcast_pyobj, scheduling.create_scheduler_watchdog = broadcast, watchdog


# --- Sampling by request seed ---------------------------------------------------------------

_STOCK_FROM_SCHEDULE_BATCH = SamplingBatchInfo.from_schedule_batch.__func__


def _with_request_seeds(cls: type, batch: Any, vocab_size: int) -> SamplingBatchInfo:
    """Replaces `SamplingBatchInfo.from_schedule_batch`, which keeps the requests' seeds only in
    SGLang's deterministic mode; that mode refuses the attention CPU uses."""
    info = _STOCK_FROM_SCHEDULE_BATCH(cls, batch, vocab_size)
    seeds = [request.sampling_params.sampling_seed for request in batch.reqs]
    info.sampling_seed = torch.tensor(seeds, dtype=torch.int64, device=batch.device)
    return info


_with_request_seeds.__wrapped__ = _STOCK_FROM_SCHEDULE_BATCH


class SeededSampler(sampling.Sampler):
    """Replaces `Sampler` for plain sampling at a temperature, and for greedy.

    A token depends on its request's seed, its position and its logits alone: not on the batch,
    the other requests, the replica or any generator's state. Where nothing is truncated this
    draws what SGLang's own `multinomial_with_seed` draws (same hash, same Gumbel race), with one
    log-softmax for sampling and log-probs instead of a softmax and two logs of it.
    """

    def forward(
        self,
        logits_output: Any,
        sampling_info: SamplingBatchInfo,
        return_logprob: bool,
        top_logprobs_nums: list[int],
        token_ids_logprobs: list[list[int]],
        positions: torch.Tensor,
    ) -> torch.Tensor:
        """Next token ids int64 [B]; fp32 log-probs [B] go to `logits_output`.

        Log-probs are log-softmax(logits / temperature) over V. Raises `NotImplementedError` for
        truncated sampling, whose log-probs would not be the trainer's.
        """
        # Not through `_preprocess_logits`, which can be told to replace logits that are not numbers
        # and sample on: their log-prob is what stops the generator.
        logits_BV = logits_output.next_token_logits
        if sampling_info.is_all_greedy:
            log_probs_BV = log_softmax(logits_BV, dim=-1)
            ids_B = torch.argmax(log_probs_BV, dim=-1)
        else:
            if (
                sampling_info.need_top_p_sampling
                or sampling_info.need_top_k_sampling
                or sampling_info.need_min_p_sampling
            ):
                raise NotImplementedError("top-p, top-k and min-p are not sampled here")
            log_probs_BV = log_softmax(logits_BV.div_(sampling_info.temperatures), dim=-1)
            ids_B = torch.argmax(
                seeded_scores(log_probs_BV, sampling_info.sampling_seed, positions), dim=-1
            )
        self._sync_token_ids_across_tp(ids_B, sampling_info)  # before the log-probs of these ids
        logits_output.next_token_logprobs = log_probs_BV.gather(1, ids_B[:, None]).squeeze(1)
        return ids_B


def seeded_scores(
    log_probs_BV: torch.Tensor, seeds_B: torch.Tensor, positions_B: torch.Tensor
) -> torch.Tensor:
    """float64 [B, V] whose largest entry of a row is the row's draw from softmax.

    Exponential race: with u uniform in [0, 1], argmax p / -log(u) is distributed as p. It is the
    Gumbel maximum log p - log(-log u) without its second logarithm.
    """
    if log_probs_BV.is_cuda:
        columns = torch.arange(log_probs_BV.shape[1], device=log_probs_BV.device)
        hashed_BV = murmur_hash32(seeds_B.to(torch.uint64), positions_B, columns)
        race_BV = hashed_BV.to(torch.float64)
    else:
        hashed = murmur_hash(seeds_B.numpy(), positions_B.numpy(), log_probs_BV.shape[1])
        race_BV = torch.from_numpy(hashed.astype(np.float64))
    # At u = 1 the race would be won whatever p is: that bucket gets its neighbour's value.
    race_BV.div_(2**32 - 1).log_().clamp_(max=-(2.0**-32)).neg_()
    return log_probs_BV.exp().to(torch.float64).div_(race_BV)


def murmur_hash(seeds_B: np.ndarray, positions_B: np.ndarray, columns: int) -> np.ndarray:
    """MurmurHash3 (32 bit) of (64-bit seed, 32-bit position, 32-bit column): uint32 [B, columns].

    Replaces `sgl_kernel.murmur_hash32_cpu`, bit for bit the hash of SGLang's triton kernel. The
    rows' and the columns' parts meet only in the last mixing step, so the columns' is kept.
    """
    seeds = seeds_B.astype(np.int64).view(np.uint64)
    row_B = np.zeros(len(seeds), dtype=np.uint32)
    for block in (seeds & 0xFFFFFFFF, seeds >> np.uint64(32), positions_B):
        row_B = _absorb(row_B, _key(block.astype(np.uint32)))
    hashed = _absorb(row_B[:, None], _column_keys(columns))
    hashed ^= np.uint32(16)  # the length of the message in bytes
    hashed ^= hashed >> np.uint32(16)
    hashed *= np.uint32(0x85EBCA6B)
    hashed ^= hashed >> np.uint32(13)
    hashed *= np.uint32(0xC2B2AE35)
    hashed ^= hashed >> np.uint32(16)
    return hashed


def _rotated(x: np.ndarray, bits: int) -> np.ndarray:
    return (x << np.uint32(bits)) | (x >> np.uint32(32 - bits))


def _key(block: np.ndarray) -> np.ndarray:
    return _rotated(block * np.uint32(0xCC9E2D51), 15) * np.uint32(0x1B873593)


def _absorb(state: np.ndarray, key: np.ndarray) -> np.ndarray:
    mixed = _rotated(state ^ key, 13)
    mixed *= np.uint32(5)
    mixed += np.uint32(0xE6546B64)
    return mixed


@functools.lru_cache(maxsize=4)
def _column_keys(columns: int) -> np.ndarray:
    return _key(np.arange(columns, dtype=np.uint32))
