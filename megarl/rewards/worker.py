"""A scoring worker: `python -m megarl.rewards.worker`, started by `workers.WorkerPool`.

A process of its own, not a fork or a multiprocessing child: forks of a process with library threads
hang, and multiprocessing would import the training script (torch, SGLang) into every worker.

It reads frames (4-byte length, pickle) from its standard input and answers on its standard output.
Scorers see neither: what they print goes to standard error, what they read is empty.
First frame in: `Setup`. First out: `Ready` or a `str` that says why not. Then, for each list of
`Response`, one `Verdict` per response as soon as it is known.
"""

from __future__ import annotations

import ctypes
import os
import pickle
import signal
import struct
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from megarl.rewards.scorer import (
    Response,
    Scorer,
    ScorerError,
    component_name,
    load_scorer,
    parts_of,
    said,
)
from megarl.rewards.sources import Sources, loaded_since

HEADER = struct.Struct("<I")
PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Setup:
    """What a worker needs to know before its first response."""

    sys_path: tuple[str, ...]
    scorers: tuple[tuple[str, dict[str, Any]], ...]
    """(name, options) of each scorer of the recipe."""


@dataclass(frozen=True)
class Ready:
    """The scorers are loaded, from these sources."""

    sources: Sources


@dataclass(frozen=True, slots=True)
class Verdict:
    """Scores of one response, or the failure of one scorer."""

    components: dict[str, float]
    detail: str
    error: str | None
    seconds: float
    steps: dict[str, tuple[tuple[int, float], ...]] = field(default_factory=dict)
    """Scorer → its step scores, of those that gave any."""


def write_frame(stream: BinaryIO, value: Any) -> None:
    body = pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)
    stream.write(HEADER.pack(len(body)) + body)
    stream.flush()


def read_frame(stream: BinaryIO) -> Any:
    """The next frame; raises `EOFError` when the other side is gone."""
    header = stream.read(HEADER.size)
    if len(header) < HEADER.size:
        raise EOFError
    (length,) = HEADER.unpack(header)
    body = stream.read(length)
    if len(body) < length:
        raise EOFError
    return pickle.loads(body)


def judge(scorers: Sequence[tuple[str, Scorer]], response: Response) -> Verdict:
    """Ask every scorer; the first that fails makes the verdict an error."""
    started = time.perf_counter()
    components: dict[str, float] = {}
    details: list[str] = []
    steps: dict[str, tuple[tuple[int, float], ...]] = {}
    for name, scorer in scorers:
        try:
            parts = parts_of(scorer(response), len(response.token_ids))
        # The pool's boundary, in a process for foreign code alone: whatever it raises, its
        # `sys.exit()` and KeyboardInterrupt too, is a status.
        except BaseException as error:
            seconds = time.perf_counter() - started
            return Verdict({}, "", f"{name}: {_describe(error)}", seconds)
        components[name] = parts.total
        if parts.steps:
            steps[name] = parts.steps
        if parts.detail and parts.detail not in details:
            details.append(parts.detail)
    return Verdict(components, "; ".join(details), None, time.perf_counter() - started, steps)


def _describe(error: BaseException) -> str:
    """`ValueError: what (file.py:12)`, one line."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f"{said(error)} ({Path(last.filename).name}:{last.lineno})"


def _take_over_streams() -> tuple[BinaryIO, BinaryIO]:
    """The two pipes to the pool; afterwards, stdin is empty and stdout is stderr."""
    reader = os.fdopen(os.dup(0), "rb")
    writer = os.fdopen(os.dup(1), "wb")
    empty = os.open(os.devnull, os.O_RDONLY)
    os.dup2(empty, 0)
    os.dup2(2, 1)
    os.close(empty)
    return reader, writer


def _die_with_parent() -> None:
    """A rank that is killed leaves no worker behind, not even one stuck in a scorer (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def main() -> None:
    _die_with_parent()
    reader, writer = _take_over_streams()
    try:
        setup: Setup = read_frame(reader)
        sys.path[:] = setup.sys_path
        before = set(sys.modules)
        try:
            loaded = [(name, *load_scorer(name, options)) for name, options in setup.scorers]
        except ScorerError as error:
            write_frame(writer, str(error))
            return
        modules = [module for _, _, module in loaded]
        write_frame(writer, Ready(loaded_since(before, modules)))
        scorers = [(component_name(name), scorer) for name, scorer, _ in loaded]
        while True:
            for response in read_frame(reader):
                write_frame(writer, judge(scorers, response))
    except (EOFError, BrokenPipeError):
        return


if __name__ == "__main__":
    # Classes pickled by name must be those of the importable module, not of `__main__`.
    from megarl.rewards.worker import main as imported_main

    imported_main()
