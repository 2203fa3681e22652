"""Where the time goes: seconds per stage for the metrics, and a trace for Perfetto.

    with stopwatch("generate", role="rollout", samples=256):
        with stopwatch("flush"):           # counted as `time/generate/flush` and within generate
            ...
    row |= stopwatch.take()                # {"time/generate": …, "time/iteration": …, …}

`timeline.json` is a Chrome trace (open it at ui.perfetto.dev): one line per event as it ends. The
format allows the closing bracket to be missing, so the file of a run that died opens as well.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

TIMELINE_FILE = "timeline.json"
ROLES = MappingProxyType(
    {
        "generate": "rollout",
        "evaluate": "rollout",
        "reshard": "resharder",
        "verify": "resharder",
        "grade": "reward",
        "log_probs": "actor",
        "update": "actor",
        "commit": "actor",
        "export": "actor",
    }
)
"""Whose track in the trace a stage is drawn on unless the call says it; any other: the loop's."""


class Stopwatch:
    """Accumulates seconds per stage of an iteration; call it for a context. Main thread only.

    Stages nest: an inner one has its outer ones' names before it, so the keys with one slash
    do not overlap, and their sum is at most `time/iteration`.
    """

    def __init__(
        self,
        path: Path | None = None,
        *,
        rank: int = 0,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`path` is where the trace goes, None for no trace (every rank but 0).

        `clock` gives seconds that only grow. The first iteration starts here.
        """
        self._clock = clock
        self._zero = self._started = clock()
        self._seconds: dict[str, float] = {}
        self._open: list[str] = []
        self._labels: dict[str, Any] = {}
        self._rank = rank
        self._tracks: dict[str, int] = {}
        self._file = None
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = open(path, "w", encoding="utf-8")  # noqa: SIM115 - lives with the run
            self._file.write("[\n")
            self._event("M", name="process_name", args={"name": f"rank {rank}"})

    def begin(self, iteration: int, version: str = "") -> None:
        """Start iteration `iteration` here, on policy version id `version`.

        Seconds counted since the last `take` (start-up, say) stay in the trace only.
        """
        self._require_closed("begin")
        self._labels = {"iteration": iteration} | ({"version": version} if version else {})
        self._seconds.clear()
        self._started = self._clock()

    @contextmanager
    def __call__(self, stage: str, *, role: str | None = None, **counters: Any) -> Iterator[None]:
        """Time `stage`; `role` is its track in the trace (default: `ROLES`), `counters` are kept
        in its args."""
        if not stage or "/" in stage or stage == "iteration":
            raise ValueError(f"{stage!r} is no stage name: not empty, no slash, not `iteration`")
        role = role or ROLES.get(stage, "loop")
        self._open.append(stage)
        key = "time/" + "/".join(self._open)
        started = self._clock()
        args = self._labels | {"role": role} | counters
        try:
            yield
        except BaseException as error:
            args["error"] = type(error).__name__
            raise
        finally:
            ended = self._clock()
            self._open.pop()
            self._seconds[key] = self._seconds.get(key, 0.0) + (ended - started)
            self._event(
                "X",
                name=stage,
                ts=self._micros(started),
                dur=round((ended - started) * 1e6, 1),
                tid=self._track(role),
                args=args,
            )

    def counter(self, name: str, value: float) -> None:
        """One point of a curve in the trace, at this moment (the reward of an iteration, say)."""
        self._event("C", name=name, ts=self._micros(self._clock()), args={"value": value})

    def take(self) -> dict[str, float]:
        """Seconds since the iteration began, and by stage; the next iteration starts here."""
        self._require_closed("take")
        now = self._clock()
        taken = {"time/iteration": now - self._started} | self._seconds
        self._event(
            "X",
            name="iteration",
            ts=self._micros(self._started),
            dur=round((now - self._started) * 1e6, 1),
            tid=self._track("iteration"),
            args=self._labels,
        )
        self._seconds = {}
        self._started = now
        if self._file is not None:
            self._file.flush()
        return taken

    def close(self) -> None:
        """End the trace; a second call does nothing."""
        if self._file is not None:
            self._event("M", name="process_labels", args={"labels": "complete"}, last=True)
            self._file.write("]\n")
            self._file.close()
            self._file = None

    def __enter__(self) -> Stopwatch:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _require_closed(self, what: str) -> None:
        if self._open:
            raise RuntimeError(f"{what}() inside the stage {'/'.join(self._open)!r}; end it first")

    def _micros(self, moment: float) -> float:
        return round((moment - self._zero) * 1e6, 1)

    def _track(self, role: str) -> int:
        if role not in self._tracks:
            self._tracks[role] = len(self._tracks)
            self._event("M", name="thread_name", tid=self._tracks[role], args={"name": role})
        return self._tracks[role]

    def _event(self, phase: str, *, last: bool = False, **fields: Any) -> None:
        if self._file is None:
            return
        event = {"ph": phase, "pid": self._rank, "tid": 0} | fields
        self._file.write(json.dumps(event) + ("\n" if last else ",\n"))
