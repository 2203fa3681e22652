"""`exact_match`: 1 when the answer found in the response equals the prompt's, as text; else 0.

A regular expression can take exponentially long on some texts. Nothing here bounds that: the
worker's deadline (`reward.deadline_seconds`) does, and the response is then a `timeout`.
"""

from __future__ import annotations

import re

from megarl.rewards.options import check_flag, check_word, compiled
from megarl.rewards.scorer import NO_ANSWER, Response, RewardParts, Scorer

NOT_FINISHED = "not_finished"


def make(
    *,
    pattern: str | None = None,
    take: str = "last",
    finished: bool = True,
    ignore_case: bool = False,
    answer_is: str = "text",
) -> Scorer:
    """Options:

    - `pattern`: regular expression with one group, searched in the response without surrounding
      white space; the group is the answer. None: the whole response is.
    - `take`: which match counts, `last` or `first`.
    - `finished`: a response that was cut off scores 0.
    - `ignore_case`: answers that differ only in case are equal.
    - `answer_is`: `text`: the found answer must equal the prompt's. `pattern`: the prompt's answer
      is a regular expression that must match the found answer from end to end.

    Both answers are compared without surrounding white space. An empty answer never matches.
    A prompt without an answer cannot be scored, nor one whose answer is to be a regular expression
    and is none, or is one that an empty text matches (`ValueError`).
    """
    check_word("take", take, ("first", "last"))
    check_flag("finished", finished)
    check_flag("ignore_case", ignore_case)
    check_word("answer_is", answer_is, ("text", "pattern"))
    expression = None if pattern is None else compiled("pattern", pattern, groups=1)

    def score(response: Response) -> RewardParts:
        wanted = response.answer.strip()
        if not wanted:
            raise ValueError("the prompt has no answer to compare with")
        wanted_pattern = _wanted(wanted, ignore_case) if answer_is == "pattern" else None
        if finished and not response.finished:
            return RewardParts(0.0, NOT_FINISHED)
        found = response.text.strip()
        if expression is not None:
            matches = expression.findall(found)
            found = matches[-1 if take == "last" else 0].strip() if matches else ""
        if not found:
            return RewardParts(0.0, NO_ANSWER)
        if wanted_pattern is not None:
            return RewardParts(float(wanted_pattern.fullmatch(found) is not None))
        if ignore_case:
            return RewardParts(float(found.casefold() == wanted.casefold()))
        return RewardParts(float(found == wanted))

    return score


def _wanted(answer: str, ignore_case: bool) -> re.Pattern[str]:
    try:
        expression = re.compile(answer, re.IGNORECASE if ignore_case else 0)
    except re.error as error:
        raise ValueError(
            f"the prompt's answer {answer!r} is no regular expression: {error}"
        ) from error
    # `.*` and the like would be won by saying anything at all.
    if expression.fullmatch("") is not None:
        raise ValueError(f"the prompt's answer {answer!r} matches an empty text")
    return expression
