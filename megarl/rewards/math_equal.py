r"""Whether two expressions are equal: exactly, or at two precisions, or at several points."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction

import mpmath
import sympy

from megarl.rewards.math_value import (
    POINTS,
    TooBig,
    Undefined,
    Unreadable,
    evaluate,
    exact,
    is_complex,
    letters,
    number,
    times,
)

COARSE, FINE = 100, 400
"""Decimal digits at which constants are computed: a difference that is 0 shrinks by the digits
between them, another one stays."""
POINT_DIGITS = 60
MOST_SMALL = 100
"""Exponents with which sympy is left to calculate."""
ENOUGH_POINTS = 3
"""At which both expressions have a value; fewer decide nothing."""


def equal(gold: sympy.Basic, other: sympy.Basic, tolerance: float = 0.0) -> bool:
    """Whether two expressions, or matrices, are equal wherever both are defined.

    `tolerance`: how far, relative to the gold one, two real constants may be apart.
    """
    if isinstance(gold, sympy.MatrixBase) or isinstance(other, sympy.MatrixBase):
        return (
            isinstance(gold, sympy.MatrixBase)
            and isinstance(other, sympy.MatrixBase)
            and gold.shape == other.shape
            and all(equal(a, b, tolerance) for a, b in zip(gold.flat(), other.flat(), strict=True))
        )
    if gold == other:
        return True
    if gold.has(sympy.oo) or other.has(sympy.oo):
        return False
    try:
        if letters(gold, other):
            return _equal_at_points(gold, other)
        return _equal_constants(gold, other, tolerance)
    except TooBig:
        return _equal_powers(gold, other)
    # Neither a constant without a value nor one that is not evaluated equals anything else.
    except (Undefined, Unreadable):
        return False


def constant(node: sympy.Basic, digits: int = 30) -> mpmath.mpf | None:
    """The real value of a constant to so many digits; None: none, or too big."""
    if node in (sympy.oo, -sympy.oo):
        return mpmath.mpf("inf") * (1 if node == sympy.oo else -1)
    try:
        with mpmath.workdps(digits):
            value = evaluate(node, {}, real=True)
    except (TooBig, Undefined, Unreadable, KeyError):
        return None
    return mpmath.re(value) if abs(mpmath.im(value)) < mpmath.mpf(10) ** (5 - digits) else None


def is_small(node: sympy.Basic) -> bool:
    """Whether sympy may calculate with it: no powers or factorials that take long to compute."""
    numbers = [power.exp for power in node.atoms(sympy.Pow) if not letters(power.exp)]
    numbers += [call.args[0] for call in node.atoms(sympy.factorial) if not letters(call)]
    sizes = [constant(one) for one in numbers]
    return all(size is not None and abs(size) <= MOST_SMALL for size in sizes)


def constant_ratio(first: sympy.Basic, second: sympy.Basic) -> mpmath.mpf | None:
    """first / second where that is the same non-zero number wherever both are defined, or None."""
    ratios = []
    try:
        for point in _points(letters(first, second)):
            with mpmath.workdps(POINT_DIGITS):
                try:
                    below = evaluate(second, point, real=True)
                    above = evaluate(first, point, real=True)
                except Undefined:
                    continue
                if below == 0 or above == 0:
                    return None
                ratios.append(above / below)
                if abs(ratios[-1] - ratios[0]) > abs(ratios[0]) * mpmath.mpf(10) ** -40:
                    return None
    except (TooBig, Unreadable):
        return None
    return ratios[0] if len(ratios) >= ENOUGH_POINTS else None


def _equal_constants(gold: sympy.Basic, other: sympy.Basic, tolerance: float) -> bool:
    first, second = exact(gold), exact(other)
    if first is not None and second is not None:
        return first == second or abs(first - second) <= Fraction(tolerance) * abs(first)
    differences, sizes = [], []
    for digits in (COARSE, FINE):
        with mpmath.workdps(digits):
            real = not (is_complex(gold) or is_complex(other))
            a, b = evaluate(gold, {}, real), evaluate(other, {}, real)
            differences.append(abs(a - b))
            sizes.append(max(abs(a), abs(b)))
    if tolerance and differences[1] <= tolerance * sizes[1]:
        return True
    with mpmath.workdps(FINE):
        if differences[1] <= sizes[1] * mpmath.mpf(10) ** (50 - FINE):
            return True
        return differences[1] < differences[0] * mpmath.mpf(10) ** (2 * (COARSE - FINE) // 3)


def _equal_at_points(gold: sympy.Basic, other: sympy.Basic) -> bool:
    for real in (True, False):
        if real and (is_complex(gold) or is_complex(other)):
            continue
        met = 0
        for point in _points(letters(gold, other)):
            with mpmath.workdps(POINT_DIGITS):
                try:
                    a, b = evaluate(gold, point, real), evaluate(other, point, real)
                except Undefined:
                    continue
                close = mpmath.mpf(10) ** -40
                if abs(a - b) > max(abs(a), abs(b)) * close and abs(a - b) > close:
                    return False
                met += 1
        if met >= ENOUGH_POINTS:
            return True
    return False


def _points(names: list[sympy.Basic]) -> Iterator[dict[sympy.Basic, mpmath.mpf]]:
    """Values of the letters; no two are alike."""
    with mpmath.workdps(POINT_DIGITS):
        for trial, text in enumerate(POINTS):
            step = mpmath.mpf(trial + 1) * mpmath.mpf("0.3571")
            yield {name: mpmath.mpf(text) + step * i for i, name in enumerate(names)}


def _equal_powers(gold: sympy.Basic, other: sympy.Basic) -> bool:
    """Powers too big to compute are equal when their logarithms are."""
    if not (gold.is_Pow and other.is_Pow):
        return False
    logs = []
    for power in (gold, other):
        base = exact(power.base)
        if base is None or base <= 1:
            return False
        logs.append(times(power.exp, sympy.log(number(base))))
    try:
        return _equal_constants(*logs, 0.0)
    except (TooBig, Undefined, Unreadable):
        return False
