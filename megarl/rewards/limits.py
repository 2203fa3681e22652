"""What Linux keeps of a scoring process for us: its end, its children, its memory.

Nothing here guards against code that means harm; it bounds what a mistake can cost.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
from contextlib import suppress
from pathlib import Path

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
FIRST_TO_GO = "1000"
"""Where the machine is out of memory the kernel ends a scorer, not a rank."""


def die_with(parent: int) -> None:
    """The kernel kills this process when `parent`, its parent, ends; at once where it has."""
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def adopt_orphans() -> None:
    """Whatever descends from this process comes to it when its own parent ends, daemons too."""
    _prctl(PR_SET_CHILD_SUBREAPER, 1)


def spare_the_machine() -> None:
    """No core files of crashes, and first to go when memory is short."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with suppress(OSError):  # a container may not let it be written; then all are alike
        Path("/proc/self/oom_score_adj").write_text(FIRST_TO_GO)


def children_of(pid: int) -> list[int]:
    """Its children, ended ones that nobody has waited for too; empty when it is gone."""
    found: list[int] = []
    try:
        for task in os.listdir(f"/proc/{pid}/task"):
            found += map(int, Path(f"/proc/{pid}/task/{task}/children").read_text().split())
    except (FileNotFoundError, ProcessLookupError):  # it, or one of its threads, has just ended
        pass
    return found


def check_kernel() -> str | None:
    """Why scoring cannot keep its processes on this machine; None when it can."""
    if not hasattr(os, "pidfd_open"):
        return "scoring needs Linux 5.3 or later (pidfd_open)"
    if not Path(f"/proc/self/task/{os.getpid()}/children").exists():
        return "scoring needs a Linux kernel with CONFIG_PROC_CHILDREN (/proc/…/children)"
    return None


class Memory:
    """Bounds the private memory of this process: what it has, and so much more.

    `RLIMIT_DATA` counts private writable memory (heap and anonymous maps), whether touched or not;
    files mapped read-only and memory that is only reserved are free. Beyond it Python raises
    `MemoryError`. It holds for each process, so for each child of the worker apart.
    """

    def __init__(self, more: int | None) -> None:
        """`more` in bytes; None: no limit."""
        self._before, self._more = _private_bytes(), more
        if more is not None:
            hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
            soft = self._before + more
            soft = soft if hard == resource.RLIM_INFINITY else min(soft, hard)
            resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))

    def lift(self) -> None:
        """Let this process use more, so that it can tell that its memory is used up."""
        hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
        resource.setrlimit(resource.RLIMIT_DATA, (hard, hard))

    def share_used(self) -> float:
        """Of what it may use more than it had; 0 without a limit."""
        if self._more is None:
            return 0.0
        return (_private_bytes() - self._before) / self._more


def _private_bytes() -> int:
    with open("/proc/self/statm", "rb") as file:
        return int(file.read().split()[5]) * resource.getpagesize()


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0):
        code = ctypes.get_errno()
        raise OSError(code, f"prctl({option}): {os.strerror(code)}")
