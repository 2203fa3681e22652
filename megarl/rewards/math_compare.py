"""Whether an answer says what the gold answer says: two readings compared."""

from __future__ import annotations

import re
from dataclasses import dataclass

import sympy

from megarl.rewards.math_equal import constant, constant_ratio, equal, is_small
from megarl.rewards.math_quantity import Quantity, Words
from megarl.rewards.math_read import Bag, Ratio, Reading, Relation, Row
from megarl.rewards.math_region import FLIPPED, is_inequality, region, same_region
from megarl.rewards.math_value import Unreadable, expression, number, times

MOST_NODES = 300
"""Of an equation whose fractions are cleared."""


ROUNDED = 0.02
"""How far, relatively, sides of a chain of `=` may be apart where one of them is a decimal."""


@dataclass(frozen=True, slots=True)
class Policy:
    percent: str = "value"
    units: str = "compare"
    tolerance: float = 0.0


def same(gold: Reading, answer: Reading, policy: Policy) -> bool:
    gold, answer = _alone(gold), _alone(answer)
    if isinstance(gold, Quantity) and isinstance(answer, Quantity):
        return _same_quantity(gold, answer, policy)
    if isinstance(gold, Words) and isinstance(answer, Words):
        return gold.text == answer.text or _reals(gold) == _reals(answer) == "reals"
    if isinstance(answer, Relation) and not _agrees(answer, policy):
        return False
    if isinstance(gold, Relation) or isinstance(answer, Relation):
        decided = _same_relations(gold, answer, policy)
        if decided is not None:
            return decided
    if _is_set(gold) or _is_set(answer):
        first, second = region(gold), region(answer)
        if first is not None and second is not None:
            letters = {first[1], second[1]} - {""}
            return len(letters) < 2 and same_region(first[0], second[0])
    gold, answer = _values(gold, answer), _values(answer, gold)
    if isinstance(gold, Bag) and isinstance(answer, Bag):
        return _same_bags(gold, answer, policy)
    if isinstance(gold, Row | Bag) and isinstance(answer, Row | Bag):
        return _same_rows(gold, answer, policy)
    if isinstance(gold, Ratio) and isinstance(answer, Ratio):
        return _same_ratios(gold, answer)
    if isinstance(gold, Ratio | Quantity) and isinstance(answer, Ratio | Quantity):
        return _is_fraction(gold, answer)
    if isinstance(gold, Row | Quantity) and isinstance(answer, Row | Quantity):
        return _same_vector(gold, answer, policy)
    return False


def _alone(reading: Reading) -> Reading:
    """The one item of a set of one."""
    if isinstance(reading, Bag) and len(reading.items) == 1:
        return reading.items[0]
    return reading


def _reals(words: Words) -> str:
    return words.text.strip("<>")


def _same_quantity(gold: Quantity, answer: Quantity, policy: Policy) -> bool:
    if gold.glued is not None and answer.glued is None and equal(gold.glued, answer.value):
        return True
    if answer.glued is not None and gold.glued is None and equal(gold.value, answer.glued):
        return True
    if not all(one.sure or other.unit for one, other in ((gold, answer), (answer, gold))):
        return False
    first, second = gold.value, answer.value
    if policy.units == "compare" and gold.unit and answer.unit:
        if gold.unit.dimensions != answer.unit.dimensions:
            return False
        if gold.unit.size != answer.unit.size:
            first = times(first, number(gold.unit.size))
            second = times(second, number(answer.unit.size))
    if equal(first, second, policy.tolerance):
        return True
    if policy.percent == "number" and gold.percent != answer.percent:
        hundred = sympy.Integer(100)
        first = times(hundred, first) if gold.percent else first
        second = times(hundred, second) if answer.percent else second
        return equal(first, second, policy.tolerance)
    return False


def _same_relations(gold: Reading, answer: Reading, policy: Policy) -> bool | None:
    """None: not decided by relations alone."""
    if isinstance(gold, Relation) and isinstance(answer, Relation):
        if gold.name and answer.name:
            if _key(gold.name) == _key(answer.name) or _function_of_x(gold.name, answer.name):
                return same(gold.sides[-1], answer.sides[-1], policy)
            if " " in gold.name + answer.name:
                return same(gold.sides[-1], answer.sides[-1], policy)
        if is_inequality(gold) or is_inequality(answer):
            first, second = region(gold), region(answer)
            if first is not None and second is not None:
                return first[1] == second[1] and same_region(first[0], second[0])
        return _proportional(gold, answer)
    if isinstance(answer, Relation) and not is_inequality(answer):
        if answer.name and not isinstance(gold, Bag):
            return same(gold, answer.sides[-1], policy)
        return (
            isinstance(gold, Quantity)
            and _computed(answer)
            and same(gold, answer.sides[-1], policy)
        )
    if isinstance(gold, Relation) and gold.name and not isinstance(answer, Bag):
        return same(gold.sides[-1], answer, policy)
    return None


def _agrees(relation: Relation, policy: Policy) -> bool:
    """False for `x = 4 = 5`, which says two things. Only plain numbers are looked at."""
    value = relation.sides[-1]
    if not relation.between or not isinstance(value, Quantity) or value.unit:
        return True
    if isinstance(value.value, sympy.MatrixBase) or constant(value.value) is None:
        return True
    tolerance = max(policy.tolerance, ROUNDED if relation.rounded else 0.0)
    return all(equal(value.value, side.value, tolerance) for side in relation.between)


def _key(name: str) -> str:
    return re.sub(r"[{}\\]|text", "", name)


def _function_of_x(*names: str) -> bool:
    """`y` and `f(x)` name the same."""
    return "y" in names and any(re.fullmatch(r"[A-Za-z]\([a-z]\)", name) for name in names)


def _computed(relation: Relation) -> bool:
    """`2+3=5`: sides that are all the same value."""
    sides = [side.value for side in relation.sides if isinstance(side, Quantity)]
    return len(sides) == len(relation.sides) and all(equal(sides[0], side) for side in sides[1:])


def _proportional(gold: Relation, answer: Relation) -> bool:
    """Whether one is the other times a number (a positive one between inequalities)."""
    if len(gold.sides) != 2 or len(answer.sides) != 2:
        return False
    numerators = [_numerator(relation) for relation in (gold, answer)]
    if any(one is None for one in numerators):
        return False
    if numerators[0] == numerators[1] == 0:
        return gold.signs == answer.signs
    ratio = constant_ratio(*numerators)
    if ratio is None or ratio.imag != 0:
        return False
    sign = FLIPPED.get(answer.signs[0], answer.signs[0]) if ratio.real < 0 else answer.signs[0]
    return gold.signs[0] == sign


def _numerator(relation: Relation) -> sympy.Expr | None:
    sides = []
    for side in relation.sides:
        if isinstance(side, Words) and side.text == relation.name:
            try:
                sides.append(expression(side.text))
            except Unreadable:
                return None
        elif isinstance(side, Quantity) and not isinstance(side.value, sympy.MatrixBase):
            sides.append(side.value)
        else:
            return None
    if not all(map(is_small, sides)):
        return None
    difference = sides[0] - sides[1]
    if is_inequality(relation) or len(list(sympy.preorder_traversal(difference))) > MOST_NODES:
        return difference
    return sympy.fraction(sympy.together(difference))[0]


def _is_set(reading: Reading) -> bool:
    if isinstance(reading, Words):
        return reading.text in ("<reals>", "<none>")
    if isinstance(reading, Bag):
        if reading.joined in ("cup", "minus"):
            return True
        return not reading.braces and any(map(is_inequality, reading.items))
    if isinstance(reading, Row):
        return reading.opening != {")": "(", "]": "["}[reading.closing]
    return is_inequality(reading)


def _values(reading: Reading, other: Reading) -> Reading:
    """Of `x = 1, y = 2`, the values, where the other side names none: a row for different names,
    a list without order for one name."""
    named = isinstance(reading, Bag) and all(
        isinstance(item, Relation) and item.name for item in reading.items
    )
    if (
        not named
        or not all(_agrees(item, Policy()) for item in reading.items)
        or isinstance(other, Bag)
        and any(isinstance(one, Relation) for one in other.items)
    ):
        return reading
    values = tuple(item.sides[-1] for item in reading.items)
    if len({item.name for item in reading.items}) == len(values) > 1:
        return Row(values, "(", ")")
    return Bag(values, joined="or")


def _same_bags(gold: Bag, answer: Bag, policy: Policy) -> bool:
    """The same items in any order; a set counts each once."""
    if len(answer.items) > 4 * len(gold.items) + 10:
        return False
    first, second = list(gold.items), list(answer.items)
    if gold.braces or answer.braces:
        first, second = _distinct(first, policy), _distinct(second, policy)
    if len(first) != len(second):
        return False
    for item in second:
        match = next((other for other in first if same(other, item, policy)), None)
        if match is None:
            return False
        first.remove(match)
    return True


def _distinct(items: list[Reading], policy: Policy) -> list[Reading]:
    kept: list[Reading] = []
    for item in items:
        if not any(same(other, item, policy) for other in kept):
            kept.append(item)
    return kept


def _same_rows(gold: Row | Bag, answer: Row | Bag, policy: Policy) -> bool:
    """The same items in the same order. A list without brackets may stand for a row in `(…)`."""
    if any(isinstance(one, Bag) and (one.braces or one.joined == "or") for one in (gold, answer)):
        return False
    if isinstance(gold, Row) and isinstance(answer, Row):
        alike = (gold.opening, gold.closing) == (answer.opening, answer.closing)
        if not alike and len(gold.items) == 2:
            return False
    elif any(
        isinstance(one, Row) and one.opening == "[" and len(one.items) == 2
        for one in (gold, answer)
    ):
        return False
    return len(gold.items) == len(answer.items) and all(
        same(a, b, policy) for a, b in zip(gold.items, answer.items, strict=True)
    )


def _same_ratios(gold: Ratio, answer: Ratio) -> bool:
    if gold.clock:
        if not answer.clock:
            return False
        halves = {one.clock[3] for one in (gold, answer) if one.clock[3]}
        seconds = [int(one.clock[2] or 0) for one in (gold, answer)]
        pairs = zip(gold.clock[:2], answer.clock[:2], strict=True)
        return (
            len(halves) < 2 and seconds[0] == seconds[1] and all(int(a) == int(b) for a, b in pairs)
        )
    if len(gold.parts) != len(answer.parts):
        return False
    return all(
        equal(times(gold.parts[0], b), times(a, answer.parts[0]))
        for a, b in zip(gold.parts[1:], answer.parts[1:], strict=True)
    )


def _is_fraction(gold: Ratio | Quantity, answer: Ratio | Quantity) -> bool:
    """`3:4` is three quarters."""
    values = []
    for one in (gold, answer):
        if isinstance(one, Ratio):
            if len(one.parts) != 2 or one.parts[1] == 0:
                return False
            values.append(times(one.parts[0], sympy.Pow(one.parts[1], -1, evaluate=False)))
        else:
            values.append(one.value)
    return equal(*values)


def _same_vector(gold: Row | Quantity, answer: Row | Quantity, policy: Policy) -> bool:
    """A matrix of one column, or row, is the row of its entries."""
    row, other = (gold, answer) if isinstance(gold, Row) else (answer, gold)
    if not isinstance(row, Row) or not isinstance(other, Quantity) or row.opening != "(":
        return False
    matrix = other.value
    if not isinstance(matrix, sympy.MatrixBase) or 1 not in matrix.shape:
        return False
    return len(matrix) == len(row.items) and all(
        same(a, Quantity(b), policy) for a, b in zip(row.items, matrix.flat(), strict=True)
    )
