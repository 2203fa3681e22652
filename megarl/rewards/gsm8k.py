r"""`gsm8k`: 1 when the number a response ends on equals the prompt's number, exactly; else 0.

Made for answers as in GSM8K (Cobbe et al. 2021, "Training Verifiers to Solve Math Word Problems"):
a worked solution that ends on `#### 1,234`.
"""

from __future__ import annotations

import re
from fractions import Fraction

from megarl.rewards.answer_text import after_thinking, last_box, last_said
from megarl.rewards.exact import NOT_FINISHED
from megarl.rewards.math_text import normal
from megarl.rewards.math_units import unit
from megarl.rewards.math_value import Unreadable, plain_number
from megarl.rewards.options import check_flag, check_word
from megarl.rewards.scorer import NO_ANSWER, Response, RewardParts, Scorer

UNREADABLE = "unreadable"
NUMBER = re.compile(
    r"(?<![\w.])(?:[-+]\s?)?(?:\\text\{\w+\}\s?)?(?:[-+]\s?)?"
    r"(?:\d{1,3}(?:,\d{3})+(?![\d])(?:\.\d+)?|\d+(?:\.\d+)?(?:\s?/\s?\d+)?|\.\d+|\\frac\{\d+\}\{\d+\})"
    r"(?:\s?\\(?:cdot|times)\s?10\^\{(?P<power>[-+]?\d{1,3})\})?"
)
"""A number in normal spelling, with a sign and money before it and a power of ten behind."""
UNIT_POWER = re.compile(
    r"(?<=[\d}])(\s?(?:\\text\s?\{\s?)?([A-Za-z][A-Za-z/]{0,20})\s?\}?)\^\{-?[1-9]\}"
)
"""Letters behind a number, and their power: `3 m^{2}`. A unit's is passed over."""
MOST = 200
"""Characters of a statement in which its number is looked for."""
TAKES = ("stated", "last_number")


def make(*, take: str = "stated", finished: bool = True) -> Scorer:
    r"""Options:

    - `take`: where the number stands. `stated`: after the last `####`, or in the last `\boxed{…}`,
      whichever comes later; without either, there is no answer. `last_number`: without either, what
      follows the last `answer is` or `Answer:`, and without that the last number of the response.
    - `finished`: a response that was cut off scores 0.

    What is stated must be one number; a sign, money, separators of thousands, a percent sign
    and words around it are passed over (`$1,234.00 a day` is 1234), so is a unit with a power
    (`3 m^2` is 3; `3x^2` is no number). A power of ten belongs to the number: `1e3` and
    `1 \times 10^3` are 1000. Numbers are compared as fractions: 72.0 is 72, 1/2 is 0.5, 0.333 is
    not 1/3. What stands before the last `</think>` is passed over. Boxes beside each other that
    hold the same number state it once. A statement with no number, or with several, is wrong
    (`unreadable`).
    """
    check_word("take", take, TAKES)
    check_flag("finished", finished)

    def score(response: Response) -> RewardParts:
        wanted = _gold(response.answer)
        if finished and not response.finished:
            return RewardParts(0.0, NOT_FINISHED)
        text = after_thinking(response.text)
        stated = _stated(text)
        if stated is None and take == "last_number":
            numbers = _numbers(last_said(text) or "") or _numbers(text[-2_000:])
            return (
                RewardParts(float(numbers[-1] == wanted))
                if numbers
                else RewardParts(0.0, NO_ANSWER)
            )
        if not stated:
            return RewardParts(0.0, NO_ANSWER)
        numbers = _numbers(stated) if len(stated) <= MOST else []
        if len(numbers) != 1:
            return RewardParts(0.0, UNREADABLE)
        return RewardParts(float(numbers[0] == wanted))

    return score


def _stated(text: str) -> str | None:
    """The statement that comes last: a line after `####`, or a box's content."""
    before, marks, after = text.rpartition("####")
    if not marks:
        return last_box(text, _same)
    boxed = last_box(after, _same)
    return boxed if boxed is not None else after.strip().partition("\n")[0].strip()


def _same(first: str, second: str) -> bool:
    """Whether two boxes hold one number each, the same."""
    if max(len(first), len(second)) > MOST:
        return False
    numbers = _numbers(first)
    return len(numbers) == 1 and numbers == _numbers(second)


def _gold(answer: str) -> Fraction:
    """The prompt's number; raises `ValueError`."""
    if not answer.strip():
        raise ValueError("the prompt has no answer to compare with")
    stated = _stated(answer)
    numbers = _numbers((answer if stated is None else stated)[:MOST])
    if len(numbers) != 1:
        raise ValueError(f"the prompt's answer {answer[-80:]!r} is not one number")
    return numbers[0]


def _without_power(match: re.Match[str]) -> str:
    """A length to a power (`m^{2}`, `people/km^{2}`), or a time below (`m/s^{2}`), without it."""
    above, slash, last = match[2].rpartition("/")
    known = unit(last)
    if known is None or last == "M":
        return match[0]
    counted = not slash or len(above) > 1 or unit(above) is not None
    dimension = known.dimensions[0][0]
    powered = counted and (dimension == "length" or slash and dimension == "time")
    return match[1] if powered else match[0]


def _numbers(text: str) -> list[Fraction]:
    found = []
    for match in NUMBER.finditer(UNIT_POWER.sub(_without_power, normal(text))):
        before_power = re.split(r"\\(?:cdot|times)", match[0])[0]
        plain = re.sub(r"\\text\{\w+\}|[,\s]", "", before_power)
        try:
            value = plain_number(plain)
        except Unreadable:
            value = None  # a division by zero is no number
        if value is not None:
            found.append(value * Fraction(10) ** int(match["power"] or 0))
    return found
