"""A graceful stop, for pre-emption and time limits: SIGUSR1 asks a run to end and be started again.

    kill -USR1 PID                          of the launcher (`bash launch/grpo.sh …`) or of any rank
    sbatch --signal=B:USR1@120 …            Slurm does it 120 s before the time limit
    scancel --batch --signal=USR1 JOB       … or now

The run finishes the iteration it is in, saves a whole checkpoint and ends with exit code 75
(EX_TEMPFAIL: not done, start again). A run that is still starting finishes its first iteration
first, so that every start makes progress. A second SIGUSR1 changes nothing. SIGTERM and SIGINT end
a run at once, also one that was asked to stop.

SIGUSR1 is blocked in every thread and waited for by one of its own, so that it interrupts no
system call and is heard while the main thread is inside a collective. The mask is inherited: ranks
are born with it and processes that score are not ended by a SIGUSR1 to all of a job.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path

from megarl import torchrun

SIGNAL = signal.SIGUSR1
EXIT_CODE = os.EX_TEMPFAIL


class StopAsked(Exception):
    """Ends the loop on every rank, once the checkpoint at `folder` is whole."""

    def __init__(self, iteration: int, folder: Path) -> None:
        """`iteration` is the last one that was finished."""
        super().__init__(
            f"stopped after iteration {iteration} as asked ({SIGNAL.name}), saved in {folder}; "
            "the same command goes on"
        )


def hold() -> None:
    """From here on a SIGUSR1 waits for `on_request`. For the main thread, before any other."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {SIGNAL})


def on_request(act: Callable[[], None]) -> None:
    """Call `act` on a thread of its own at every SIGUSR1, also at one that was held."""

    def serve() -> None:
        while True:
            signal.sigwait({SIGNAL})
            act()

    hold()
    threading.Thread(target=serve, name="stop", daemon=True).start()


class StopRequest:
    """Whether this rank or its launcher was asked to stop.

    Ranks may hear of it at different times, so they must agree before one of them stops.
    """

    def __init__(self) -> None:
        self._asked = threading.Event()
        self._file = torchrun.stop_file()

    def listen(self) -> None:
        """Hear SIGUSR1 from now on."""
        on_request(self._asked.set)

    @property
    def asked(self) -> bool:
        """Stays true once it was. Costs a look for a file: for once an iteration."""
        if not self._asked.is_set() and self._file is not None and self._file.exists():
            self._asked.set()
        return self._asked.is_set()
