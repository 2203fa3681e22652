"""`format`: 1 when the whole response (outer white space aside) matches a pattern, else 0."""

from __future__ import annotations

import re

from megarl.rewards.scorer import Response, RewardParts, Scorer


def make(*, pattern: str) -> Scorer:
    """Option `pattern`: regular expression that must match from the first to the last character."""
    try:
        expression = re.compile(pattern)
    except re.error as error:
        raise ValueError(f"pattern {pattern!r} is no regular expression: {error}") from error

    def score(response: Response) -> RewardParts:
        return RewardParts(float(expression.fullmatch(response.text.strip()) is not None))

    return score
