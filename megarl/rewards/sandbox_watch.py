"""What the processes of a sandbox use together, seen from outside of it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path

from megarl.rewards.limits import children_of

PAGE = os.sysconf("SC_PAGE_SIZE")
VMSTAT = Path("/proc/vmstat")


def below(pid: int) -> list[int]:
    """All processes below it."""
    found = children_of(pid)
    for child in found:  # grows on the way
        found += children_of(child)
    return found


def threads_of(pids: Sequence[int]) -> int:
    count = 0
    for pid in pids:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
            count += len(os.listdir(f"/proc/{pid}/task"))
    return count


def uses_more(pids: Sequence[int], most: int) -> bool:
    """Whether they hold more than `most` bytes of memory together."""
    # Pages that forks share are counted for each here; the exact sum costs more.
    if sum(map(_resident, pids)) <= most:
        return False
    return sum(map(_proportional, pids)) > most


def oom_kills() -> int:
    """How many processes of the machine Linux has killed for want of memory, be it the machine's or
    a control group's (Documentation/admin-guide/cgroup-v2.rst, `oom_kill`). It counts a kill before
    it sends the signal. 0 where it does not tell (before 4.13, or without that file)."""
    with contextlib.suppress(OSError):
        for line in VMSTAT.read_text().splitlines():
            name, _, count = line.partition(" ")
            if name == "oom_kill":
                return int(count)
    return 0


def _resident(pid: int) -> int:
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE
    return 0


def _proportional(pid: int) -> int:
    """Its bytes, pages that several processes have divided among them (Pss).

    A process may forbid others of its user to look; all its pages are its own then.
    """
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except PermissionError:
        return _resident(pid)
    except (FileNotFoundError, ProcessLookupError):  # it has just ended
        return 0
    shares = [int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:")]
    return sum(shares)
