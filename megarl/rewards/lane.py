"""One thread of a scoring pool: feeds a worker, holds the deadline, replaces the worker.

Plain scorers: responses travel in chunks of about 20 ms of work, verdicts come back one by one, so
the lane knows which response is being scored and since when. While one keeps the worker busy, the
rest of its chunk is offered to other lanes; the first verdict counts.

Batched and async scorers see several responses at once, and the worker says which. Where it dies
or misses the deadline on several, each is scored again alone (once, and this is no try), so that
only the guilty one carries the status.
"""

from __future__ import annotations

import time
from contextlib import suppress
from typing import TYPE_CHECKING

from megarl.rewards.frames import Began, Died, Ready, TimedOut, Told
from megarl.rewards.processes import END_SECONDS, START_SECONDS, Keeper, Worker
from megarl.rewards.scorer import ScorerError
from megarl.rewards.sources import changed

if TYPE_CHECKING:
    from megarl.rewards.workers import Job, WorkerPool

PATIENCE_SECONDS = 0.05
TOP_UP_SECONDS = 0.02
"""How often a worker with room for more responses is given more."""


class Lane:
    """Serves one worker after the other until the pool closes."""

    def __init__(self, pool: WorkerPool, keeper: Keeper, ready: Ready, deadline: float) -> None:
        self._pool, self._keeper, self._deadline = pool, keeper, deadline
        self._sources, self._takes, self._flows = ready.sources, ready.takes, ready.flows
        self._is_plain = ready.takes == 1 and not ready.flows
        self._worker: Worker | None = None
        self._flight: dict[int, Job] = {}
        self._begun: set[int] = set()
        self._since = 0.0
        """When the worker last said, or was given, something."""
        self._is_offered = False

    def start(self) -> None:
        """A worker with its scorers loaded. Raises `ScorerError`."""
        self._worker = self._keeper.start()
        try:
            answer = self._worker.receive(START_SECONDS)
        except EOFError:
            answer = "reward.scorers: a worker ended while loading; see its error above"
        if isinstance(answer, Ready) and answer.sources == self._sources:
            return
        self.end()
        if isinstance(answer, Ready):
            answer = changed(self._sources, answer.sources)
        raise ScorerError(answer or f"reward.scorers: loading took longer than {START_SECONDS:g} s")

    def end(self, patience: float = 0.0) -> int:
        """The worker's exit code, see `Worker.end`; 0 without a worker."""
        worker, self._worker = self._worker, None
        return 0 if worker is None else worker.end(patience)

    def free(self) -> None:
        """Close what is open to a worker that the keeper ends, or has ended."""
        if self._worker is not None:
            self._worker.free()

    def serve(self) -> None:
        """Raises `Closed` when the pool closes."""
        while True:
            if not self._feed():
                if not self._is_offered:  # others take the rest while a worker starts
                    self._pool.offer(list(self._flight.values()))
                self._flight.clear()
                self._begun.clear()
                self.start()

    def _feed(self) -> bool:
        """Give the worker more where it has room, hear it once; False when it had to be ended."""
        try:
            with suppress(BrokenPipeError, ConnectionResetError):  # what it said is heard first
                self._top_up()
            until = self._since + self._deadline
            answer = self._worker.receive(min(self._patience(), until - time.monotonic()))
        except TimeoutError:
            return self._missed()
        except EOFError:
            return self._died()
        match answer:
            case Began(numbers=numbers):
                self._since = time.monotonic()
                self._begun = self._begun.union(numbers) if self._flows else set(numbers)
            case Told():
                return self._told(answer)
            case _ if time.monotonic() >= until:
                return self._missed()
            case _ if self._is_plain and not self._is_offered:
                self._is_offered = True
                self._pool.offer(list(self._flight.values())[1:])
        return True

    def _top_up(self) -> None:
        flight = self._flight
        room = self._takes - len(flight) if self._flows else (0 if flight else self._takes)
        if room <= 0 or any(job.is_alone for job in flight.values()):
            return
        jobs = self._pool.take(None if self._is_plain else room, wait=not flight)
        if not jobs:
            return
        if not flight:
            if self._worker.has_ended():  # of itself, while there was nothing to do
                self.end()
                self.start()
            self._since, self._is_offered = time.monotonic(), False
        flight.update((job.number, job) for job in jobs)
        self._worker.send([(job.number, job.response) for job in jobs], self._deadline)

    def _patience(self) -> float:
        if self._flows:
            return TOP_UP_SECONDS if len(self._flight) < self._takes else self._deadline
        return PATIENCE_SECONDS if self._is_plain and not self._is_offered else self._deadline

    def _told(self, told: Told) -> bool:
        self._since = time.monotonic()
        self._begun.discard(told.number)
        self._pool.finish(self._flight.pop(told.number), told.outcome)
        if told.spent:
            self.end()
        return not told.spent

    def _missed(self) -> bool:
        self.end()
        self._blame(TimedOut(self._deadline, time.monotonic() - self._since))
        return False

    def _died(self) -> bool:
        code = self.end(END_SECONDS)
        self._blame(Died(code, time.monotonic() - self._since))
        return False

    def _blame(self, outcome: TimedOut | Died) -> None:
        """The outcome of the response that the worker was at; of several, none is known yet."""
        if self._is_plain:
            guilty = list(self._flight.values())[:1]
        else:
            begun = [self._flight[number] for number in self._begun if number in self._flight]
            guilty = begun or list(self._flight.values())
        for job in guilty:
            if len(guilty) == 1:
                self._pool.finish(job, outcome)
                del self._flight[job.number]
            else:
                job.is_alone = True
