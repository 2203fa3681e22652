r"""Numbers with units, money, percent and bases, and answers that are words.

What stands in an answer when lists, brackets and relations are taken apart.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import sympy

from megarl.rewards.math_text import plain_words
from megarl.rewards.math_units import Unit, unit
from megarl.rewards.math_value import MOST_CHARACTERS, Unreadable, expression, times

MOST_UNIT_WORDS = 6
NO_UNIT = re.compile(
    r"or|and|not|but|nor|to|minus|plus|times|over|maybe|either|if|else|than|percent|squared|cubed"
    r"|factorial|root|hal(?:f|ves)|(?:third|quarter|fifth|sixth|eighth|tenth|hundredth|thousandth)s?"
    r"|wrong|incorrect",
    re.IGNORECASE,
)
"""Words behind a number that change it, or put another beside it."""
SCALES = {
    "dozen": 12, "hundred": 100, "thousand": 10**3, "million": 10**6, "billion": 10**9,
    "trillion": 10**12,
}  # fmt: skip
TAIL = re.compile(
    r"(?P<core>.*?[\d)}!\]a-z|])(?P<tail>(?:\s*\\text\s*\{[^{}]*\}|\s*\^\\circ"
    r"|(?<=[\d}) /])[A-Za-z]+\.?|\s+[A-Za-z]+\.?|\s*/(?=\s*(?:\\text|[A-Za-z]))|\^\{?[23]\}?)+)"
)
BASED = re.compile(r"([+-]?)(\d[0-9A-Fa-f]*)_\{?\s*(?:\\text\s*\{\s*)?(\d+|[a-z]+)\s*\}*")
BASES = {"two": 2, "three": 3, "four": 4, "five": 5, "six": 6, "seven": 7, "eight": 8, "nine": 9,
         "ten": 10, "twelve": 12, "sixteen": 16}  # fmt: skip
SPECIAL = {
    "empty set": "none", "the empty set": "none", r"\emptyset": "none", "no solution": "none",
    "no solutions": "none", "no real solution": "none", "no real solutions": "none", "none": "none",
    "there is no solution": "none", "there are no solutions": "none", "no real roots": "none",
    r"\{\}": "none", r"\{ \}": "none",
    "all real numbers": "reals", "all reals": "reals", "all real": "reals", "reals": "reals",
    r"\mathbb{r}": "reals", "any real number": "reals", "real numbers": "reals",
    "yes": "yes", "no": "no", "does not exist": "undefined", "dne": "undefined",
    "undefined": "undefined",
    "not defined": "undefined", "infinitely many solutions": "infinitely many",
    "infinitely many": "infinitely many", "infinite solutions": "infinitely many",
}  # fmt: skip
NUMBER_WORDS = {
    "zero": 0, "one": 1, "two": 2, "three": 3, "four": 4, "five": 5, "six": 6, "seven": 7,
    "eight": 8, "nine": 9, "ten": 10, "eleven": 11, "twelve": 12,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Quantity:
    value: sympy.Basic
    unit: Unit | None = None
    percent: bool = False
    glued: sympy.Basic | None = None
    """The whole as an expression, where the unit may as well be letters: `5m`, `5 m`."""
    sure: bool = True
    """The unit is one; False for a letter right behind a number."""


@dataclass(frozen=True, slots=True)
class Words:
    text: str


def quantity(text: str) -> Quantity | Words:
    """Raises `Unreadable`."""
    money = re.match(r"([+-]?)\s*\\text\{(dollar|euro|pound|yen)\}\s*(?=[\d.-])", text)
    if money:
        text = f"{money[1]}{text[money.end() :]}\\text{{{money[2]}}}"
        text = re.sub(r"(\\text\{\w+\})\s*(?:\\text\s*\{)?\s*\1?\}?$", r"\1", text)
    based = BASED.fullmatch(text)
    if based:
        return _in_base(*based.groups())
    percent = re.fullmatch(
        r"(.+?)\s*(?:%|\\text\s*\{\s*(?:percent|per cent)\s*\}|percent|per cent)", text
    )
    if percent:
        return Quantity(times(expression(percent[1]), sympy.Rational(1, 100)), percent=True)
    if r"^\circ" in text and re.search(r"\\(?:sin|cos|tan|cot|sec|csc)", text):
        text = re.sub(r"(\d+(?:\.\d+)?)\s*\^\\circ", r"(\\frac{\1\\pi}{180})", text)
    words = plain_words(text)
    if words in NUMBER_WORDS:
        return Quantity(sympy.Integer(NUMBER_WORDS[words]))
    measured = _measured(text)
    if measured is not None:
        return measured
    if _is_words(text):
        return Words(words)
    return Quantity(expression(text))


def _measured(text: str) -> Quantity | None:
    """A number with a unit, or with the words for what is counted; None for anything else."""
    match = TAIL.fullmatch(text) if len(text) <= MOST_CHARACTERS else None
    if not match or len(match["tail"].split()) > MOST_UNIT_WORDS:
        return None
    core, tail = match["core"].strip(), match["tail"]
    try:
        value = expression(core)
    except Unreadable:
        return None
    scaled = re.match(r"\s*(?:\\text\s*\{\s*)?([A-Za-z]+)(?![A-Za-z])", tail)
    if scaled and scaled[1].lower() in SCALES:
        value = times(value, sympy.Integer(SCALES[scaled[1].lower()]))
        tail = tail.replace(scaled[1], "", 1)
        if not re.search("[A-Za-z]", tail.replace(r"\text", "")):
            return Quantity(value)
    named = unit(tail)
    bare = re.fullmatch(r"(\s*)([A-Za-z]{1,2})", tail)
    if named is not None and bare:
        if value.free_symbols:
            return None
        try:
            return Quantity(
                value, named, glued=expression(text), sure=bool(bare[1]) or len(bare[2]) > 1
            )
        except Unreadable:
            return Quantity(value, named)
    if named is not None:
        return Quantity(value, named)
    # `5 apples`: what is counted is not compared. `5x` and `5 or` are no such.
    words = re.findall(r"[A-Za-z]+", re.sub(r"\\text", "", tail))
    counted = (
        words
        and not any(map(NO_UNIT.fullmatch, words))
        and (r"\text" in tail or (tail[0].isspace() and len(words[0]) > 2))
        and not re.search(r"[\d^]", tail)
    )
    return Quantity(value) if counted and not value.free_symbols else None


def _is_words(text: str) -> bool:
    if re.fullmatch(r"\\mathbb\{[A-Z]\}", text):
        return True
    inside = re.sub(r"\\text\s*\{([^{}]*)\}", r" \1 ", text)
    return bool(re.search(r"[^\W\d_]{3}", inside)) and not re.search(r"[\\^_=+*{}<>|]", inside)


def _in_base(sign: str, digits: str, base_text: str) -> Quantity:
    base = BASES.get(base_text) or (int(base_text) if base_text.isdigit() else 0)
    if not 2 <= base <= 36 or len(digits) > 200:
        raise Unreadable(f"{digits[:40]} in base {base_text}")
    try:
        return Quantity(sympy.Integer(int(sign + digits, base)))
    except ValueError as error:
        raise Unreadable(f"{digits[:40]} has digits that base {base} lacks") from error
