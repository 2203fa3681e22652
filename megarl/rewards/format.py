"""`format`: 1 when the whole response has the form that a pattern or a list of tags gives, else 0.

A regular expression can take exponentially long on some texts. Nothing here bounds that: the
worker's deadline (`reward.deadline_seconds`) does, and the response is then a `timeout`. Tags are
looked for in linear time.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from megarl.rewards.options import check_flag, check_text, compiled
from megarl.rewards.scorer import Response, RewardParts, Scorer

TAG_NAME = re.compile(r"[A-Za-z_][\w-]*")


def make(
    *,
    pattern: str | None = None,
    tags: Sequence[str] | None = None,
    outside: bool = False,
    filled: bool = True,
    prefix: str = "",
) -> Scorer:
    """Options, exactly one of the first two:

    - `pattern`: regular expression that must match from the first to the last character (outer
      white space aside).
    - `tags`: names, as in `[think, answer]`: `<think>…</think>` and then `<answer>…</answer>`,
      every one of the four exactly once and in this order, so no tag within another.
    - `outside`: text may stand before, between and after the tags.
    - `filled`: something other than white space must stand in every tag.
    - `prefix`: put in front of the response first: what the chat template has already written of
      it, as `<think>`.
    """
    if (pattern is None) == (tags is None):
        raise ValueError("give pattern or tags, one of the two")
    check_flag("outside", outside)
    check_flag("filled", filled)
    check_text("prefix", prefix, empty=True)
    if pattern is not None:
        problem = _by_pattern(pattern)
    else:
        problem = _by_tags(_checked(tags), outside, filled)

    def score(response: Response) -> RewardParts:
        detail = problem((prefix + response.text).strip())
        return RewardParts(float(detail is None), detail or "")

    return score


def _by_pattern(pattern: str) -> Callable[[str], str | None]:
    expression = compiled("pattern", pattern)
    # A pattern has no words for what is wrong, so the detail stays empty.
    return lambda text: None if expression.fullmatch(text) else ""


def _checked(tags: Sequence[str] | None) -> list[str]:
    names = list(tags) if isinstance(tags, Sequence) and not isinstance(tags, str) else []
    if not names or len(set(map(str, names))) < len(names):
        raise ValueError(f"tags must be a list of different names, not {tags!r}")
    for name in names:
        if not isinstance(name, str) or not TAG_NAME.fullmatch(name):
            raise ValueError(f"tags: {name!r} is no tag's name; leave out < and >")
    return names


def _by_tags(names: list[str], outside: bool, filled: bool) -> Callable[[str], str | None]:
    wanted = [mark for name in names for mark in (f"<{name}>", f"</{name}>")]
    marks = re.compile("|".join(map(re.escape, wanted)))

    def problem(text: str) -> str | None:
        found = list(marks.finditer(text))
        said = [match.group() for match in found]
        for mark in wanted:
            if said.count(mark) != 1:
                return f"{mark} stands {said.count(mark)} times"
        if said != wanted:
            return f"order: {' '.join(said)}"
        ends = [0, *(match.end() for match in found)]
        starts = [*(match.start() for match in found), len(text)]
        # Even places lie outside the tags, odd ones in them.
        between = [text[a:b].strip() for a, b in zip(ends, starts, strict=True)]
        if not outside and any(between[0::2]):
            return "text outside the tags"
        for name, inner in zip(names, between[1::2], strict=True):
            if filled and not inner:
                return f"<{name}> is empty"
        return None

    return problem
