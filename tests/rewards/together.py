"""Batched and async scorers. Imported by scoring workers."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Sequence

import numpy as np

from megarl.rewards.scorer import Response, RewardParts

AT_ONCE = [0, 0]
"""Calls that are on their way, and the most that were."""


def _obey(text: str) -> float:
    match text.split():
        case ["score", number]:
            return float(number)
        case ["raise"]:
            raise RuntimeError("it")
        case ["kill"]:
            os.kill(os.getpid(), signal.SIGKILL)
        case ["block"]:
            time.sleep(3600)
        case ["leave"]:
            raise SystemExit(3)
        case ["bytes"]:
            bytearray(8 << 30)
    raise ValueError(f"cannot obey {text!r}")


def batched(responses: list[Response]) -> Sequence[object]:
    """Each one's detail is how many it was scored with."""
    assert isinstance(responses, list)
    return [RewardParts(_obey(one.text), f"of {len(responses)}") for one in responses]


def shaped(responses: list[Response]) -> object:
    """Gives back the shape that the first response's text names."""
    scores = [float(len(one.text)) for one in responses]
    match responses[0].text:
        case "array":
            return np.array(scores, dtype=np.float32)
        case "tuple":
            return tuple(scores)
        case "short":
            return scores[1:]
        case "long":
            return [*scores, 0.0]
        case "one":
            return scores[0]
        case "none":
            return None
        case "dict":
            return dict.fromkeys(range(len(scores)), 1.0)
        case "square":
            return np.array(scores)[:, None]
        case "nan":
            return [float("nan"), *scores[1:]]
        case "text":
            return "1" * len(scores)
        case "yield":
            return (score for score in scores)
    raise ValueError(responses[0].text)


async def _wait(text: str) -> float:
    match text.split():
        case ["wait", seconds]:
            await asyncio.sleep(float(seconds))
            return 1.0
        case ["stubborn"]:
            while True:
                try:
                    await asyncio.sleep(3600)
                except asyncio.CancelledError:
                    continue
        case ["fork"]:
            os.fork()
            await asyncio.sleep(0.05)
            return 1.0
        case ["pid"]:
            return float(os.getpid())
        case ["cancel"]:
            raise asyncio.CancelledError
        case ["spawn"]:
            process = await asyncio.create_subprocess_exec("sleep", "3600")
            return float(process.returncode is None)
    return _obey(text)


async def awaited(response: Response) -> RewardParts:
    """Its detail is the most that were on their way at once until it ended."""
    AT_ONCE[0] += 1
    AT_ONCE[1] = max(AT_ONCE)
    try:
        return RewardParts(await _wait(response.text), str(AT_ONCE[1]))
    finally:
        AT_ONCE[0] -= 1


def busy(response: Response) -> float:
    """A plain scorer that takes its time."""
    time.sleep(0.3)
    return 1.0


async def in_steps(response: Response) -> float:
    """Asks twice; 0.2 s in all."""
    await asyncio.sleep(0.1)
    await asyncio.sleep(0.1)
    return 1.0


async def stepping(response: Response) -> RewardParts:
    """A step at each token: an answer far larger than a socket holds."""
    await asyncio.sleep(0.01)
    return RewardParts(1.0, "", tuple((at, 0.5) for at in range(len(response.token_ids))))


class Awaited:
    async def __call__(self, response: Response) -> float:
        await asyncio.sleep(0.0)
        return 2.0


an_object = Awaited()


async def both(responses: list[Response]) -> list[RewardParts]:
    """Batched and async."""
    waited = await asyncio.gather(*(_wait(one.text) for one in responses))
    return [RewardParts(score, f"of {len(responses)}") for score in waited]


def not_async(response: Response) -> object:
    return _wait(response.text)


async def generating(response: Response):
    yield 1.0


def running_a_loop(response: Response) -> float:
    """A plain scorer with a loop of its own."""
    return asyncio.run(_wait("wait 0"))
