"""A reward that always varies within a group, whatever the response: learning never runs dry."""

from __future__ import annotations

from megarl.rewards.scorer import Response


def digits(response: Response) -> float:
    """The share of digits among the response's characters; `trl_run.py` has the same."""
    return sum(map(str.isdigit, response.text)) / max(1, len(response.text))
