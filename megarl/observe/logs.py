"""Library noise goes to the rank's log, our own words to the person.

`captured` moves the file descriptors 1 and 2, so it also takes what C++ writes, what child
processes inherit, and every warning, logging line, progress bar and stray print. It returns a
`Terminal`: handles on the real standard output and error for our own console. An exception that
leaves the context becomes one line on the real standard error, the traceback stays in the log.
Import nothing noisy (torch, megatron, sglang, transformers) before it.
"""

from __future__ import annotations

import logging
import os
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import TextIO

from megarl import torchrun
from megarl.contracts.errors import InputError

LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
LEVELS = MappingProxyType({"": logging.INFO, "sglang": logging.WARNING})
"""What is kept in the log, by logger; SGLang's INFO would be a line for every batch."""
PEER_LOST = (
    "Connection closed by peer",
    "Connection reset by peer",
    "failed to pass monitored",
    "remote process exited",
)
"""In an error's text: it probably follows from another rank's, which should be told first."""
PEER_PATIENCE = 8.0
"""Seconds that a rank with such an error waits for the other rank to tell its own."""


class Terminal:
    """The real standard output and error of a captured process."""

    def __init__(self, log_file: Path, stdout: TextIO, stderr: TextIO, rank: int) -> None:
        self.log_file = log_file
        self.stdout = stdout
        self.stderr = stderr
        self.rank = rank
        self.exit_code = 1
        self._reported: BaseException | None = None

    def report(self, error: BaseException) -> str:
        """Tell an error and return why the run ends: in its words, or another rank's.

        The traceback to the log; one line to the person, from one rank of this machine.

        An `InputError` that all ranks raise alike is told as `fail` tells it, in its words alone.
        Under torchrun the first rank to fail tells its error. A rank that fails because a peer
        went away lets that peer speak first. Reporting the same error again prints nothing.
        """
        if error is self._reported:
            return torchrun.told() or one_line(error)
        self._reported = error
        traceback.print_exception(error, file=sys.stderr)
        sys.stderr.flush()
        line = one_line(error)
        if lost_a_peer(error):
            line = f"lost another rank: {line}"
            until = time.monotonic() + PEER_PATIENCE
            while time.monotonic() < until and not torchrun.told():
                time.sleep(0.05)
        if isinstance(error, InputError) and error.told_by_all:
            self.tell(line)
        else:
            where = f"rank {self.rank}: " if "RANK" in os.environ else ""
            self.tell(where + line, f" (traceback in {self.log_file})")
        return torchrun.told() or line

    def tell(self, why: str, where: str = "") -> None:
        """One error line to the person, unless a rank of this machine told one already."""
        if torchrun.may_tell(why):
            print(f"megarl: error: {why}{where}", file=self.stderr, flush=True)

    def interrupted(self, name: str = "") -> None:
        """The line for Ctrl-C, or for another signal of this name."""
        if self.rank == 0:
            word = f"ended by {name}" if name else "interrupted"
            print(f"megarl: {word} (log in {self.log_file})", file=self.stderr, flush=True)


_active: list[Terminal] = []
"""Descriptors 1 and 2 belong to the whole process, and so does who holds their originals."""


def real_stdout() -> TextIO:
    """Where the person reads: the terminal's standard output, captured or not."""
    return _active[-1].stdout if _active else sys.stdout


def real_stderr() -> TextIO:
    """The person's standard error, captured or not."""
    return _active[-1].stderr if _active else sys.stderr


def lost_a_peer(error: BaseException) -> bool:
    """Whether the error probably follows from the end of another rank."""
    return any(sign in str(error) for sign in PEER_LOST)


def one_line(error: BaseException) -> str:
    """The first line of an error's text, with its type unless the text was written by megarl."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    kind = type(error)
    if not lines:
        return kind.__name__
    told = lines[0] + (" …" if len(lines) > 1 else "")
    ours = kind.__module__.partition(".")[0] == "megarl" or kind in (RuntimeError, ValueError)
    return told if ours else f"{kind.__name__}: {told}"


def fail(message: str) -> None:
    """For errors that every rank meets alike (a bad recipe): the first rank to meet it prints
    `megarl: error: …` on the person's standard error. The caller exits."""
    if torchrun.may_tell(message):
        print(f"megarl: error: {message}", file=real_stderr(), flush=True)


@contextmanager
def captured(log_file: Path, rank: int | None = None) -> Iterator[Terminal]:
    """Everything written to standard output and error goes to `log_file` (appended) meanwhile.

    `rank` defaults to torchrun's RANK. An exception is told (`Terminal.report`) and becomes
    `SystemExit(Terminal.exit_code)`, 1 unless set; Ctrl-C becomes `SystemExit(130)`; a SystemExit
    passes.
    """
    terminal, saved = _redirect(log_file, rank)
    try:
        yield terminal
    except KeyboardInterrupt as error:
        traceback.print_exception(error, file=sys.stderr)
        terminal.interrupted()
        raise SystemExit(130) from None
    except Exception as error:  # the process boundary: told in one line, traceback in the log
        terminal.report(error)
        raise SystemExit(terminal.exit_code) from None
    finally:
        _restore(terminal, saved)


def quiet_libraries(log_file: Path, rank: int | None = None) -> Terminal:
    """`captured` for the rest of the process: also what is written while Python shuts down.

    An uncaught exception is told through `sys.excepthook`; the text of `sys.exit("…")` would go
    to the log only, so raise an exception instead.
    """
    terminal, _ = _redirect(log_file, rank)

    def hook(kind: type[BaseException], error: BaseException, trace: object) -> None:
        if issubclass(kind, KeyboardInterrupt):
            traceback.print_exception(error, file=sys.stderr)
            terminal.interrupted()
        else:
            terminal.report(error)

    sys.excepthook = hook
    return terminal


def _redirect(log_file: Path, rank: int | None) -> tuple[Terminal, logging.Handler]:
    rank = int(os.environ.get("RANK", "0")) if rank is None else rank
    log_file.parent.mkdir(parents=True, exist_ok=True)
    sys.stdout.flush()
    sys.stderr.flush()
    # Copies made by dup are closed in child processes, so no child holds the person's terminal.
    handles = [
        os.fdopen(os.dup(fd), "w", encoding="utf-8", errors="replace", buffering=1) for fd in (1, 2)
    ]
    log = os.open(log_file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for fd in (1, 2):
        os.dup2(log, fd)
    os.close(log)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(encoding="utf-8", errors="replace", line_buffering=True)
    started = time.strftime("%Y-%m-%d %H:%M:%S")
    print(f"=== rank {rank}, process {os.getpid()}, {started}: {' '.join(sys.argv)}", flush=True)
    # A bar in a file is a line per redraw: seldom is enough.
    os.environ.setdefault("TQDM_MININTERVAL", "10")
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(LOG_FORMAT))
    logging.getLogger().addHandler(handler)
    for name, level in LEVELS.items():
        logging.getLogger(name).setLevel(level)
    logging.captureWarnings(True)
    _active.append(Terminal(log_file, handles[0], handles[1], rank))
    return _active[-1], handler


def _restore(terminal: Terminal, handler: logging.Handler) -> None:
    _active.remove(terminal)
    logging.captureWarnings(False)
    logging.getLogger().removeHandler(handler)
    for name in LEVELS:
        logging.getLogger(name).setLevel(logging.NOTSET if name else logging.WARNING)
    for stream, handle, fd in (
        (sys.stdout, terminal.stdout, 1),
        (sys.stderr, terminal.stderr, 2),
    ):
        stream.flush()
        handle.flush()
        os.dup2(handle.fileno(), fd)
        handle.close()
