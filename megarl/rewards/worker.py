"""A scoring worker: a process for foreign code alone, started by the keeper (`keeper.py`).

It gets lists of tasks as frames over a socket and answers each response with `Told` as soon as it
is known. Its main thread calls the scorers. They see neither the socket nor the pool: what they
print goes to standard error, what they read is empty.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from megarl.rewards.frames import Began, Channel, Ready, Setup, Told, say
from megarl.rewards.judge import Case, Judge, Loaded
from megarl.rewards.limits import (
    Memory,
    adopt_orphans,
    children_of,
    die_with,
    spare_the_machine,
)
from megarl.rewards.surroundings import Surroundings

MOST_CHILDREN = 256
"""Processes that scorers may leave behind in a worker, ended ones too, before it is replaced.

They live as long as the worker: a scorer may have started a server that it asks each time."""
MEMORY_SHARE = 0.75
"""Of the memory it may use more: a worker that keeps so much of it between two responses is
replaced. A leak does not become the error of the response at which it runs over."""


def main(
    channel: Channel, setup: Setup, scorers: Sequence[Loaded], ready: Ready, keeper: int
) -> NoReturn:
    """The life of a worker whose parent is the process `keeper`; ends with the other side."""
    pid = os.getpid()
    code = 1
    try:
        die_with(keeper)
        adopt_orphans()
        spare_the_machine()
        channel.send(ready)
        _Worker(channel, setup, scorers).serve()
    except (EOFError, BrokenPipeError, ConnectionResetError):
        code = 0
    except BaseException as error:  # the process ends here, and its parent's code must not go on
        if os.getpid() == pid:
            sys.excepthook(type(error), error, error.__traceback__)
    os._exit(code)


class _Worker:
    def __init__(self, channel: Channel, setup: Setup, scorers: Sequence[Loaded]) -> None:
        self._channel, self._judge = channel, Judge(scorers)
        self._pid = os.getpid()
        self._is_spent = False
        self._flow = None
        if self._judge.awaited:  # asyncio is imported only where it is used
            from megarl.rewards.flow import Flow

            self._flow = Flow(self._judge, setup.deadline_seconds, self._began)
        self._surroundings = Surroundings()
        self._memory = Memory(setup.memory_bytes)

    def serve(self) -> None:
        size = self._judge.takes
        while True:
            tasks = self._next_tasks()
            for at in range(0, len(tasks), size):
                self._score(tasks[at : at + size])

    def _next_tasks(self) -> list:
        while (tasks := self._channel.take()) is None:
            if self._flow is not None:
                self._flow.run_until_readable(self._channel.fileno())
            self._channel.read()
        return tasks

    def _score(self, tasks: list) -> None:
        cases = self._judge.ask(tasks, self._began)
        if self._flow is None:
            for case in cases:
                self._tell(case)
        else:
            self._flow.add(cases, self._tell)

    def _began(self, numbers: tuple[int, ...]) -> None:
        # A worker that scores one response after the other is known to work on the first.
        if self._flow is not None or self._judge.takes > 1:
            self._send(Began(numbers))

    def _tell(self, case: Case) -> None:
        if case.out_of_memory:
            self._memory.lift()
        outcome = case.outcome(self._judge.titles)
        self._send(Told(case.number, outcome, case.out_of_memory or self._is_used_up()))

    def _is_used_up(self) -> bool:
        if self._flow is None or self._flow.is_alone:
            # While others are on their way, what is around may be theirs.
            self._is_spent |= not self._surroundings.restore()
        self._is_spent |= self._memory.share_used() > MEMORY_SHARE
        self._is_spent |= len(children_of(self._pid)) > MOST_CHILDREN
        self._is_spent |= self._flow is not None and bool(self._flow.abandoned)
        return self._is_spent

    def _send(self, frame: Began | Told) -> None:
        self._judge.leave_if_forked()
        if not self._channel.is_whole():
            say("reward.scorers: a scorer closed the descriptors of its process")
            os._exit(1)
        self._channel.send(frame)
