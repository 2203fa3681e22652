"""A worker's scoring: plain scorers one response after the other, batched and async ones together.

A response's plain scorers are asked first, then the batched ones, then the async ones, each group
in the recipe's order; the first that fails makes the verdict an error. A batched call that raises
is made again for each response alone, so that only the guilty one carries the error.
"""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megarl.rewards.frames import ScorerSetup, Setup, Task, TimedOut, Verdict
from megarl.rewards.scorer import (
    BUILT_IN,
    Response,
    RewardParts,
    ScorerError,
    answers_of,
    is_async,
    load_scorer,
    parts_of,
    said,
)
from megarl.rewards.sources import Sources, loaded_since


@dataclass(frozen=True, slots=True)
class Loaded:
    """A scorer that can be asked."""

    title: str
    function: Callable[..., Any]
    only: frozenset[str]
    batch: int
    is_async: bool

    def scores(self, response: Response) -> bool:
        return not self.only or response.reward in self.only


@dataclass(slots=True)
class Case:
    """A response while it is being scored."""

    number: int
    response: Response
    parts: dict[str, RewardParts] = field(default_factory=dict)
    times: dict[str, float] = field(default_factory=dict)
    error: str | None = None
    timed_out: TimedOut | None = None
    out_of_memory: bool = False

    @property
    def is_open(self) -> bool:
        return self.error is None and self.timed_out is None

    def take(self, scorer: Loaded, value: Any) -> None:
        """A scorer's answer, good or bad."""
        try:
            self.parts[scorer.title] = parts_of(value, len(self.response.token_ids))
        except BaseException as error:  # an answer's own methods are foreign code too
            self.fail(scorer, error)

    def fail(self, scorer: Loaded, error: BaseException) -> None:
        """A scorer's failure: whatever it raises, `sys.exit()` and KeyboardInterrupt too."""
        self.out_of_memory |= isinstance(error, MemoryError)
        self.error = f"{scorer.title}: {_describe(error)}"

    def spent(self, scorer: Loaded, seconds: float) -> None:
        self.times[scorer.title] = self.times.get(scorer.title, 0.0) + seconds

    def outcome(self, titles: Sequence[str]) -> Verdict | TimedOut:
        """The verdict; `titles` in the recipe's order."""
        if self.timed_out is not None:
            return self.timed_out
        seconds = sum(self.times.values())
        if self.error is not None:
            return Verdict({}, "", self.error, seconds, times=self.times)
        asked = [title for title in titles if title in self.parts]
        details = [self.parts[title].detail for title in asked]
        return Verdict(
            components={title: self.parts[title].total for title in asked},
            detail="; ".join(dict.fromkeys(filter(None, details))),
            error=None,
            seconds=seconds,
            steps={title: self.parts[title].steps for title in asked if self.parts[title].steps},
            times=self.times,
        )


def load(setup: Setup) -> tuple[list[Loaded], Sources]:
    """The recipe's scorers, and the sources behind them. Raises `ScorerError`."""
    before = set(sys.modules)
    loaded, modules = [], []
    for item in setup.scorers:
        scorer, module = load_scorer(item.name, item.options)
        loaded.append(_loaded(item, scorer))
        modules.append(module)
    return loaded, loaded_since(before, modules)


def _loaded(item: ScorerSetup, scorer: Callable) -> Loaded:
    if item.batch > 1 and item.name in BUILT_IN:
        raise ScorerError(
            f"reward.scorers: {item.name} takes one response; batch is for own functions, leave it "
            "out"
        )
    return Loaded(item.title, scorer, item.only, item.batch, is_async(scorer))


class Judge:
    """Asks the scorers that are no coroutines; what it gives is one verdict per response."""

    def __init__(self, scorers: Sequence[Loaded]) -> None:
        self.titles = [scorer.title for scorer in scorers]
        self._plain = [s for s in scorers if not s.is_async and s.batch == 1]
        self._batched = [s for s in scorers if not s.is_async and s.batch > 1]
        self.awaited = [s for s in scorers if s.is_async]
        self.takes = max([1] + [s.batch for s in scorers])
        """Responses that are best scored together."""
        self._pid = os.getpid()

    def ask(self, tasks: Sequence[Task], began: Callable[[tuple[int, ...]], None]) -> list[Case]:
        """Scores by plain and batched scorers. `began` is told the numbers of the responses that
        the scorers see from there on."""
        cases = [Case(number, response) for number, response in tasks]
        for case in cases:
            if self._plain:
                began((case.number,))
            for scorer in self._plain:
                if case.is_open and scorer.scores(case.response):
                    self._call(scorer, case)
        for scorer in self._batched:
            for some in slices(scorer, cases):
                began(tuple(case.number for case in some))
                if not self._call_batch(scorer, some):
                    for case in some:
                        began((case.number,))
                        self._call_batch(scorer, [case])
        return cases

    def leave_if_forked(self) -> None:
        """A scorer that forked and returned in the child too: the child ends without a word."""
        if os.getpid() != self._pid:
            os._exit(0)

    def _call(self, scorer: Loaded, case: Case) -> None:
        started = time.perf_counter()
        try:
            value = scorer.function(case.response)
        # The pool's boundary, in a process for foreign code alone.
        except BaseException as error:
            self.leave_if_forked()
            case.fail(scorer, error)
        else:
            self.leave_if_forked()
            case.take(scorer, value)
        case.spent(scorer, time.perf_counter() - started)

    def _call_batch(self, scorer: Loaded, cases: Sequence[Case]) -> bool:
        """False when it raised on several, who are then to be asked alone."""
        started = time.perf_counter()
        try:
            value = scorer.function([case.response for case in cases])
        except BaseException as error:
            self.leave_if_forked()
            is_told = raised(scorer, cases, error)
        else:
            self.leave_if_forked()
            is_told = True
            answered(scorer, cases, value)
        share(scorer, cases, time.perf_counter() - started)
        return is_told


def slices(scorer: Loaded, cases: Sequence[Case]) -> Iterator[list[Case]]:
    """Those the scorer is to be asked about, as many at a time as it takes."""
    asked = [case for case in cases if case.is_open and scorer.scores(case.response)]
    for at in range(0, len(asked), scorer.batch):
        yield asked[at : at + scorer.batch]


def answered(scorer: Loaded, cases: Sequence[Case], value: Any) -> None:
    """Give each its answer of a batched call; a list that does not fit is an error of each."""
    try:
        answers = answers_of(value, len(cases))
    except BaseException as error:
        for case in cases:
            case.fail(scorer, error)
    else:
        for case, answer in zip(cases, answers, strict=True):
            case.take(scorer, answer)


def raised(scorer: Loaded, cases: Sequence[Case], error: BaseException) -> bool:
    """A batched call raised: its response failed where it was alone, else False."""
    if len(cases) > 1:
        return False
    cases[0].fail(scorer, error)
    return True


def share(scorer: Loaded, cases: Sequence[Case], seconds: float) -> None:
    for case in cases:
        case.spent(scorer, seconds / len(cases))


def _describe(error: BaseException) -> str:
    """`ValueError: what (file.py:12)`, one line; no place where an answer was refused."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    if last.filename == parts_of.__code__.co_filename:
        return said(error)
    return f"{said(error)} ({Path(last.filename).name}:{last.lineno})"
