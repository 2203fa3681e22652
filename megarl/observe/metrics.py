"""The numbers of a run: one JSON object per iteration in `metrics.jsonl`, the same in TensorBoard.

Key names are `group/number`; the ones that this room shows are constants here, so that the loop,
the console, the summary and the report mean the same thing by the same word.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Mapping
from numbers import Integral, Real
from pathlib import Path
from typing import Any

METRICS_FILE = "metrics.jsonl"
TENSORBOARD_FOLDER = "tensorboard"

ITERATION = "iteration"
REWARD = "reward/mean"
PARITY = "parity/logprob_gap_max"
SECONDS = "time/iteration"
STAGE_PREFIX = "time/"
ACCURACY = "eval/accuracy"
ACCURACY_SAMPLED = "eval/accuracy_sampled"
TOKENS_PER_SECOND = "time/tokens_per_second"
ENTROPY = "policy/entropy"
EVALUATION_PREFIX = "eval/"
FINAL_PREFIX = "eval/final/"
"""Of the final weights' evaluation, in the last row."""
PENALISED = "reward/penalised"
APPROX_KL = "policy/approx_kl"
APPROX_KL_STOPPED = "policy/approx_kl_stopped"
CLIP_LOW, CLIP_HIGH = "policy/clip_low", "policy/clip_high"
REFERENCE_KL = "reference/kl"
VALUE_LOSS = "critic/value_loss"
EXPLAINED = "value/explained_variance"
REWARD_OF = "reward/source/"
EQUAL_OF = "groups/zero_variance/source/"
LENGTH_OF = "response/length/source/"
PROMPTS_OF = "rollout/prompts/source/"
BY_SOURCE = (REWARD_OF, EQUAL_OF, LENGTH_OF, PROMPTS_OF)
"""Numbers of each source, whose name follows."""
SHOWN = frozenset(
    {
        REWARD,
        PARITY,
        ENTROPY,
        APPROX_KL,
        APPROX_KL_STOPPED,
        CLIP_LOW,
        CLIP_HIGH,
        REFERENCE_KL,
        VALUE_LOSS,
        EXPLAINED,
    }
)
"""Numbers that console, summary and report show, besides times, evaluations and those by source."""
MOST_ITERATIONS = 1 << 53
"""Whole numbers below it are exact as floats."""


def final_name(key: str) -> str:
    """What the final evaluation's number of the name `key` is called."""
    return FINAL_PREFIX + key.removeprefix(EVALUATION_PREFIX)


class MetricsError(ValueError):
    """A row that must not be written, or a metrics file that cannot be read."""


class MetricsWriter:
    """Appends rows to `metrics.jsonl` and their numbers to TensorBoard; for rank 0 only.

    A row is flushed to the operating system before `write` returns, `iteration` first and the
    other keys sorted, so that equal runs give equal lines but for `time/…`.
    """

    def __init__(self, run_folder: Path, tensorboard: bool) -> None:
        """A file that is there already is continued after its last iteration.

        Raises `MetricsError` when that file is broken or ends in the middle of a line.
        """
        self._last = -1
        self._events: Any = None
        run_folder.mkdir(parents=True, exist_ok=True)
        path = run_folder / METRICS_FILE
        if path.exists():
            rows, torn = read_rows(path)
            if torn:
                raise MetricsError(f"{path}: the last line is cut off; remove it to go on")
            self._last = rows[-1][ITERATION] if rows else -1
        self._file = open(path, "a", encoding="utf-8")  # noqa: SIM115 - lives with the run
        if tensorboard:
            # TensorBoard's own writer: torch.utils.tensorboard imports as fast once torch is
            # there (0.15 s) but needs torch (2.4 s against 0.2 s), and writes the same file.
            from tensorboard.summary.writer.event_file_writer import EventFileWriter

            self._events = EventFileWriter(str(run_folder / TENSORBOARD_FOLDER))

    def write(self, row: Mapping[str, Any]) -> None:
        """Write one iteration's row: numbers, truth values and short texts.

        Raises `MetricsError` naming the key for a non-finite number or a value of another kind,
        and for an iteration that is not after the last one written.
        """
        plain = {key: _plain(key, value) for key, value in row.items()}
        iteration = plain.get(ITERATION)
        if not isinstance(iteration, int) or isinstance(iteration, bool) or iteration < 0:
            raise MetricsError(f"a row needs `iteration`, a whole number >= 0, not {iteration!r}")
        if iteration <= self._last:
            raise MetricsError(
                f"row of iteration {iteration} after the row of iteration {self._last}; "
                "each iteration is written once, in order"
            )
        self._last = iteration
        ordered = {ITERATION: iteration} | {key: plain[key] for key in sorted(plain)}
        self._file.write(json.dumps(ordered, allow_nan=False, ensure_ascii=False) + "\n")
        self._file.flush()
        if self._events is not None:
            self._write_events(iteration, plain)

    def _write_events(self, iteration: int, row: Mapping[str, Any]) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [
            Summary.Value(tag=key, simple_value=float(row[key]))
            for key in sorted(row)
            if key != ITERATION and not isinstance(row[key], str)
        ]
        event = Event(step=iteration, wall_time=time.time(), summary=Summary(value=values))
        self._events.add_event(event)
        self._events.flush()

    def close(self) -> None:
        """Close both files; a second call does nothing."""
        self._file.close()
        if self._events is not None:
            self._events.close()
            self._events = None

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_rows(path: Path) -> tuple[list[dict[str, Any]], bool]:
    """The rows of a metrics file, and whether its last line is cut off (and left out).

    Raises `MetricsError` naming file and line for a broken line that is not the last one, and for
    a value that `MetricsWriter` would not have written.
    """
    lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    torn = lines.pop() != ""
    rows = []
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
            iteration = row[ITERATION]
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise MetricsError(f"{path}:{number}: not a row of metrics: {line[:60]!r}") from error
        try:
            _check_read(row)
        except MetricsError as error:
            raise MetricsError(f"{path}:{number}: {error}") from error
        if rows and iteration <= rows[-1][ITERATION]:
            raise MetricsError(f"{path}:{number}: iteration {iteration} is not after the last one")
        rows.append(row)
    return rows, torn


def _check_read(row: Mapping[str, Any]) -> None:
    """Raises `MetricsError` for a value that no row has, or no number where one is shown."""
    iteration = row[ITERATION]
    if type(iteration) is not int or not 0 <= iteration < MOST_ITERATIONS:
        raise MetricsError(f"`iteration` is {iteration!r:.60}, not a whole number >= 0")
    for key, value in row.items():
        if isinstance(value, int) and abs(value) > sys.float_info.max:
            raise MetricsError(f"metric {key!r} is out of range")
        _plain(key, value)
        shown = key in SHOWN or key.startswith((STAGE_PREFIX, EVALUATION_PREFIX, *BY_SOURCE))
        if shown and isinstance(value, bool | str):
            raise MetricsError(f"metric {key!r} is {value!r:.60}, not a number")


def _plain(key: str, value: Any) -> bool | int | float | str:
    if isinstance(value, bool | str):
        return value
    if isinstance(value, Integral):
        return int(value)
    if not isinstance(value, Real):
        raise MetricsError(
            f"metric {key!r} is a {type(value).__name__}; give a number, a truth value or a text"
        )
    number = float(value)
    if not math.isfinite(number):
        raise MetricsError(f"metric {key!r} is {number}; leave out what could not be measured")
    return number
