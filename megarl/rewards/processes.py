"""The rank's side of the scoring processes: the keeper, and the workers it starts and ends."""

from __future__ import annotations

import os
import select
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

from megarl.rewards.frames import Channel, End, Ended, Ready, Setup, Start, Started
from megarl.rewards.limits import check_kernel
from megarl.rewards.scorer import ScorerError

START_SECONDS = 120.0
END_SECONDS = 1.0
"""What a worker that closed its socket gets to end by itself: the exit code is then its own."""
CLOSE_SECONDS = 60.0
ONE_THREAD = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS")
"""Workers are many, and a fork must not have threads. Set for the scoring processes alone."""


class KeeperEnded(ScorerError):
    """The keeper is gone, and every worker with it."""


class Keeper:
    """The process that starts and ends a pool's workers. Usable from several threads."""

    def __init__(self, setup: Setup) -> None:
        """Raises `ScorerError` on a kernel that cannot keep processes."""
        problem = check_kernel()
        if problem is not None:
            raise ScorerError(problem)
        ours, theirs = socket.socketpair()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "megarl.rewards.keeper", str(theirs.fileno()), str(os.getpid())],
            stdin=subprocess.DEVNULL,
            stdout=2,  # what scorers print
            pass_fds=(theirs.fileno(),),
            env=_environment(setup),
            start_new_session=True,
        )
        theirs.close()
        self._control = Channel(ours)
        self._setup = setup
        self._lock = threading.Lock()
        self._closed = False

    def load(self) -> Ready:
        """Wait for the scorers. Raises `ScorerError` when one cannot be loaded, or in time."""
        with self._lock:
            answer = self._ask(self._setup, START_SECONDS)
        if answer is None:
            raise ScorerError(
                f"reward.scorers: loading {self._setup.names} took longer than {START_SECONDS:g} s"
            )
        if isinstance(answer, str):
            raise ScorerError(answer)
        return answer

    def start(self) -> Worker:
        """A worker, which says `Ready` when its scorers are loaded. Raises `ScorerError`."""
        ours, theirs = socket.socketpair()
        try:
            with theirs, self._lock:
                answer = self._ask(Start(), START_SECONDS, theirs.fileno())
                if not isinstance(answer, Started):
                    raise ScorerError(answer or "reward.scorers: no worker started in time")
                watch = self._control.descriptors.pop(0)
        except BaseException:
            ours.close()
            raise
        return Worker(Channel(ours), answer.pid, watch, self._end)

    def close(self) -> None:
        """End every process of the pool and wait for it; idempotent."""
        self._closed = True
        self._control.shut()
        try:
            self._process.wait(CLOSE_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def free(self) -> None:
        """Close the socket, when no thread uses it any more."""
        self._control.close()

    def _end(self, pid: int) -> int:
        with self._lock:
            answer: Ended = self._ask(End(pid), None)
        return answer.exit_code

    def _ask(self, request: Any, seconds: float | None, *descriptors: int) -> Any | None:
        try:
            self._control.send(request, *descriptors)
            return self._control.receive(seconds)
        except (EOFError, BrokenPipeError, ConnectionResetError) as error:
            if self._closed:
                raise KeeperEnded("the scoring pool is closed") from error
            code = self._process.wait()
            why = "a scorer that kills its parent does that" if code < 0 else "see its error above"
            raise KeeperEnded(
                "reward.scorers: the process that keeps the scoring workers ended with exit code "
                f"{code}; {why}"
            ) from error


class Worker:
    """One worker process, used by one thread."""

    def __init__(self, channel: Channel, pid: int, watch: int, end: Callable[[int], int]) -> None:
        self._channel, self._pid, self._watch, self._end = channel, pid, watch, end

    def send(self, value: Any, seconds: float) -> None:
        """Raises `BrokenPipeError` or `ConnectionResetError` when the process is gone and
        `TimeoutError` when it neither listens nor says anything for so long."""
        self._channel.send(value, seconds=seconds)

    def receive(self, seconds: float) -> Any | None:
        """The next frame, None when there is none for `seconds`; `EOFError` at the end."""
        return self._channel.receive(max(0.0, seconds), self._watch)

    def has_ended(self, patience: float = 0.0) -> bool:
        """Whether the process ends by itself within so many seconds."""
        poller = select.poll()
        poller.register(self._watch, select.POLLIN)
        return bool(poller.poll(patience * 1e3))

    def end(self, patience: float = 0.0) -> int:
        """Kill it with all that descends from it. Returns the exit code: its own when it ends by
        itself within `patience` seconds. Raises `KeeperEnded`."""
        self.has_ended(patience)
        try:
            return self._end(self._pid)
        finally:
            self.free()

    def free(self) -> None:
        """Close what is open to it here."""
        self._channel.close()
        os.close(self._watch)


def _environment(setup: Setup) -> dict[str, str]:
    return (
        os.environ
        | dict.fromkeys(ONE_THREAD, "1")
        | {
            "PYTHONHASHSEED": "0",  # the same verdict from the same response
            "PYTHONPATH": os.pathsep.join(filter(None, setup.sys_path)),
        }
    )
