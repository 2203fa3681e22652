"""torchrun for one machine, quiet when a rank fails: that rank has told its error in one line.

    python -m megarl.launcher NPROC MODULE [argument …]

Starts `NPROC` ranks of `python -m MODULE argument …` and ends with the failed rank's exit code.
The ranks meet at a port that is free, or at MASTER_ADDR and MASTER_PORT where those are set.
SIGUSR1 asks all of them to stop (`megarl.stop`); then the exit code is 75.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

from megarl import stop
from megarl.torchrun import OURS, STAGE, STOP, TOLD

SHUTDOWN_SECONDS = 10
"""After one rank failed, how long the others may take to end before they are killed."""
ASKED = "MEGARL_STOP_ASKED"
"""Set by the launch script where SIGUSR1 came before there was a launcher."""
SIGNALS = (signal.SIGINT, signal.SIGTERM)


class PortError(RuntimeError):
    """MASTER_ADDR and MASTER_PORT cannot be used."""


def main(arguments: list[str]) -> int:
    ranks, module, *rest = arguments
    stop.hold()
    # Until torchrun takes signals over there is nothing to clean up.
    for number in SIGNALS:
        signal.signal(number, lambda received, _: os._exit(_ended_by(received)))
    # The agent's warnings repeat what the failed rank has said; TORCH_CPP keeps its own level.
    os.environ.setdefault("TORCHELASTIC_LOG_LEVEL", "CRITICAL")
    os.environ[OURS] = "1"
    try:
        meeting = rendezvous()
    except PortError as error:
        return _told(f"error: {error}", 2)
    import torch.distributed.run  # noqa: F401 - takes seconds; no folder is left if it is cut short

    with tempfile.TemporaryDirectory(prefix="megarl_", ignore_cleanup_errors=True) as logs:
        _take_stops(Path(logs) / STOP)
        options = [*meeting, "--nproc_per_node", ranks, "--log_dir", logs]
        options += ["--shutdown_timeout", str(SHUTDOWN_SECONDS), "-m", module, *rest]
        return _run(options, Path(logs))


def _take_stops(file: Path) -> None:
    """`file` is there as soon as this launcher is, or was, asked to stop: its ranks look for it."""

    def ask() -> None:
        with suppress(FileNotFoundError):  # the folder went with the last rank: nobody is left
            file.touch()

    if os.environ.pop(ASKED, ""):
        ask()
    stop.on_request(ask)


def rendezvous() -> list[str]:
    """torchrun's options for where the ranks meet. Raises `PortError`."""
    port = os.environ.get("MASTER_PORT")
    if port is None:
        return ["--standalone"]
    address = os.environ.get("MASTER_ADDR", "127.0.0.1")
    if not port.isdigit() or not 0 < int(port) < 65536:
        raise PortError(f"MASTER_PORT={port} is no port; unset it and a free one is taken")
    try:
        family, *_, place = socket.getaddrinfo(address, int(port), type=socket.SOCK_STREAM)[0]
        socket.create_server(place[:2], family=family).close()
    except OSError as error:
        known = error.errno is not None and error.errno > 0  # a name that is not found has none
        reason = os.strerror(error.errno) if known else error.strerror
        raise PortError(
            f"MASTER_ADDR={address} MASTER_PORT={port} cannot be listened on here "
            f"({reason}); choose another port, or unset MASTER_PORT and a free one is taken"
        ) from error
    return ["--master_addr", address, "--master_port", port]


def _run(options: list[str], logs: Path) -> int:
    from torch.distributed.elastic.multiprocessing.api import PContext, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import parse_args, run

    # Its loggers have levels of their own, and a line of theirs would tear rank 0's live panel.
    logging.disable(logging.ERROR)
    # After a rank failed torchrun closes the others without passing its --shutdown_timeout on.
    PContext.close.__defaults__ = (None, SHUTDOWN_SECONDS)
    try:
        try:
            run(parse_args(options))
        finally:  # a second signal, as Slurm sends one to all of a job, finds everything told
            for number in SIGNALS:
                signal.signal(number, signal.SIG_IGN)
    except ChildFailedError as error:
        return _failed(error, logs)
    except SignalException as error:
        return _ended_by(int(error.sigval))
    return 0


def _failed(error: object, logs: Path) -> int:
    """The exit code of the rank that failed first. What no rank could tell is told here.

    torchrun's failures include the ranks that it ended itself, by SIGTERM and then SIGKILL.
    """
    codes = {rank: failure.exitcode for rank, failure in error.failures.items()}
    failed = [code for code in codes.values() if 0 < code < 128]
    if stop.EXIT_CODE in failed:
        return stop.EXIT_CODE  # the ranks that torchrun ended then were on their way out too
    if list(logs.glob(f"*/*/{TOLD}")):
        # A rank that met wrong input ends with 2, and those it leaves alone with 1.
        return 2 if 2 in failed else failed[0] if failed else 1
    for rank, code in codes.items():
        if code < 0 and -code not in SIGNALS:
            name = signal.Signals(-code).name
            where = _stage_of(error.failures[rank], logs)
            return _told(f"error: rank {rank} was killed by {name}{where}", 128 - code)
    rank, failure = error.get_first_failure()
    if failed:
        where = _stage_of(failure, logs)
        return _told(f"error: rank {rank} ended with exit code {failed[0]}{where}", failed[0])
    interrupted = {-signal.SIGINT, 128 + signal.SIGINT} & set(codes.values())
    return _ended_by(signal.SIGINT if interrupted else signal.SIGTERM)


def _stage_of(failure: object, logs: Path) -> str:
    files = sorted(logs.glob(f"*/attempt_*/{failure.local_rank}/{STAGE}"))
    stage = files[-1].read_text(encoding="utf-8").strip() if files else ""
    return f" in {stage}" if stage else ""


def _ended_by(number: int) -> int:
    word = "interrupted" if number == signal.SIGINT else f"ended by {signal.Signals(number).name}"
    return _told(word, 128 + number)


def _told(text: str, code: int) -> int:
    print(f"megarl: {text}", file=sys.stderr, flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
