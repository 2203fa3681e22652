"""A pool of scoring processes with a hard deadline per response.

One thread per worker starts it, feeds it and, when a response takes longer than the deadline, kills
it with its process group and starts another. Responses travel in chunks, verdicts come back one by
one, so the thread always knows which response is being scored and since when. Chunks hold about
20 ms of work by what responses took so far: slow scorers get one at a time. While one response
keeps a worker busy, the rest of its chunk is offered to the others; the first verdict counts.
"""

from __future__ import annotations

import os
import pickle
import select
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from megarl.rewards.scorer import Response, ScorerError
from megarl.rewards.sources import Sources
from megarl.rewards.worker import HEADER, Ready, Setup, Verdict

CHUNK_SECONDS = 0.02
CHUNK_MOST = 64
PATIENCE_SECONDS = 0.05
START_SECONDS = 120.0
END_SECONDS = 1.0
"""What a worker that closed its pipe gets to end by itself: the exit code is then its own."""


@dataclass(frozen=True, slots=True)
class TimedOut:
    """The response took longer than the deadline; its worker was killed."""

    deadline: float
    seconds: float


@dataclass(frozen=True, slots=True)
class Died:
    """The worker ended while scoring the response."""

    exit_code: int
    seconds: float


Outcome = Verdict | TimedOut | Died


@dataclass(slots=True, eq=False)
class Job:
    """One response on its way. `outcome` is set once."""

    response: Response
    tries: int = 0
    outcome: Outcome | None = field(default=None)


class WorkerPool:
    """Scores responses in `workers` processes; started, and every scorer loaded, on return."""

    def __init__(
        self,
        setup: Setup,
        workers: int,
        deadline_seconds: float,
        retry: Callable[[Outcome, int], bool],
    ) -> None:
        """`retry(outcome, tries)` says whether a response is scored once more.

        Raises `ScorerError` when a scorer cannot be loaded with its options.
        """
        self.sources: Sources | None = None
        self._setup, self._workers, self._deadline = setup, workers, deadline_seconds
        self._retry = retry
        self._queue: deque[Job] = deque()
        self._open = workers  # what is waited for: workers that start, then jobs without outcome
        self._typical_seconds = CHUNK_SECONDS
        self._failure: Exception | None = None
        self._closing = False
        self._live: set[_Worker] = set()
        lock = threading.Lock()
        self._work, self._done = threading.Condition(lock), threading.Condition(lock)
        self._threads = [
            threading.Thread(target=self._serve, name=f"scoring-{index}", daemon=True)
            for index in range(workers)
        ]
        for thread in self._threads:
            thread.start()
        try:
            self.wait()
        except BaseException:
            self.close()
            raise

    def submit(self, response: Response) -> Job:
        """Queue a response; returns at once."""
        job = Job(response)
        with self._work:
            self._queue.append(job)
            self._open += 1
            self._work.notify()
        return job

    def wait(self) -> None:
        """Until every submitted job has its outcome.

        Raises `ScorerError` when a scorer could not be loaded (again) or its code changed.
        """
        with self._done:
            self._done.wait_for(lambda: self._open == 0 or self._failure is not None)
            if self._failure is not None:
                raise self._failure

    def close(self) -> None:
        """Kill every worker with what it started; idempotent."""
        with self._work:
            self._closing = True
            live = list(self._live)
            self._work.notify_all()
        for worker in live:
            worker.interrupt()
        for thread in self._threads:
            thread.join()

    def _serve(self) -> None:
        """A worker's thread: start it, feed it, start another when it had to be killed."""
        worker = None
        try:
            worker = self._start()
            self._settle()
            while chunk := self._take():
                if not self._score(worker, chunk):
                    worker = self._start()
        except _Closed:
            return
        except Exception as error:  # handed to the thread that waits
            with self._done:
                self._failure = self._failure or error
                self._done.notify_all()
        finally:
            if worker is not None:
                worker.kill()

    def _start(self) -> _Worker:
        with self._work:
            if self._closing:
                raise _Closed
            worker = _Worker(self._setup)
            self._live.add(worker)
        names = ", ".join(name for name, _ in self._setup.scorers)
        try:
            answer = worker.receive(START_SECONDS)
        except EOFError:
            answer = f"reward.scorers: a worker ended while loading {names}; see its error above"
        if isinstance(answer, Ready):
            self._check_sources(answer.sources)
            return worker
        self._kill(worker)
        if self._closing:
            raise _Closed
        raise ScorerError(
            answer or f"reward.scorers: loading {names} took longer than {START_SECONDS:.0f} s"
        )

    def _check_sources(self, sources: Sources) -> None:
        with self._work:
            self.sources = self.sources or sources
            if sources != self.sources:
                raise ScorerError(
                    "reward.scorers: the code of a scorer changed while it is in use: "
                    f"{self.sources} became {sources}; one run has one scorer version"
                )

    def _take(self) -> list[Job] | None:
        """The next chunk, waiting for one; None when the pool closes."""
        with self._work:
            while True:
                self._work.wait_for(lambda: self._queue or self._closing)
                if self._closing:
                    return None
                fair = -(-len(self._queue) // self._workers)
                size = min(fair, CHUNK_MOST, max(1, int(CHUNK_SECONDS / self._typical_seconds)))
                chunk = [self._queue.popleft() for _ in range(size)]
                chunk = [job for job in chunk if job.outcome is None]
                if chunk:
                    return chunk

    def _score(self, worker: _Worker, chunk: Sequence[Job]) -> bool:
        """Outcomes of a chunk; False when the worker had to be killed on the way."""
        with suppress(BrokenPipeError):  # it is gone: the first job's `receive` says so
            worker.send([job.response for job in chunk])
        offered = False
        for position, job in enumerate(chunk):
            rest = chunk[position + 1 :]
            began = time.monotonic()
            try:
                answer = worker.receive(min(PATIENCE_SECONDS, self._deadline))
                if answer is None and not offered:
                    self._offer(rest)
                    offered = True
                if answer is None:
                    answer = worker.receive(began + self._deadline - time.monotonic())
            except EOFError:
                code = self._kill(worker, END_SECONDS)
                self._finish(job, Died(code, time.monotonic() - began))
            else:
                if answer is not None:
                    self._typical_seconds += 0.2 * (answer.seconds - self._typical_seconds)
                    self._finish(job, answer)
                    continue
                self._kill(worker)
                self._finish(job, TimedOut(self._deadline, time.monotonic() - began))
            if not offered:
                self._offer(rest)
            return False
        return True

    def _offer(self, jobs: Sequence[Job]) -> None:
        with self._work:
            self._queue.extendleft(job for job in reversed(jobs) if job.outcome is None)
            self._work.notify(len(jobs))

    def _finish(self, job: Job, outcome: Outcome) -> None:
        with self._work:
            if job.outcome is not None:
                return
            job.tries += 1
            if self._retry(outcome, job.tries):
                self._queue.append(job)
                self._work.notify()
                return
            job.outcome = outcome
        self._settle()

    def _settle(self) -> None:
        with self._done:
            self._open -= 1
            if self._open == 0:
                self._done.notify_all()

    def _kill(self, worker: _Worker, patience: float = 0.0) -> int:
        with self._work:
            self._live.discard(worker)
        return worker.kill(patience)


class _Closed(Exception):
    """The pool closes: a thread has nothing more to do."""


class _Worker:
    """One worker process, used by one thread (Linux kills the process when that thread ends)."""

    def __init__(self, setup: Setup) -> None:
        environment = os.environ | {
            "PYTHONHASHSEED": "0",  # the same verdict from the same response
            "PYTHONPATH": os.pathsep.join(filter(None, setup.sys_path)),
        }
        self._process = subprocess.Popen(
            [sys.executable, "-m", "megarl.rewards.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            env=environment,
            start_new_session=True,
        )
        self._poller = select.poll()
        self._poller.register(self._process.stdout, select.POLLIN)
        self._received = bytearray()
        self.send(setup)

    def send(self, value: Any) -> None:
        """Raises `BrokenPipeError` when the process is gone."""
        body = pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)
        rest = memoryview(HEADER.pack(len(body)) + body)
        while rest:
            rest = rest[os.write(self._process.stdin.fileno(), rest) :]

    def receive(self, seconds: float) -> Any | None:
        """The next frame, None when there is none for `seconds`; `EOFError` at the end."""
        limit = time.monotonic() + seconds
        while True:
            if len(self._received) >= HEADER.size:
                (length,) = HEADER.unpack_from(self._received)
                end = HEADER.size + length
                if len(self._received) >= end:
                    value = pickle.loads(memoryview(self._received)[HEADER.size : end])
                    del self._received[:end]
                    return value
            if not self._poller.poll(max(0.0, limit - time.monotonic()) * 1e3):
                return None
            read = os.read(self._process.stdout.fileno(), 1 << 16)
            if not read:
                raise EOFError
            self._received += read

    def _has_ended(self) -> bool:
        """The process stays uncollected, so that its number still names its group."""
        how = os.WEXITED | os.WNOHANG | os.WNOWAIT
        try:
            return os.waitid(os.P_PID, self._process.pid, how) is not None
        except ChildProcessError:  # `interrupt` of another thread has collected it
            return True

    def interrupt(self) -> None:
        """Kill the process and all it started; the thread that reads from it sees the end."""
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except ProcessLookupError:
            self._process.kill()

    def kill(self, patience: float = 0.0) -> int:
        """Kill, wait and free what belongs to it; idempotent. Returns the exit code: its own when
        it ends by itself within `patience` seconds."""
        if self._process.returncode is None:
            until = time.monotonic() + patience
            while not self._has_ended() and time.monotonic() < until:
                time.sleep(0.01)
            self.interrupt()
            self._process.wait()
            self._process.stdin.close()
            self._process.stdout.close()
        return self._process.returncode
