"""Async scorers in a worker: one event loop, several responses on their way at once.

Each call has the deadline inside the loop; a response that misses it times out alone. While plain
and batched scorers see other responses the loop stands still, and that time is none of a call's. A
call that blocks the loop cannot be ended from inside: the worker then falls silent, and the pool
ends it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any

from megarl.rewards.frames import TimedOut
from megarl.rewards.judge import Case, Judge, Loaded, answered, raised, share, slices

BEATS = 4.0
"""Signs of life within one deadline."""
CANCEL_SECONDS = 0.25
"""What a call that is cancelled gets to clean up, and to close its connection."""


class Flow:
    """Awaits the async scorers of one worker."""

    def __init__(self, judge: Judge, deadline: float, began: Callable[[tuple[int, ...]], None]):
        """`began` as in `Judge.ask`; called without numbers it is a sign of life."""
        self._judge, self._deadline, self._began = judge, deadline, began
        self._loop = asyncio.new_event_loop()
        asyncio.set_event_loop(self._loop)
        self._open: set[asyncio.Task] = set()
        self.abandoned: set[asyncio.Task] = set()
        """Calls that missed the deadline and did not end when they were cancelled."""
        self._stood = 0.0
        """Seconds that the loop did not run, since the first call."""
        self._left = time.perf_counter()

    @property
    def is_alone(self) -> bool:
        """Whether no other responses are on their way than those of the call to `done`."""
        return len(self._open) <= 1

    def add(self, cases: Sequence[Case], done: Callable[[Case], None]) -> None:
        """Let the scorers see these; `done` is called with each when all have answered."""
        self._began(tuple(case.number for case in cases if case.is_open))
        task = self._loop.create_task(self._score(cases, done))
        self._open.add(task)

    def run_until_readable(self, descriptor: int) -> None:
        """Score on until something arrives; raises what `done` raised."""
        self._stood += time.perf_counter() - self._left
        try:
            self._loop.run_until_complete(self._until_readable(descriptor))
        finally:
            self._left = time.perf_counter()

    async def _until_readable(self, descriptor: int) -> None:
        readable = asyncio.Event()
        self._loop.add_reader(descriptor, readable.set)
        waiter = asyncio.ensure_future(readable.wait())
        try:
            while not readable.is_set():
                done, _ = await asyncio.wait(
                    {waiter, *self._open},
                    timeout=self._deadline / BEATS if self._open else None,
                    return_when=asyncio.FIRST_COMPLETED,
                )
                for task in done & self._open:
                    self._open.discard(task)
                    task.result()
                if self._open:
                    self._began(())
        finally:
            self._loop.remove_reader(descriptor)
            waiter.cancel()

    async def _score(self, cases: Sequence[Case], done: Callable[[Case], None]) -> None:
        for scorer in self._judge.awaited:
            await asyncio.gather(*(self._call(scorer, some) for some in slices(scorer, cases)))
        for case in cases:
            done(case)

    async def _call(self, scorer: Loaded, cases: Sequence[Case]) -> None:
        started = self._ran()
        alone = len(cases) == 1
        responses = [case.response for case in cases]
        call = scorer.function(responses if scorer.batch > 1 else responses[0])
        task = self._loop.create_task(self._caught(call))
        ended = await self._ends(task, started + self._deadline)
        self._judge.leave_if_forked()
        seconds = self._ran() - started
        share(scorer, cases, seconds)
        is_told = True
        if not ended:
            await self._cancel(task)
            is_told = alone
            if alone:
                cases[0].timed_out = TimedOut(self._deadline, seconds)
        else:
            value, error = task.result()
            if error is not None:
                is_told = raised(scorer, cases, error)
            elif scorer.batch > 1:
                answered(scorer, cases, value)
            else:
                cases[0].take(scorer, value)
        if not is_told:
            await asyncio.gather(*(self._call(scorer, [case]) for case in cases))

    async def _cancel(self, task: asyncio.Task) -> None:
        task.cancel()
        if not await self._ends(task, self._ran() + CANCEL_SECONDS):
            self.abandoned.add(task)

    def _ran(self) -> float:
        """Seconds on a clock that stands while the loop does. Read inside the loop."""
        return time.perf_counter() - self._stood

    async def _ends(self, task: asyncio.Task, until: float) -> bool:
        """Whether it ends before `_ran()` is `until`."""
        while not task.done() and (left := until - self._ran()) > 0.0:
            await asyncio.wait({task}, timeout=left)
        return task.done()

    async def _caught(self, call: Any) -> tuple[Any, BaseException | None]:
        """What a call gave or raised. Caught here, since `SystemExit` and `KeyboardInterrupt` that
        leave a task would stop the whole loop."""
        try:
            return await call, None
        except BaseException as error:
            return None, error
        finally:
            self._judge.leave_if_forked()
