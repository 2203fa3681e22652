"""Own scorers, named in a recipe by import path."""

import json
import os

from megarl.rewards.scorer import Response


def digit_share(response: Response) -> float:
    """Share of the response's characters that are digits."""
    return sum(c.isdigit() for c in response.text) / max(1, len(response.text))


def recorded(response: Response, *, file: str) -> float:
    """Appends what was sampled to `file`, one line at a time, and scores nothing."""
    line = json.dumps([response.prompt_id, response.token_ids]) + "\n"
    out = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.write(out, line.encode())
    os.close(out)
    return 0.0


def stuck(response: Response) -> float:
    """Never ends."""
    while True:
        pass


def broken(response: Response) -> float:
    raise KeyError("no such answer")


def meeting_point(response: Response) -> float:
    """The port where the run's ranks met."""
    return float(os.environ["MASTER_PORT"])


def choosy(response: Response) -> float:
    """Cannot score answers that end in 7, gives all responses to even ones the same."""
    if response.answer.endswith("7"):
        raise ValueError("ends in 7")
    return digit_share(response) if int(response.answer) % 2 else 1.0
