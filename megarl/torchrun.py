"""What the ranks of one torchrun launch share on a machine: the folder torchrun makes for them.

It is `<log dir>/<run id>/attempt_<n>/<local rank>/`, known to a rank as the place of its
TORCHELASTIC_ERROR_FILE. Ranks started without torchrun have none.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from pathlib import Path

OURS = "MEGARL_LAUNCHER"
"""Set for ranks that `megarl.launcher` started: it tells what signals did to them."""
TOLD = "told"
STAGE = "stage"
STOP = "stop"
PR_SET_PDEATHSIG = 1


def die_with_launcher() -> None:
    """A launcher that is killed leaves no rank behind (Linux)."""
    if sys.platform == "linux" and "TORCHELASTIC_RUN_ID" in os.environ:
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def rank_folder() -> Path | None:
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    return Path(file).parent if file else None


def stage_file() -> Path | None:
    """Where this rank keeps the name of its stage for whoever finds it dead."""
    folder = rank_folder()
    return folder / STAGE if folder is not None and folder.is_dir() else None


def stop_file() -> Path | None:
    """There once our launcher was asked to stop, in its log folder. None under another's."""
    folder = rank_folder()
    return None if folder is None or not os.environ.get(OURS) else folder.parents[2] / STOP


def may_tell(why: str) -> bool:
    """True on the first rank of this launch that asks: it tells `why` the run ends.

    Without torchrun's folder: on rank 0.
    """
    folder = rank_folder()
    if folder is None or not folder.is_dir():
        return os.environ.get("RANK", "0") == "0"
    try:
        with open(folder.parent / TOLD, "x", encoding="utf-8") as file:
            file.write(why)
    except FileExistsError:
        return False
    return True


def told() -> str | None:
    """Why the run ends, by the rank of this launch that told it; None as long as none has."""
    folder = rank_folder()
    file = None if folder is None else folder.parent / TOLD
    return file.read_text(encoding="utf-8") if file is not None and file.exists() else None
