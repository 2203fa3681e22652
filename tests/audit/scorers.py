"""Scorers of the audited run, named in its recipe by import path."""

from megarl.rewards.scorer import Response


def by_thirds(response: Response) -> float:
    """1 for about a third of all responses, whatever they say; a ninth cannot be scored."""
    if response.token_ids[0] % 9 == 0:
        raise ValueError("first id is a multiple of 9")
    return float(sum(response.token_ids) % 3 == 0)
