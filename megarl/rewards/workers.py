"""A pool of scoring processes with a hard deadline per response.

Responses wait in one queue; a thread per worker (`lane.py`) takes them from there and brings their
outcomes back. The processes themselves are started and ended by a keeper (`keeper.py`).
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from megarl.rewards.frames import Outcome, Setup, Verdict
from megarl.rewards.lane import Lane
from megarl.rewards.processes import Keeper
from megarl.rewards.scorer import Response

CHUNK_SECONDS = 0.02
CHUNK_MOST = 64


class Closed(Exception):
    """The pool closes: a lane has nothing more to do."""


@dataclass(slots=True, eq=False)
class Job:
    """One response on its way. `outcome` is set once."""

    number: int
    response: Response
    tries: int = 0
    outcome: Outcome | None = None
    is_alone: bool = False
    """It was with others in a worker that died or timed out: it is scored without any."""


class WorkerPool:
    """Scores responses in `workers` processes; started, and every scorer loaded, on return."""

    def __init__(
        self,
        setup: Setup,
        workers: int,
        max_pending: int,
        retry: Callable[[Outcome, int], bool],
    ) -> None:
        """`retry(outcome, tries)` says whether a response is scored once more.

        Raises `ScorerError` when a scorer cannot be loaded with its options.
        """
        self._workers, self._max_pending, self._retry = workers, max_pending, retry
        self._queue: deque[Job] = deque()
        self._open = workers  # what is waited for: workers that start, then jobs without outcome
        self._submitted = 0
        self._typical_seconds = CHUNK_SECONDS
        self._failure: Exception | None = None
        self._closing = False
        lock = threading.Lock()
        self._work, self._done = threading.Condition(lock), threading.Condition(lock)
        self._threads: list[threading.Thread] = []
        self._keeper = Keeper(setup)
        try:
            ready = self._keeper.load()
            self.sources = ready.sources
            lanes = [
                Lane(self, self._keeper, ready, setup.deadline_seconds) for _ in range(workers)
            ]
            for index, lane in enumerate(lanes):
                thread = threading.Thread(
                    target=self._serve, args=(lane,), name=f"scoring-{index}", daemon=True
                )
                self._threads.append(thread)
                thread.start()
            self.wait()
        except BaseException:
            self.close()
            raise

    def submit(self, response: Response) -> Job:
        """Queue a response; waits while `max_pending` have no outcome.

        Raises what `wait` raises.
        """
        with self._done:
            self._wait_for(lambda: self._open < self._max_pending)
            self._submitted += 1
            job = Job(self._submitted, response)
            self._queue.append(job)
            self._open += 1
            self._work.notify()
        return job

    def wait(self) -> None:
        """Until every submitted job has its outcome.

        Raises `ScorerError` when a scorer could not be loaded (again) or its code changed.
        """
        with self._done:
            self._wait_for(lambda: self._open == 0)

    def _wait_for(self, reached: Callable[[], bool]) -> None:
        self._done.wait_for(lambda: reached() or self._failure is not None or self._closing)
        if self._failure is not None:
            raise self._failure
        if self._closing:
            raise RuntimeError("the scoring pool is closed")

    def close(self) -> None:
        """Kill every worker with what it started; idempotent."""
        with self._work:
            self._closing = True
            self._work.notify_all()
            self._done.notify_all()
        self._keeper.close()
        for thread in self._threads:
            thread.join()
        self._keeper.free()

    def take(self, most: int | None, wait: bool) -> list[Job]:
        """For a lane: its share of the queue, at most so many (None: about 20 ms of work).

        Empty where `wait` is False and there is nothing for it. Raises `Closed`.
        """
        with self._work:
            while True:
                self._work.wait_for(lambda: self._queue or self._closing or not wait)
                if self._closing:
                    raise Closed
                while self._queue and self._queue[0].outcome is not None:
                    self._queue.popleft()
                jobs = self._share(most, wait)
                if jobs or not wait:
                    return jobs

    def _share(self, most: int | None, may_be_alone: bool) -> list[Job]:
        if most is None:
            most = min(CHUNK_MOST, max(1, int(CHUNK_SECONDS / self._typical_seconds)))
        size = min(-(-len(self._queue) // self._workers), most)
        jobs: list[Job] = []
        while self._queue and len(jobs) < size:
            if self._queue[0].is_alone and (jobs or not may_be_alone):
                break
            job = self._queue.popleft()
            if job.outcome is None:
                jobs.append(job)
            if job.is_alone:
                break
        return jobs

    def offer(self, jobs: Sequence[Job]) -> None:
        """For a lane: let others take these, before what is queued."""
        with self._work:
            self._queue.extendleft(job for job in reversed(jobs) if job.outcome is None)
            self._work.notify(len(jobs))

    def finish(self, job: Job, outcome: Outcome) -> None:
        """For a lane: a job's outcome; the first counts, unless its status is retried."""
        with self._work:
            if isinstance(outcome, Verdict):
                self._typical_seconds += 0.2 * (outcome.seconds - self._typical_seconds)
            if job.outcome is not None:
                return
            job.tries += 1
            if self._retry(outcome, job.tries):
                self._queue.append(job)
                self._work.notify()
                return
            job.outcome = outcome
        self._settle()

    def _serve(self, lane: Lane) -> None:
        """A lane's thread."""
        try:
            lane.start()
            self._settle()
            lane.serve()
        except Closed:
            return
        except Exception as error:  # handed to the thread that waits
            with self._done:
                if not self._closing:  # then it is only the end of what is being closed
                    self._failure = self._failure or error
                self._done.notify_all()
        finally:
            lane.free()

    def _settle(self) -> None:
        with self._done:
            self._open -= 1
            if self._open == 0 or self._open == self._max_pending - 1:
                self._done.notify_all()
