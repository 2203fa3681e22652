"""`exact_match`: 1 when the answer found in the response equals the prompt's, as text; else 0."""

from __future__ import annotations

import re

from megarl.rewards.scorer import NO_ANSWER, Response, RewardParts, Scorer

NOT_FINISHED = "not_finished"


def make(*, pattern: str | None = None, take: str = "last", finished: bool = True) -> Scorer:
    """Options:

    - `pattern`: regular expression with one group, searched in the response without surrounding
      white space; the group is the answer. None: the whole response is.
    - `take`: which match counts, `last` or `first`.
    - `finished`: a response that was cut off scores 0.

    Both answers are compared without surrounding white space. An empty answer never matches; a
    prompt without an answer cannot be scored.
    """
    if take not in ("first", "last"):
        raise ValueError(f"take must be first or last, not {take!r}")
    expression = None if pattern is None else _compile(pattern)

    def score(response: Response) -> RewardParts:
        wanted = response.answer.strip()
        if not wanted:
            raise ValueError("the prompt has no answer to compare with")
        if finished and not response.finished:
            return RewardParts(0.0, NOT_FINISHED)
        found = response.text.strip()
        if expression is not None:
            matches = expression.findall(found)
            found = matches[-1 if take == "last" else 0].strip() if matches else ""
        if not found:
            return RewardParts(0.0, NO_ANSWER)
        return RewardParts(float(found == wanted))

    return score


def _compile(pattern: str) -> re.Pattern[str]:
    try:
        expression = re.compile(pattern)
    except re.error as error:
        raise ValueError(f"pattern {pattern!r} is no regular expression: {error}") from error
    if expression.groups != 1:
        raise ValueError(
            f"pattern {pattern!r} has {expression.groups} groups; exactly one must hold the answer "
            "(write the others as (?:…))"
        )
    return expression
