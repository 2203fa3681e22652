"""What differs between machines: CPU stand-ins and patches of the two libraries.

Nothing here runs at import. `prepare_sglang()` must precede the first `import sglang` of a
process; `megarl.rollout.scheduler` does that.
"""

from __future__ import annotations

import importlib.metadata
import logging

from megarl import SGLANG_INSTALL, SGLANG_VERSION


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
