"""A pool of gloo ranks that many distributed tests share; their imports are done (`tests/warm.py`).

`RankPool.run(world, function, *args)` calls `function(*args)` on `world` processes, each with a
fresh default process group, and returns the results by rank. A rank that raises fails the test
with that rank's traceback; its peers are killed, for they may wait in a collective, and replaced.
"""

from __future__ import annotations

import importlib
import os
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from tests.warm import forking

MOST_DESCRIPTORS = 400
"""A worker with more open files is replaced: SGLang leaks a thread and some files per engine."""


def _serve(connection: Connection) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    while True:
        try:
            module, name, arguments, rank, world, store, timeout = connection.recv()
        except EOFError:
            return
        try:
            for key, value in (("RANK", rank), ("LOCAL_RANK", rank), ("WORLD_SIZE", world)):
                os.environ[key] = str(value)
            dist.init_process_group(
                "gloo",
                store=dist.FileStore(store, world),
                rank=rank,
                world_size=world,
                timeout=timedelta(seconds=timeout),
            )
            function = importlib.import_module(module)
            for part in name.split("."):
                function = getattr(function, part)
            answer = ("ok", function(*arguments))
            if dist.is_initialized():
                dist.destroy_process_group()
            connection.send((*answer, len(os.listdir("/proc/self/fd"))))
        except BaseException:  # the process boundary: the parent gets the traceback
            connection.send(("error", traceback.format_exc(), 0))
            return


class RankPool:
    """Worker processes, started when first needed."""

    def __init__(self) -> None:
        self._context = forking()
        self._workers: list[tuple[Any, Connection]] = []
        self._folder = tempfile.TemporaryDirectory(prefix="megarl-pool-")
        self._runs = 0

    def _grow(self, world: int) -> None:
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        while len(self._workers) < world:
            mine, theirs = self._context.Pipe()
            process = self._context.Process(target=_serve, args=(theirs,), daemon=False)
            process.start()
            theirs.close()
            self._workers.append((process, mine))

    def run(
        self, world: int, function: Callable[..., Any], *arguments: Any, timeout: float = 120
    ) -> list[Any]:
        """Results of `function(*arguments)` by rank; raises `AssertionError` with a traceback."""
        self._grow(world)
        self._runs += 1
        store = str(Path(self._folder.name) / f"store{self._runs}")
        crew = self._workers[:world]
        for rank, (_, connection) in enumerate(crew):
            connection.send(
                (function.__module__, function.__qualname__, arguments, rank, world, store, timeout)
            )
        results: dict[int, Any] = {}
        worn: list[int] = []
        ranks = {connection: rank for rank, (_, connection) in enumerate(crew)}
        while len(results) < world:
            ready = wait([c for c, rank in ranks.items() if rank not in results], timeout=timeout)
            if not ready:
                self.close()
                missing = [rank for rank in range(world) if rank not in results]
                raise AssertionError(f"ranks {missing} gave no answer in {timeout} s")
            for connection in ready:
                rank = ranks[connection]
                try:
                    status, value, descriptors = connection.recv()
                except EOFError:
                    status, value, descriptors = "error", "the process died", 0
                if status == "error":
                    self.close()
                    raise AssertionError(f"rank {rank} of {world} failed:\n{value}")
                results[rank] = value
                if descriptors > MOST_DESCRIPTORS:
                    worn.append(rank)
        for rank in sorted(worn, reverse=True):
            self._dismiss(self._workers.pop(rank))
        return [results[rank] for rank in range(world)]

    @staticmethod
    def _dismiss(worker: tuple[Any, Connection]) -> None:
        process, connection = worker
        connection.close()
        process.join(timeout=5)
        if process.is_alive():
            process.kill()
            process.join()

    def close(self) -> None:
        for process, connection in self._workers:
            connection.close()
            process.kill()
        for process, _ in self._workers:
            process.join()
        self._workers.clear()
