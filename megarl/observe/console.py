"""What a person sees while a run goes on: a live panel in a terminal, else one line an iteration.

The console never stops a run for its own sake: a number that a row lacks is shown as a dash.
"""

from __future__ import annotations

import math
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TextIO

from megarl import torchrun
from megarl.observe import metrics
from megarl.observe.logs import real_stdout
from megarl.observe.plots import clock_text, sparkline

MODES = ("auto", "plain", "rich", "off")
REFRESHES_PER_SECOND = 4
PANEL_WIDTH = 78
LABEL_WIDTH = 11
GAP = "   "
PROGRESS_SECONDS = 10.0
"""Between two lines on a stage's progress, in plain mode."""
RECENT = 40
"""Iterations that the sparkline shows."""
ETA_ITERATIONS = 10
"""Latest iterations whose mean duration predicts the rest."""

# Heading, width and format of the plain columns; None takes a value that is no single metric.
COLUMNS: tuple[tuple[str, int, str, str | None], ...] = (
    ("iteration", 11, "", None),
    ("reward", 9, ".4f", metrics.REWARD),
    ("greedy", 9, ".4f", metrics.ACCURACY),
    ("sampled", 9, ".4f", metrics.ACCURACY_SAMPLED),
    ("tokens/s", 10, ",.0f", metrics.TOKENS_PER_SECOND),
    ("parity gap", 11, ".1e", metrics.PARITY),
    ("entropy", 9, ".4f", metrics.ENTROPY),
    ("kl", 9, ".4f", metrics.REFERENCE_KL),
    ("seconds", 9, ".2f", metrics.SECONDS),
    ("eta", 9, "", None),
)


def number(row: Mapping[str, Any], key: str, form: str, width: int = 100) -> str:
    """`row[key]` in format `form` (or an exponent's, to stay below `width` characters); a dash
    when it is missing or no number."""
    value = row.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return "-"
    text = format(value, form)
    return text if len(text) < width else f"{value:.1e}"


def fitting(parts: Sequence[str], room: int) -> str:
    """As many of `parts`, from the first on, as go into `room` characters; always the first."""
    line = parts[0]
    for part in parts[1:]:
        if len(line) + len(GAP) + len(part) > room:
            break
        line += GAP + part
    return line


class Console:
    """Progress on rank 0. With mode `off` (every other rank) each method does nothing.

    `rich` draws a panel that is redrawn in place, `plain` prints lines of at most 100 columns,
    `auto` is rich when `stream` is a terminal. Text given to `note` goes above the panel.
    """

    def __init__(
        self,
        mode: str = "auto",
        total: int = 0,
        *,
        title: str = "",
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`total` iterations, `title` the run's name, `stream` where to write (default: the
        person's terminal, also while `logs` captures standard output).

        Raises ValueError for an unknown mode.
        """
        if mode not in MODES:
            raise ValueError(f"observe.console is {mode!r}; choose one of {', '.join(MODES)}")
        self._stream = stream if stream is not None else real_stdout()
        self._on = mode != "off"
        able = self._stream.isatty() and os.environ.get("TERM", "dumb") != "dumb"
        self._rich = mode == "rich" or (mode == "auto" and able)
        self._total, self._title, self._clock = total, title, clock
        self._live: Any = None
        self._terminal: Any = None
        self._headed = False
        self._stages: set[str] = set()
        self._stage, self._stage_since = "", clock()
        self._progress_since = clock()
        self._started = clock()
        self._row: Mapping[str, Any] = {}
        self._first_evaluation: Mapping[str, Any] = {}
        self._evaluation: Mapping[str, Any] = {}
        self._rewards: deque[float] = deque(maxlen=RECENT)
        self._durations: deque[float] = deque(maxlen=ETA_ITERATIONS)

    def start(self, total: int | None = None) -> None:
        """The loop begins: its clock starts and plain mode prints the heading."""
        self._total = self._total if total is None else total
        self._started = self._clock()
        if self._on and not self._rich and not self._headed:
            self._print("".join(f"{head:>{width}}" for head, width, _, _ in COLUMNS))
        self._headed = True

    def stage(self, name: str) -> None:
        """What the run does now. Plain mode prints it, once each, until the heading is there."""
        self._stage, self._stage_since = name, self._clock()
        self._progress_since = self._stage_since
        if self._on and self._rich and self._live is None:
            self._start_live()
        elif self._on and not self._rich and not self._headed and name not in self._stages:
            self._print(f"{name} …")
        self._stages.add(name)

    def progress(self, text: str) -> None:
        """How far the stage is, in its place in the panel; plain mode prints a line every ten
        seconds at most."""
        if self._rich:
            self._stage = text
        elif self._on and self._clock() - self._progress_since >= PROGRESS_SECONDS:
            self._progress_since = self._clock()
            self._print(f"{text} …")

    def iteration(self, row: Mapping[str, Any]) -> None:
        """An iteration is done: `row` is its row of metrics. The last one shows the final
        evaluation, where it has no other."""
        shown = (metrics.ACCURACY, metrics.ACCURACY_SAMPLED)
        names = {key: metrics.final_name(key) for key in shown}
        final = {key: row[name] for key, name in names.items() if name in row}
        for evaluation in (row, final):
            if metrics.ACCURACY in evaluation:
                self._keep_evaluation(evaluation)
        row = {**final, **row}
        self._row = row
        self._keep(self._rewards, row, metrics.REWARD)
        self._keep(self._durations, row, metrics.SECONDS)
        if not self._on:
            return
        if not self._headed:
            self.start()
        if self._live is not None:
            self._live.refresh()
        else:
            self._print(self._line(row))

    def evaluated(self, row: Mapping[str, Any]) -> None:
        """A held-out evaluation is done, before its iteration's row is complete."""
        self._keep_evaluation(row)
        greedy = number(row, metrics.ACCURACY, ".4f")
        sampled = number(row, metrics.ACCURACY_SAMPLED, ".4f")
        if self._live is None:
            self.note(f"held-out accuracy {greedy} greedy, {sampled} sampled")

    def note(self, text: str) -> None:
        """A line of text, above the panel if there is one."""
        if not self._on:
            return
        if self._live is not None:
            self._terminal.print(text, markup=False, highlight=False, soft_wrap=True)
        else:
            self._print(text)

    def close(self) -> None:
        """Leave the last panel standing and the terminal as it was; twice does nothing."""
        if self._live is None:
            return
        self._live.stop()
        self._live = None
        told = torchrun.told()
        if told:
            # Another rank told it in this terminal, and the living panel was drawn over it.
            self._print(f"megarl: error: {told}")

    def __enter__(self) -> Console:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self._stage = ""  # after an error the last panel still names the stage
        self.close()

    def _print(self, text: str) -> None:
        print(text, file=self._stream, flush=True)

    @staticmethod
    def _keep(kept: deque[float], row: Mapping[str, Any], key: str) -> None:
        value = row.get(key)
        if isinstance(value, int | float) and math.isfinite(value):
            kept.append(value)

    def _keep_evaluation(self, row: Mapping[str, Any]) -> None:
        self._evaluation = row
        self._first_evaluation = self._first_evaluation or row

    def _done(self) -> int:
        last = self._row.get(metrics.ITERATION)
        return last + 1 if isinstance(last, int) else 0

    def _eta(self) -> str:
        left = self._total - self._done()
        if not self._durations or left < 0:
            return "-"
        return clock_text(left * sum(self._durations) / len(self._durations))

    def _line(self, row: Mapping[str, Any]) -> str:
        cells = {"iteration": f"{self._done()}/{self._total or '-'}", "eta": self._eta()}
        return "".join(
            f"{cells[head] if key is None else number(row, key, form, width):>{width}}"
            for head, width, form, key in COLUMNS
        )

    def _start_live(self) -> None:
        from rich.console import Console as RichConsole
        from rich.live import Live

        # A library's print goes above the panel, unless the output is captured elsewhere.
        ours = sys.stdout is self._stream
        self._terminal = RichConsole(file=self._stream, force_terminal=True)
        self._live = Live(
            console=self._terminal,
            get_renderable=self._panel,
            refresh_per_second=REFRESHES_PER_SECOND,
            redirect_stdout=ours,
            redirect_stderr=ours,
        )
        self._live.start(refresh=True)
        # Live hides the cursor; shown again, even a killed run leaves a usable terminal.
        self._terminal.show_cursor(True)

    def _panel(self) -> Any:
        from rich.panel import Panel
        from rich.text import Text

        # A fixed width: a panel that follows its contents jitters.
        width = min(PANEL_WIDTH, self._terminal.width)
        room = width - LABEL_WIDTH - 4  # two borders and their padding
        body = Text(no_wrap=True, overflow="ellipsis")
        for label, parts in self._facts(room):
            body.append(f"{label:{LABEL_WIDTH}}", style="bold")
            body.append(fitting(parts, room) + "\n")
        body.right_crop()
        title = f"megarl {self._title}".rstrip()
        return Panel(body, title=Text(title), title_align="left", width=width)

    def _facts(self, room: int) -> list[tuple[str, list[str]]]:
        """(label, parts) of each line; in a narrow terminal the last parts are left out."""
        row, now = self._row, self._clock()
        reward = number(row, metrics.REWARD, ".4f")
        tokens = number(row, metrics.TOKENS_PER_SECOND, ",.0f")
        gap = number(row, metrics.PARITY, ".1e")
        entropy = number(row, metrics.ENTROPY, ".4f")
        kl = number(row, metrics.REFERENCE_KL, ".4f")
        seconds = number(row, metrics.SECONDS, ".2f")
        bars = min(RECENT, max(0, room - len(reward) - len(GAP)))
        stage = [f"{self._stage} {now - self._stage_since:.0f} s"] if self._stage else []
        return [
            ("iteration", [f"{self._done()}/{self._total or '-'}", *stage]),
            ("reward", [reward, sparkline(self._rewards, bars)]),
            ("accuracy", self._accuracy()),
            ("rollout", [f"{tokens} tokens/s", f"parity gap {gap}"]),
            ("policy", [f"entropy {entropy}", f"kl {kl}"]),
            (
                "time",
                [
                    f"{self._eta()} to go",
                    f"{clock_text(now - self._started)} gone",
                    f"{seconds} s an iteration",
                ],
            ),
        ]

    def _accuracy(self) -> list[str]:
        if not self._evaluation:
            return ["-"]
        parts = []
        for name, key in (("greedy", metrics.ACCURACY), ("sampled", metrics.ACCURACY_SAMPLED)):
            first = number(self._first_evaluation, key, ".3f")
            last = number(self._evaluation, key, ".3f")
            parts.append(f"{name} {last}" if first == last else f"{name} {first} → {last}")
        return parts
