"""Graders of a user's own, for the bench of scoring. Imported by scoring workers."""

from __future__ import annotations

import asyncio
import os
import signal
import time
import zlib

from megarl.rewards.scorer import Response


def plain(response: Response) -> float:
    """1 where the answer is the response's last word."""
    return float(response.text.split()[-1] == response.answer)


def batched(responses: list[Response]) -> list[float]:
    """The same of a list."""
    return [plain(response) for response in responses]


async def awaited(response: Response) -> float:
    """The same, awaited."""
    return plain(response)


async def waiting(response: Response, *, least: float, most: float) -> float:
    """Waits so many seconds, as for a judge elsewhere; the same for the same tokens."""
    share = zlib.crc32(repr(response.token_ids).encode()) / 2**32
    await asyncio.sleep(least + (most - least) * share)
    return share


def burning(response: Response, *, seconds: float) -> float:
    """Keeps a core busy for so many seconds of CPU time."""
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        pass
    return 1.0


def storming(response: Response) -> float:
    """Never ends, ends its process, or gives 1, as the row says."""
    kind = response.metadata["kind"]
    if kind == "stuck":
        time.sleep(1e6)
    if kind == "crash":
        os.kill(os.getpid(), signal.SIGKILL)
    return 1.0
