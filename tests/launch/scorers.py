"""Own scorers, named in a recipe by import path."""

from megarl.rewards.scorer import Response


def digit_share(response: Response) -> float:
    """Share of the response's characters that are digits."""
    return sum(c.isdigit() for c in response.text) / max(1, len(response.text))


def stuck(response: Response) -> float:
    """Never ends."""
    while True:
        pass


def broken(response: Response) -> float:
    raise KeyError("no such answer")
