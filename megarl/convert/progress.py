"""How far a conversion is: a bar on a terminal, a line at each quarter elsewhere; on stderr."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Any

LINES = 4
QUIET_SECONDS = 2.0
"""What is over sooner says nothing but that."""


class Progress:
    """`with Progress("reading x", total_bytes) as progress: progress.advance(bytes)`."""

    def __init__(self, what: str, total: int, shown: bool = True) -> None:
        """`shown`: nothing is told where it is false, as on ranks but the first."""
        self.what, self.total, self.shown = what, max(total, 1), shown
        self.done = 0
        self._told = 0
        self._bar: Any = None
        self._began = time.monotonic()

    def __enter__(self) -> Progress:
        if self.shown and sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, DownloadColumn, TextColumn, TransferSpeedColumn
            from rich.progress import Progress as Bar
            from rich.progress import TimeRemainingColumn as Remaining

            columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn())
            self._bar = Bar(
                *columns,
                TransferSpeedColumn(),
                Remaining(),
                console=Console(stderr=True),
                # Nothing is redrawn by another thread: it would run beside the copy.
                auto_refresh=False,
            )
            self._bar.start()
            self._task = self._bar.add_task(self.what, total=self.total)
        return self

    def advance(self, size: int) -> None:
        self.done += size
        if not self.shown:
            return
        if self._bar is not None:
            self._bar.update(self._task, completed=min(self.done, self.total))
            if self.done * 100 // self.total > self._told:
                self._told = self.done * 100 // self.total
                self._bar.refresh()
        elif self.done * LINES // self.total > self._told:
            self._told = self.done * LINES // self.total
            seconds = time.monotonic() - self._began
            if seconds < QUIET_SECONDS:
                return
            print(
                f"{self.what}: {min(100, self.done * 100 // self.total)}% of "
                f"{human(self.total)}, {seconds:.1f} s",
                file=sys.stderr,
                flush=True,
            )

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.refresh()
            self._bar.stop()


def human(size: float) -> str:
    """Bytes for a person: 538.1 MB."""
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"
