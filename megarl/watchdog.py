"""Names the rank that is stuck, the stage it is in, and who waits for it.

A thread in every rank tells the others, through torchrun's store, which stage its rank is in and
where in the code. All ranks run the same loop, so a rank that has entered fewer stages than others
is the one they wait for. When it has been in its stage for longer than the recipe allows, rank 0
ends the run, and another rank does so where rank 0 itself is frozen.

The limits of all collectives lie beyond every stage's, so a stuck rank is named before a library
gives up with "connection timed out". Ranks of one stage are told apart by their main thread: inside
`torch.distributed` a rank waits. On a GPU a rank may also wait in a synchronisation, which looks
like work; then the message names every rank of that stage and where each is.
"""

from __future__ import annotations

import json
import linecache
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from types import FrameType

import torch.distributed as dist

from megarl.stages import StageBoard

LATEST_TICK = 1.0
"""Seconds between two looks."""
OTHERS_LATER = 3.0
"""Seconds that ranks other than 0 leave to rank 0."""
SILENT_TICKS = 5
"""Looks without a sign of a rank after which its whole process counts as frozen."""
STORE_SECONDS = 10.0
PACKAGE = Path(__file__).parent
TORCH = Path(dist.__file__).parent


@dataclass(frozen=True, slots=True)
class Sign:
    """What a rank tells the others at every look."""

    beat: int
    """Grows by one at each look."""
    count: int
    """Stages entered so far."""
    stage: str
    at: str
    """`file:line function` of the main thread."""
    waits: bool
    """The main thread is inside a collective."""


@dataclass(slots=True)
class Seen:
    """A rank's latest sign; seconds by the observer's clock, since hosts' clocks differ."""

    sign: Sign
    entered: float
    """When the sign's stage was first seen."""
    heard: float


def place(frame: FrameType) -> tuple[str, bool]:
    """`file:line function` of the innermost frame of megarl (else of all), and whether the thread
    waits in a collective."""
    path = Path(frame.f_code.co_filename)
    line = linecache.getline(str(path), frame.f_lineno)
    waits = path.is_relative_to(TORCH) or ".wait(" in line
    inner: FrameType | None = frame
    while inner is not None and not Path(inner.f_code.co_filename).is_relative_to(PACKAGE):
        inner = inner.f_back
    shown = inner or frame
    path = Path(shown.f_code.co_filename)
    name = path.relative_to(PACKAGE.parent) if path.is_relative_to(PACKAGE) else path
    return f"{name}:{shown.f_lineno} {shown.f_code.co_name}", waits


def verdict(
    seen: Sequence[Seen], now: float, limit: Callable[[str], float], silence: float
) -> str | None:
    """Why the run cannot go on, None while it may. `seen` is by rank.

    `limit(stage)` is how long a stage may take; a rank unheard of for `silence` is frozen.
    """
    behind = min(one.sign.count for one in seen)
    late = [rank for rank, one in enumerate(seen) if one.sign.count == behind]
    stage = seen[late[0]].sign.stage
    spent = max(now - seen[rank].entered for rank in late)
    if spent <= limit(stage):
        return None
    working = [rank for rank in late if not seen[rank].sign.waits]
    frozen = [rank for rank in late if now - seen[rank].heard > silence]
    blamed = frozen or working or late
    where = "; ".join(f"rank {rank} at {seen[rank].sign.at}" for rank in blamed)
    several = len(blamed) > 1
    names = f"rank{'s' * several} {', '.join(map(str, blamed))}"
    what = f"{'are' if several else 'is'} stuck in {stage}, for {spent:.0f} s now"
    if frozen:  # its last sign may be from just before its last stage
        what = f"{'do' if several else 'does'} not answer any more, last seen in {stage}"
    told = f"{names} {what} ({where})"
    others = [rank for rank in range(len(seen)) if rank not in blamed]
    if others:
        told += "; waiting: " + ", ".join(f"rank {r} in {seen[r].sign.stage}" for r in others)
    return told


class Watchdog:
    """Watches from construction until `close`; `on_stuck(message)` is called on its thread."""

    def __init__(
        self,
        board: StageBoard,
        store: dist.Store,
        rank: int,
        size: int,
        limit: Callable[[str], float],
        on_stuck: Callable[[str], None],
        tick: float = LATEST_TICK,
    ) -> None:
        """`store` is shared by the ranks; a connection of its own is made to it, because a wait
        of the main thread would hold up whoever shares one."""
        self._board, self._rank, self._size = board, rank, size
        self._limit, self._on_stuck, self._tick = limit, on_stuck, tick
        self._store = dist.PrefixStore("megarl/watchdog", store.clone())
        self._store.set_timeout(timedelta(seconds=STORE_SECONDS))
        self._main = threading.main_thread().ident
        self._seen: list[Seen | None] = [None] * size
        self._beat = 0
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closed.set()
        self._thread.join()

    def __enter__(self) -> Watchdog:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _watch(self) -> None:
        patience = 0.0 if self._rank == 0 else OTHERS_LATER
        silence = SILENT_TICKS * self._tick
        while not self._closed.wait(self._tick):
            try:
                self._look()
            except dist.DistError:  # the store went with the launcher, which ends this rank too
                return
            if None in self._seen:
                continue
            now = time.monotonic() - patience
            told = verdict(self._seen, now, self._limit, silence)
            if told is not None:
                self._on_stuck(told)
                return

    def _look(self) -> None:
        """Tell this rank's sign, read all others'."""
        self._beat += 1
        frame = sys._current_frames().get(self._main)
        at, waits = ("?", False) if frame is None else place(frame)
        entered = self._board.now
        sign = Sign(self._beat, entered.count, entered.stage, at, waits)
        self._store.set(f"{self._rank}", json.dumps(asdict(sign)))
        keys = [f"{rank}" for rank in range(self._size)]
        if not self._store.check(keys):
            return
        now = time.monotonic()
        for rank, value in enumerate(self._store.multi_get(keys)):
            sign, before = Sign(**json.loads(value)), self._seen[rank]
            if before is None or before.sign.count != sign.count:
                self._seen[rank] = Seen(sign, now, now)
            elif before.sign.beat != sign.beat:
                self._seen[rank] = Seen(sign, before.entered, now)
