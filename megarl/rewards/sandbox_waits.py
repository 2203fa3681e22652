"""How long a sandboxed case had no CPU because others had it, so that this is not held against it.

Linux tells of each thread how long it ran and how long it waited in a run queue
(/proc/<pid>/task/<tid>/schedstat, nanoseconds; Documentation/scheduler/sched-stats.rst). In every
interval between two looks, the case waited for others as long as the thread for which this is most:
its waiting, less what the other threads of the case ran meanwhile. A case that keeps itself waiting
by many busy processes so gains nothing. CPU time of processes that ended between two looks, which
their parents have, is taken off as well.

Not seen: waiting for disk or memory, time that a hypervisor gave to other machines, the runner's
waiting while the case waits for the runner. Processes that end between two looks and that nobody
waits for (SIGCHLD ignored) can keep their siblings waiting unseen. Where Linux does not tell the
times (no CONFIG_SCHED_INFO) no waiting is seen, so that all wall time counts.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

TICK = 1.0 / os.sysconf("SC_CLK_TCK")
ROUNDING_SECONDS = 0.02
"""By how much the sums of the two clocks, ticks and nanoseconds, may differ."""
LEAST_SECONDS = 0.01
"""What a case gets at least when it gets more time."""


@dataclass(slots=True)
class _Thread:
    ran: float = 0.0
    waited: float = 0.0
    changed: float = 0.0
    """When it was last seen to have run or waited."""


class Waits:
    """Of one case: all its processes are born in it."""

    def __init__(self) -> None:
        self._threads: dict[tuple[int, int], _Thread] = {}
        self._waited = self._ticks = 0.0

    def look(self, pids: Sequence[int]) -> None:
        """Take in what the case's processes did since the last look."""
        self._ticks = max(self._ticks, sum(map(_cpu_seconds, pids)))
        steps = [self._step(pid, tid) for pid in pids for tid in _listed(pid)]
        ran = sum(step[0] for step in steps)
        for_others = [waited - (ran - own) for own, waited in steps]
        self._waited += max(0.0, *for_others) if for_others else 0.0

    def counted(self, seconds: float) -> float:
        """Of so many seconds of wall time, what counts: all but the waiting, and no less than the
        CPU time of all processes together (as far as it fits in)."""
        ran = sum(thread.ran for thread in self._threads.values())
        unseen = max(0.0, self._ticks - ran - ROUNDING_SECONDS)
        waited = max(0.0, self._waited - unseen)
        return max(0.0, seconds - waited, min(seconds, max(ran, self._ticks)))

    def more(self, seconds: float, limit: float, most: float) -> float:
        """Seconds that a case gets after so many of wall time: what of `limit` the waiting took,
        as far as `most` leaves it. 0: no more."""
        missing, left = limit - self.counted(seconds), most - seconds
        return min(max(missing, LEAST_SECONDS), left) if missing > 0 and left > 0 else 0.0

    def _step(self, pid: int, tid: int) -> tuple[float, float]:
        """By how much its time on a CPU and its waiting grew."""
        here = f"/proc/{pid}/task/{tid}"
        times = _read(f"{here}/schedstat").split()
        if len(times) < 2:
            return 0.0, 0.0
        ran, waited = int(times[0]) / 1e9, int(times[1]) / 1e9
        at, known = time.monotonic(), self._threads.get((pid, tid))
        if known is None:
            self._threads[pid, tid] = _Thread(ran, waited, at)
            return ran, waited
        if ran != known.ran or waited > known.waited:
            known.changed = at
        elif _read(f"{here}/stat").rpartition(")")[2].split()[:1] == ["R"]:
            # Linux adds a wait up when it is over. Whoever runs shows that at every timer tick.
            waited = known.waited + at - known.changed
            known.changed = at
        step = max(0.0, ran - known.ran), max(0.0, waited - known.waited)
        known.ran, known.waited = ran, max(known.waited, waited)
        return step


def _listed(pid: int) -> list[int]:
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
        return [int(name) for name in os.listdir(f"/proc/{pid}/task")]
    return []


def _cpu_seconds(pid: int) -> float:
    """Of all its threads, and of the children that it waited for."""
    fields = _read(f"/proc/{pid}/stat").rpartition(")")[2].split()
    return sum(map(int, fields[11:15])) * TICK


def _read(path: str) -> str:
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
        return Path(path).read_text(errors="replace")
    return ""
