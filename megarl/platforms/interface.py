"""What the rest of megarl asks of a device, so that no other room compares device names.

`megarl.platforms.platform_of` picks the implementation: `cpu.py` or `cuda.py`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch

KV_CACHE, WEIGHTS, CUDA_GRAPH = "kv_cache", "weights", "cuda_graph"
"""SGLang's names for what its memory saver can give back."""


class Platform(ABC):
    """One kind of device. Stateless: every process may ask as often as it likes."""

    device_type: str
    backend: str
    """Of the default process group: tensors of either device, and of the host, can be sent."""

    @abstractmethod
    def refusal(self) -> str | None:
        """Why this machine has no such device, in one line, or None."""

    @abstractmethod
    def prepare(self) -> None:
        """Set this process's environment; before anything asks torch for a device."""

    @abstractmethod
    def device(self, local_rank: int) -> torch.device:
        """The device of this rank, made the current one."""

    @abstractmethod
    def synchronize(self, device: torch.device) -> None:
        """Wait until everything given to `device` is done."""

    @abstractmethod
    def release_cached(self) -> None:
        """Hand memory that torch keeps for itself back to the device, for SGLang to take."""

    @abstractmethod
    def rng_state(self, device: torch.device) -> torch.Tensor | None:
        """Of the device's own generator; None where torch's host generator is all there is."""

    @abstractmethod
    def restore_rng(self, device: torch.device, state: torch.Tensor | None) -> None:
        """Put back what `rng_state` gave."""

    @abstractmethod
    def host_buffer(self, size: int) -> torch.Tensor:
        """uint8 [size] in host memory that copies from and to the device fast."""

    # --- The generator ------------------------------------------------------------------------

    @abstractmethod
    def engine_arguments(self, section: Any) -> dict[str, Any]:
        """What SGLang's `ServerArgs` gets because of the device; `section` is recipe.rollout."""

    @abstractmethod
    def prepare_engine(self, section: Any) -> None:
        """Set what SGLang reads before it is built. Raises `ValueError` when it cannot be had."""

    @abstractmethod
    def engine_device(self, rank_in_replica: int) -> int:
        """SGLang's `gpu_id` of this rank."""

    @abstractmethod
    def adapt_engine(self, scheduler: Any) -> None:
        """Finish a new scheduler as SGLang's own start of its event loop would."""

    @abstractmethod
    def cache_tags(self) -> tuple[str, ...]:
        """What sleeps beside the weights: the cache, and captured graphs where that is offered."""
