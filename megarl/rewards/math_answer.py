r"""`math`: 1 when the answer a response gives equals the prompt's as mathematics, else 0.

Expressions are read by latex2sympy, the reader of math-verify; lists, sets, intervals, relations
and units are taken apart before; values are not rounded. See `math_read` and `math_compare`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import lru_cache
from itertools import product

from megarl.rewards.answer_text import after_thinking, last_box, last_line, last_said
from megarl.rewards.exact import NOT_FINISHED
from megarl.rewards.math_compare import Policy, same
from megarl.rewards.math_read import MOST_READ, Reading, readings
from megarl.rewards.math_text import normal, plain_words
from megarl.rewards.math_value import MACHINE_FAILURES, Unreadable, plain_number
from megarl.rewards.options import check_flag, check_number, check_word, compiled
from megarl.rewards.scorer import NO_ANSWER, Response, RewardParts, Scorer

UNREADABLE = "unreadable"
"""Detail of an answer that is no mathematics that can be compared: scored, and wrong."""

TAKES: dict[str, Callable[[str], str | None]] = {
    "stated": lambda text: found if (found := _boxed(text)) is not None else last_said(text),
    "boxed": lambda text: _boxed(text),
    "said": last_said,
    "last_line": last_line,
    "whole": lambda text: text.strip(),
}
LETTERS = "ABCDEFGHIJ"
LABELLED = re.compile(
    r"\\text\s?\{\s?\(([A-J])\)\s?(?:\}\s?(?:\\text\s?\{)?|(?=[^}]))(?P<option>.+)"
    r"|\(([A-J])\)\s(?P<bare>[^-+*/^=<>_,!|&\\].*|\\(?:text|frac|sqrt).*)"
)
r"""An option and its letter in a box, as AMC writes them: `\textbf{(C)}\ 12`, `(C) 12`."""
LABEL = re.compile(r"\([A-J]\)|\b(?:or|and)\s\(?[A-J]\b", re.IGNORECASE)
"""A second letter behind it."""
WARM = [
    r"\frac{x^2+\sqrt{3}}{2}-2\pi",
    r"\begin{pmatrix}1\\2\end{pmatrix}",
    r"2\sin(x)+\ln 3",
    "|x|",
]
"""Expressions that make the parser build most of its tables."""


def make(
    *,
    take: str = "stated",
    pattern: str | None = None,
    finished: bool = True,
    percent: str = "value",
    units: str = "compare",
    tolerance: float = 0.0,
) -> Scorer:
    r"""Options:

    - `take`: where the answer stands. `stated`: in the last `\boxed{…}` whose braces balance;
      without one, what follows the last `answer is`, `Answer:` or `####`, to the sentence's end.
      `boxed` or `said`: only the one or the other. `last_line`: the last line that is not empty.
      `whole`: the response. What stands before the last `</think>` is never looked at.
    - `pattern`: instead, a regular expression with one group; the last match's group is the answer.
    - `finished`: a response that was cut off scores 0.
    - `percent`: `value`: 28% is 0.28 and nothing else. `number`: 28% is also the plain number 28.
    - `units`: `compare`: units that both answers give must agree (5 m is 500 cm, not 5 cm); one
      that only one of them gives is passed over. `ignore`: units are never looked at.
    - `tolerance`: how far, relative to the prompt's answer, a real number may be from it. 0: not at
      all; 0.333 is not 1/3, but 0.5 is 1/2.

    Where the prompt's answer is one letter from A to J, a box may hold an option's text behind its
    letter in brackets (`\textbf{(C)}\ 12`); the letter counts. Boxes with nothing but `,`, `;`,
    `and` or `or` between them are one list, or where each gives the same, that answer.
    `x = 4 = 5` says two things, and is wrong.
    A response that gives several answers wins only where the prompt's answer has as many.
    An answer that cannot be read, or would take long to compare, is wrong (`unreadable`); a
    prompt's answer that cannot be read cannot be scored: a ValueError.
    """
    check_word("take", take, TAKES)
    check_flag("finished", finished)
    check_word("percent", percent, ("value", "number"))
    check_word("units", units, ("compare", "ignore"))
    check_number("tolerance", tolerance, 0)
    if tolerance >= 1:
        raise ValueError(f"tolerance must be a share from 0 to below 1, not {tolerance!r}")
    find = TAKES[take] if pattern is None else _by_pattern(pattern)
    policy = Policy(percent, units, float(tolerance))
    for text in WARM:
        same(_gold(text)[1][0], readings(normal(text))[0], policy)

    def score(response: Response) -> RewardParts:
        gold_text, gold = _gold(response.answer)
        if finished and not response.finished:
            return RewardParts(0.0, NOT_FINISHED)
        found = find(after_thinking(response.text))
        if not found or not found.strip():
            return RewardParts(0.0, NO_ANSWER)
        try:
            text = _spelled(found)
            if not text or text == gold_text:
                return RewardParts(1.0) if text else RewardParts(0.0, NO_ANSWER)
            if letter := _label(gold_text, text):
                return RewardParts(float(letter == plain_words(gold_text)))
            said = readings(text)
            return RewardParts(float(any(same(a, b, policy) for a in gold for b in said)))
        except MACHINE_FAILURES:
            raise
        # `Unreadable`, or whatever sympy raises on a strange expression: no response may escape its
        # 0 by that.
        except Exception:
            _check_comparable(response.answer, gold, policy)
            return RewardParts(0.0, UNREADABLE)

    return score


@lru_cache(maxsize=1024)
def _gold(answer: str) -> tuple[str, list[Reading]]:
    """The prompt's answer in normal spelling, and what it says; raises `ValueError`."""
    boxed = last_box(answer)
    try:
        text = _spelled(answer if boxed is None else boxed)
        if not text:
            raise ValueError("the prompt has no answer to compare with")
        return text, readings(text)
    except Unreadable as error:
        raise ValueError(f"the prompt's answer {answer[:80]!r} cannot be read: {error}") from error


def _boxed(text: str) -> str | None:
    return last_box(text, _say_the_same)


def _say_the_same(first: str, second: str) -> bool:
    """Whether two boxes of a list give one answer twice (18 and 18.00)."""
    try:
        pairs = product(readings(_spelled(first)), readings(_spelled(second)))
        return any(same(one, two, Policy()) for one, two in pairs)
    except MACHINE_FAILURES:
        raise
    # What cannot be compared stays in the list, which then gets its verdict.
    except Exception:
        return False


def _label(gold: str, text: str) -> str | None:
    """The letter of the option that `text` gives, where the prompt's answer is a letter."""
    letter = plain_words(gold)
    if len(letter) != 1 or letter not in LETTERS or not (found := LABELLED.fullmatch(text)):
        return None
    option = plain_words(found["option"] or found["bare"])
    return None if LABEL.search(option) else found[1] or found[3]


def _check_comparable(answer: str, gold: list[Reading], policy: Policy) -> None:
    """Raises `ValueError` where the prompt's answer cannot even be compared with itself."""
    try:
        for reading in gold:
            same(reading, reading, policy)
    except MACHINE_FAILURES:
        raise
    except Exception as error:
        why = f"{type(error).__name__}: {error}".partition("\n")[0]
        raise ValueError(
            f"the prompt's answer {answer[:80]!r} cannot be compared: {why}"
        ) from error


def _spelled(text: str) -> str:
    """In normal spelling; raises `Unreadable` for what is too long, plain numbers aside."""
    text = text.strip()
    if len(text) > MOST_READ:
        if plain_number(text) is None:
            raise Unreadable(f"an answer of {len(text)} characters")
        return text
    return normal(text)


def _by_pattern(pattern: str) -> Callable[[str], str | None]:
    expression = compiled("pattern", pattern, groups=1)

    def find(text: str) -> str | None:
        matches = expression.findall(text)
        return matches[-1] if matches else None

    return find
