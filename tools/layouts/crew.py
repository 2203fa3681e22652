"""Ranks of one number, forked with their imports done; they live until one of them fails."""

from __future__ import annotations

import importlib
import multiprocessing
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

PRELOADED = "tools.layouts.preloaded"
"""What the fork server imports."""
TIMEOUT = 600.0
"""Seconds that a rank waits for the others, and that all may be silent."""

ENDING_SECONDS = 5.0
LAST_LINES = 20


class RankError(RuntimeError):
    """A rank raised or died; the message is its traceback."""


def forking() -> Any:
    """The context that starts processes with their imports done."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([PRELOADED])
    return context


class Crew:
    """`world` processes that do one job after the other. Close it."""

    def __init__(self, world: int, folder: Path) -> None:
        """`folder` takes what the ranks print, `ranks.log`."""
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        self.log = folder / "ranks.log"
        context = forking()
        self._members: list[tuple[Any, Connection]] = []
        for rank in range(world):
            mine, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, rank, world, str(self.log)))
            process.start()
            theirs.close()
            self._members.append((process, mine))

    def run(self, function: str, job: Any) -> Iterator[Any]:
        """What rank 0 tells while every rank does `function(job, tell, meet)`; `module:name`.

        `meet()` gives a rank a fresh default process group. Raises `RankError`.
        """
        with tempfile.TemporaryDirectory(prefix="megarl-layouts-") as stores:
            for _, connection in self._members:
                connection.send((function, job, stores))
            waiting = {connection: rank for rank, (_, connection) in enumerate(self._members)}
            while waiting:
                ready = wait(list(waiting), timeout=TIMEOUT)
                if not ready:
                    raise RankError(f"ranks {sorted(waiting.values())} were silent {TIMEOUT:.0f} s")
                for connection in ready:
                    try:
                        kind, value = connection.recv()
                    except EOFError:
                        kind, value = "error", f"rank {waiting[connection]} died\n{self._last()}"
                    if kind == "error":
                        raise RankError(value)
                    if kind == "done":
                        del waiting[connection]
                    else:
                        yield value

    def _last(self) -> str:
        """Of what the ranks printed."""
        told = self.log.read_text(encoding="utf-8", errors="replace") if self.log.exists() else ""
        return "\n".join(told.splitlines()[-LAST_LINES:])

    def close(self) -> None:
        """Idle ranks end by themselves; those that wait for a lost one are killed."""
        for _, connection in self._members:
            connection.close()
        until = time.monotonic() + ENDING_SECONDS
        for process, _ in self._members:
            process.join(max(0.0, until - time.monotonic()))
            if process.is_alive():
                process.kill()
                process.join()
        self._members.clear()


def _serve(connection: Connection, rank: int, world: int, log: str) -> None:
    import torch

    target = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for stream in (1, 2):
        os.dup2(target, stream)
    os.close(target)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)
    from megarl.platforms import platform_of, prepare_sglang

    torch.set_num_threads(1)
    platform_of("cpu").prepare()
    prepare_sglang()  # before megatron looks for CUDA
    for key, value in (("RANK", rank), ("LOCAL_RANK", rank), ("WORLD_SIZE", world)):
        os.environ[key] = str(value)
    while True:
        try:
            function, job, stores = connection.recv()
        except EOFError:
            return
        try:
            _do(function, job, stores, connection, rank, world)
            connection.send(("done", None))
        except BaseException:  # the process boundary: the parent gets the traceback
            connection.send(("error", f"rank {rank} of {world}: {traceback.format_exc()}"))
            return


def _do(
    function: str,
    job: Any,
    stores: str,
    connection: Connection,
    rank: int,
    world: int,
) -> None:
    import torch.distributed as dist

    meetings = 0

    def leave() -> None:
        if dist.is_initialized():
            dist.destroy_process_group()

    def meet() -> None:
        nonlocal meetings
        leave()
        meetings += 1
        dist.init_process_group(
            "gloo",
            store=dist.FileStore(f"{stores}/{meetings}", world),
            rank=rank,
            world_size=world,
            timeout=timedelta(seconds=TIMEOUT),
        )

    def tell(value: Any) -> None:
        if rank == 0:
            connection.send(("told", value))

    module, _, name = function.partition(":")
    getattr(importlib.import_module(module), name)(job, tell, meet)
    leave()
