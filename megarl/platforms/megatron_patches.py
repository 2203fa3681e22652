"""What megatron-core 0.16.1 needs to build its optimizer and step on a machine without CUDA.

`install()` sets what must hold for the whole process; `cpu_mode()` is a scope, entered in
`models/` only, around the few megatron calls that name "cuda" themselves. Forward and generation
run outside of it (`plain_mode()`): a TorchFunctionMode costs every torch call some microseconds
(16-23 % of a generation, measured).
"""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.tensor_parallel import random
from megatron.core.transformer import multi_latent_attention
from torch import Tensor
from torch.overrides import TorchFunctionMode


def current_device() -> torch.device:
    """Replaces `torch.cuda.current_device`, where megatron's gradient and parameter buffers go.

    (`_ParamAndGradBuffer`, `DistributedOptimizer`; the plain function raises without CUDA.)
    """
    return torch.device("cpu")


def get_device_rng_state(*_: Any, **__: Any) -> Tensor:
    """Replaces `_get_cuda_rng_state`: activation recompute saves the device's random state.

    (`CheckpointFunction`, `_fork_rng`.) A CPU has the one state that megatron saves beside it.
    """
    return torch.empty(0, dtype=torch.uint8)


def set_device_rng_state(*_: Any, **__: Any) -> None:
    """Replaces `_set_cuda_rng_state`, which would queue a call for a CUDA that never comes."""


def results_queue() -> queue.SimpleQueue:
    """Replaces `_get_write_results_queue`, whose queue lives in a process that it spawns.

    (`FileSystemWriterAsync.prepare_write_data`.) Checkpoints are written by a thread here, so a
    queue of this process will do; the manager process would import `__main__` again.
    """
    return queue.SimpleQueue()


def _on_cpu(func: Callable, args: tuple, kwargs: dict) -> Any:
    """Replaces the literal `device="cuda"` of megatron's optimizers and gradient norm.

    (`MixedPrecisionOptimizer.__init__`, `FP32Optimizer.__init__`, `get_grad_norm_fp32`,
    `clip_grad_by_total_norm_fp32`, `local_multi_tensor_l2_norm`; the pipeline schedule.)
    """
    if str(kwargs.get("device")).startswith("cuda"):
        kwargs = {**kwargs, "device": torch.device("cpu")}
    return func(*args, **kwargs)


def _type_as_on_cuda(func: Callable, args: tuple, kwargs: dict) -> Any:
    """Replaces `Tensor.type()`: megatron sorts parameters by names such as torch.cuda.FloatTensor.

    (`DistributedOptimizer`, `Float16OptimizerWithFloat16Params`, `clip_grad_by_total_norm_fp32`.)
    """
    answer = func(*args, **kwargs)
    if isinstance(answer, str) and not answer.startswith("torch.cuda."):
        return answer.replace("torch.", "torch.cuda.", 1)
    return answer


def _stay(tensor: Tensor) -> Tensor:
    """Replaces `Tensor.cuda`, where megatron joins the two copies of a tied embedding.

    (`LanguageModule.setup_embeddings_and_output_layer`.)
    """
    return tensor


class _CpuMode(TorchFunctionMode):
    def __init__(self, without: frozenset[str]) -> None:
        super().__init__()
        self.without = without

    def __torch_function__(
        self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.type and "type_as_on_cuda" not in self.without:
            return _type_as_on_cuda(func, args, kwargs)
        if func is torch.Tensor.cuda and "stay" not in self.without:
            return _stay(*args)
        if "device" in kwargs and "on_cpu" not in self.without:
            return _on_cpu(func, args, kwargs)
        return func(*args, **kwargs)


def install() -> None:
    """Patch this process; again is harmless. With CUDA only the first two are needed."""
    filesystem_async._get_write_results_queue = results_queue
    # Without Transformer Engine it takes the stand-in for it, a mock, for a class.
    multi_latent_attention.HAVE_TE = isinstance(multi_latent_attention.TELinear, type)
    if not torch.cuda.is_available():
        torch.cuda.current_device = current_device
        random._get_cuda_rng_state = get_device_rng_state
        random._set_cuda_rng_state = set_device_rng_state


@contextmanager
def cpu_mode(without: frozenset[str] = frozenset()) -> Iterator[None]:
    """The scope in which megatron's "cuda" means this CPU; nothing where there is CUDA.

    `without` leaves replacements out by name (`on_cpu`, `type_as_on_cuda`, `stay`): for the test
    that proves each of them needed.
    """
    if torch.cuda.is_available():
        yield
        return
    with _CpuMode(without):
        yield


@contextmanager
def plain_mode() -> Iterator[None]:
    """A scope inside `cpu_mode()` that megatron calls back into: torch's functions unwatched."""
    if torch.cuda.is_available():
        yield
        return
    with torch._C.DisableTorchFunction():
        yield
