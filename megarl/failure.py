"""How a rank ends when it may not go on: told first, then torn down, and gone in seconds.

Three ways lead here: an exception, a stuck rank (`watchdog.py`), a signal. Each leaves FAILED in
the journal and at most one line, from one rank of the machine. Teardown comes after the line and
has a limit, because closing process groups can wait for ranks that are gone.

A run that stops as it was asked (`stop.py`) ends here too: one line, exit code 75, no FAILED.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from megarl import torchrun
from megarl.contracts.errors import InputError
from megarl.contracts.states import Journal
from megarl.observe.console import Console
from megarl.observe.logs import Terminal, lost_a_peer
from megarl.stages import StageBoard
from megarl.stop import EXIT_CODE, StopAsked, StopRequest
from megarl.torchrun import OURS

TEARDOWN_SECONDS = 3.0
SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Failure:
    """The end of one rank's run, if it fails."""

    def __init__(self, terminal: Terminal, board: StageBoard) -> None:
        self.stop = StopRequest()
        self._terminal, self._board = terminal, board
        # A world of one gets torchrun's variables later, from `world.process_group`.
        self._alone = "RANK" not in os.environ
        self._lost = False
        self._journal: Journal | None = None
        self._console: Console | None = None

    def attach(self, journal: Journal, console: Console) -> None:
        """What is told of the end, once there is a run."""
        self._journal, self._console = journal, console

    @contextmanager
    def told(self) -> Iterator[None]:
        """An exception that leaves the context is told before anything outside is torn down."""
        try:
            yield
        except StopAsked as asked:
            self._stopped(str(asked))
            raise SystemExit(EXIT_CODE) from None
        except Exception as error:  # the process boundary, entered innermost so that it is first
            self._lost = lost_a_peer(error)
            if isinstance(error, InputError) and not self._has_weights:
                self._terminal.exit_code = 2
            self._record(self._terminal.report(error))
            self.leave_signals()
            _leave_within(TEARDOWN_SECONDS, self._terminal.exit_code)
            raise

    @property
    def _has_weights(self) -> bool:
        """The run came to a version: what it was given could be used."""
        return self._journal is not None and self._journal.version is not None

    def _stopped(self, told: str) -> None:
        if self._console is not None:
            self._console.close()
        if self._terminal.rank == 0:
            print(f"megarl: {told}", file=self._terminal.stderr, flush=True)
        self.leave_signals()
        _leave_within(TEARDOWN_SECONDS, EXIT_CODE)

    def stuck(self, message: str) -> None:
        """Called by the watchdog's thread; ends the process."""
        self._record(message)
        faulthandler.dump_traceback(sys.stderr, all_threads=True)
        self._terminal.tell(message)
        os._exit(1)

    def watch_signals(self) -> None:
        """End at once on SIGINT and SIGTERM, also while the main thread is inside a library; on
        SIGUSR1 the run is only asked to stop.

        Python runs handlers between two instructions of the main thread, which a collective that
        waits for a dead rank never reaches; the wake-up descriptor is written by the C handler.
        """
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        for number in SIGNALS:
            signal.signal(number, lambda *_: None)
        threading.Thread(target=self._serve_signals, args=(reader,), daemon=True).start()
        self.stop.listen()

    def leave_signals(self) -> None:
        """SIGINT and SIGTERM end the process without a word again: its end has been told, or was
        good. SIGUSR1 still does nothing."""
        signal.set_wakeup_fd(-1)
        for number in SIGNALS:
            signal.signal(number, signal.SIG_DFL)

    def _serve_signals(self, reader: int) -> None:
        number = 0
        while number not in SIGNALS:
            number = os.read(reader, 1)[0]
        name = signal.Signals(number).name
        why = "lost another rank" if self._lost else f"ended by {name}"
        self._record(torchrun.told() or why)
        print(f"megarl: ended by {name} in {self._board.now.stage}", file=sys.stderr)
        faulthandler.dump_traceback(sys.stderr, all_threads=True)
        # The launcher tells it for all ranks. torchrun sends SIGTERM when a rank has failed.
        if not os.environ.get(OURS) and (number == signal.SIGINT or self._alone):
            self._terminal.interrupted("" if number == signal.SIGINT else name)
        os._exit(128 + number)

    def _record(self, reason: str) -> None:
        if self._journal is not None:
            self._journal.fail(f"{self._board.now.stage}: {reason}")
        if self._console is not None:
            self._console.close()


def _leave_within(seconds: float, code: int) -> None:
    def leave() -> None:
        time.sleep(seconds)
        os._exit(code)

    threading.Thread(target=leave, daemon=True).start()
