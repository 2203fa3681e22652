"""The optimizer state in host memory, and no gradients at all, while a process does not train.

Works on storages: what is emptied keeps every view that megatron-core made of it (`main_grad`,
buckets, shards), and comes back bit for bit. Megatron's own `offload_to_cpu` replaces the
tensors' data instead; its fp32 masters that *are* the model's weights would then be copies.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, UntypedStorage

from megarl.platforms.interface import Platform


class OptimizerOffload:
    """Moves a `Trainer`'s masters and optimizer state out of the device and back.

    Gradients are dropped and come back as zeros: an update begins by clearing them. The model's
    own weights stay, also where they serve as masters.
    """

    def __init__(self, trainer: Any, platform: Platform) -> None:
        self._trainer = trainer
        self._platform = platform
        self._saved: list[tuple[UntypedStorage, Tensor]] = []
        self._dropped: list[tuple[UntypedStorage, int]] = []
        self._buffers: dict[int, list[Tensor]] = {}
        """Host buffers not in use, by size: pinning memory is slow, so they are kept."""

    @property
    def is_out(self) -> bool:
        """Between `out` and `back`: nothing may touch gradients, masters or optimizer state."""
        return bool(self._saved or self._dropped)

    def out(self) -> None:
        """Free the device of it; again does nothing."""
        if self.is_out:
            return
        kept = _unique(parameter.data for parameter in self._trainer.model.parameters())
        gradients = _unique(self._gradients())
        state = _unique(self._state())
        for address, storage in state.items():
            if address not in kept and address not in gradients:
                host = self._take(storage.nbytes())
                host.copy_(_bytes(storage), non_blocking=True)
                self._saved.append((storage, host))
        self._platform.synchronize(self._trainer.world.device)
        self._dropped = [(storage, storage.nbytes()) for storage in gradients.values()]
        for storage, _ in self._saved + self._dropped:
            storage.resize_(0)
        self._platform.release_cached()

    def back(self) -> None:
        """As before `out`, gradients zero; again does nothing."""
        for storage, size in self._dropped:
            storage.resize_(size)
            _bytes(storage).zero_()
        for storage, host in self._saved:
            storage.resize_(host.numel())
            _bytes(storage).copy_(host, non_blocking=True)
        self._platform.synchronize(self._trainer.world.device)
        for _, host in self._saved:
            self._buffers.setdefault(host.numel(), []).append(host)
        self._saved, self._dropped = [], []

    def _take(self, size: int) -> Tensor:
        free = self._buffers.get(size)
        return free.pop() if free else self._platform.host_buffer(size)

    def _gradients(self) -> Iterator[Tensor]:
        for ddp in self._trainer.ddps:
            for buffer in ddp.buffers + ddp.expert_parallel_buffers:
                yield buffer.grad_data

    def _state(self) -> Iterator[Tensor]:
        """Masters, and what the optimizer keeps for each (from its first step on)."""
        device = self._trainer.world.device
        for chained in self._trainer.optimizer.chained_optimizers:
            for group in chained.optimizer.param_groups:
                yield from (master.data for master in group["params"])
            for state in chained.optimizer.state.values():
                for value in state.values():
                    if isinstance(value, Tensor) and value.device == device:
                        yield value


def _unique(tensors: Iterator[Tensor]) -> dict[int, UntypedStorage]:
    """The storages under `tensors` by address, each once, without empty ones."""
    storages = (tensor.untyped_storage() for tensor in tensors)
    return {storage.data_ptr(): storage for storage in storages if storage.nbytes()}


def _bytes(storage: UntypedStorage) -> Tensor:
    """All of `storage` as uint8."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
