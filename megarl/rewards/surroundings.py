"""What one response's scoring could change in the process for the next one's, put right again.

A scorer's own memory is its own: globals and modules stay as it left them, and what it added to or
changed in `sys.path` and `os.environ`, since it may have set these up for all responses at its
first. What it removed from them comes back.
"""

from __future__ import annotations

import os
import signal
import sys

STREAMS = (0, 1, 2)
SIGNALS = (
    signal.SIGALRM,
    signal.SIGCHLD,
    signal.SIGHUP,
    signal.SIGINT,
    signal.SIGPIPE,
    signal.SIGPROF,
    signal.SIGTERM,
    signal.SIGUSR1,
    signal.SIGUSR2,
    signal.SIGVTALRM,
)
"""Those that programs are used to handle."""


class Surroundings:
    """Working directory, recursion limit, signal handlers, the timer, streams, import path and
    environment of this process."""

    def __init__(self) -> None:
        self._folder = os.open(".", os.O_RDONLY | os.O_DIRECTORY)
        self._place = _identity(self._folder)
        self._recursion = sys.getrecursionlimit()
        self._handlers = {number: signal.getsignal(number) for number in SIGNALS}
        self._streams = [_identity(number) for number in STREAMS]
        self._path, self._environment = list(sys.path), dict(os.environ)
        self._files = (sys.stdin, sys.stdout, sys.stderr)

    def restore(self) -> bool:
        """Back to what was found at first; False where that cannot be: streams were closed."""
        if sys.getrecursionlimit() != self._recursion:
            sys.setrecursionlimit(self._recursion)
        for number, handler in self._handlers.items():
            # None: set by C code, which Python cannot set back.
            if handler is not None and signal.getsignal(number) is not handler:
                signal.signal(number, handler)
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        if sys.path != self._path:
            sys.path += [place for place in self._path if place not in sys.path]
        for name, value in self._environment.items():
            os.environ.setdefault(name, value)
        sys.stdin, sys.stdout, sys.stderr = self._files
        if any(file.closed for file in self._files):
            return False
        try:
            if _identity(".") != self._place:
                os.fchdir(self._folder)
            return [_identity(number) for number in STREAMS] == self._streams
        except OSError:
            return False


def _identity(file: int | str) -> tuple[int, int]:
    found = os.stat(file)
    return found.st_dev, found.st_ino
