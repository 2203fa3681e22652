"""NVIDIA GPUs. NOT YET RUN ON A GPU: every choice is written against the installed sources of
SGLang 0.5.21, torch_memory_saver 0.0.9.post1 and megatron-core 0.16.1.

The trainer keeps megarl's own packed layer (`models/packed.py`) and not Transformer Engine's:
TE joins norm and projection under other parameter names, which would be a second table for
resharding, and computes in an order of its own. The packed layer's products are torch's
(cuBLAS), which are also SGLang's for unquantised weights.

SGLang's deterministic mode is not used: it replaces mm, addmm, bmm and log_softmax of the whole
process, the trainer's too, and gives every request one seed. Requests are seeded by
`sglang_patches.SeededSampler` on GPUs as on CPUs: a token depends on its seed, its position and
its logits. The logits may differ in their last bits with the size of the batch.

Order of memory, kept by `rollout/hybrid.py` and `rollout/generator.py`: drain, release cache and
weights, train, resume weights, write weights, flush, resume cache and graphs, generate.
"""

from __future__ import annotations

import importlib.util
import os
from typing import Any

import torch

from megarl.platforms.interface import CUDA_GRAPH, KV_CACHE, Platform

ENVIRONMENT = {
    # Megatron's order of communication and computation under tensor parallelism. (SGLang's own
    # start-up sets 8; it is not called here.)
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    # SGLang's default: NCCL's buffers by plain allocation, outside of the virtual memory that the
    # memory saver maps and unmaps.
    "NCCL_CUMEM_ENABLE": "0",
}
ALLOCATOR_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
FREE_SHARE = 0.9
"""Of the memory free when SGLang starts (megatron's shards already exist): the most that weights
and cache may take. The rest is for activations and captured graphs. What the cache does take is
rollout.max_total_tokens."""


class CudaPlatform(Platform):
    """One GPU per rank, the one of its local rank."""

    device_type = "cuda"
    backend = "cpu:gloo,cuda:nccl"

    def refusal(self) -> str | None:
        if torch.cuda.is_available():
            return None
        return (
            "world.device is cuda, but torch sees no GPU here; set world.device=cpu, "
            "or install a CUDA build of torch and check nvidia-smi"
        )

    def prepare(self) -> None:
        for name, value in ENVIRONMENT.items():
            os.environ.setdefault(name, value)

    def device(self, local_rank: int) -> torch.device:
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
        return device

    def synchronize(self, device: torch.device) -> None:
        torch.cuda.synchronize(device)

    def release_cached(self) -> None:
        # The saver maps fresh physical memory when it resumes: torch's cache would be in its way.
        torch.cuda.synchronize()
        torch.cuda.empty_cache()

    def rng_state(self, device: torch.device) -> torch.Tensor | None:
        return torch.cuda.get_rng_state(device)

    def restore_rng(self, device: torch.device, state: torch.Tensor | None) -> None:
        if state is not None:
            torch.cuda.set_rng_state(state, device)

    def host_buffer(self, size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)

    # --- The generator ------------------------------------------------------------------------

    def engine_arguments(self, section: Any) -> dict[str, Any]:
        return {
            "device": self.device_type,
            "attention_backend": _attention_backend(section),
            "mem_fraction_static": FREE_SHARE,
            "enable_memory_saver": section.release,
            # Decode graphs for every batch the recipe allows, not for what the memory suggests.
            "cuda_graph_max_bs_decode": section.max_running_requests,
            # Prefill graphs take minutes to capture and memory that never sleeps.
            "disable_prefill_cuda_graph": True,
            # It shares buffers between processes by address, which memory that is unmapped and
            # mapped again does not survive; NCCL's sum also has one order on all ranks.
            "disable_custom_all_reduce": True,
        }

    def prepare_engine(self, section: Any) -> None:
        from sglang.srt.layers import sampler

        # A rank of a replica that drew another token would step alone, and its peers wait for it.
        sampler.SYNC_TOKEN_IDS_ACROSS_TP = section.tp > 1
        if not section.release:
            return
        if importlib.util.find_spec("torch_memory_saver") is None:
            raise ValueError(
                "rollout.release needs torch_memory_saver, which is not installed; "
                "pip install torch_memory_saver, or set rollout.release=false"
            )
        for name in ALLOCATOR_VARIABLES:
            if "expandable_segments:true" in os.environ.get(name, "").lower():
                raise ValueError(
                    f"rollout.release cannot work with expandable_segments ({name}): the memory "
                    f"saver maps memory itself; unset {name} or set rollout.release=false"
                )
        self._choose_hook()

    def _choose_hook(self) -> None:
        """Have the saver allocate through torch, unless LD_PRELOAD brought it in at the start.

        It must be told before its first use, and cannot be told otherwise after that.
        """
        from torch_memory_saver import torch_memory_saver as saver

        if _preloaded():
            os.environ["SGLANG_MEMORY_SAVER_CUDA_GRAPH"] = "1"
        elif saver._impl is None:
            saver.hook_mode = "torch"

    def engine_device(self, rank_in_replica: int) -> int:
        return int(os.environ.get("LOCAL_RANK", "0"))

    def adapt_engine(self, scheduler: Any) -> None:
        """As `Scheduler.run_event_loop` does, which is not entered here."""
        scheduler._war_barrier_enabled = True

    def cache_tags(self) -> tuple[str, ...]:
        # Graphs are captured in memory of the saver only when it is preloaded; else they stay.
        return (KV_CACHE, CUDA_GRAPH) if _preloaded() else (KV_CACHE,)


def _preloaded() -> bool:
    return "torch_memory_saver" in os.environ.get("LD_PRELOAD", "")


def _attention_backend(section: Any) -> str | None:
    """None lets SGLang choose by the GPU: fa3, trtllm_mha, flashinfer or triton.

    None of those computes float32 as float32 (they refuse it or multiply in TF32, which the
    trainer does not), so float32 gets torch's own attention: slow, without graphs, exact.
    """
    if section.attention_backend != "auto":
        return section.attention_backend
    return "torch_native" if section.dtype == "float32" else None
