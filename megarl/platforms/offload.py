"""What a stage does not need in host memory: the optimizer state and all gradients while a process
does not train, a frozen model's weights while it does not score.

Works on storages: what is emptied keeps every view that megatron-core made of it (`main_grad`,
buckets, shards), and comes back bit for bit. Megatron's own `offload_to_cpu` replaces the
tensors' data instead; its fp32 masters that *are* the model's weights would then be copies.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, UntypedStorage

from megarl.platforms.interface import Platform


class Offload(Protocol):
    """Something that leaves the device and comes back as it was."""

    @property
    def is_out(self) -> bool:
        """Between `out` and `back`: nothing may touch it."""

    def out(self) -> None:
        """Free the device of it; again does nothing."""

    def back(self) -> None:
        """As before `out`; again does nothing."""


class Offloads:
    """Several as one. After `out` all of them are, after `back` none is."""

    def __init__(self, parts: Iterable[Offload]) -> None:
        self.parts: Sequence[Offload] = tuple(parts)

    @property
    def is_out(self) -> bool:
        """Whether some of them is."""
        return any(part.is_out for part in self.parts)

    def out(self) -> None:
        """Each of them."""
        for part in self.parts:
            part.out()

    def back(self) -> None:
        """Each of them."""
        for part in self.parts:
            part.back()


class _Storages:
    """Storages of one device, emptied into host buffers and filled again."""

    def __init__(self, device: torch.device, platform: Platform) -> None:
        self._device = device
        self._platform = platform
        self._saved: list[tuple[UntypedStorage, Tensor]] = []
        self._dropped: list[tuple[UntypedStorage, int]] = []
        self._buffers: dict[int, list[Tensor]] = {}
        """Host buffers not in use, by size: pinning memory is slow, so they are kept."""

    @property
    def is_out(self) -> bool:
        """Between `out` and `back`: nothing may touch what is moved or dropped."""
        return bool(self._saved or self._dropped)

    def _empty(self, moved: Iterable[UntypedStorage], dropped: Iterable[UntypedStorage]) -> None:
        for storage in moved:
            host = self._take(storage.nbytes())
            host.copy_(_bytes(storage), non_blocking=True)
            self._saved.append((storage, host))
        self._platform.synchronize(self._device)
        self._dropped = [(storage, storage.nbytes()) for storage in dropped]
        for storage, _ in self._saved + self._dropped:
            storage.resize_(0)
        self._platform.release_cached()

    def back(self) -> None:
        """As before `out`, what was dropped zero; again does nothing."""
        for storage, size in self._dropped:
            storage.resize_(size)
            _bytes(storage).zero_()
        for storage, host in self._saved:
            storage.resize_(host.numel())
            _bytes(storage).copy_(host, non_blocking=True)
        self._platform.synchronize(self._device)
        for _, host in self._saved:
            self._buffers.setdefault(host.numel(), []).append(host)
        self._saved, self._dropped = [], []

    def _take(self, size: int) -> Tensor:
        free = self._buffers.get(size)
        return free.pop() if free else self._platform.host_buffer(size)


class OptimizerOffload(_Storages):
    """Moves a `Trainer`'s masters and optimizer state out of the device and back.

    Gradients are dropped and come back as zeros: an update begins by clearing them. The model's
    own weights stay, also where they serve as masters.
    """

    def __init__(self, trainer: Any, platform: Platform) -> None:
        super().__init__(trainer.world.device, platform)
        self._trainer = trainer

    def out(self) -> None:
        """Free the device of it; again does nothing."""
        if self.is_out:
            return
        kept = _unique(parameter.data for parameter in self._trainer.model.parameters())
        gradients = _unique(self._gradients())
        state = _unique(self._state())
        moved = [
            storage
            for address, storage in state.items()
            if address not in kept and address not in gradients
        ]
        self._empty(moved, gradients.values())

    def _gradients(self) -> Iterator[Tensor]:
        for ddp in self._trainer.ddps:
            for buffer in ddp.buffers + ddp.expert_parallel_buffers:
                yield buffer.grad_data

    def _state(self) -> Iterator[Tensor]:
        """Masters, and what the optimizer keeps for each (from its first step on)."""
        for chained in self._trainer.optimizer.chained_optimizers:
            for group in chained.optimizer.param_groups:
                yield from (master.data for master in group["params"])
            for state in chained.optimizer.state.values():
                for value in state.values():
                    if isinstance(value, Tensor) and value.device == self._device:
                        yield value


class WeightOffload(_Storages):
    """Moves the weights of a role that has no optimizer, and its buffers, out of the device and
    back. In between the role can neither score nor be refreshed nor saved."""

    def __init__(self, role: Any, platform: Platform) -> None:
        """`role`: a `Reference`."""
        super().__init__(role.world.device, platform)
        self._role = role

    def out(self) -> None:
        """Free the device of them; again does nothing."""
        if not self.is_out:
            weights = self._role.named_parameters().values()
            self._empty(_unique(tensor.data for tensor in weights).values(), ())


def _unique(tensors: Iterable[Tensor]) -> dict[int, UntypedStorage]:
    """The storages under `tensors` by address, each once, without empty ones."""
    storages = (tensor.untyped_storage() for tensor in tensors)
    return {storage.data_ptr(): storage for storage in storages if storage.nbytes()}


def _bytes(storage: UntypedStorage) -> Tensor:
    """All of `storage` as uint8."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
