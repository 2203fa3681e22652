r"""Sets of real numbers, as intervals: `(1,2]`, `x>3`, `1<x<2 or x=5`, unions, complements.

Only what has numbers as its ends; what has letters there is compared part by part elsewhere.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cmp_to_key

import sympy

from megarl.rewards.math_equal import constant, equal, is_small
from megarl.rewards.math_quantity import Quantity, Words
from megarl.rewards.math_read import Bag, Reading, Relation, Row

MOST_POWER = 4
"""Of a letter in an inequality that is solved."""


@dataclass(frozen=True, slots=True)
class Span:
    low: sympy.Basic
    high: sympy.Basic
    low_open: bool
    high_open: bool


Region = list[Span]
"""Disjoint, in increasing order, none touching the next."""

FLIPPED = {"<": ">", ">": "<", r"\le": r"\ge", r"\ge": r"\le"}
REALS = [Span(-sympy.oo, sympy.oo, True, True)]


def region(reading: Reading) -> tuple[Region, str] | None:
    """The set of real numbers that a reading says, and the letter it says it of ("" for none);
    None where it says no such set."""
    if isinstance(reading, Words):
        return {"<reals>": (REALS, ""), "<none>": ([], "")}.get(reading.text)
    if isinstance(reading, Row):
        return _interval(reading)
    if isinstance(reading, Relation):
        return _solved(reading)
    if not isinstance(reading, Bag):
        return None
    if reading.braces:
        ends = [_end(item) for item in reading.items]
        points = [Span(end, end, False, False) for end in ends if end is not None]
        return (_joined(points), "") if len(points) == len(ends) else None
    return _combined(reading)


def same_region(first: Region, second: Region) -> bool:
    return len(first) == len(second) and all(
        (a.low_open, a.high_open) == (b.low_open, b.high_open)
        and equal(a.low, b.low)
        and equal(a.high, b.high)
        for a, b in zip(first, second, strict=True)
    )


def is_inequality(reading: Reading) -> bool:
    return isinstance(reading, Relation) and any(
        sign not in ("=", r"\approx") for sign in reading.signs
    )


def _combined(bag: Bag) -> tuple[Region, str] | None:
    found = [region(item) for item in bag.items]
    if any(one is None for one in found):
        return None
    letters = {one[1] for one in found if one[1]}
    if len(letters) > 1:
        return None
    letter = letters.pop() if letters else ""
    regions = [one[0] for one in found]
    if bag.joined == "minus":
        total = regions[0]
        for other in regions[1:]:
            total = _common(total, _complement(other))
        return total, letter
    if bag.joined == "cup":
        return _joined([span for one in regions for span in one]), letter
    if bag.joined == "or":
        total = _joined([span for one in regions for span in one])
        return None if any(same_region(total, one) for one in regions) else (total, letter)
    if not all(is_inequality(item) for item in bag.items):
        return None
    total = regions[0]
    for other in regions[1:]:
        total = _common(total, other)
    # `x < 1, x > 2` can only mean: or.
    if not total and bag.joined == ",":
        total = _joined([span for one in regions for span in one])
    # Of several guesses, the one that implies the others is no answer.
    return None if any(same_region(total, one) for one in regions) else (total, letter)


def _end(reading: Reading) -> sympy.Basic | None:
    if not isinstance(reading, Quantity) or isinstance(reading.value, sympy.MatrixBase):
        return None
    return reading.value if constant(reading.value) is not None else None


def _interval(row: Row) -> tuple[Region, str] | None:
    if len(row.items) != 2 or row.opening not in "([" or row.closing not in ")]":
        return None
    low, high = map(_end, row.items)
    if low is None or high is None or _order(low, high) >= 0:
        return None
    return [Span(low, high, row.opening == "(", row.closing == ")")], ""


def _solved(relation: Relation) -> tuple[Region, str] | None:
    """The solutions of a chain of inequalities in one letter."""
    values = []
    for side in relation.sides:
        if not isinstance(side, Quantity) or isinstance(side.value, sympy.MatrixBase):
            return None
        values.append(side.value)
    letters = set().union(*(value.free_symbols for value in values))
    if len(letters) != 1 or not is_inequality(relation) or not all(map(is_small, values)):
        return None
    letter = letters.pop()
    total = REALS
    for left, sign, right in zip(values, relation.signs, values[1:], strict=False):
        if left in (-sympy.oo, sympy.oo) or right in (-sympy.oo, sympy.oo):
            continue  # -∞ < x says nothing
        part = _solved_pair(left, sign, right, letter)
        if part is None:
            return None
        total = _common(total, part)
    return total, str(letter)


def _solved_pair(
    left: sympy.Expr, sign: str, right: sympy.Expr, letter: sympy.Symbol
) -> Region | None:
    """Where `left sign right`; `|u| < c` is `-c < u < c`."""
    if isinstance(right, sympy.Abs):
        left, sign, right = right, FLIPPED.get(sign, sign), left
    if not isinstance(left, sympy.Abs) or right.free_symbols:
        return _below_zero(left - right, letter, sign)
    size = constant(right)
    if size is None or size <= 0 or sign not in FLIPPED:
        return None
    inside = left.args[0]
    upper = _below_zero(inside - right, letter, sign)
    lower = _below_zero(inside + right, letter, FLIPPED[sign])
    if upper is None or lower is None:
        return None
    return _common(upper, lower) if sign in ("<", r"\le") else _joined(upper + lower)


def _below_zero(difference: sympy.Expr, letter: sympy.Symbol, sign: str) -> Region | None:
    """Where `difference sign 0`, for polynomials of degree 1 and 2."""
    powers = [node.exp for node in difference.atoms(sympy.Pow) if node.has(letter)]
    if any(not power.is_Integer or not 0 < power <= MOST_POWER for power in powers):
        return None
    try:
        polynomial = sympy.Poly(difference, letter)
    except sympy.PolynomialError:
        return None
    coefficients = polynomial.all_coeffs()
    signs = [constant(value) for value in coefficients]
    if len(coefficients) not in (2, 3) or any(value is None for value in signs):
        return None
    if len(coefficients) == 2:
        roots = [-coefficients[1] / coefficients[0]]
    else:
        a, b, c = coefficients
        inside = b**2 - 4 * a * c
        size = constant(inside)
        if size is None or abs(size) < 1e-20:
            roots = [-b / (2 * a)]
        else:
            root = sympy.sqrt(inside)
            roots = [(-b - root) / (2 * a), (-b + root) / (2 * a)] if size > 0 else []
            roots.sort(key=cmp_to_key(_order))
    if sign == "=":
        return [Span(root, root, False, False) for root in roots]
    if sign == r"\ne":
        return _complement([Span(root, root, False, False) for root in roots])
    strict = sign in ("<", ">")
    wanted = -1 if sign in ("<", r"\le") else 1
    ends = [-sympy.oo, *roots, sympy.oo]
    pieces = []
    rising = 1 if signs[0] > 0 else -1
    for index, (low, high) in enumerate(zip(ends, ends[1:], strict=False)):
        crossings = len(roots) - index  # roots to the right of this piece
        odd = crossings % 2 == 1 and not (len(roots) == 1 and len(coefficients) == 3)
        if (-rising if odd else rising) == wanted:
            pieces.append(Span(low, high, strict or low == -sympy.oo, strict or high == sympy.oo))
    if not strict:
        pieces += [Span(root, root, False, False) for root in roots]
    return _joined(pieces)


def _order(first: sympy.Basic, second: sympy.Basic) -> int:
    if first == second or equal(first, second):
        return 0
    return -1 if constant(first) < constant(second) else 1


def _joined(spans: list[Span]) -> Region:
    """The union."""
    ordered = sorted(
        spans, key=cmp_to_key(lambda a, b: _order(a.low, b.low) or a.low_open - b.low_open)
    )
    done: Region = []
    for span in ordered:
        if done:
            last = done[-1]
            gap = _order(span.low, last.high)
            if gap < 0 or (gap == 0 and not (span.low_open and last.high_open)):
                end = _order(span.high, last.high)
                high = span.high if end > 0 else last.high
                high_open = (
                    span.high_open and last.high_open
                    if end == 0
                    else (span if end > 0 else last).high_open
                )
                done[-1] = Span(last.low, high, last.low_open, high_open)
                continue
        done.append(span)
    return done


def _complement(spans: Region) -> Region:
    done: Region = []
    low, low_open = -sympy.oo, True
    for span in spans:
        if span.low != -sympy.oo:
            done.append(Span(low, span.low, low_open, not span.low_open))
        low, low_open = span.high, not span.high_open
    if low != sympy.oo:
        done.append(Span(low, sympy.oo, low_open, True))
    return done


def _common(first: Region, second: Region) -> Region:
    """The intersection: what is in neither complement."""
    return _complement(_joined(_complement(first) + _complement(second)))
