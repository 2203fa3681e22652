r"""What an answer says: a number, words, a list, an ordered row, a set, a relation, a ratio.

Read from the outside in: separators, relation signs, brackets; what is left is a quantity or words.
A list written without brackets, or with `or`/`and`, has no order; `(…)` has one; `{…}` is a set.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

import sympy

from megarl.rewards.math_quantity import SPECIAL, Quantity, Words, quantity
from megarl.rewards.math_text import plain_words
from megarl.rewards.math_value import Unreadable, expression, plain_number

MOST_READ = 4_000
"""Characters of an answer that is read; a longer one is no answer, unless it is a plain number."""
MOST_ITEMS = 200
OPENING, CLOSING = "([{", ")]}"
SIGNS = re.compile(
    r"\\(?:le|ge|ne|approx|in|equiv|sim|cong|to|implies|iff|Rightarrow|rightarrow|Longrightarrow"
    r"|propto|subset|parallel|perp)(?![a-zA-Z])|[=<>]"
)
NAME = re.compile(
    r"\\?[A-Za-z]{1,3}(?:_\{?\w+\}?)?'*(?:\^\{-1\})?(?:\([^=<>]*\))?"
    r"|\\[a-zA-Z]+\s*(?:\{[\w\s]*\}|[A-Z]{1,4})?(?:_\{?\w+\}?)?"
    r"|(?:\\text\s*\{[^{}]*\}\s*|[A-Z]{1,4} ?)+(?:\([^=<>]*\))?"
    r"|\|[A-Z]{2}\||m ?\\angle ?[A-Z]{1,3}|[A-Z]{1,5}"
    r"|(?:[A-Za-z]{3,} ?){1,5}"
)
"""What stands left of `=` where the right side is the answer: `x`, `f(x)`, `AB`, `\\text{area}`."""
PLAIN = re.compile(r"(?:[\d\s.+\-/(){}^]|\\(?:frac|cdot|times|sqrt|pi)(?![a-zA-Z]))+")
"""A side that is computed from numbers alone."""
CLOCK = re.compile(
    r"(\d{1,2}):([0-5]\d)(?::([0-5]\d))?\s*(?:\\text\s*\{)?\s*([ap])?\.?\s*m?\.?\s*\}?", re.I
)
THOUSANDS = re.compile(r"(?<![\d.,{])\d{1,3}(?:,\d{3})+(?![\d}])(?!,\d)")
SPACED = re.compile(r"(?<![\d.,{] )(?<![\d.,{])\b\d{1,3}(?: \d{3})+(?![\d/])(?! ?[\d/])")


@dataclass(frozen=True, slots=True)
class Row:
    items: tuple[Reading, ...]
    opening: str
    closing: str


@dataclass(frozen=True, slots=True)
class Bag:
    items: tuple[Reading, ...]
    braces: bool = False
    joined: str = ","
    """What stood between the items: `,`, `or`, `and`, or `cup` between sets."""


@dataclass(frozen=True, slots=True)
class Relation:
    sides: tuple[Reading, ...]
    signs: tuple[str, ...]
    name: str = ""
    """The left side's text where it only names what the right side is."""
    between: tuple[Quantity, ...] = ()
    """Of `x = 2+3 = 5`, the plain numbers between name and value."""
    rounded: bool = False
    """One of them, or the value, is written as a decimal."""


@dataclass(frozen=True, slots=True)
class Ratio:
    parts: tuple[sympy.Basic, ...]
    clock: tuple[str, ...] = ()
    """Hours, minutes, seconds and `a` or `p`, where it may be a time of day."""


Reading = Quantity | Words | Row | Bag | Relation | Ratio


def readings(text: str) -> list[Reading]:
    """What `text`, in normal spelling, may say; several where commas may group digits or separate.

    Raises `Unreadable` where it says nothing.
    """
    if plain_number(text) is None:
        if len(text) > MOST_READ:
            raise Unreadable(f"an answer of {len(text)} characters")
        check_nesting(text)
    found = [read(text)]
    if THOUSANDS.fullmatch(text) and not re.search(r",0", text):
        found.append(read(text.replace(",", ", ")))
    return found


def read(text: str, bracketed: bool = False) -> Reading:
    text = _bare(text)
    if not text:
        raise Unreadable("nothing")
    plain = plain_number(text)
    if plain is not None:
        return Quantity(expression(text))
    special = SPECIAL.get(plain_words(text))
    if special:
        return Words(f"<{special}>")
    text = _ungrouped(text, bracketed)
    for joined, separator in SEPARATORS:
        parts = split(text, separator)
        if len(parts) > 1:
            return _bag(parts, joined, bracketed)
    related = _relation(text)
    if related is not None:
        return related
    return _single(text)


def _single(text: str) -> Reading:
    if split(text, PLUS_MINUS)[1:] or re.search(r"\\(?:pm|mp)(?![a-zA-Z])", text):
        up = re.sub(r"\\pm(?![a-zA-Z])", "+", re.sub(r"\\mp(?![a-zA-Z])", "-", text))
        down = re.sub(r"\\pm(?![a-zA-Z])", "-", re.sub(r"\\mp(?![a-zA-Z])", "+", text))
        return Bag((read(up.strip().removeprefix("+")), read(down)), joined="or")
    bracketed = _brackets(text)
    if bracketed is not None:
        return bracketed
    clock = CLOCK.fullmatch(text)
    if clock:
        parts = tuple(expression(part) for part in clock.groups()[:2])
        return Ratio(parts, tuple((group or "").lower() for group in clock.groups()))
    parts = split(text, COLON)
    if len(parts) > 1:
        values = tuple(expression(part.strip()) for part in parts)
        if any(isinstance(value, sympy.MatrixBase) for value in values):
            raise Unreadable("a matrix in a ratio")
        return Ratio(values)
    return quantity(text)


SEPARATORS = [
    ("or", re.compile(r"\\text\s*\{\s*,?\s*or\s*\}|(?<![a-zA-Z])or(?![a-zA-Z])|\\lor(?![a-zA-Z])")),
    ("and", re.compile(
        r"\\text\s*\{\s*,?\s*and\s*\}|(?<![a-zA-Z])and(?![a-zA-Z])|\\land(?![a-zA-Z])|(?<!\\)&")),
    (",", re.compile(r"(?<!\\);")),
    ("cup", re.compile(r"\\cup(?![a-zA-Z])")),
    ("minus", re.compile(r"\\setminus(?![a-zA-Z])")),
    (",", re.compile(r"(?<!\\),")),
]  # fmt: skip
PLUS_MINUS = re.compile(r"\\pm(?![a-zA-Z])")
COLON = re.compile(r":")


def check_nesting(text: str) -> None:
    r"""Raises `Unreadable` where braces do not balance. (Brackets need not: `[1,2)`.)"""
    depth = 0
    for char in re.sub(r"\\[{}]", "", text):
        depth += (char == "{") - (char == "}")
        if not 0 <= depth <= 20:
            raise Unreadable("braces do not match, or nest too deep")
    if depth:
        raise Unreadable("braces do not match")


def split(text: str, separator: re.Pattern[str]) -> list[str]:
    """`text` cut at the separators that stand outside all brackets."""
    depths, depth, environment = [], 0, 0
    for index, char in enumerate(text):
        environment += text.startswith(r"\begin", index) - text.startswith(r"\end", index)
        depth += (char in OPENING) - (char in CLOSING)
        depth += text.startswith(r"\langle", index) - text.startswith(r"\rangle", index)
        depths.append(depth + environment)
    parts, start = [], 0
    for match in separator.finditer(text):
        if depths[match.start()] == 0 or (
            match[0].startswith("\\text") and depths[match.start()] == 0
        ):
            parts.append(text[start : match.start()])
            start = match.end()
    return [*parts, text[start:]]


def _bare(text: str) -> str:
    """Without white space, the text command around all of it, and words that only introduce."""
    text = re.sub(r"^(?:\s|\\ )+|(?:\s|\\ |[.,;])+$", "", text)
    match = re.fullmatch(r"\\text\s*\{([^{}]*)\}", text)
    if match:
        text = match[1].strip(" .,;")
    match = re.fullmatch(r"(?:[a-zA-Z]|\([a-z, ]+\))\s*\\in(?![a-zA-Z])\s*(.+)", text)
    return match[1] if match else text


def _ungrouped(text: str, bracketed: bool) -> str:
    """Without the separators between groups of three digits."""
    if not bracketed or re.search(r",\s", text) or re.search(r"\d,0\d\d(?!\d)", text):
        text = THOUSANDS.sub(lambda match: match[0].replace(",", ""), text)
    return SPACED.sub(lambda match: match[0].replace(" ", ""), text)


def _bag(parts: list[str], joined: str, bracketed: bool) -> Reading:
    if len(parts) > MOST_ITEMS:
        raise Unreadable(f"a list of {len(parts)} items")
    items = [read(part, bracketed) for part in parts]
    first = items[0]
    # `x = 1, 2`: both are x.
    if (
        isinstance(first, Relation)
        and first.name
        and not any(isinstance(item, Relation | Bag) for item in items[1:])
    ):
        items[1:] = [Relation((first.sides[0], item), ("=",), first.name) for item in items[1:]]
    flat: list[Reading] = []
    for item in items:
        inside = isinstance(item, Bag) and not item.braces and item.joined in ("or", joined)
        flat.extend(item.items if inside and joined != "cup" else [item])
    return Bag(tuple(flat), joined=joined)


def _relation(text: str) -> Reading | None:
    signs = [match[0] for match in _outside(text, SIGNS)]
    if not signs:
        return None
    if any(sign not in (r"\le", r"\ge", r"\ne", r"\approx", "<", ">", "=") for sign in signs):
        raise Unreadable(f"{text[:60]!r} is a relation that is not compared")
    texts = [part.strip() for part in split(text, SIGNS)]
    if not all(texts):
        raise Unreadable(f"{text[:60]!r} lacks a side")
    equations = all(sign in ("=", r"\approx") for sign in signs)
    if equations:
        if NAME.fullmatch(texts[-1]) and not NAME.fullmatch(texts[0]) and len(texts) == 2:
            texts.reverse()  # 5 = x
        if NAME.fullmatch(texts[0]):
            return _chained(_named(texts[0], read(texts[-1])), texts, signs)
        if texts[0].startswith("(") and texts[-1].startswith("("):
            names, values = read(texts[0]), read(texts[-1])
            if isinstance(names, Row) and isinstance(values, Row):
                if len(names.items) != len(values.items):
                    raise Unreadable("as many names as values are needed")
                names_text = [part.strip() for part in texts[0][1:-1].split(",")]
                return Bag(tuple(map(_named, names_text, values.items)), joined="and")
    return Relation(tuple(read(side) for side in texts), tuple(signs))


def _chained(named: Reading, texts: list[str], signs: list[str]) -> Reading:
    """`named` with what stands between its name and its value, where `=` joins all that follows."""
    if not isinstance(named, Relation) or not isinstance(named.sides[-1], Quantity):
        return named
    first = max((at for at, sign in enumerate(signs, 1) if sign != "="), default=1)
    plain = [text for text in texts[first:-1] if PLAIN.fullmatch(text)]
    between = []
    for text in plain:
        try:
            side = read(text)
        except Unreadable:
            continue
        if isinstance(side, Quantity):
            between.append(side)
    rounded = any("." in text for text in (*plain, texts[-1]))
    return replace(named, between=tuple(between), rounded=rounded)


def _named(name: str, value: Reading) -> Reading:
    """`name = value`; one for each of several values."""
    if isinstance(value, Bag) and not value.braces:
        return Bag(tuple(_named(name, item) for item in value.items), joined="or")
    plain = re.sub(r"\s+", "", name)
    return Relation((Words(plain), value), ("=",), plain)


def _outside(text: str, expression: re.Pattern[str]) -> Iterator[re.Match[str]]:
    start = 0
    for part in split(text, expression)[:-1]:
        match = expression.match(text, start + len(part))
        assert match is not None
        start = match.end()
        yield match


def _brackets(text: str) -> Reading | None:
    r"""A row, a set or what stands in mere parentheses; None for anything else."""
    shape = re.fullmatch(r"(\(|\[|\\?\{|\\langle)(.*?)(\)|\]|\\?\}|\\rangle)", text, re.DOTALL)
    if not shape or not _closes_last(text):
        return None
    opening, inside, closing = shape[1], shape[2].strip(), shape[3]
    if opening == r"\{":
        builder = re.fullmatch(r"[a-zA-Z]\s*(?:\\in\s*\\mathbb\{R\})?\s*[|:](.+)", inside)
        if builder:
            return read(builder[1])
    inner = read(inside, bracketed=True)
    several = isinstance(inner, Bag) and not inner.braces and inner.joined in (",", "and")
    if opening == r"\{" or (opening == "{" and several):
        return Bag(inner.items if isinstance(inner, Bag) and not inner.braces else (inner,), True)
    if several:
        return Row(
            inner.items, "(" if "lan" in opening else opening, ")" if "ran" in closing else closing
        )
    return inner if (opening, closing) in (("(", ")"), ("[", "]"), ("{", "}")) else None


def _closes_last(text: str) -> bool:
    """Whether the first bracket stays open to the last character."""
    marked = text.replace(r"\langle", "\\(").replace(r"\rangle", "\\)")
    depth = 0
    for index, char in enumerate(marked):
        depth += (char in OPENING) - (char in CLOSING)
        if depth == 0 and index < len(marked) - 1 and char != "\\":
            return False
    return depth == 0
