"""Processes that start with a rank's imports done: of the rank pool, and of whole runs.

`forking()` is the context of such processes, `run_ranks` a launch by them. Its ranks are those of
torchrun (`megarl.process.main`, an environment, a store and a folder as torchrun gives them), but
nobody launches them: for tests of what a run computes and writes. What is tested of the launch
script, of torchrun, signals, exit codes and ends starts for real (`tests.launch.runs.launch`).
Forked ranks also share one hash seed, so a run that must come out equal is held against a real one.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[1]
ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
ENDING_SECONDS = 10.0
"""After a rank failed, how long the others may take to end before they are killed."""


def forking() -> ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.preloaded"])
    return context


def run_ranks(
    arguments: list[str],
    environment: dict[str, str],
    timeout: float,
    entry: Callable[[], int] | None = None,
    world: int | None = None,
) -> tuple[int, str]:
    """Ranks of one machine with a launch's `arguments`; (exit code, both streams of all ranks).

    Each calls `entry`, by default `megarl.process.main`, whose arguments say how many there are;
    those of another entry need `world`. The exit code is that of the first rank
    that failed; the others then get SIGTERM. Raises `AssertionError` after `timeout` seconds, and
    where a process of the ranks outlives them.
    """
    from torch.distributed import TCPStore

    from megarl.modes.launch import read_launch

    world = world or read_launch(arguments).recipe.world.ranks
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    store.set_timeout(timedelta(seconds=timeout))
    with tempfile.TemporaryDirectory(prefix="megarl_", ignore_cleanup_errors=True) as folder:
        said = Path(folder) / "said"
        ranks = []
        for rank in range(world):
            place = Path(folder) / "run" / "attempt_0" / str(rank)
            place.mkdir(parents=True)
            given = environment | {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(world),
                "LOCAL_WORLD_SIZE": str(world),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(store.port),
                "TORCHELASTIC_USE_AGENT_STORE": "True",
                "TORCHELASTIC_RUN_ID": "run",
                ERROR_FILE: str(place / "error.json"),
            }
            ranks.append(forking().Process(target=_rank, args=(arguments, given, said, entry)))
        for rank in ranks:
            rank.start()
        code = _code_of(ranks, time.monotonic() + timeout)
        told = said.read_text(errors="replace") if said.exists() else ""
        left = _left(folder)
    assert code is not None, f"not over after {timeout} s: {told}"
    assert not left, f"{left} outlived the ranks: {told}"
    return code, told


def _code_of(ranks: list[BaseProcess], until: float) -> int | None:
    """Of the ranks' end, as torchrun brings it about; None where that took too long."""
    first, killed = 0, False
    while any(rank.exitcode is None for rank in ranks):
        failed = [rank.exitcode for rank in ranks if rank.exitcode]
        if failed and not first:
            first, until = failed[0], time.monotonic() + ENDING_SECONDS
            for rank in ranks:
                rank.terminate()
        if time.monotonic() > until:
            killed = True
            for rank in ranks:
                rank.kill()
                rank.join()
        time.sleep(0.02)
    if killed and not first:
        return None
    code = first or next((rank.exitcode for rank in ranks if rank.exitcode), 0)
    return code if code >= 0 else 128 - code


def _left(folder: str) -> list[str]:
    """Programs that ranks of `folder` started and that live on, by their environment."""

    def found() -> list[psutil.Process]:
        every = psutil.process_iter(["environ"])
        return [one for one in every if folder in str((one.info["environ"] or {}).get(ERROR_FILE))]

    _, alive = psutil.wait_procs(found(), timeout=1)
    # What has ended and was not collected yet, as orphans are by and by, does not live.
    every = psutil.process_iter(["status"])
    living = {one.pid for one in every if one.info["status"] != psutil.STATUS_ZOMBIE}
    return [str(one) for one in alive if one.pid in living]


def _rank(
    arguments: list[str],
    environment: dict[str, str],
    said: Path,
    entry: Callable[[], int] | None,
) -> None:
    """One rank, in a process of its own."""
    target = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for stream in (1, 2):
        os.dup2(target, stream)
    os.close(target)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(ROOT)
    added = environment.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:0] = [each for each in added if each and each not in sys.path]
    sys.argv[:] = ["megarl.train", *arguments]
    from megarl.process import main

    sys.exit((entry or main)())
