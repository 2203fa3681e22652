"""What differs between machines: the devices, CPU stand-ins and patches of the two libraries.

`platform_of` gives a device's choices. Nothing here runs at import. `prepare_sglang()` must
precede the first `import sglang` of a process; `megarl.rollout.scheduler` does that.
"""

from __future__ import annotations

import importlib.metadata
import logging
from typing import TYPE_CHECKING

from megarl import SGLANG_INSTALL, SGLANG_VERSION

if TYPE_CHECKING:
    from megarl.platforms.interface import Platform


def platform_of(device_type: str) -> Platform:
    """The choices for `cpu` or `cuda` (the recipe's `world.device`, a torch device's `type`)."""
    if device_type == "cpu":
        from megarl.platforms.cpu import CpuPlatform

        return CpuPlatform()
    if device_type == "cuda":
        from megarl.platforms.cuda import CudaPlatform

        return CudaPlatform()
    raise ValueError(f"there is no platform {device_type!r}; choose cpu or cuda")


def require_sglang() -> None:
    """Raise `ImportError`, one line, unless the pinned SGLang is installed.

    Its scheduler is driven from inside the rank through internals that change between releases,
    so any other version is refused.
    """
    try:
        found = importlib.metadata.version("sglang")
    except importlib.metadata.PackageNotFoundError:
        raise ImportError(f"sglang is not installed: {SGLANG_INSTALL}") from None
    if found != SGLANG_VERSION:
        raise ImportError(
            f"sglang {found} is installed, megarl drives {SGLANG_VERSION}: {SGLANG_INSTALL}"
        )


def prepare_sglang() -> None:
    """Make `import sglang` possible and quiet in this process; idempotent.

    Raises `ImportError` (see `require_sglang`).
    """
    require_sglang()
    # Its import warns about every model file whose optional dependency is absent. A level that
    # someone chose (a run's log files) is left alone.
    library = logging.getLogger("sglang")
    if library.level == logging.NOTSET:
        library.setLevel(logging.ERROR)
    import torch

    if not torch.cuda.is_available():
        from megarl.platforms import cpu

        cpu.install_stand_ins()
